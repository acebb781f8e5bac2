"""What a profile brings to planning: facts of the device kinds that it measured, at which microbatch size its ops were
timed, and how much of the plan's time it covers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version

from costmodel.block_times import graph_with_most_blocks
from costmodel.cluster import Cluster
from costmodel.errors import ProfileError
from costmodel.graph import ModelGraph
from costmodel.op_times import measured_graph
from planner.planfile.schema import Finding
from planner.search.facts import Facts
from profiles.apply import apply_profile
from profiles.block_table import layer_models, layer_names
from profiles.catalogue import kind_for_jax_name, load_catalogue
from profiles.coverage import Coverage, op_coverage
from profiles.schema import Profile

ENOUGH = 0.5
"""Share of a model's time that a profile should have measured; less is a warning."""


@dataclass(frozen=True, kw_only=True)
class KindFacts:
    """Prices' inputs of a cluster.

    Attributes:
        facts: by device kind name; the datasheet's where the profile is of another kind.
        profiled: the kinds that the profile is of.
        notes: sentences about how the profile was used.
    """

    facts: Mapping[str, Facts]
    profiled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def facts_of_kinds(cluster: Cluster, profile: Profile | None) -> KindFacts:
    """Facts of every device kind of a cluster; the profile is used for its own kind.

    Raises:
        ProfileError: MP301 the profile is of none of the cluster's kinds.
    """
    facts = {group.device.name: Facts(group.device) for group in cluster.groups}
    if profile is None:
        return KindFacts(facts=facts)
    errors, notes, profiled = [], [], []
    for group in cluster.groups:
        try:
            applied = apply_profile(group.device, profile, devices=group.device_count)
        except ProfileError as error:
            errors.append(error)
            continue
        facts[group.device.name] = Facts(
            applied.kind,
            applied.op_times,
            applied.collectives,
            applied.copies,
            products=applied.products,
            blocks=applied.blocks,
        )
        profiled.append(group.device.name)
        notes += [*applied.notes, *_other_versions(profile)]
    if not profiled:
        raise errors[0]
    return KindFacts(facts=facts, profiled=tuple(dict.fromkeys(profiled)), notes=tuple(dict.fromkeys(notes)))


def _other_versions(profile: Profile) -> list[str]:
    """A sentence if the profile was measured with another minor version of JAX than plans are made with here."""
    then, now = profile.software.get("jax", ""), version("jax")
    if not then or then.split(".")[:2] == now.split(".")[:2]:
        return []
    return [
        f"the profile of {profile.device_kind} was measured with JAX {then}, this is JAX {now}, which compiles "
        "differently: measure again with `meshplan profile`"
    ]


def with_measured_size(
    kinds: KindFacts, profile: Profile, graph_of: Callable[[int], ModelGraph], sizes: Iterable[int]
) -> KindFacts:
    """The facts with the model as it was when its ops and blocks were timed, so that times carry over to other sizes.

    Args:
        graph_of: captures the model at a microbatch size; called for no more sizes than it takes to find that one.
        sizes: what the search tries; looked through, after 1 that `meshplan profile` takes where nothing else is asked
            for, if the profile does not say its own sizes.
    """
    first = kinds.facts[kinds.profiled[0]]
    found = blocks = None
    if profile.ops:
        likely = profile.microbatches or sorted({1, *sizes})
        found = measured_graph(first.op_times, map(graph_of, likely))
    if first.blocks:
        own = {one.microbatch for one in profile.blocks if one.block_class in first.blocks}
        blocks = graph_with_most_blocks(first.blocks, map(graph_of, sorted(own)))
    if found is None and blocks is None:
        return kinds
    facts = dict(kinds.facts)
    for name in kinds.profiled:
        facts[name] = replace(facts[name], measured=found, measured_blocks=blocks)
    return replace(kinds, facts=facts)


def coverage_findings(kinds: KindFacts, profile: Profile, graph: ModelGraph) -> tuple[Finding, ...]:
    """How much of the time of a microbatch was measured, for each profiled kind: MP173.

    Args:
        graph: at the plan's microbatch size.
    """
    findings = []
    for name in kinds.profiled:
        facts = kinds.facts[name]
        found = op_coverage(graph, profile, facts.kind, facts.op_times_of(graph))
        whole = bool(found.blocks) and not found.blocks_missing  # every block's time is known, whatever its ops take
        few = found.measured_share + found.carried_share < ENOUGH and not whole
        findings.append(
            Finding(
                code="MP173",
                severity="warning" if few else "note",
                message=f"the profile of {name}, at microbatch {graph.microbatch}: {found.describe()}",
                hint="measure the model's ops: meshplan profile --model MODEL "
                f"--microbatch {graph.microbatch}, with a larger --budget if it has gaps"
                if few
                else "",
            )
        )
    return tuple(findings)


def layer_table_findings(profile: Profile) -> tuple[Finding, ...]:
    """That a profile's imported layer times are not used by a plan: MP179."""
    models = layer_models(profile)
    if not models:
        return ()
    counts = ", ".join(f"{model} ({len(layer_names(profile, model))} entries)" for model in models)
    message = f"the profile has layer times of {counts}: a plan is priced op by op and makes no use of them"
    hint = "`meshplan estimate --profile` does; `meshplan profile --blocks` measures blocks that plans use"
    return (Finding(code="MP179", severity="note", message=message, hint=hint),)


def model_coverage(profile: Profile, graph: ModelGraph) -> Coverage:
    """Which ops and blocks of a model a profile has, for the device kind that it is of.

    Args:
        graph: at the microbatch size of interest.

    Raises:
        ProfileError: MP312 the catalogue does not know the kind, whose facts weigh what is missing.
    """
    kind = load_catalogue().get(profile.device_kind) or kind_for_jax_name(profile.jax_device_kind)
    if kind is None:
        message = f"the catalogue has no {profile.device_kind!r}, so that what is missing cannot be weighed"
        raise ProfileError("MP312", message, "plan with --profile: MP173 says what it covers of the cluster's devices")
    return op_coverage(graph, profile, apply_profile(kind, profile).kind)

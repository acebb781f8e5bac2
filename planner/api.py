"""The Python API: `plan`, `compile_plan`, `reference` and what they need, on files or objects."""

from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from costmodel.cluster import Cluster
from costmodel.errors import InfeasibleError, InputError
from costmodel.graph import ModelGraph, UpdateJoins
from planner import arguments as given
from planner.assemble import assemble_plan, model_record
from planner.card_findings import card_findings
from planner.check.drift import drift
from planner.completeness import missing_in_plan
from planner.figure_sources import figure_sources
from planner.frontend.capture import Capture, capture
from planner.frontend.chunks.walk import chunked_model
from planner.frontend.graph import model_graph
from planner.frontend.microbatch import DECLARE, MicrobatchCheck, check_microbatches
from planner.frontend.task import TrainingTask
from planner.lowering import compile as lowering
from planner.lowering.compile import Trainer
from planner.lowering.reference import Reference
from planner.lowering.reference import reference as one_device
from planner.models import load_model
from planner.op_findings import op_findings
from planner.planfile.schema import BaselinePlan, Finding, ModelRecord, Plan
from planner.profile_facts import coverage_findings, facts_of_kinds, layer_table_findings, with_measured_size
from planner.search.baselines import Baseline, baselines
from planner.search.joint import Request, microbatch_sizes, search
from planner.search.pinned import StagePin
from planner.sequence_plan import in_chunks
from planner.strategy.constants import split_constants
from planner.strategy.pinned import StrategyPins, pins_of
from planner.strategy.strategy import AnyStrategy, microbatches_of, parse_strategy
from profiles.schema import Profile
from profiles.store import profile_id

Progress = Callable[[str, int, int], None]


def load_task(spec: str | Path, sequence: int | None = None) -> TrainingTask:
    """The task of a built-in name, dimensions, a ``config.json`` or ``path.py:function``."""
    call = 'planner.load_task("gpt2")'
    return load_model(given.require_spec(spec, call), seq=given.optional_count("sequence", sequence))


def plan(
    model: TrainingTask | str | Path,
    *,
    cluster: Cluster | str | Path,
    global_batch: int,
    profile: Profile | str | Path | None = None,
    max_microbatch: int | None = None,
    microbatch: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    stages: int | None = None,
    pins: tuple[StagePin, ...] | None = None,
    strategy: AnyStrategy | None = None,
    baselines: bool = True,
    name: str | None = None,
    sequence: int | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The best plan found for a task on a cluster, with its proof.

    Args:
        model: a task, or what `load_task` takes.
        cluster: a cluster or its file.
        global_batch: examples in one step.
        profile: measured costs, or their file; None plans from the cluster's datasheet figures.
        max_microbatch, microbatch: bounds or fixes the microbatch size (examples of all devices that share one).
        schedule: a name (`planner.arguments.SCHEDULES`), ``auto`` for the best of all and of those made for the
            plan's own times; None for the best of 1f1b, gpipe, hetero-1f1b and zb-h1, which takes less time to find.
        chunks: slices of each sequence under ``sequence-chunks`` (default 4): stages are found as for 1f1b, then their
            microbatches run slice by slice.
        stages: fixes the number of pipeline stages; `pins` fixes devices and blocks of each.
        strategy: the configuration to plan, as `planner.estimate` takes it (``dp=8,tp=4,pp=2,microbatch=1,zero=1``):
            degrees, storage, remat and schedule are fixed, what they leave open is solved.
        baselines: also score hand-written configurations.
        progress: called with (what is being done, done, total).

    Raises:
        InputError: something given cannot be used. InfeasibleError: nothing fits; the message says by how much.
    """
    say = progress or (lambda what, done, total: None)
    call = 'planner.plan(task, cluster="cluster.toml", global_batch=512)'
    model = given.require_model(model, call)
    spec = model if isinstance(model, str) else None
    global_batch = given.require_count("global_batch", global_batch, most=given.LARGEST_BATCH)
    max_microbatch = given.optional_count("max_microbatch", max_microbatch)
    microbatch = given.optional_count("microbatch", microbatch)
    given.require_microbatch(microbatch, global_batch)
    schedule = None if schedule is None else given.require_choice("schedule", schedule, given.SCHEDULES)
    chunks = given.require_chunks(schedule, chunks)
    stages, pins = given.optional_count("stages", stages), given.require_pins(pins, call)
    name, sequence = given.require_text("name", name), given.optional_count("sequence", sequence)
    target = given.require_cluster(cluster, call)
    named = None
    if pins is not None and strategy is None:
        given.require_alone("pins", {"stages": stages})
    if strategy is not None:
        others = {"microbatch": microbatch, "max_microbatch": max_microbatch, "schedule": schedule}
        given.require_alone("strategy", {**others, "stages": stages, "pins": pins})
        named = strategy_pins(strategy, target, global_batch)
        pins, microbatch, schedule = named.stages, named.microbatch, named.schedule
    elif microbatch is not None:
        given.require_alone("microbatch", {"max_microbatch": max_microbatch})
    measured = given.require_profile(profile, call)
    if not isinstance(model, str):
        given.require_no_sequence(sequence)
    task = load_task(model, sequence) if isinstance(model, str) else model
    say("checking microbatches", 0, 1)
    check = check_microbatches(task)
    sizes = (microbatch,) if microbatch is not None else microbatch_sizes(global_batch, largest=max_microbatch)
    findings = list(_microbatch_findings(check, sizes, global_batch, microbatch))
    if not check.splits:
        sizes = (global_batch,)
    if chunks is not None:
        chunked_model(capture(task, sizes[-1]), chunks)  # what cannot be cut is refused before the search
    graphs = _Graphs(task)
    say("capturing", 0, 1)
    graphs(sizes[0])
    kinds = facts_of_kinds(target, measured)
    if measured is not None:
        kinds = with_measured_size(kinds, measured, graphs, sizes)
    findings += [Finding(code="MP172", severity="note", message=note) for note in kinds.notes]
    request = Request(
        cluster=target,
        graph_of=graphs,
        facts=kinds.facts,
        global_batch=global_batch,
        sizes=sizes,
        schedule=schedule if chunks is None else "1f1b",
        stages=stages,
        pins=pins,
        chunks=named.chunks if named is not None else None,
        one_group=task.state is not None,
        restrict=named.restrict if named is not None else None,
        remats=(named.remat,) if named is not None else ("none", "full"),
    )
    result = search(request, say)
    if measured is not None:
        findings += coverage_findings(kinds, measured, result.score.layout.graph)
        findings += layer_table_findings(measured)
    findings += op_findings(result.score)
    if named is not None:
        findings += named.findings(g.decision for stage in result.score.layout.stages for g in stage.groups)
    scored = tuple(_baseline_plan(b) for b in _baselines(request, say)) if baselines else ()
    label = name or f"{task.name} on {target.name}"
    plan = assemble_plan(
        result.score,
        name=label,
        model=_record(graphs(result.score.layout.graph.microbatch), task, spec, sequence),
        certificate=result.certificate,
        baselines=scored,
        findings=tuple(findings),
        versions=_versions(),
        tokens_per_example=task.tokens_per_example,
        provenance=figure_sources(result.score),
        profile=None if measured is None else profile_id(measured),
    )
    if chunks is not None:
        say("cutting sequences", 0, 1)
        plan = in_chunks(plan, result.score, capture(task, plan.microbatch_size), chunks)
    return msgspec.structs.replace(plan, findings=(*plan.findings, *card_findings(plan)))


def strategy_pins(strategy: AnyStrategy, cluster: Cluster, global_batch: int) -> StrategyPins:
    """The search that a strategy leaves of a plan.

    Raises:
        InputError: MP180 for what is no strategy or no plan decides, MP183 where the cluster has too few devices, MP185
            if the batch does not divide.
    """
    own, constants = split_constants(strategy)
    if constants:
        words = ", ".join(f"{key}={value}" for key, value in constants.items())
        message = f"{words}: constants of a software stack are for `meshplan estimate`; a plan runs its own programs"
        raise InputError("MP180", message, f"leave out {', '.join(constants)}")
    wanted = parse_strategy(own)
    microbatches_of(wanted, global_batch)
    return pins_of(wanted, cluster)


class _Graphs:
    """Model graphs by microbatch size, captured once each."""

    def __init__(self, task: TrainingTask):
        self.task = task
        self._graphs: dict[int, ModelGraph] = {}

    def __call__(self, microbatch: int) -> ModelGraph:
        if microbatch not in self._graphs:
            known = next(iter(self._graphs.values()), None)
            joins = known.joins if known is not None else None
            self._graphs[microbatch] = model_graph(capture(self.task, microbatch), joins)
        return self._graphs[microbatch]


def _microbatch_findings(
    check: MicrobatchCheck, sizes: tuple[int, ...], global_batch: int, pinned: int | None
) -> list[Finding]:
    if check.splits:
        return []
    if pinned is not None and pinned != global_batch:
        raise InputError("MP170", f"microbatch={pinned} was asked for, but {check.message}", DECLARE)
    return [
        Finding(
            code="MP170",
            severity="warning",
            message=f"{check.message}; planned as one microbatch",
            hint=DECLARE,
            where=check.source,
        )
    ]


def _baselines(request: Request, say: Progress) -> list[Baseline]:
    found = []
    for baseline in baselines(
        request.cluster, request.graph_of, request.facts, global_batch=request.global_batch, sizes=request.sizes
    ):
        found.append(baseline)
        say("baselines", len(found), 4)
    return found


def _baseline_plan(baseline: Baseline) -> BaselinePlan:
    import math

    score = baseline.score
    return BaselinePlan(
        name=baseline.name,
        description=baseline.description,
        feasible=score is not None,
        step_time_s=score.time_s if score else None,
        peak_memory_bytes=max(math.ceil(size) for size in score.device_bytes.values()) if score else None,
        reason=baseline.reason,
    )


def _record(graph: ModelGraph, task: TrainingTask, spec: str | None, sequence: int | None) -> ModelRecord:
    return model_record(graph, reduction=task.reduction, spec=spec, sequence=sequence)


def capture_record(task: TrainingTask, plan: Plan) -> ModelRecord:
    """The model record of a task as it is now, to compare with a plan's."""
    call = "planner.capture_record(task, plan)"
    task, plan = given.require_task(task, call), given.require_plan(plan, call)
    return _captured_record(capture(task, plan.microbatch_size), plan)


def _captured_record(captured: Capture, plan: Plan) -> ModelRecord:
    graph = model_graph(captured, UpdateJoins())  # no part of the record
    return _record(graph, captured.task, plan.model.spec, plan.model.sequence)


def model_findings(plan: Plan, task: TrainingTask) -> tuple[Finding, ...]:
    """Whether `task` is the model that was planned (MP630 to MP633), and if so, whether the plan says all that running
    it needs (MP634)."""
    captured = capture(task, plan.microbatch_size)
    return drift(plan, _captured_record(captured, plan)) or missing_in_plan(plan, captured)


def compile_plan(
    plan: Plan | str | Path, task: TrainingTask, *, devices: Sequence[Any] | None = None, verify: bool = True
) -> Trainer:
    """Makes a plan runnable.

    Args:
        plan: a plan or a plan file.
        task: the training task that it was made for.
        devices: JAX devices, in the order of the plan's device ids as they first occur. Default: ``jax.devices()``.
        verify: compare where the results of the first step lie with the plan (a mismatch raises MP503). The trainer's
            own ``verify()`` also compares collectives and the bytes that are kept for the backward pass.

    Returns:
        an object with ``init(params[, state])``, ``step(state, batch[, rng])``, ``params(state)`` and ``verify()``.

    Raises:
        InputError: an argument of another type. MismatchError: too few devices, or the plan was made for another model
            or leaves out something that it needs.
    """
    call = "planner.compile_plan(plan, task)"
    plan, task = given.require_plan(plan, call), given.require_task(task, call)
    return lowering.compile_plan(plan, task, devices=devices, verify=verify)


def reference(task: TrainingTask, plan: Plan | str | Path) -> Reference:
    """The one-device reference of a plan: the same microbatches, the same order."""
    call = "planner.reference(task, plan)"
    return one_device(given.require_task(task, call), given.require_plan(plan, call))


def _versions() -> dict[str, str]:
    return {package: version(package) for package in ("jax", "jaxlib", "ortools")} | {"meshplan": _own_version()}


def _own_version() -> str:
    from importlib.metadata import PackageNotFoundError

    try:
        return version("meshplan")
    except PackageNotFoundError:
        return "0.1.0"


__all__ = [
    "Capture",
    "InfeasibleError",
    "Reference",
    "Trainer",
    "capture_record",
    "compile_plan",
    "load_task",
    "plan",
    "reference",
]

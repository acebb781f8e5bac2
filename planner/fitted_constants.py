"""Which constants `calibrate` fits, where they start, and how far they may well be off."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from costmodel.cluster import COLLECTIVE_START_S, INTER_EFFICIENCY, TIER_EFFICIENCY, Cluster
from costmodel.device_kind import DeviceKind
from costmodel.documents import suggestion
from costmodel.stack import Stack
from planner.check.finding import some
from planner.planfile.schema import Finding
from profiles.calibrate import Constant
from profiles.constants import SHARES, Constants, FittedKinds

STACK = "stack"
"""Owner of a stack's constants; those of a device kind are owned by its name."""


class _Prior(NamedTuple):
    """`usual` is where a constant starts that the base leaves at nothing; `spread` the factor by which it may well be
    off; `high` the most that it can be."""

    usual: float
    spread: float
    high: float = float("inf")


_OF_STACK = {
    "host_launch_s": _Prior(3e-6, 3.0),
    "traffic": _Prior(1.0, 1.3),
    "attention": _Prior(1.0, 1.5),
    "start_s": _Prior(COLLECTIVE_START_S, 2.0),
    "inter_start_s": _Prior(COLLECTIVE_START_S, 2.0),
    "tier_share": _Prior(TIER_EFFICIENCY, 1.3, 1.0),
    "inter_share": _Prior(INTER_EFFICIENCY, 1.7, 1.0),
    "gradient_overlap": _Prior(0.7, 1.4, 1.0),
    "parameter_overlap": _Prior(0.7, 1.4, 1.0),
    "tensor_overlap": _Prior(0.7, 1.4, 1.0),
    "send_exposed": _Prior(0.3, 2.0, 1.0),
    "microbatch_s": _Prior(5e-4, 3.0),
    "step_s": _Prior(5e-3, 4.0),
    "skew": _Prior(5e-3, 3.0),
}
"""Spreads are about those between the shipped stacks, which were fitted to published measurements."""

_OF_KIND = {
    "matmul_efficiency": _Prior(0.7, 1.3, 1.0),
    "matmul_half_depth": _Prior(100.0, 1.5),
    "matmul_half_area": _Prior(1e6, 1.5),
    "bandwidth_efficiency": _Prior(0.8, 1.2, 1.0),
}

SHORTEST_SHARE = 0.02
"""Of the shortest measured step, the most that a cost of each step or microbatch starts at: milliseconds are much of a
toy model's step."""

Kinds = Mapping[str, DeviceKind]


def candidates(stack: Stack, kinds: Kinds, shortest_s: float, per_step: int) -> list[Constant]:
    """Constants that may be fitted, with their priors: the base's where it has them.

    Args:
        shortest_s: of the measured steps. per_step: most microbatches of one.
    """
    found = []
    for field, prior in _OF_STACK.items():
        base = getattr(stack, field)
        usual = prior.usual
        if field == "step_s":
            usual = min(usual, SHORTEST_SHARE * shortest_s)
        if field == "microbatch_s":
            usual = min(usual, SHORTEST_SHARE * shortest_s / max(1, per_step))
        found.append(_constant(STACK, field, base or usual, prior))
    for name, kind in kinds.items():
        for field, prior in _OF_KIND.items():
            base = getattr(kind, field)
            if base > 0.0:  # of a product's shape: 0 where it does not matter
                found.append(_constant(name, field, base, prior))
    return found


def _constant(owner: str, field: str, value: float, prior: _Prior) -> Constant:
    return Constant(f"{owner}.{field}", value, prior.spread, 0.0, max(prior.high, value))


def put(values: Mapping[str, float], stack: Stack, kinds: Kinds) -> tuple[Stack, dict[str, DeviceKind]]:
    """The stack and kinds with constants named ``owner.field``."""
    own, changes = dict(kinds), dict[str, float]()
    for name, value in values.items():
        owner, field = name.rsplit(".", 1)
        if owner == STACK:
            changes[field] = value
        else:
            own[owner] = msgspec.structs.replace(own[owner], **{field: value})
    return msgspec.structs.replace(stack, **changes), own


def before(name: str, stack: Stack, kinds: Kinds) -> float | None:
    """What the base has for a constant; None for the links' own."""
    owner, field = name.rsplit(".", 1)
    return getattr(stack if owner == STACK else kinds[owner], field)


def with_kinds(cluster: Cluster, kinds: Kinds) -> Cluster:
    """The cluster with these device kinds."""
    groups = tuple(msgspec.structs.replace(g, device=kinds[g.device.name]) for g in cluster.groups)
    return msgspec.structs.replace(cluster, groups=groups)


def fitted_kinds(kinds: Kinds, own: Kinds, fitted_on: str) -> tuple[FittedKinds, ...]:
    """Document entries of the kinds whose achieved shares are not the cluster's own."""
    entries: Sequence[FittedKinds] = []
    for name, kind in kinds.items():
        changed = {field: getattr(kind, field) for field in SHARES if getattr(kind, field) != getattr(own[name], field)}
        if changed:
            entries = [*entries, FittedKinds(kinds=(name,), fitted_on=fitted_on, **changed)]
    return tuple(entries)


def kind_findings(constants: Constants | None, cluster: Cluster) -> tuple[Finding, ...]:
    """MP178 of constants that were fitted for device kinds which the cluster does not have."""
    own = {group.device.name for group in cluster.groups}
    named = dict.fromkeys(name for one in (constants.fitted if constants is not None else ()) for name in one.kinds)
    unused = [name for name in named if name not in own]
    if not unused:
        return ()
    message = f"constants fitted for {some(unused, limit=4)} change nothing: the cluster has {', '.join(sorted(own))}"
    if len(unused) < len(named):
        return (Finding(code="MP178", severity="note", message=message),)
    hint = f"in `kinds` stand device kinds as the cluster has them; {suggestion(unused[0], own, 'it has')}"
    return (Finding(code="MP178", severity="warning", message=message, hint=hint),)

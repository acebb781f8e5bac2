"""Findings out of what compilers say of a plan: does it fit, was it foreseen, was anything not compiled."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from costmodel.cluster import Cluster
from costmodel.units import format_bytes, format_count
from planner.check.finding import finding, group_label, group_path
from planner.compile_check import CompiledGroup, Moved, Progress, compile_groups
from planner.frontend.task import TrainingTask
from planner.planfile.schema import Finding, Plan
from planner.strategy.memory import StageMemory
from profiles.compiled.oracle import Oracle

MEMORY_TOLERANCE = 0.15
"""Planned memory may be this share above or below the compiler's."""

COLLECTIVE_TOLERANCE, COLLECTIVE_SLACK_BYTES = 0.01, 1 << 16
"""Compiled programs may move this much more than planned: sums of the loss, and what XLA joins with them."""


def compile_findings(
    plan: Plan, cluster: Cluster, task: TrainingTask, oracle: Oracle, progress: Progress | None = None
) -> tuple[Finding, ...]:
    """Compiles a plan for the devices of its cluster and says what came of it (MP650 to MP655), errors first.

    Raises:
        MismatchError: the plan was made for another model (MP402).
    """
    kinds = {g.device.name: g.device for g in cluster.groups}
    groups = compile_groups(plan, task, kinds=kinds, oracle=oracle, progress=progress)
    return findings_of(plan, groups)


def findings_of(plan: Plan, groups: Sequence[CompiledGroup]) -> tuple[Finding, ...]:
    """Findings of compiled groups, errors first."""
    found = [one for group in groups for one in _findings(plan, group)]
    rank = {"error": 0, "warning": 1, "note": 2}
    return tuple(sorted(found, key=lambda one: (rank[one.severity], one.code)))


def estimate_findings(
    plan: Plan, groups: Sequence[CompiledGroup], memory: Sequence[StageMemory]
) -> tuple[Finding, ...]:
    """Findings of the compiled groups of the plan that a strategy names, errors first, and MP651 of the strategy's own
    estimate; what they would say of places in a plan's document and of figures (MP655) is left out.

    Args:
        memory: of the strategy's stages as estimated, by the planner's own programs; none if by another software's.
    """
    of_plan = [one for one in findings_of(plan, groups) if one.code != "MP655"]
    found = [msgspec.structs.replace(one, where="") for one in of_plan]
    if len(memory) != len(groups):  # devices of an estimate's stage run several of the plan's
        return tuple(found)
    for group, stage in zip(groups, memory, strict=True):
        taken = group.memory_bytes
        if taken is None or group.substitute:
            continue
        estimated = stage.peak_bytes - group.outside_bytes
        label = group_label(plan, group.stage, group.group)
        found += _deviation(f"{label}: estimated memory", "", estimated, taken, group.kind)
    return tuple(found)


def _findings(plan: Plan, group: CompiledGroup) -> Iterator[Finding]:
    label, where = group_label(plan, group.stage, group.group), group_path(group.stage, group.group, "memory")
    if group.substitute:
        yield finding(
            "MP654",
            group_path(group.stage, group.group, "kind"),
            f"{label} was compiled for this machine's CPU, not for {group.kind}: {group.substitute.split(': pip')[0]}",
            _install(group.substitute),
        )
    for failure in group.failures:
        phases = [p.phase for p in group.phases if p.outcome == failure]
        hint = failure.hint or "other programs of the plan were compiled"
        yield finding("MP653", where, f"{label}, {' and '.join(dict.fromkeys(phases))}: {failure.message}", hint)
    worst, taken = group.worst, group.memory_bytes
    if worst is not None and taken is not None:
        yield _figures(label, where, group, worst.phase, taken)
        if not group.substitute:
            yield from _memory(label, where, group, worst.phase, taken)
    if group.compiled_collectives is not None:
        yield from _collectives(label, group_path(group.stage, group.group, "time.collectives"), group)


def _install(why: str) -> str:
    command = why.partition(": ")[2]
    rest = "its memory is another compiler's and is not judged"
    return f"{command} compiles for {'TPUs' if 'tpu' in command else 'CUDA devices'}; {rest}" if command else rest


def _figures(label: str, where: str, group: CompiledGroup, phase: str, taken: int) -> Finding:
    whose = "the CPU's compiler" if group.substitute else f"the compiler for {group.kind}"
    seconds = sum(getattr(p.outcome, "compile_s", 0.0) for p in group.phases)
    during = "" if phase == "step" else f" during {phase}"
    moved = group.compiled_collectives
    size = "" if moved is None else f"; collectives move {format_bytes(sum(m.bytes for m in moved.values()))} a step"
    return finding(
        "MP655",
        where,
        f"{label}: {whose} allocates {format_bytes(taken)}{during}, planned {format_bytes(group.planned_bytes)}{size} "
        f"({format_count(len(group.phases), 'program')} compiled in {seconds:.1f} s)",
    )


def _memory(label: str, where: str, group: CompiledGroup, phase: str, taken: int) -> Iterator[Finding]:
    needed = taken + group.outside_bytes
    if needed > group.limit_bytes:
        yield finding(
            "MP650",
            where,
            f"{label} does not fit {group.kind}: its {phase} takes {format_bytes(taken)} as compiled, with reserve and "
            f"buffers {format_bytes(needed)} of {format_bytes(group.limit_bytes)}",
            f"{format_bytes(needed - group.limit_bytes)} too much: plan with a smaller microbatch or more devices",
        )
    yield from _deviation(f"{label}: planned memory", where, group.planned_bytes, taken, group.kind)


def _deviation(what: str, where: str, foreseen: int, taken: int, kind: str) -> Iterator[Finding]:
    """MP651 of foreseen bytes that are far off what the compiler for a kind allocates."""
    deviation = foreseen / taken - 1
    if abs(deviation) > MEMORY_TOLERANCE:
        yield finding(
            "MP651",
            where,
            f"{what} of {format_bytes(foreseen)} is {deviation:+.0%} off the {format_bytes(taken)} that the compiler "
            f"for {kind} allocates",
            "trust the compiler's figure" + (": a larger microbatch may fit" if deviation > 0 else ""),
        )


def _collectives(label: str, where: str, group: CompiledGroup) -> Iterator[Finding]:
    more = added(group.planned_collectives, group.compiled_collectives or {}, widened=group.platform == "cpu")
    if more:
        lines = ", ".join(f"{name} {format_bytes(a)} and {format_bytes(b)}" for name, (a, b) in more.items())
        yield finding(
            "MP652",
            where,
            f"{label}: a step moves more than planned (planned and compiled bytes): {lines}",
            "the plan's communication times are too short for these; please report the model",
        )


def added(
    planned: Mapping[str, Moved], compiled: Mapping[str, Moved], *, widened: bool = False
) -> dict[str, tuple[int, int]]:
    """Bytes planned and compiled by kind and axis, where the compiler moves more.

    Args:
        widened: the compiler makes float32 of shorter floats (the CPU's does), so that elements are compared.
    """
    found = {}
    for name, moved in compiled.items():
        foreseen = planned.get(name, Moved(0, 0, 0))
        pair = (foreseen.elements, moved.elements) if widened else (foreseen.bytes, moved.bytes)
        if pair[1] > pair[0] * (1 + COLLECTIVE_TOLERANCE) + COLLECTIVE_SLACK_BYTES:
            found[name] = (foreseen.bytes, moved.bytes)
    return found


__all__ = ["compile_findings", "estimate_findings", "findings_of"]

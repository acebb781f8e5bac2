"""Compares what a plan says with what its programs are: shardings, bytes kept for the backward pass, collectives.

Collectives are counted twice. As **written** in the traced program they must be the plan's, each phase, kind and axis.
As **compiled** there may be fewer (XLA folds the gather of a constant, such as the cotangent of a mean), never more;
passes that join, merge or move collectives are off for this count.

What the loss is summed with, and what the optimizer joins itself (a global norm), is no part of a plan and not counted.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax.sharding import NamedSharding

from costmodel.errors import LoweringError
from planner.lowering.group_programs import GroupPrograms
from planner.lowering.placement import GroupPlacement
from planner.lowering.split_programs import SplitPrograms
from planner.lowering.written import UPDATE, Counts, phase_of, written
from profiles.compiled.hlo import SEPARATE, HloCollective, collectives

if TYPE_CHECKING:
    from planner.lowering.one_stage import OneStageTrainer
    from planner.lowering.pipeline import PipelineTrainer

# Residuals are predicted op by op. What JAX shares between ops beyond equal tensors, and the single numbers that it
# keeps, is not predicted; over the built-in families the two differ by less than this.
SAVED_TOLERANCE, SAVED_SLACK_BYTES = 0.02, 1024
# What weight gradients read of a backward pass that ran again differs more: the plan is mostly above, by less than this
# below.
WEIGHTS_TOLERANCE = 0.15


@dataclass(frozen=True, kw_only=True)
class GroupReport:
    """Planned and found figures of one stage group.

    Attributes:
        planned, written: collectives a microbatch (forward, backward) and a step (once), by ``phase kind axis``.
        compiled: the same of the compiled programs; None where nothing was compiled.
        until_weights_bytes: what a microbatch keeps between its B and its W; None where the schedule has no W.
        until_weights_planned_bytes: the same by the plan; 0 where it does not say.
    """

    stage: int
    group: int
    saved_planned_bytes: int
    saved_found_bytes: int
    planned: Mapping[str, float]
    written: Mapping[str, float]
    compiled: Mapping[str, float] | None = None
    until_weights_bytes: int | None = None
    until_weights_planned_bytes: int = 0

    @property
    def weights_agree(self) -> bool:
        """Whether no more is kept for weight gradients than planned, but for the tolerance."""
        planned, found = self.until_weights_planned_bytes, self.until_weights_bytes
        return not planned or not found or found <= planned * (1 + WEIGHTS_TOLERANCE) + SAVED_SLACK_BYTES

    @property
    def saved_deviation(self) -> float:
        """Found over planned, less one."""
        return self.saved_found_bytes / self.saved_planned_bytes - 1 if self.saved_planned_bytes else 0.0

    @property
    def saved_agrees(self) -> bool:
        missing = abs(self.saved_found_bytes - self.saved_planned_bytes)
        return missing <= SAVED_TOLERANCE * self.saved_planned_bytes + SAVED_SLACK_BYTES

    @property
    def differences(self) -> dict[str, tuple[float, float]]:
        """Collectives planned and written, where they differ."""
        return _differences(self.planned, self.written)

    @property
    def added(self) -> dict[str, tuple[float, float]]:
        """Collectives written and compiled, where the compiler made more of a kind on an axis."""
        found = _differences(self.written, self.compiled) if self.compiled is not None else {}
        return {name: (a, b) for name, (a, b) in found.items() if b > a}


@dataclass(frozen=True)
class Verification:
    """What was found of every stage group."""

    groups: tuple[GroupReport, ...]

    def check(self) -> None:
        """Raises where a group is not what was planned.

        Raises:
            LoweringError: MP504 bytes kept for the backward pass, MP505 collectives.
        """
        for g in self.groups:
            where = f"stage {g.stage} group {g.group}"
            if not g.saved_agrees:
                raise LoweringError(
                    "MP504",
                    f"{where} keeps {g.saved_found_bytes} bytes a microbatch for its backward pass, planned "
                    f"{g.saved_planned_bytes} ({g.saved_deviation:+.1%}, allowed {SAVED_TOLERANCE:.0%})",
                    "the plan's memory figures do not hold; please report this model",
                )
            if not g.weights_agree:
                raise LoweringError(
                    "MP504",
                    f"{where} keeps {g.until_weights_bytes} bytes a microbatch for its weight gradients, planned "
                    f"{g.until_weights_planned_bytes} (allowed {WEIGHTS_TOLERANCE:.0%} more)",
                    "the plan's memory figures do not hold; please report this model",
                )
            for what, pairs in (("planned and written", g.differences), ("written and compiled", g.added)):
                if pairs:
                    lines = ", ".join(f"{name} {a:g} and {b:g}" for name, (a, b) in sorted(pairs.items()))
                    raise LoweringError(
                        "MP505",
                        f"{where}: collectives {what} differ: {lines}",
                        "the plan's times do not hold; please report this model",
                    )


def verify_one_stage(trainer: "OneStageTrainer", *, compiled: bool) -> Verification:
    """Verifies a step that is one program."""
    traced, times = trainer.trace(), trainer.feed.microbatches

    def each(counts: Mapping[str, int]) -> dict[str, float]:
        return {n: k / times if n.startswith(("forward", "backward")) else k for n, k in counts.items()}

    placement = trainer.placement
    have = each(_compiled_counts(traced, None, placement)) if compiled else None
    programs = GroupPrograms(trainer.micro, trainer.feed.seeds())
    return Verification((_report(0, 0, programs, programs.residual_bytes, each(written(traced)), have),))


def verify_pipeline(trainer: "PipelineTrainer", *, compiled: bool) -> Verification:
    """Verifies the programs of every stage group. Updates run on the first group of a stage."""
    reports = []
    for actor, programs in sorted(trainer.programs.items()):
        found: Counts = Counter()
        have: Counts | None = Counter() if compiled else None
        for phase, traced in trainer.traces(actor):
            found.update(written(traced, phase))
            if have is not None:
                have.update(_compiled_counts(traced, phase, programs.placement))
        reports.append(_report(*actor, programs, trainer.held_bytes(actor), found, have))
    return Verification(tuple(reports))


def _report(
    stage: int,
    group: int,
    programs: GroupPrograms,
    held_bytes: int,
    found: Mapping[str, float],
    have: Mapping[str, float] | None,
) -> GroupReport:
    plan = programs.placement.plan
    planned = {name: float(n) for name, n in plan.time.collectives.items()}
    if group > 0:  # new parameters come from the first group
        planned = {name: n for name, n in planned.items() if not name.startswith("once all_gather")}
    return GroupReport(
        stage=stage, group=group, saved_planned_bytes=plan.memory.saved_per_microbatch_bytes,
        saved_found_bytes=held_bytes, planned=planned, written=dict(found),
        compiled=None if have is None else dict(have),
        until_weights_bytes=programs.kept_bytes if isinstance(programs, SplitPrograms) else None,
        until_weights_planned_bytes=plan.memory.until_weights_bytes,
    )  # fmt: skip


def compiled_collectives(traced: Any, placement: GroupPlacement) -> list[HloCollective]:
    """Collectives of a traced program after compilation without the passes that join or move them."""
    if not placement.axis_names:
        return []
    text = traced.lower().compile(compiler_options=SEPARATE).as_text()
    return collectives(text, placement.axis_names, placement.sizes)


def _compiled_counts(traced: Any, phase: str | None, placement: GroupPlacement) -> Counts:
    found: Counts = Counter()
    for c in compiled_collectives(traced, placement):
        of = phase if phase is not None and UPDATE not in c.op_name else phase_of(c.op_name)
        if of:
            for axis in c.axes:
                found[f"{of} {c.kind} {axis}"] += c.runs
    return found


def check_shardings(arrays: Iterable[tuple[str, Any, NamedSharding]]) -> int:
    """Compares where arrays lie with where the plan says; their number.

    Args:
        arrays: name, array, planned sharding.

    Raises:
        LoweringError: MP503, one lies elsewhere.
    """
    count = 0
    for name, x, planned in arrays:
        count += 1
        if not x.sharding.is_equivalent_to(planned, x.ndim):
            raise LoweringError(
                "MP503",
                f"{name} {tuple(x.shape)} lies as {x.sharding}, planned {planned}",
                "this is a defect of the lowering; please report it",
            )
    return count


def _differences(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    pairs = {n: (a.get(n, 0.0), b.get(n, 0.0)) for n in sorted({*a, *b})}
    return {n: (x, y) for n, (x, y) in pairs.items() if abs(x - y) > 1e-9}


__all__ = [
    "GroupReport",
    "Verification",
    "check_shardings",
    "compiled_collectives",
    "verify_one_stage",
    "verify_pipeline",
]

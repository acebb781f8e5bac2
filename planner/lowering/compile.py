"""From a plan and its task to something that trains, with the checks between what was planned and what is run."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from costmodel.errors import MismatchError
from planner.check.timetable import schedule_of
from planner.completeness import require_complete
from planner.frontend.capture import capture
from planner.frontend.task import TrainingTask
from planner.lowering.chunked import chunked_trainer
from planner.lowering.feed import Feed
from planner.lowering.group_programs import GroupPrograms
from planner.lowering.microbatch import micro_of
from planner.lowering.one_stage import OneStageTrainer
from planner.lowering.pipeline import PipelineTrainer
from planner.lowering.placement import GroupPlacement
from planner.lowering.split_programs import SplitPrograms
from planner.lowering.stage import StageProgram
from planner.lowering.update import Updater, parts_of
from planner.planfile.names import expand_names
from planner.planfile.schema import Plan

Trainer = OneStageTrainer | PipelineTrainer


def compile_plan(
    plan: Plan, task: TrainingTask, *, devices: Sequence[Any] | None = None, verify: bool = True
) -> Trainer:
    """Makes a plan runnable.

    Args:
        devices: JAX devices, in the order of the plan's device ids as they first occur. Default: ``jax.devices()``.
        verify: compare where the results of the first step lie with the plan (a mismatch raises MP503). The trainer's
            own ``verify()`` also compares collectives and the bytes that are kept for the backward pass.

    Returns:
        an object with ``init(params[, state])``, ``step(state, batch[, rng])``, ``params(state)`` and ``verify()``.

    Raises:
        MismatchError: too few devices, or the plan was made for another model.
    """
    ids = list(dict.fromkeys(d for stage in plan.stages for g in stage.groups for d in g.devices))
    available = list(jax.devices() if devices is None else devices)
    if len(available) < len(ids):
        raise MismatchError(
            "MP401",
            f"the plan runs on {len(ids)} devices, {len(available)} are available",
            "attach more devices, plan for fewer, or use fake CPU devices (--fake-devices)",
        )
    return _trainer(plan, task, dict(zip(ids, available, strict=False)), verify)


def abstract_trainer(plan: Plan, task: TrainingTask) -> Trainer:
    """A trainer without devices: its programs can be traced and exported, not run.

    Raises:
        MismatchError: the plan was made for another model.
    """
    return _trainer(plan, task, None, False)


def _trainer(plan: Plan, task: TrainingTask, at: Mapping[str, Any] | None, verify: bool) -> Trainer:
    """
    Args:
        at: JAX device of each of the plan's device ids; None for none.
    """
    captured = capture(task, plan.microbatch_size)
    blocks = {b.name: b for b in captured.blocks}
    require_complete(plan, captured)
    schedule = schedule_of(plan)
    if plan.schedule.chunks > 1:
        return chunked_trainer(plan, task, captured, schedule, at, check=verify)
    groups: dict[tuple[int, int], tuple[GroupPlacement, StageProgram]] = {}
    for s, stage in enumerate(plan.stages):
        own = tuple(blocks[n] for n in expand_names(stage.blocks))
        for g, group in enumerate(stage.groups):
            devices = tuple(at[d] for d in group.devices) if at is not None else None
            placement = GroupPlacement(group, devices, captured.classes)
            groups[s, g] = (placement, StageProgram(captured, placement, own, schedule.splits_backward))
    micros = {
        actor: micro_of(captured, actor[0], [p for a, (_, p) in sorted(groups.items()) if a[1] == 0], program)
        for actor, (_, program) in groups.items()
    }
    first = [micros[s, 0] for s in range(len(plan.stages))]
    updater = Updater(task, parts_of([m.held for m in first]), tuple(m.stage.placement for m in first))
    feed = Feed(captured, plan.microbatches)
    if len(groups) == 1:
        return OneStageTrainer(micros[0, 0], updater, feed, verify)
    make = SplitPrograms if schedule.splits_backward else GroupPrograms
    return PipelineTrainer(
        programs={actor: make(micro, feed.seeds()) for actor, micro in micros.items()},
        shares={
            (s, g): group.microbatches for s, stage in enumerate(plan.stages) for g, group in enumerate(stage.groups)
        },
        schedule=schedule,
        updater=updater,
        feed=feed,
        check=verify,
    )


__all__ = ["Trainer", "abstract_trainer", "compile_plan"]

"""From a plan in sequence chunks to something that trains."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from costmodel.errors import InputError
from costmodel.schedule.actions import Schedule
from costmodel.schedule.sequence import keeps_causal_order, units_of
from planner.frontend.capture import Capture
from planner.frontend.chunks.walk import ChunkCapture, ChunkedModel, chunked_model
from planner.frontend.task import TrainingTask
from planner.lowering.chunk_pipeline import ChunkedTrainer
from planner.lowering.chunk_placement import ChunkPlacement
from planner.lowering.chunk_programs import ChunkPrograms
from planner.lowering.feed import Feed
from planner.lowering.microbatch import MicrobatchProgram, micro_of
from planner.lowering.stage import StageProgram
from planner.lowering.update import Updater, parts_of
from planner.planfile.names import expand_names
from planner.planfile.schema import GroupPlan, Plan

Actor = tuple[int, int]  # stage, group


def chunked_trainer(
    plan: Plan,
    task: TrainingTask,
    captured: Capture,
    schedule: Schedule,
    at: Mapping[str, Any] | None,
    *,
    check: bool,
) -> ChunkedTrainer:
    """A trainer of a plan whose schedule cuts sequences into chunks.

    Args:
        at: JAX device of each of the plan's device ids; None for none.
        check: whether the first step compares where its results lie with the plan.

    Raises:
        InputError: MP166 or MP167, the model's sequence cannot be cut; MP168, the schedule does not run chunks forward
            in order and backward in reverse, or splits backwards.
    """
    chunks = plan.schedule.chunks
    require_causal_order(schedule, chunks)
    model = chunked_model(captured, chunks)
    seen = {
        (s, j): model.of_blocks([b for b in captured.blocks if b.name in set(expand_names(stage.blocks))], j)
        for s, stage in enumerate(plan.stages)
        for j in range(chunks)
    }
    groups = {(s, g): group for s, stage in enumerate(plan.stages) for g, group in enumerate(stage.groups)}
    programs: dict[tuple[Actor, int], ChunkPrograms] = {}
    feed = Feed(captured, plan.microbatches)
    for j in range(chunks):
        stages = {actor: _stage(captured, model, seen[actor[0], j], group, at, j) for actor, group in groups.items()}
        firsts = [program for actor, program in sorted(stages.items()) if actor[1] == 0]
        for actor, program in stages.items():
            chunk = seen[actor[0], j]
            micro = _sending(micro_of(program.capture, actor[0], firsts, program), chunk)
            programs[actor, j] = ChunkPrograms(micro, feed.seeds(), own=chunk.own, earlier=chunk.earlier)
    firsts = [programs[(s, 0), 0].micro for s in range(len(plan.stages))]
    return ChunkedTrainer(
        programs={actor: programs[actor, 0] for actor in groups},
        shares={actor: units_of(group.microbatches, chunks) for actor, group in groups.items()},
        schedule=schedule,
        updater=Updater(task, parts_of([m.held for m in firsts]), tuple(m.stage.placement for m in firsts)),
        feed=feed,
        check=check,
        model=model,
        of_chunk=programs,
    )


def require_causal_order(schedule: Schedule, chunks: int) -> None:
    """
    Raises:
        InputError: MP168, an actor runs chunks out of order, or splits backwards.
    """
    if schedule.splits_backward:
        raise InputError("MP168", f"a schedule of {chunks} sequence chunks has backwards split into B and W")
    if schedule.microbatches % chunks or not keeps_causal_order(schedule, chunks):
        raise InputError(
            "MP168",
            f"the schedule does not run the {chunks} chunks of each sequence forward in order and backward in reverse",
            "a chunk reads the keys and values of those before it; plan again",
        )


def _stage(
    captured: Capture, model: ChunkedModel, seen: ChunkCapture, group: GroupPlan, at: Mapping[str, Any] | None, j: int
) -> StageProgram:
    devices = tuple(at[d] for d in group.devices) if at is not None else None
    originals = {b.name: b for b in captured.blocks}
    chunked = {b.cls.key: (model.chunk_class(originals[b.name], j), originals[b.name].cls) for b in seen.blocks}
    placement = ChunkPlacement(group, devices, captured.classes, chunked)
    return StageProgram(seen.capture, placement, seen.blocks)


def _sending(micro: MicrobatchProgram, seen: ChunkCapture) -> MicrobatchProgram:
    return replace(micro, sends=(*micro.sends, *seen.own))

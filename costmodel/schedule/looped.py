"""Schedules of looped placements: stage i of p runs the virtual stages i, p + i, 2p + i, ..., its *chunks*.

    interleaved     1F1B over chunks: p microbatches through one chunk, then the next; little memory.
    breadth-first   all microbatches through a chunk before the next chunk, then back chunk by chunk.
    layer-major     breadth-first with one layer a chunk: layered gradient accumulation on modular stages. A layer's
                    gradient is complete, and can be reduced, while the stage works on the layers before it.

With v chunks a stage, all alike, T the time of a whole stage per microbatch, and m a multiple of p, the bubble of each
is (p - 1)·T/v. Stage 0 holds p·v + p - 1 chunk activations under `interleaved`, all m·v under the other two.
"""

from itertools import islice

from costmodel.errors import InputError
from costmodel.schedule.actions import Action, ActionKind, ActorActions, Schedule, require_positive
from costmodel.schedule.generate import one_f_one_b


def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B for any number of microbatches.

    Microbatches go in rounds of at least p (or all of them, if fewer), as equal as can be; a round passes chunk by
    chunk. Stage i starts its backwards after ℓ + 2·(p - 1 - i) forwards, where ℓ is the least lead that lets the last
    stage run each backward after its forward: (v - 1)·p + 1 if m is a multiple of p.

    Args:
        stages: number of stages p.
        microbatches: number of microbatches m.
        chunks: virtual stages on each stage, v. With 1 this is 1F1B.

    Raises:
        InputError: MP143 for a count below 1.
    """
    _check(stages, microbatches, chunks)
    if chunks == 1:
        return Schedule(
            name="interleaved", microbatches=microbatches, actions=one_f_one_b(stages, microbatches).actions
        )
    count = max(1, microbatches // stages)
    small, larger = divmod(microbatches, count)
    numbers = iter(range(microbatches))
    rounds = [tuple(islice(numbers, small + (at < larger))) for at in range(count)]
    forwards = [(chunk, k) for own in rounds for chunk in range(chunks) for k in own]
    backwards = [(chunk, k) for own in rounds for chunk in reversed(range(chunks)) for k in own]
    position = {unit: at for at, unit in enumerate(forwards)}
    lead = 1 + max(position[unit] - at for at, unit in enumerate(backwards))
    rows = []
    for stage in range(stages):
        warm_up = lead + 2 * (stages - 1 - stage)
        order: list[tuple[ActionKind, tuple[int, int]]] = [("F", unit) for unit in forwards[:warm_up]]
        for at, unit in enumerate(backwards):
            order.append(("B", unit))
            order.extend(("F", late) for late in forwards[warm_up + at : warm_up + at + 1])
        actions = tuple(Action(chunk * stages + stage, kind, k) for kind, (chunk, k) in order)
        rows.append(ActorActions(stage=stage, group=0, actions=actions))
    return Schedule(name="interleaved", microbatches=microbatches, actions=tuple(rows))


def breadth_first(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """All microbatches forward through one chunk after the other, then backward through them in reverse.

    Args:
        stages: number of stages p.
        microbatches: number of microbatches m.
        chunks: virtual stages on each stage, v. With 1 this is GPipe.

    Raises:
        InputError: MP143 for a count below 1.
    """
    return _chunk_by_chunk("breadth-first", stages, microbatches, chunks)


def layer_major(stages: int, microbatches: int, layers: int) -> Schedule:
    """Layered gradient accumulation: layer ℓ is on stage ℓ mod p, and takes all microbatches before the next layer.

    Args:
        stages: number of stages p.
        microbatches: number of microbatches m.
        layers: layers of the model, a multiple of p; each is a virtual stage.

    Raises:
        InputError: MP143 for a count below 1, MP146 if `layers` is no multiple of `stages`.
    """
    _check(stages, microbatches, layers)
    if layers % stages:
        raise InputError(
            "MP146",
            f"layer-major places layers in turn, {layers} layers are no multiple of {stages} stages",
            f"use {layers - layers % stages or stages} layers, or a number of stages that divides {layers}",
        )
    return _chunk_by_chunk("layer-major", stages, microbatches, layers // stages)


def _chunk_by_chunk(name: str, stages: int, microbatches: int, chunks: int) -> Schedule:
    _check(stages, microbatches, chunks)
    rows = []
    for stage in range(stages):
        own = range(stage, stages * chunks, stages)
        forwards = [Action(virtual, "F", k) for virtual in own for k in range(microbatches)]
        backwards = [Action(virtual, "B", k) for virtual in reversed(own) for k in range(microbatches)]
        rows.append(ActorActions(stage=stage, group=0, actions=(*forwards, *backwards)))
    return Schedule(name=name, microbatches=microbatches, actions=tuple(rows))


def _check(stages: int, microbatches: int, chunks: int) -> None:
    require_positive("stages", stages)
    require_positive("microbatches", microbatches)
    require_positive("chunks", chunks)

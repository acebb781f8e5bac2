"""Schedules of looped placements: stage i of p runs the virtual stages i, p + i, 2p + i, ..., its *chunks*.

    interleaved     1F1B over chunks: p microbatches through one chunk, then the next; little memory.
    breadth-first   all microbatches through a chunk before the next chunk, then back chunk by chunk.
    layer-major     breadth-first with one layer a chunk: layered gradient accumulation on modular stages. A layer's
                    gradient is complete, and can be reduced, while the stage works on the layers before it.

With v chunks a stage, all alike, T the time of a whole stage per microbatch, and m a multiple of p, the bubble of each
is (p - 1)·T/v. Stage 0 holds p·v + p - 1 chunk activations under `interleaved`, all m·v under the other two.

Where stages have several groups, each runs the actions of its own microbatches in the order of its stage. Under
`interleaved` that is the order for as many stages as the windows of 1F1B with the same shares add up to: while a group
works on one microbatch its stage begins others.
"""

from itertools import islice

from costmodel.errors import InputError
from costmodel.schedule.actions import Action, ActionKind, ActorActions, Schedule, require_positive
from costmodel.schedule.generate import Shares, checked_shares, dealt, default_windows, one_f_one_b


def interleaved(stages: int, microbatches: int, chunks: int = 2, shares: Shares | None = None) -> Schedule:
    """Interleaved 1F1B for any number of microbatches.

    Microbatches go in rounds of at least p (or all of them, if fewer), as equal as can be; a round passes chunk by
    chunk. Stage i starts its backwards after ℓ + 2·(p - 1 - i) forwards, where ℓ is the least lead that lets the last
    stage run each backward after its forward: (v - 1)·p + 1 if m is a multiple of p. With windows w_i other than 1,
    Σ w_i stands for p and Σ over the later stages for p - 1 - i.

    Args:
        stages: number of stages p.
        microbatches: number of microbatches m.
        chunks: virtual stages on each stage, v. With 1 this is 1F1B.
        shares: per stage and group the microbatches that it runs; by default each stage has one group.

    Raises:
        InputError: MP143 for a count below 1, MP144 if the groups of a stage do not partition the microbatches.
    """
    _check(stages, microbatches, chunks)
    checked = checked_shares(stages, microbatches, shares)
    if chunks == 1:
        actions = one_f_one_b(stages, microbatches, shares).actions
        return Schedule(name="interleaved", microbatches=microbatches, actions=actions)
    widths = default_windows(checked)
    count = max(1, microbatches // sum(widths))
    small, larger = divmod(microbatches, count)
    numbers = iter(range(microbatches))
    rounds = [tuple(islice(numbers, small + (at < larger))) for at in range(count)]
    forwards = [(chunk, k) for own in rounds for chunk in range(chunks) for k in own]
    backwards = [(chunk, k) for own in rounds for chunk in reversed(range(chunks)) for k in own]
    position = {unit: at for at, unit in enumerate(forwards)}
    lead = 1 + max(position[unit] - at for at, unit in enumerate(backwards))
    rows = []
    for stage in range(stages):
        warm_up = lead + 2 * sum(widths[stage + 1 :])
        order: list[tuple[ActionKind, tuple[int, int]]] = [("F", unit) for unit in forwards[:warm_up]]
        for at, unit in enumerate(backwards):
            order.append(("B", unit))
            order.extend(("F", late) for late in forwards[warm_up + at : warm_up + at + 1])
        actions = tuple(Action(chunk * stages + stage, kind, k) for kind, (chunk, k) in order)
        rows.append(ActorActions(stage=stage, group=0, actions=actions))
    return dealt(Schedule(name="interleaved", microbatches=microbatches, actions=tuple(rows)), checked)


def breadth_first(stages: int, microbatches: int, chunks: int = 2, shares: Shares | None = None) -> Schedule:
    """All microbatches forward through one chunk after the other, then backward through them in reverse.

    Args:
        stages: number of stages p.
        microbatches: number of microbatches m.
        chunks: virtual stages on each stage, v. With 1 this is GPipe.
        shares: per stage and group the microbatches that it runs; by default each stage has one group.

    Raises:
        InputError: MP143 for a count below 1, MP144 if the groups of a stage do not partition the microbatches.
    """
    return _chunk_by_chunk("breadth-first", stages, microbatches, chunks, shares)


def layer_major(stages: int, microbatches: int, layers: int, shares: Shares | None = None) -> Schedule:
    """Layered gradient accumulation: layer ℓ is on stage ℓ mod p, and takes all microbatches before the next layer.

    Args:
        stages: number of stages p.
        microbatches: number of microbatches m.
        layers: layers of the model, a multiple of p; each is a virtual stage.
        shares: per stage and group the microbatches that it runs; by default each stage has one group.

    Raises:
        InputError: MP143 for a count below 1, MP144 if the groups of a stage do not partition the microbatches, MP146
            if `layers` is no multiple of `stages`.
    """
    _check(stages, microbatches, layers)
    if layers % stages:
        raise InputError(
            "MP146",
            f"layer-major places layers in turn, {layers} layers are no multiple of {stages} stages",
            f"use {layers - layers % stages or stages} layers, or a number of stages that divides {layers}",
        )
    return _chunk_by_chunk("layer-major", stages, microbatches, layers // stages, shares)


def _chunk_by_chunk(name: str, stages: int, microbatches: int, chunks: int, shares: Shares | None) -> Schedule:
    _check(stages, microbatches, chunks)
    checked = checked_shares(stages, microbatches, shares)
    rows = []
    for stage in range(stages):
        own = range(stage, stages * chunks, stages)
        forwards = [Action(virtual, "F", k) for virtual in own for k in range(microbatches)]
        backwards = [Action(virtual, "B", k) for virtual in reversed(own) for k in range(microbatches)]
        rows.append(ActorActions(stage=stage, group=0, actions=(*forwards, *backwards)))
    return dealt(Schedule(name=name, microbatches=microbatches, actions=tuple(rows)), checked)


def _check(stages: int, microbatches: int, chunks: int) -> None:
    require_positive("stages", stages)
    require_positive("microbatches", microbatches)
    require_positive("chunks", chunks)

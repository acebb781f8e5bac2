"""V-shaped schedules: stage i of p runs the virtual stages i and 2p - 1 - i, so that the way turns at stage p - 1.

The first stage also has the loss, and stages can be made to hold equal memory. All three split the backward.

    zb-v     no bubble if F = B = W (of a chunk); 2p chunk activations on every stage: what 1F1B's first stage holds.
    v-half   half of that memory, some bubble.
    v-min    a third of it, about 1F1B's bubble.

zb-v is written down phase by phase. The other two repeat a *building block* of one microbatch every six slots, one for
each of F, B, W of both chunks. Chunk 0's forward moves on by one stage every `x` slots and its backward every `y`,
chunk 1's the other way round; an activation's life on a stage, and with it memory, is proportional to x + y,

    zb-v x + y = 6,   v-half x + y = 3,   v-min x + y = 2.                                                      (V1)

Three gaps, after the turns of the way there, of the loss and of the way back, are chosen as the smallest for which no
two actions of a stage fall into one slot (modulo six). Only the order in each stage's list is kept, so nothing waits
for a slot. Where stages have several groups, each runs the actions of its own microbatches in the order of its stage.
"""

from collections.abc import Iterable
from itertools import product

from costmodel.schedule.actions import Action, ActionKind, ActorActions, Schedule
from costmodel.schedule.generate import Shares, checked_shares, dealt

_PERIOD = 6


def zb_v(stages: int, microbatches: int, shares: Shares | None = None) -> Schedule:
    """ZB-V: the memory of 1F1B on every stage, without a bubble if F = B = W; each link carries everything twice.

    Args:
        stages: number of stages p.
        microbatches: number of microbatches m.
        shares: per stage and group the microbatches that it runs; by default each stage has one group.

    Raises:
        InputError: MP143 for a count below 1, MP144 if the groups of a stage do not partition the microbatches.
    """
    checked = checked_shares(stages, microbatches, shares)
    rows = []
    for stage in range(stages):
        units = _zb_v_order(stages, max(microbatches, 2 * stages - 1), stage)
        rows.append(_row(stages, stage, (unit for unit in units if unit[2] < microbatches)))
    return dealt(Schedule(name="zb-v", microbatches=microbatches, actions=tuple(rows)), checked)


def v_half(stages: int, microbatches: int, shares: Shares | None = None) -> Schedule:
    """V-Half: about half of 1F1B's memory on every stage.

    Args:
        stages: number of stages p.
        microbatches: number of microbatches m.
        shares: per stage and group the microbatches that it runs; by default each stage has one group.

    Raises:
        InputError: MP143 for a count below 1, MP144 if the groups of a stage do not partition the microbatches.
    """
    return _repeated("v-half", stages, microbatches, shares, 1, 2)


def v_min(stages: int, microbatches: int, shares: Shares | None = None) -> Schedule:
    """V-Min: about a third of 1F1B's memory on every stage.

    Args:
        stages: number of stages p.
        microbatches: number of microbatches m.
        shares: per stage and group the microbatches that it runs; by default each stage has one group.

    Raises:
        InputError: MP143 for a count below 1, MP144 if the groups of a stage do not partition the microbatches.
    """
    return _repeated("v-min", stages, microbatches, shares, 1, 1)


_Unit = tuple[ActionKind, int, int]
"""Kind, chunk, microbatch."""


def _zb_v_order(stages: int, microbatches: int, stage: int) -> list[_Unit]:
    """Warm-up, steady state and cool-down of one stage; at least 2p - 1 microbatches."""
    counts: dict[tuple[ActionKind, int], int] = {}
    units: list[_Unit] = []

    def run(*pairs: tuple[ActionKind, int]) -> None:
        for kind, chunk in pairs:
            at = counts.get((kind, chunk), 0)
            if at < microbatches:
                units.append((kind, chunk, at))
                counts[kind, chunk] = at + 1

    for _ in range(2 * (stages - stage) - 1):
        run(("F", 0))
    for _ in range(stage):
        run(("F", 1), ("F", 0))
    for _ in range(stages - stage):
        run(("F", 1), ("B", 1), ("W", 1))
    while counts.get(("F", 1), 0) < microbatches:
        run(("F", 0), ("B", 0), ("W", 0), ("F", 1), ("B", 1), ("W", 1))
    for _ in range(stage):
        run(("B", 0), ("B", 1))
    for _ in range(stages - stage):
        run(("B", 0), ("W", 0))
    while counts.get(("W", 1), 0) < microbatches:
        run(("W", 1))
    while counts.get(("W", 0), 0) < microbatches:
        run(("W", 0))
    return units


def _repeated(name: str, stages: int, microbatches: int, shares: Shares | None, there: int, back: int) -> Schedule:
    checked = checked_shares(stages, microbatches, shares)
    rows = []
    for stage, block in enumerate(_building_block(stages, there, back)):
        slots: list[tuple[int, _Unit]] = [
            (slot + _PERIOD * k, (kind, chunk, k)) for (kind, chunk), slot in block.items() for k in range(microbatches)
        ]
        rows.append(_row(stages, stage, (unit for _, unit in sorted(slots))))
    return dealt(Schedule(name=name, microbatches=microbatches, actions=tuple(rows)), checked)


def _building_block(stages: int, there: int, back: int) -> list[dict[tuple[ActionKind, int], int]]:
    """Slots of one microbatch's six actions on every stage (V1), with the smallest gaps that never collide."""
    for gaps in sorted(product(range(1, _PERIOD + 1), repeat=3), key=lambda gaps: (sum(gaps), gaps)):
        blocks = []
        for stage in range(stages):
            rest = stages - 1 - stage
            turn = (stages - 1) * there + gaps[0]
            loss = turn + (stages - 1) * back + gaps[1]
            home = loss + (stages - 1) * there + gaps[2]
            block: dict[tuple[ActionKind, int], int] = {
                ("F", 0): stage * there,
                ("F", 1): turn + rest * back,
                ("B", 1): loss + stage * there,
                ("B", 0): home + rest * back,
            }
            if len({slot % _PERIOD for slot in block.values()}) < 4:
                break
            _place_weights(block)
            blocks.append(block)
        if len(blocks) == stages:
            return blocks
    raise AssertionError(f"no building block for {stages} stages")  # cannot happen: the slots differ by a parity


def _place_weights(block: dict[tuple[ActionKind, int], int]) -> None:
    """Puts both W into the two slots that are left, as soon after their B as they can be together."""
    free = [slot for slot in range(_PERIOD) if slot not in {used % _PERIOD for used in block.values()}]
    waits = []
    for order in (free, free[::-1]):
        waits.append([(slot - block["B", chunk]) % _PERIOD for chunk, slot in enumerate(order)])
    best = min(waits, key=sum)
    for chunk, wait in enumerate(best):
        block["W", chunk] = block["B", chunk] + wait


def _row(stages: int, stage: int, units: Iterable[_Unit]) -> ActorActions:
    virtual = (stage, 2 * stages - 1 - stage)
    actions = tuple(Action(virtual[chunk], kind, k) for kind, chunk, k in units)
    return ActorActions(stage=stage, group=0, actions=actions)

"""A schedule as lists of numbers, so that a simulation touches no objects.

With p (virtual) stages and m microbatches, cell s·m + k stands for microbatch k on stage s, and *slots* are where
inputs arrive: slot `cell` for F, `p·m + cell` for B, `2·p·m + cell` for W. The slot that an action waits for is also
its code. An F fills the F slot of the next stage, or on the last stage the B slot of its own; a B fills the B slot of
the stage before. So a B of stage s < p - 1 that has its input comes after the F of its own stage, by way of the stages
after it. W waits for nothing but its place in its actor's list, which is checked here.
"""

from dataclasses import dataclass
from itertools import accumulate

from costmodel.errors import InputError
from costmodel.schedule.actions import Schedule
from costmodel.schedule.validate import validate_schedule

FORWARD, BACKWARD, WEIGHT = 0, 1, 2
_KINDS = {"F": FORWARD, "B": BACKWARD, "W": WEIGHT}
NOTHING = -1  # slot that an action fills which nobody waits for


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A schedule, flattened. Lists are by actor in the schedule's order, then by step.

    Args:
        schedule: what was flattened.
        stages: p.
        split: whether weight gradients are actions of their own.
        needs: the slot that each action waits for; `divmod(slot, cells)` is (kind, cell).
        keys: for each action `(kind·p + stage) · actors + receiver`: all that its prices depend on. What fills nothing
            has some receiver.
        fills: the slot that each action's output arrives in, or NOTHING.
        owners: for each cell, the index of the actor that runs it, -1 if none does.
        peaks: most microbatches that each actor holds activations of at one time.
    """

    schedule: Schedule
    stages: int
    split: bool
    needs: list[list[int]]
    keys: list[list[int]]
    fills: list[list[int]]
    owners: list[int]
    peaks: list[int]

    @property
    def cells(self) -> int:
        return self.stages * self.schedule.microbatches


def flatten(schedule: Schedule) -> Program:
    """The program of a schedule.

    Raises:
        InputError: MP148 if an action is there twice, lies outside the microbatches, or is on another actor than its F.
            Deadlocks show when the program is run.
    """
    stages, microbatches = schedule.stages, schedule.microbatches
    cells = stages * microbatches
    last = cells - microbatches
    base = {kind: at * cells for kind, at in _KINDS.items()}
    needs: list[list[int]] = []
    owners = [-1] * cells
    forwards = 0
    for actor, row in enumerate(schedule.actions):
        if max([action.microbatch for action in row.actions], default=0) >= microbatches:
            raise inconsistent(schedule)
        own = [base[action.kind] + action.stage * microbatches + action.microbatch for action in row.actions]
        first = [slot for slot in own if slot < cells]
        for cell in first:
            owners[cell] = actor
        # nothing twice, and no B or W without the F of its cell
        if len(set(own)) < len(own) or len({slot % cells for slot in own}) > len(first):
            raise inconsistent(schedule)
        forwards += len(first)
        needs.append(own)
    if cells - owners.count(-1) < forwards:
        raise inconsistent(schedule)  # two actors run one forward
    split = any(max(own, default=0) >= 2 * cells for own in needs)
    if split:
        _check_weights(schedule, needs, cells)
    fills = [
        [
            (slot + microbatches if slot < last else slot + cells)
            if slot < cells
            else slot - microbatches
            if cells + microbatches <= slot < 2 * cells
            else NOTHING
            for slot in own
        ]
        for own in needs
    ]
    count = len(needs)
    keys = [
        [slot // microbatches * count + owners[fill % cells] for slot, fill in zip(own, filled)]
        for own, filled in zip(needs, fills)
    ]
    # an activation is held until the B, or until the W of a schedule that has any
    low, high = (2 * cells, 3 * cells) if split else (cells, 2 * cells)
    peaks = [
        max(accumulate([1 if slot < cells else -1 if low <= slot < high else 0 for slot in own]), default=0)
        for own in needs
    ]
    return Program(
        schedule=schedule, stages=stages, split=split, needs=needs, keys=keys, fills=fills, owners=owners, peaks=peaks
    )


def _check_weights(schedule: Schedule, needs: list[list[int]], cells: int) -> None:
    """Each W comes after the B of its cell in its actor's list."""
    for own in needs:
        seen: set[int] = set()
        for slot in own:
            if slot >= 2 * cells:
                if slot - cells not in seen:
                    raise inconsistent(schedule)
            elif slot >= cells:
                seen.add(slot)


def inconsistent(schedule: Schedule) -> InputError:
    """MP148 with what the schedule's validator finds first, and its grid."""
    findings = validate_schedule(schedule, schedule.stages)
    first = f"{findings[0].code}: {findings[0].message}" if findings else "an action is on another actor than its F"
    return InputError("MP148", f"schedule {schedule.name!r} cannot be simulated: {first}")

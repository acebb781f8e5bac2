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


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A schedule, flattened. Lists are by actor in the schedule's order, then by step.

    Args:
        schedule: what was flattened.
        stages: p.
        split: whether weight gradients are actions of their own.
        needs: the slot that each action waits for; `divmod(slot, cells)` is (kind, cell).
        keys: for each action `(kind·p + stage) · actors + receiver`: all that its prices depend on. What fills nothing
            has some receiver; what is for nobody has the actor itself.
        fills: the slot that each action's output arrives in; below 0 if nobody waits for it.
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
    base = {kind: at * stages for kind, at in _KINDS.items()}
    # a *class* of actions is kind·p + stage; an action's slot is class·m + microbatch
    classes: list[list[int]] = []
    needs: list[list[int]] = []
    owners = [-1] * cells
    forwards = 0
    for actor, row in enumerate(schedule.actions):
        numbers = [action.microbatch for action in row.actions]
        if max(numbers, default=0) >= microbatches:
            raise inconsistent(schedule)
        kinds = [base[action.kind] + action.stage for action in row.actions]
        own = [kind * microbatches + number for kind, number in zip(kinds, numbers)]
        first = [slot for slot in own if slot < cells]
        for cell in first:
            owners[cell] = actor
        # nothing twice, and no B or W without the F of its cell
        if len(set(own)) < len(own) or len({slot % cells for slot in own}) > len(first):
            raise inconsistent(schedule)
        forwards += len(first)
        classes.append(kinds)
        needs.append(own)
    if cells - owners.count(-1) < forwards:
        raise inconsistent(schedule)  # two actors run one forward
    split = any(max(kinds, default=0) >= 2 * stages for kinds in classes)
    if split:
        _check_weights(schedule, needs, cells)
    shifts = _shifts(stages, microbatches)
    fills = [[slot + shifts[kind] for slot, kind in zip(own, kinds)] for own, kinds in zip(needs, classes)]
    # an activation is held until the B, or until the W of a schedule that has any
    held = [1] * stages + ([0] * stages + [-1] * stages if split else [-1] * stages)
    return Program(
        schedule=schedule,
        stages=stages,
        split=split,
        needs=needs,
        keys=_keys(classes, fills, owners, stages, microbatches),
        fills=fills,
        owners=owners,
        peaks=[max(accumulate(map(held.__getitem__, kinds)), default=0) for kinds in classes],
    )


def _shifts(stages: int, microbatches: int) -> list[int]:
    """For each class of actions what leads from its slot to the one that it fills; below 0 for those that fill none."""
    cells = stages * microbatches
    none = -4 * cells
    forwards = [microbatches] * (stages - 1) + [cells]
    backwards = [none] + [-microbatches] * (stages - 1)
    return [*forwards, *backwards, *[none] * stages]


def _keys(
    classes: list[list[int]], fills: list[list[int]], owners: list[int], stages: int, microbatches: int
) -> list[list[int]]:
    """See `Program.keys`. Where a stage has one actor, a class of actions has one receiver."""
    count, cells = len(classes), stages * microbatches
    sole = []
    for stage in range(stages):
        own = owners[stage * microbatches : (stage + 1) * microbatches]
        sole.append(own[0] if own[0] >= 0 and own.count(own[0]) == microbatches else None)
    receivers = [*sole[1:], sole[-1], sole[0], *sole[:-1], *sole]
    table = [None if receiver is None else kind * count + receiver for kind, receiver in enumerate(receivers)]
    keys: list[list[int]] = []
    for actor, (kinds, filled) in enumerate(zip(classes, fills)):
        found = [table[kind] for kind in kinds]
        if None in found:
            targets = [owners[fill % cells] for fill in filled]
            found = [kind * count + (to if to >= 0 else actor) for kind, to in zip(kinds, targets)]
        keys.append(found)  # type: ignore[arg-type]
    return keys


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

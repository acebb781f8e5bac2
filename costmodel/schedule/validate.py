"""Checks that a schedule is complete and can run, and shows where it is not, as a stage × step grid.

What an action needs, for stage s of p (virtual stages) and microbatch k:

    F(s, k) after F(s-1, k);   B(s, k) after F(s, k) and B(s+1, k);   W(s, k) after B(s, k),

and after the action before it on the same actor. Sends never block: a schedule runs iff these have no cycle.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from costmodel.schedule.actions import Action, ActionKind, Actor, Schedule, require_positive

_MOST_FINDINGS_PER_CODE = 10
_MOST_COLUMNS = 12
_MOST_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFinding:
    """One thing that is wrong with a schedule.

    Args:
        code: MP610 missing, MP611 duplicated, MP612 out of order, MP613 deadlock, MP614 misplaced (an action on another
            stage's actor, or outside the schedule's stages and microbatches).
        message: what is wrong, then the grid with the bad cell marked as ``>2F0<``.
        actor: where, if the actor is known.
        step: position in the actor's list, 0-based, if there is one.
    """

    code: str
    message: str
    actor: Actor | None
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DependencyOrder:
    """Every action that can run, each after all that it needs.

    Args:
        order: (index of the actor in the schedule, action); an actor's actions keep their order.
        stuck: for each actor that cannot finish, (its index, step of the action that never runs, what that waits for).
    """

    order: list[tuple[int, Action]]
    stuck: tuple[tuple[int, int, Action], ...]


def validate_schedule(schedule: Schedule, stages: int) -> tuple[ScheduleFinding, ...]:
    """All findings, empty if the schedule is complete and free of deadlock.

    Args:
        schedule: the schedule to check.
        stages: number of stages that it must run (virtual stages, where it has any).

    Returns:
        Findings by code, at most 10 of a code. MP613 is looked for only where nothing else is wrong, since a missing
        action also blocks those that need it.
    """
    require_positive("stages", stages)
    findings: list[ScheduleFinding] = []
    for check in (_missing, _duplicated, _out_of_order, _misplaced):
        findings.extend(_capped(check(schedule, stages)))
    return tuple(findings or _capped(_deadlocked(schedule, stages)))


def in_flight(schedule: Schedule) -> dict[Actor, int]:
    """Most microbatches per actor whose activations are held at one time.

    An activation is held from its F until its B, or until its W where the schedule splits backwards. Under virtual
    stages each (stage, microbatch) counts by itself.
    """
    last: ActionKind = "W" if schedule.splits_backward else "B"
    peaks = {}
    for row in schedule.actions:
        held = peak = 0
        for action in row.actions:
            if action.kind == "F":
                held += 1
                peak = max(peak, held)
            elif action.kind == last:
                held -= 1
        peaks[row.actor] = peak
    return peaks


def dependency_order(schedule: Schedule, stages: int) -> DependencyOrder:
    """Runs the schedule without times, in time linear in the number of actions.

    Args:
        schedule: every action lies in 0..stages-1 and 0..microbatches-1.
        stages: number of (virtual) stages.
    """
    microbatches, cells = schedule.microbatches, stages * schedule.microbatches
    last_stage = stages - 1
    lists = [row.actions for row in schedule.actions]
    steps = [0] * len(lists)
    done = bytearray(3 * cells)  # F at s·m + k, B after all F, W after all B
    waiting: dict[int, list[int]] = {}
    order: list[tuple[int, Action]] = []
    runnable = list(range(len(lists) - 1, -1, -1))
    while runnable:
        actor = runnable.pop()
        actions, step = lists[actor], steps[actor]
        while step < len(actions):
            action = actions[step]
            kind, stage = action.kind, action.stage
            cell = stage * microbatches + action.microbatch
            need = -1
            if kind == "F":
                if stage and not done[cell - microbatches]:
                    need = cell - microbatches
            elif kind == "B":
                if not done[cell]:
                    need = cell
                elif stage < last_stage and not done[cells + cell + microbatches]:
                    need = cells + cell + microbatches
                cell += cells
            else:
                if not done[cells + cell]:
                    need = cells + cell
                cell += 2 * cells
            if need >= 0:
                waiting.setdefault(need, []).append(actor)
                break
            done[cell] = 1
            order.append((actor, action))
            if cell in waiting:
                runnable.extend(waiting.pop(cell))
            step += 1
        steps[actor] = step
    stuck = []
    kinds: tuple[ActionKind, ...] = ("F", "B", "W")
    for need, actors in waiting.items():
        kind, cell = divmod(need, cells)
        awaited = Action(cell // microbatches, kinds[kind], cell % microbatches)
        stuck.extend((actor, steps[actor], awaited) for actor in actors)
    return DependencyOrder(order=order, stuck=tuple(sorted(stuck, key=lambda entry: entry[:2])))


def format_grid(schedule: Schedule, *, marks: Iterable[tuple[int, int]] = (), focus: tuple[int, int] = (0, 0)) -> str:
    """Actors down, steps across; a large schedule is cut to the neighbourhood of `focus`.

    Args:
        schedule: the schedule to show.
        marks: (index of the actor, step) of the bad cells, shown as ``>2F0<``; a step past the end marks an empty cell.
        focus: (index of the actor, step) that must be in the picture.
    """
    bad = set(marks)
    longest = max(max((len(row.actions) for row in schedule.actions), default=0), focus[1] + 1)
    columns = _around(focus[1], longest, _MOST_COLUMNS)
    rows = _around(focus[0], len(schedule.actions), _MOST_ROWS)
    labels = {index: str(schedule.actions[index].actor) for index in rows}
    width = max(map(len, labels.values()))
    cells = {
        (index, step): _cell(schedule.actions[index].actions, step, (index, step) in bad)
        for index in rows
        for step in columns
    }
    cell_width = max(6, *map(len, cells.values()))
    left, right = (columns.start > 0) * ".. ", (columns.stop < longest) * " .."
    lines = [f"{'step':<{width}} | {left}" + "".join(f"{step:^{cell_width}}" for step in columns) + right]
    for index in rows:
        text = "".join(f"{cells[index, step]:^{cell_width}}" for step in columns)
        lines.append(f"{labels[index]:<{width}} | {left}{text}{right}")
    hidden = len(schedule.actions) - len(rows)
    if hidden:
        lines.append(f"({hidden} more actors)")
    return "\n".join(line.rstrip() for line in lines)


def _missing(schedule: Schedule, stages: int) -> Iterator[ScheduleFinding]:
    present = {action for row in schedule.actions for action in row.actions}
    kinds: tuple[ActionKind, ...] = ("F", "B", "W") if schedule.splits_backward else ("F", "B")
    homes: dict[int, int] = {}
    for index, _, action in _cells(schedule):
        homes.setdefault(action.stage, index)
    for index, row in enumerate(schedule.actions):
        homes.setdefault(row.stage, index)
    for stage in range(stages):
        for kind in kinds:
            missing = [k for k in range(schedule.microbatches) if Action(stage, kind, k) not in present]
            if not missing:
                continue
            text = f"{Action(stage, kind, missing[0])} is missing: stage {stage} has no {kind} of "
            text += f"{len(missing)} of {schedule.microbatches} microbatches ({_some(missing)})"
            if stage not in homes:
                yield _finding(schedule, "MP610", f"{text}; no actor runs stage {stage}", None)
                continue
            index = homes[stage]
            rest = {Action(stage, other, missing[0]) for other in kinds}
            for at, _, action in _cells(schedule):  # the group that runs the rest of this microbatch, if one does
                if action in rest:
                    index = at
                    break
            yield _finding(schedule, "MP610", text, (index, len(schedule.actions[index].actions)))


def _duplicated(schedule: Schedule, stages: int) -> Iterator[ScheduleFinding]:
    first: dict[Action, tuple[int, int]] = {}
    for index, step, action in _cells(schedule):
        if action not in first:
            first[action] = (index, step)
            continue
        earlier, at = first[action]
        text = f"{action} is duplicated: step {at} of {schedule.actions[earlier].actor} and step {step} of "
        text += f"{schedule.actions[index].actor}"
        yield _finding(schedule, "MP611", text, (index, step), (earlier, at))


def _out_of_order(schedule: Schedule, stages: int) -> Iterator[ScheduleFinding]:
    """B before its F, or W before its B, or on another group than it."""
    places: dict[Action, tuple[int, int]] = {}
    for index, step, action in _cells(schedule):
        places.setdefault(action, (index, step))
    for action, (index, step) in places.items():
        if action.kind == "F":
            continue
        needed = Action(action.stage, "F" if action.kind == "B" else "B", action.microbatch)
        if needed not in places:
            continue  # MP610
        at, before = places[needed]
        if at != index:
            text = f"{action} runs on {schedule.actions[index].actor}, but {needed} ran on {schedule.actions[at].actor}"
        elif before > step:
            text = f"{action} (step {step}) comes before {needed} (step {before}) on {schedule.actions[index].actor}"
        else:
            continue
        yield _finding(schedule, "MP612", text, (index, step), (at, before))


def _misplaced(schedule: Schedule, stages: int) -> Iterator[ScheduleFinding]:
    virtual = stages != len({row.stage for row in schedule.actions})
    homes: dict[int, int] = {}  # virtual stage to the stage of the actors that run it
    for index, step, action in _cells(schedule):
        row = schedule.actions[index]
        if action.stage >= stages or action.microbatch >= schedule.microbatches:
            text = f"{action} is outside the schedule's {stages} stages and {schedule.microbatches} microbatches"
        elif row.stage != (home := homes.setdefault(action.stage, row.stage) if virtual else action.stage):
            text = f"{action} runs on {row.actor}, but stage {action.stage} belongs to the actors of stage {home}"
        else:
            continue
        yield _finding(schedule, "MP614", text, (index, step))


def _deadlocked(schedule: Schedule, stages: int) -> Iterator[ScheduleFinding]:
    stuck = dependency_order(schedule, stages).stuck
    if not stuck:
        return
    waits = "; ".join(
        f"{schedule.actions[index].actor} stops before {schedule.actions[index].actions[step]} (step {step}), "
        f"which needs {awaited}"
        for index, step, awaited in stuck[:_MOST_FINDINGS_PER_CODE]
    )
    bad = [(index, step) for index, step, _ in stuck]
    yield _finding(schedule, "MP613", f"deadlock, {len(stuck)} actors wait for ever: {waits}", *bad)


def _finding(
    schedule: Schedule, code: str, text: str, place: tuple[int, int] | None, *more: tuple[int, int]
) -> ScheduleFinding:
    marks = () if place is None else (place, *more)
    grid = format_grid(schedule, marks=marks, focus=place or (0, 0))
    actor = None if place is None else schedule.actions[place[0]].actor
    return ScheduleFinding(code=code, message=f"{text}\n{grid}", actor=actor, step=place and place[1])


def _capped(findings: Iterator[ScheduleFinding]) -> list[ScheduleFinding]:
    kept = []
    for finding in findings:
        kept.append(finding)
        if len(kept) == _MOST_FINDINGS_PER_CODE:
            break
    return kept


def _cells(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for index, row in enumerate(schedule.actions):
        for step, action in enumerate(row.actions):
            yield index, step, action


def _cell(actions: tuple[Action, ...], step: int, marked: bool) -> str:
    text = str(actions[step]) if step < len(actions) else ""
    return f">{text or '?'}<" if marked else text


def _around(middle: int, count: int, most: int) -> range:
    start = max(0, min(middle - most // 2, count - most))
    return range(start, min(count, start + most))


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")

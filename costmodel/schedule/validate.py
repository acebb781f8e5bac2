"""Checks that a schedule is complete and can run, and shows where it is not, as a stage × step grid.

What an action needs, for stage s of p (virtual stages) and microbatch k:

    F(s, k) after F(s-1, k);   B(s, k) after F(s, k) and B(s+1, k);   W(s, k) after B(s, k),

and after the action before it on the same actor. Sends never block: a schedule runs iff these have no cycle.
"""

from collections.abc import Iterator, Mapping, Sequence
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


def held_at_peak(schedule: Schedule, saved_bytes: Mapping[Actor, float]) -> dict[Actor, int]:
    """Microbatches that each stage group holds when its actor holds the most bytes; without virtual stages these are
    `in_flight`.

    Args:
        saved_bytes: what one microbatch's activations take, by (virtual stage, group of the actor).
    """
    last: ActionKind = "W" if schedule.splits_backward else "B"
    found: dict[Actor, int] = {}
    for row in schedule.actions:
        held = {action.stage: 0 for action in row.actions}
        most, at_most = (0.0, 0), dict(held)
        size, count = 0.0, 0
        for action in row.actions:
            step = 1 if action.kind == "F" else -1 if action.kind == last else 0
            held[action.stage] += step
            count += step
            size += step * saved_bytes[Actor(action.stage, row.group)]
            if step > 0 and (size, count) > most:
                most, at_most = (size, count), dict(held)
        found.update((Actor(stage, row.group), count) for stage, count in at_most.items())
    return found


def held_bytes(
    schedule: Schedule,
    until_backward: Mapping[Actor, float],
    until_weights: Mapping[Actor, float],
    made: Mapping[Actor, float],
) -> dict[Actor, float]:
    """Bytes of activations that each stage group holds when its actor holds the most.

    Args:
        until_backward: what one microbatch holds from its F to its B, by (virtual stage, group of the actor).
        until_weights: what it holds from its B to its W, where the schedule splits backwards.
        made: what of that its B makes, while it still holds all that it had until then.
    """
    found: dict[Actor, float] = {}
    for row in schedule.actions:
        held = {Actor(action.stage, row.group): 0.0 for action in row.actions}
        most, at_most = 0.0, dict(held)
        for action in row.actions:
            place = Actor(action.stage, row.group)
            if action.kind == "F":
                held[place] += until_backward[place]
            elif action.kind == "B":
                if schedule.splits_backward:
                    held[place] += made[place]
                    if (total := sum(held.values())) > most:
                        most, at_most = total, dict(held)
                    held[place] += until_weights[place] - made[place]
                held[place] -= until_backward[place]
            else:
                held[place] -= until_weights[place]
            if (total := sum(held.values())) > most:
                most, at_most = total, dict(held)
        found.update(at_most)
    return found


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


def format_grid(schedule: Schedule, marks: Sequence[tuple[int, int]] = ()) -> str:
    """Actors down, steps across, the bad cells marked. A large schedule is cut to the neighbourhood of the marks.

    Args:
        schedule: the schedule to show.
        marks: (index of the actor, step) of the bad cells, shown as ``>2F0<``; a step past the end is shown as ``>?<``.
    """
    steps = max((len(row.actions) for row in schedule.actions), default=0)
    steps = max(steps, 1, *(step + 1 for _, step in marks)) if marks else max(steps, 1)
    rows = _near([index for index, _ in marks], len(schedule.actions), _MOST_ROWS)
    columns = _near([step for _, step in marks], steps, _MOST_COLUMNS)
    table = [["step", *map(str, columns)]]
    for index in rows:
        actions = schedule.actions[index].actions
        cells = [_cell(actions, step, (index, step) in marks) for step in columns]
        table.append([str(schedule.actions[index].actor), *cells])
    label_width = max(len(line[0]) for line in table)
    cell_width = max(6, *(len(cell) for line in table for cell in line[1:]))
    lines = []
    for label, *cells in table:
        text, before = "", -1
        for step, cell in zip(columns, cells):
            text += ".. " * (step != before + 1) + f"{cell:^{cell_width}}"
            before = step
        lines.append(f"{label:<{label_width}} | {text}{' ..' * (before != steps - 1)}".rstrip())
    if len(rows) < len(schedule.actions):
        lines.append(f"({len(schedule.actions) - len(rows)} more actors)")
    return "\n".join(lines)


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
                yield _finding(schedule, "MP610", f"{text}; no actor runs stage {stage}")
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
    """The cycle of actors that wait for each other, out of all that cannot go on."""
    stuck = {index: (step, awaited) for index, step, awaited in dependency_order(schedule, stages).stuck}
    if not stuck:
        return
    homes = {action: index for index, _, action in _cells(schedule)}
    path = [min(stuck)]
    while (ahead := homes[stuck[path[-1]][1]]) not in path:
        path.append(ahead)
    cycle = path[path.index(ahead) :]
    first = cycle.index(min(cycle))
    cycle = cycle[first:] + cycle[:first]
    waits = []
    for index in cycle[:_MOST_ROWS]:
        step, awaited = stuck[index]
        row = schedule.actions[index]
        waits.append(f"{row.actor} stops before {row.actions[step]} (step {step}), which needs {awaited}")
    text = f"deadlock, {len(cycle)} of {len(stuck)} stopped actors wait for each other: {'; '.join(waits)}"
    yield _finding(schedule, "MP613", text, *((index, stuck[index][0]) for index in cycle))


def _finding(schedule: Schedule, code: str, text: str, *marks: tuple[int, int]) -> ScheduleFinding:
    actor, step = (schedule.actions[marks[0][0]].actor, marks[0][1]) if marks else (None, None)
    return ScheduleFinding(code=code, message=f"{text}\n{format_grid(schedule, marks)}", actor=actor, step=step)


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


def _near(points: list[int], count: int, most: int) -> list[int]:
    """At most `most` of 0..count-1, in order: the points and their nearest neighbours; with no points the first."""
    wanted = points or [0]
    if count <= most:
        return list(range(count))
    near = dict.fromkeys(wanted[:most])
    distance = 1
    while len(near) < most:
        for point in wanted:
            for neighbour in (point - distance, point + distance):
                if 0 <= neighbour < count and len(near) < most:
                    near[neighbour] = None
        distance += 1
    return sorted(near)


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")

"""When each action of a plan's schedule runs, by the plan's own stage times, and as a text grid."""

from costmodel.errors import InputError
from costmodel.schedule.actions import Actor, Schedule
from costmodel.simulate import SendTimes, Simulation, StageTimes, TimelineEntry, simulate
from costmodel.units import format_seconds
from planner.check.placement import groups_of
from planner.check.timetable import schedule_of, waits_of
from planner.planfile.schema import Plan

MIN_COLUMNS = 3  # of the shortest forward
FILL = {"F": "-", "B": "=", "W": "~"}


def run_schedule(plan: Plan) -> Simulation:
    """Simulates the plan's schedule with its predicted times.

    Raises:
        InputError: the schedule cannot be read or cannot run (`check_plan` says where).
    """
    schedule = schedule_of(plan)
    times: dict[Actor, StageTimes] = {}
    known = {(stage, group): record.time for stage, group, record in groups_of(plan)}
    for row in schedule.actions:
        if row.actor not in known:
            raise InputError("MP615", f"the schedule names {row.actor}, which the plan does not have")
        time = known[row.actor]
        virtual = sorted({action.stage for action in row.actions}) or [row.stage]
        for stage in virtual:
            times[Actor(stage, row.group)] = StageTimes(
                forward_s=time.forward_s / len(virtual),
                backward_s=time.backward_s / len(virtual),
                reduce_s=time.gradient_reduction_s / len(virtual),
                update_s=max(time.once_s - time.gradient_reduction_s, 0.0) / len(virtual),
            )
    return simulate(schedule, times, _sends(plan, schedule), waits=waits_of(plan))


def _sends(plan: Plan, schedule: Schedule) -> dict[tuple[Actor, Actor], SendTimes] | None:
    if schedule.stages != len(plan.stages):
        return None
    found = {transfer.from_stage: transfer for transfer in plan.transfers}
    sends = {}
    for stage in range(len(plan.stages) - 1):
        transfer = found.get(stage)
        time_s = transfer.time_s if transfer else 0.0
        back = transfer.gradient_bytes / transfer.bytes if transfer and transfer.bytes else 0.0
        for source in range(len(plan.stages[stage].groups)):
            for target in range(len(plan.stages[stage + 1].groups)):
                edge = (Actor(stage, source), Actor(stage + 1, target))
                sends[edge] = SendTimes(activation_s=time_s, gradient_s=time_s * back)
    return sends


def render_timeline(plan: Plan, width: int = 110) -> str:
    """One row a stage group, time to the right: the microbatch's number, then ``-`` forward, ``=`` backward, ``~``
    weight gradient, ``.`` waiting. A long step shows its beginning and its end.

    Raises:
        InputError: as `run_schedule`.
    """
    simulation = run_schedule(plan)
    shortest_s = min((e.end_s - e.start_s for e in simulation.timeline if e.end_s > e.start_s), default=0.0)
    if not simulation.timeline or shortest_s <= 0 or simulation.pipeline_s <= 0:
        return "(the plan has no times to show)\n"
    labels = {use.actor: _label(plan, use.actor) for use in simulation.actors}
    room = max(width - max(map(len, labels.values())) - 3, 20)
    columns = max(round(simulation.pipeline_s / shortest_s * MIN_COLUMNS), min(room, 60))
    columns = min(columns, 100_000)
    rows = {actor: ["."] * columns for actor in labels}
    for entry in simulation.timeline:
        _draw(rows[entry.actor], entry, columns / simulation.pipeline_s)
    margin = max(map(len, labels.values()))
    lines = [f"{labels[actor]:<{margin}} | {_cut(''.join(row), room)}" for actor, row in rows.items()]
    scale = f"{'':<{margin}}   0 to {format_seconds(simulation.pipeline_s)}"
    shown = f", the middle {columns - room + 5} of {columns} columns left out" if columns > room else ""
    legend = f"{scale}{shown}; numbers are microbatches, - forward, = backward, . waiting"
    if plan.schedule.actors and any("W" in actor.actions for actor in plan.schedule.actors):
        legend += ", ~ weight gradient"
    return "\n".join([*lines, legend, *_update_lines(simulation, labels)]) + "\n"


def _update_lines(simulation: Simulation, labels: dict[Actor, str]) -> list[str]:
    """One line for the stages whose updates wait for each other."""
    waits = [(labels[use.actor], use.joined_s) for use in simulation.actors if use.joined_s > 0]
    if not waits:
        return []
    each = ", ".join(f"{label} {format_seconds(time_s)}" for label, time_s in waits)
    return [f"updates wait for values of other stages' gradients: {each}"]


def _label(plan: Plan, actor: Actor) -> str:
    groups = plan.stages[actor.stage].groups
    return f"stage {actor.stage}" + (f" {groups[actor.group].name}" if len(groups) > 1 else "")


def _draw(row: list[str], entry: TimelineEntry, columns_per_s: float) -> None:
    start = min(round(entry.start_s * columns_per_s), len(row) - 1)
    stop = max(min(round(entry.end_s * columns_per_s), len(row)), start + 1)
    text = str(entry.action.microbatch)[: stop - start].ljust(stop - start, FILL[entry.action.kind])
    row[start:stop] = text


def _cut(text: str, room: int) -> str:
    if len(text) <= room:
        return text
    head = (room - 5) // 2
    return f"{text[:head]} ... {text[len(text) - (room - 5 - head) :]}"

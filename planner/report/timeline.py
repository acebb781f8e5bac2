"""When each action of a plan's schedule runs, by the plan's own stage times, and as a text grid."""

from collections.abc import Mapping

from costmodel.schedule.actions import Actor
from costmodel.simulate import Simulation, TimelineEntry, simulate
from costmodel.units import format_seconds
from planner.device_stages import actor_label
from planner.plan_problem import problem_of
from planner.planfile.schema import Plan

MIN_COLUMNS = 3  # of the shortest forward
MAX_COLUMNS = 100_000  # of a row, before its middle is left out
FILL = {"F": "-", "B": "=", "W": "~"}


def run_schedule(plan: Plan) -> Simulation:
    """Simulates the plan's schedule with its predicted times.

    Raises:
        InputError: the schedule cannot be read or cannot run (`check_plan` says where).
    """
    problem = problem_of(plan)
    return simulate(problem.schedule, problem.times, problem.sends, waits=problem.waits)


def render_timeline(plan: Plan, width: int = 110) -> str:
    """The plan's own schedule as `draw_timeline` draws it.

    Raises:
        InputError: as `run_schedule`.
    """
    simulation = run_schedule(plan)
    return draw_timeline(simulation, {use.actor: actor_label(plan, use.actor) for use in simulation.actors}, width)


def draw_timeline(simulation: Simulation, labels: Mapping[Actor, str], width: int = 110) -> str:
    """One row a stage group, time to the right: the microbatch's number, then ``-`` forward, ``=`` backward, ``~``
    weight gradient, ``.`` waiting. A long step shows its beginning and its end.

    Args:
        simulation: with its timeline.
        labels: of the rows.
        width: characters of a row.
    """
    timeline = simulation.timeline
    shortest_s = min((e.end_s - e.start_s for e in timeline if e.end_s > e.start_s), default=0.0)
    if not timeline or shortest_s <= 0 or simulation.pipeline_s <= 0:
        return "(the plan has no times to show)\n"
    room = max(width - max(map(len, labels.values())) - 3, 20)
    columns = round(min(simulation.pipeline_s / shortest_s * MIN_COLUMNS, MAX_COLUMNS))
    columns = max(columns, min(room, 60))
    rows = {actor: ["."] * columns for actor in labels}
    for entry in timeline:
        _draw(rows[entry.actor], entry, columns / simulation.pipeline_s)
    margin = max(map(len, labels.values()))
    lines = [f"{labels[actor]:<{margin}} | {_cut(''.join(row), room)}" for actor, row in rows.items()]
    scale = f"{'':<{margin}}   0 to {format_seconds(simulation.pipeline_s)}"
    shown = f", the middle {columns - room + 5} of {columns} columns left out" if columns > room else ""
    legend = f"{scale}{shown}; numbers are microbatches, - forward, = backward, . waiting"
    if simulation.schedule.splits_backward:
        legend += ", ~ weight gradient"
    return "\n".join([*lines, legend, *_update_lines(simulation, labels)]) + "\n"


def _update_lines(simulation: Simulation, labels: Mapping[Actor, str]) -> list[str]:
    """One line for the stages whose updates wait for each other."""
    waits = [(labels[use.actor], use.joined_s) for use in simulation.actors if use.joined_s > 0]
    if not waits:
        return []
    each = ", ".join(f"{label} {format_seconds(time_s)}" for label, time_s in waits)
    return [f"updates wait for values of other stages' gradients: {each}"]


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

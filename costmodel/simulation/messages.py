"""What was sent in a simulation, and when."""

from collections.abc import Sequence

from costmodel.simulation.costs import Costs
from costmodel.simulation.program import Program
from costmodel.simulation.records import Message


def strict_wires_s(program: Program, costs: Costs, ends_s: Sequence[Sequence[float]]) -> list[list[float]]:
    """When the output of each action began to occupy its link, where links are shared by nobody; 0 if it has none."""
    free_s = [0.0] * len(costs.ends)
    wires_s = []
    for routes, own_ends_s in zip(costs.routes, ends_s):
        own = []
        for route, end_s in zip(routes, own_ends_s):
            start_s = 0.0
            if route:
                link = costs.link_of[route]
                start_s = max(free_s[link], end_s)
                free_s[link] = start_s + costs.wire_s[route]
            own.append(start_s)
        wires_s.append(own)
    return wires_s


def messages_of(
    program: Program, costs: Costs, ends_s: Sequence[Sequence[float]], wires_s: Sequence[Sequence[float]]
) -> tuple[Message, ...]:
    """Every message, by sender, then in its order.

    Args:
        program, costs: what was run.
        ends_s: of each action, by actor, then by step.
        wires_s: when its output began to occupy its link.
    """
    rows = program.schedule.actions
    found = []
    for actor, row in enumerate(rows):
        for step, route in enumerate(costs.routes[actor]):
            if route:
                start_s = wires_s[actor][step]
                end_s = start_s + costs.wire_s[route]
                found.append(
                    Message(
                        source=row.actor,
                        target=rows[costs.ends[costs.link_of[route]][1]].actor,
                        action=row.actions[step],
                        ready_s=ends_s[actor][step],
                        start_s=start_s,
                        end_s=end_s,
                        arrival_s=end_s + costs.latency_s[route],
                    )
                )
    return tuple(found)

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
    actors = program.schedule.actors
    link_of, wire_s, latency_s = costs.link_of, costs.wire_s, costs.latency_s
    targets = [actors[target] for _, target in costs.ends]
    found: list[Message] = []
    for row, source, *own in zip(program.schedule.actions, actors, costs.routes, ends_s, wires_s):
        for action, route, ready_s, start_s in zip(row.actions, *own):
            if route:
                end_s = start_s + wire_s[route]
                arrival_s = end_s + latency_s[route]
                found.append(Message(source, targets[link_of[route]], action, ready_s, start_s, end_s, arrival_s))
    return tuple(found)

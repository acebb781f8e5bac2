"""The simulation in which messages share resources and nothing slows compute down: one event an action.

An action's end is the only thing that must be handled in order of time, because then its message asks for resources,
first come first served; of one time, in the order of actors. An action whose output goes nowhere is no event: the next
one follows at once. Kept as one loop without calls, for speed.

Measured on two cores that ran other work, CPython 3.11, 1F1B with network cards that messages share: this loop 2.0
(4 stages) to 1.2 (64 stages) million actions a second of processor time, whole calls of `simulate` 1.2 to 0.8
(benchmarks/simulator_speed.py), of which flattening the schedule is a third. Handling each event by methods, and the
link of a message beside its cards, made 0.6 to 0.48.
"""

from heapq import heapify, heappop, heappush, heapreplace

from costmodel.simulation.costs import Costs
from costmodel.simulation.program import Program, inconsistent

Lists = list[list[float]]


def run_shared(program: Program, costs: Costs, resources: list[list[int]], count: int) -> tuple[Lists, Lists, Lists]:
    """Start and end of each action, and when its output began to occupy its link (0 if it has none), by actor, then by
    step.

    Args:
        resources: for each link, the numbers of all that a message on it occupies; count: how many numbers there are.

    Raises:
        InputError: MP148 if the schedule deadlocks.
    """
    cells, microbatches = program.cells, program.schedule.microbatches
    at_s = [0.0] * microbatches + [-1.0] * (2 * cells - microbatches) + [0.0] * cells
    waiting = [-1] * len(at_s)  # actor by the slot that it waits for
    stuck = 0
    free_s = [0.0] * count
    wire_s, latency_s = costs.wire_s, costs.latency_s
    over = [resources[link] for link in costs.link_of]  # by route
    starts_s: Lists = [[] for _ in program.needs]
    ends_s: Lists = [[] for _ in program.needs]
    wires_s: Lists = [[0.0] * len(own) for own in program.needs]
    ahead = list(map(zip, program.needs, costs.durations_s, program.fills, costs.routes))  # each actor's actions
    took_s, fills, routes = [0.0] * len(ahead), [-1] * len(ahead), [0] * len(ahead)  # of each actor's current action
    events: list[tuple[float, int]] = []
    for actor, own in enumerate(program.needs):
        if own:
            need, took_s[actor], fills[actor], routes[actor] = next(ahead[actor])
            if at_s[need] >= 0.0:
                starts_s[actor].append(at_s[need])
                events.append((at_s[need] + took_s[actor], actor))
            else:
                waiting[need] = actor
                stuck += 1
    heapify(events)
    while events:
        now_s, actor = events[0]
        ends_s[actor].append(now_s)
        fill, woken, arrival_s = fills[actor], -1, now_s
        if fill >= 0:
            route = routes[actor]
            if route:
                start_s, own = now_s, over[route]
                for resource in own:
                    if free_s[resource] > start_s:
                        start_s = free_s[resource]
                end_s = start_s + wire_s[route]
                for resource in own:
                    free_s[resource] = end_s
                wires_s[actor][len(ends_s[actor]) - 1] = start_s
                arrival_s = end_s + latency_s[route]
            at_s[fill] = arrival_s
            woken = waiting[fill]
        for need, duration_s, then, way in ahead[actor]:
            ready_s = at_s[need]
            if ready_s < 0.0:
                took_s[actor], fills[actor], routes[actor] = duration_s, then, way
                waiting[need] = actor
                stuck += 1
                heappop(events)
                break
            if ready_s > now_s:
                now_s = ready_s
            starts_s[actor].append(now_s)
            now_s += duration_s
            if then >= 0:
                fills[actor], routes[actor] = then, way
                heapreplace(events, (now_s, actor))
                break
            ends_s[actor].append(now_s)
        else:
            heappop(events)
        if woken >= 0:
            stuck -= 1
            before = ends_s[woken]
            if before and before[-1] > arrival_s:  # it was busy with what is no event
                arrival_s = before[-1]
            starts_s[woken].append(arrival_s)
            heappush(events, (arrival_s + took_s[woken], woken))
    if stuck:
        raise inconsistent(program.schedule)
    return starts_s, ends_s, wires_s

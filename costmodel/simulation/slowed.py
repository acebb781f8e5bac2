"""The simulation in which compute slows down beside communication, and messages may share resources.

An action runs at a fraction of its speed while a message leaves or reaches its actor, or part of a reduction runs.
As in `shared`, the end of an action is the one event that must be handled in order of time. All that is kept of what
runs beside an actor is until when it does: messages ask for their links at ends of actions, so they become known in the
order in which they begin, and one that waits for its own link waits behind others between the same two actors. (One
that waits for a card which its receiver has no part in begins later, by an event of its own.) A message that begins can
only put off the end of an action that runs; that end is looked up anew when its earlier time comes.

    the rest r of an action at t, slowed down by q until u, ends at t + q·r, or, if u is earlier, at u + r - (u - t)/q
                                                                                                                    (S1)

Kept as one loop with few calls, for speed. Measured on two cores that ran other work, CPython 3.11, 1F1B with links, in
million actions a second of processor time (benchmarks/simulator_speed.py): this loop 1.5 (4 stages), 1.1 (16) and 0.85
(64), whole calls of `simulate` 0.95, 0.8 and 0.65. Events for all that begins and ends made 0.46, 0.35 and 0.28. A
kernel compiled by numba would make several million, at the price of 0.4 s to import it, 1.6 s to compile it the first
time (0.3 s from then on) and 200 MB on disk: it would pay from about a million actions on, and plans have some ten
thousand.
"""

from heapq import heappop, heappush, heapreplace

from costmodel.simulation.costs import Costs
from costmodel.simulation.program import Program, inconsistent
from costmodel.simulation.shared import Lists


def run_slowed(
    program: Program, costs: Costs, resources: list[list[int]], count: int, slow: float, early_s: list[float]
) -> tuple[Lists, Lists, Lists]:
    """Start and end of each action, and when its output began to occupy its link (0 if it has none), by actor, then by
    step.

    Args:
        resources: for each link, the numbers of all that a message on it occupies; count: how many numbers there are.
        slow: actions take this many times as long beside communication.
        early_s: for each actor, how long its reduction runs beside its last action, from its start.

    Raises:
        InputError: MP148 if the schedule deadlocks.
    """
    cells, microbatches = program.cells, program.schedule.microbatches
    at_s = [0.0] * microbatches + [-1.0] * (2 * cells - microbatches) + [0.0] * cells
    waiting = [-1] * len(at_s)  # actor by the slot that it waits for
    stuck = 0
    free_s = [0.0] * count
    ways = [
        (resources[link], wire_s, latency_s, costs.ends[link][1])
        for link, wire_s, latency_s in zip(costs.link_of, costs.wire_s, costs.latency_s)
    ]  # by route: what a message occupies, for how long, when it arrives after that, and where
    starts_s: Lists = [[] for _ in program.needs]
    ends_s: Lists = [[] for _ in program.needs]
    wires_s: Lists = [[] for _ in program.needs]
    actors = len(program.needs)
    ahead = list(map(zip, program.needs, costs.durations_s, program.fills, costs.routes))  # each actor's actions
    left = list(map(len, program.needs))  # actions that each actor has not begun
    took_s, fills, routes = [0.0] * actors, [-1] * actors, [0] * actors  # of each actor's current action
    start_s, end_s = [0.0] * actors, [0.0] * actors  # of it; the end by what is known
    until_s = [0.0] * actors  # what runs beside each actor, from now or earlier on, ends then
    later: dict[tuple[float, int], float] = {}  # by event, the end of what begins then beside an actor
    events: list[tuple[float, int]] = []  # (time, actor) of ends, (time, -1 - actor) of what begins beside

    def begin(actor: int, begun_s: float) -> None:
        """The actor's current action begins."""
        starts_s[actor].append(begun_s)
        start_s[actor] = begun_s
        left[actor] -= 1
        duration_s, beside_s = took_s[actor], until_s[actor] - begun_s
        if early_s[actor] > beside_s and not left[actor]:
            beside_s = early_s[actor]
            until_s[actor] = begun_s + beside_s
        if beside_s > 0.0:  # S1
            slowed_s = duration_s * slow
            duration_s = slowed_s if slowed_s <= beside_s else beside_s + (duration_s - beside_s / slow)
        end_s[actor] = begun_s + duration_s
        heappush(events, (end_s[actor], actor))

    def run_beside(actor: int, now_s: float, begun_s: float, stop_s: float) -> None:
        """Something runs beside the actor until `stop_s`, which is later than what does so already."""
        base_s = until_s[actor]
        if begun_s > now_s and begun_s > base_s:
            if (event := (begun_s, -1 - actor)) not in later:
                heappush(events, event)
            later[event] = max(stop_s, later.get(event, 0.0))
            return
        until_s[actor] = stop_s
        if now_s > base_s:
            base_s = now_s
        if start_s[actor] > base_s:
            base_s = start_s[actor]
        rest_s, beside_s = end_s[actor] - base_s, stop_s - base_s
        if rest_s > 0.0 and beside_s > 0.0:  # S1
            slowed_s = rest_s * slow
            end_s[actor] = base_s + slowed_s if slowed_s <= beside_s else stop_s + (rest_s - beside_s / slow)

    for actor, own in enumerate(program.needs):
        if own:
            need, took_s[actor], fills[actor], routes[actor] = next(ahead[actor])
            if at_s[need] < 0.0:
                waiting[need] = actor
                stuck += 1
            else:
                begin(actor, at_s[need])
    while events:
        now_s, actor = events[0]
        if actor < 0:
            heappop(events)
            stop_s = later.pop((now_s, actor))
            if stop_s > until_s[-1 - actor]:
                run_beside(-1 - actor, now_s, now_s, stop_s)
            continue
        if end_s[actor] > now_s:  # put off since
            heapreplace(events, (end_s[actor], actor))
            continue
        ends_s[actor].append(now_s)
        fill, sent_s, arrival_s, woken = fills[actor], 0.0, now_s, -1
        if fill >= 0:
            route = routes[actor]
            if route:
                own, wire_s, latency_s, taker = ways[route]
                sent_s = now_s
                for resource in own:
                    if free_s[resource] > sent_s:
                        sent_s = free_s[resource]
                stop_s = sent_s + wire_s
                for resource in own:
                    free_s[resource] = stop_s
                arrival_s = stop_s + latency_s
                if stop_s > sent_s:
                    if stop_s > until_s[actor]:
                        if sent_s <= now_s:  # the sender runs nothing at this moment
                            until_s[actor] = stop_s
                        else:
                            run_beside(actor, now_s, sent_s, stop_s)
                    base_s = until_s[taker]
                    if stop_s > base_s:  # as by `run_beside`
                        if sent_s > now_s and sent_s > base_s:
                            run_beside(taker, now_s, sent_s, stop_s)
                        else:
                            until_s[taker] = stop_s
                            if now_s > base_s:
                                base_s = now_s
                            rest_s = end_s[taker] - base_s
                            if rest_s > 0.0:
                                if start_s[taker] > base_s:
                                    base_s = start_s[taker]
                                    rest_s = end_s[taker] - base_s
                                beside_s = stop_s - base_s
                                if beside_s > 0.0:
                                    slowed_s = rest_s * slow
                                    end_s[taker] = (
                                        base_s + slowed_s
                                        if slowed_s <= beside_s
                                        else stop_s + (rest_s - beside_s / slow)
                                    )
            at_s[fill] = arrival_s
            woken = waiting[fill]
        wires_s[actor].append(sent_s)
        for need, duration_s, then, way in ahead[actor]:  # the next action, as by `begin`
            fills[actor], routes[actor], ready_s = then, way, at_s[need]
            if ready_s < 0.0:
                took_s[actor] = duration_s
                waiting[need] = actor
                stuck += 1
                heappop(events)
                break
            if ready_s < now_s:
                ready_s = now_s
            starts_s[actor].append(ready_s)
            start_s[actor] = ready_s
            left[actor] -= 1
            beside_s = until_s[actor] - ready_s
            if early_s[actor] > beside_s and not left[actor]:
                beside_s = early_s[actor]
                until_s[actor] = ready_s + beside_s
            if beside_s > 0.0:
                slowed_s = duration_s * slow
                duration_s = slowed_s if slowed_s <= beside_s else beside_s + (duration_s - beside_s / slow)
            end_s[actor] = done_s = ready_s + duration_s
            heapreplace(events, (done_s, actor))
            break
        else:
            heappop(events)
        if woken >= 0:
            stuck -= 1
            begin(woken, arrival_s)
    if stuck:
        raise inconsistent(program.schedule)
    return starts_s, ends_s, wires_s

"""The loop of the contended simulation: messages share resources, compute slows down beside communication.

The end of an action is the one event that must be handled in order of time, because then its message asks for
resources, first come first served; of one time, in the order of actors. Where nothing slows compute down, an action
whose output goes nowhere is no event: the next one follows at once.

An action runs at a fraction of its speed while a message leaves or reaches its actor, or part of a reduction runs. All
that is kept of what runs beside an actor is until when it does: messages ask for their links at ends of actions, so
they become known in the order in which they begin, and one that waits for its own link waits behind others between the
same two actors. (One that waits for a card which its receiver has no part in begins later, by an event of its own.) A
message that begins can only put off the end of an action that runs; that end is looked up anew when its earlier time
comes.

    the rest r of an action at t, slowed down by q until u, ends at t + q·r, or, if u is earlier, at u + r - (u - t)/q
                                                                                                                    (S1)

The loop runs as it stands, and compiled (`costmodel.simulation.compiled`), to the same last bit. So it is one function
of lists of numbers, in what numba compiles; and it has few calls, for speed: one for each action takes 0.1 µs.

Measured on two cores that ran other work, CPython 3.11, 1F1B with links, whole calls of `simulate` in million actions a
second of processor time (benchmarks/simulator_speed.py): as it stands 1.2 (4 stages), 1.1 (16) and 0.75 (64) where
messages share network cards, 0.9, 0.8 and 0.57 where compute slows down; compiled 1.7, 1.8 and 1.35, and 1.65, 1.8 and
1.3, of which the loop itself is a quarter to a third. Two loops, of which one knew no slowdown, made 0.83 and 0.63
instead of 0.75 and 0.57; events for all that begins and ends, handled by methods, half of that.
"""

from heapq import heappop, heappush, heapreplace
from typing import NamedTuple


class Work(NamedTuple):
    """What the loop runs: a program with its prices, flat. Actions are numbered through, actor by actor.

    Args:
        first: for each actor the number of its first action, and at the end how many actions there are. The first
            action of each stands for its beginning: it takes no time and fills nothing.
        needs, fills: of each action, the slots of `costmodel.simulation.program`.
        durations_s: of each action alone.
        routes: of each action's output, 0 if it stays where it is.
        over: for each route, the numbers of the resources that a message occupies.
        wire_s: for each route, how long it does; latency_s: when it arrives after that; takers: at which actor.
        early_s: for each actor, how long its reduction runs beside its last action, from its start.
        slow: actions take this many times as long beside communication, at least 1.
        resources: how many there are.
        microbatches, cells: of the program.
    """

    first: list[int]
    needs: list[int]
    fills: list[int]
    durations_s: list[float]
    routes: list[int]
    over: list[list[int]]
    wire_s: list[float]
    latency_s: list[float]
    takers: list[int]
    early_s: list[float]
    slow: float
    resources: int
    microbatches: int
    cells: int


def run_events(work: Work) -> tuple[list[float], list[float], list[float], bool]:
    """Start and end of each action, when its output began to occupy its link (0 if it has none), and whether all ran:
    if not, the schedule deadlocks and the times mean nothing."""
    (
        first,
        needs,
        fills,
        durations_s,
        routes,
        over,
        wire_s,
        latency_s,
        takers,
        early_s,
        slow,
        resources,
        microbatches,
        cells,
    ) = work
    count, actors, slowing = len(needs), len(first) - 1, slow > 1.0
    starts_s, ends_s, wires_s = [0.0] * count, [0.0] * count, [0.0] * count  # ends by what is known
    at_s = [0.0] * microbatches + [-1.0] * (2 * cells - microbatches) + [0.0] * cells  # by slot; below 0: not yet
    waiting = [-1] * (3 * cells)  # actor by the slot that it waits for
    stuck = 0  # actors that wait
    free_s = [0.0] * resources
    finals = [first[actor + 1] - 1 for actor in range(actors)]
    steps = [first[actor] for actor in range(actors)]  # the action that each actor runs or waits for
    idle_s = [0.0] * actors  # from when on an actor that waits does
    until_s = [0.0] * actors  # what runs beside each actor, from now or earlier on, ends then
    later = [0 for _ in range(0)]  # actors beside which something begins later, and when that ends
    later_until_s = [0.0 for _ in range(0)]
    events = [(0.0, actor) for actor in range(actors)]  # of ends; (time, -1 - index into `later`) of what begins then

    def put_off(actor: int, base_s: float, stop_s: float) -> None:
        """Something more runs beside the actor, from `base_s` until `stop_s`."""
        at = steps[actor]
        if ends_s[at] > base_s:
            if starts_s[at] > base_s:
                base_s = starts_s[at]
            rest_s, beside_s = ends_s[at] - base_s, stop_s - base_s
            if beside_s > 0.0:  # S1
                slowed_s = rest_s * slow
                ends_s[at] = base_s + slowed_s if slowed_s <= beside_s else stop_s + (rest_s - beside_s / slow)

    while events:
        now_s, actor = events[0]
        if slowing:
            if actor < 0:
                heappop(events)
                actor, stop_s = later[-1 - actor], later_until_s[-1 - actor]
                if stop_s > until_s[actor]:
                    put_off(actor, max(now_s, until_s[actor]), stop_s)
                    until_s[actor] = stop_s
                continue
            at = steps[actor]
            if ends_s[at] > now_s:  # put off since
                heapreplace(events, (ends_s[at], actor))
                continue
        else:
            at = steps[actor]
        fill, arrival_s, woken = fills[at], now_s, -1
        if fill >= 0:
            route = routes[at]
            if route:
                sent_s, own = now_s, over[route]
                for resource in own:
                    if free_s[resource] > sent_s:
                        sent_s = free_s[resource]
                stop_s = sent_s + wire_s[route]
                for resource in own:
                    free_s[resource] = stop_s
                wires_s[at] = sent_s
                arrival_s = stop_s + latency_s[route]
                if slowing and stop_s > sent_s:
                    for side in (actor, takers[route]):
                        base_s = until_s[side]
                        if stop_s > base_s:
                            if sent_s > now_s and sent_s > base_s:
                                later.append(side)
                                later_until_s.append(stop_s)
                                heappush(events, (sent_s, -len(later)))
                            else:
                                until_s[side] = stop_s
                                if now_s > base_s:
                                    base_s = now_s
                                if ends_s[steps[side]] > base_s:
                                    put_off(side, base_s, stop_s)
            at_s[fill] = arrival_s
            woken = waiting[fill]
        final = finals[actor]
        while at < final:  # the actor's next action
            at += 1
            need = needs[at]
            begun_s = at_s[need]
            if begun_s < 0.0:
                waiting[need] = actor
                stuck += 1
                idle_s[actor] = now_s
                heappop(events)
                break
            if begun_s < now_s:
                begun_s = now_s
            starts_s[at] = begun_s
            took_s = durations_s[at]
            if slowing:
                beside_s = until_s[actor] - begun_s
                if at == final and early_s[actor] > beside_s:
                    beside_s = early_s[actor]
                    until_s[actor] = begun_s + beside_s
                if beside_s > 0.0:  # S1
                    slowed_s = took_s * slow
                    took_s = slowed_s if slowed_s <= beside_s else beside_s + (took_s - beside_s / slow)
            now_s = begun_s + took_s
            ends_s[at] = now_s
            if slowing or fills[at] >= 0:
                heapreplace(events, (now_s, actor))
                break
        else:
            heappop(events)
        steps[actor] = at
        if woken >= 0:  # the action that waited for the output, as above
            stuck -= 1
            at = steps[woken]
            took_s = durations_s[at]
            if slowing:
                beside_s = until_s[woken] - arrival_s
                if at == finals[woken] and early_s[woken] > beside_s:
                    beside_s = early_s[woken]
                    until_s[woken] = arrival_s + beside_s
                if beside_s > 0.0:  # S1
                    slowed_s = took_s * slow
                    took_s = slowed_s if slowed_s <= beside_s else beside_s + (took_s - beside_s / slow)
            elif idle_s[woken] > arrival_s:  # it was busy with what is no event
                arrival_s = idle_s[woken]
            starts_s[at] = arrival_s
            arrival_s += took_s
            ends_s[at] = arrival_s
            heappush(events, (arrival_s, woken))
    return starts_s, ends_s, wires_s, stuck == 0

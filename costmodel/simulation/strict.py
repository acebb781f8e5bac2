"""The simulation in which nothing but its own link holds a message up, in one pass over the actions.

Each link has one sender, which sends in the order of its list, so first come is first served in whatever order the
actors are run, as long as each action comes after all that it needs. An actor runs until an input is missing, and is
called again by who fills that slot. So times are found while the order is: a fraction of a microsecond an action.

Measured on two cores that ran other work, CPython 3.11, 1F1B with links, in million actions a second of processor time
(benchmarks/simulator_speed.py): whole calls of `simulate` from action objects 1.4 (64 stages) to 2.0 (4 stages), 2.4 to
4.2 where the schedule is flattened already, `run_strict` alone 3.2 to 6.0; a loop over action objects in a dependency
order found before made 0.4 to 1.1. Levels of independent actions as numpy arrays, with the levels given, made 1.6 with
4 stages, 5.9 with 16 and 18 with 64. But levels must be found first, at the price of this loop, so that they pay only
for many simulations of one wide schedule, and plan-file commands, which start without numpy, would have to import it.
"""

from collections.abc import Iterator

from costmodel.simulation.costs import Costs
from costmodel.simulation.program import Program, inconsistent


def run_strict(program: Program, costs: Costs) -> list[list[float]]:
    """Start of each action in seconds, by actor, then by step.

    Raises:
        InputError: MP148 if the schedule deadlocks.
    """
    cells, microbatches = program.cells, program.schedule.microbatches
    at_s = [-1.0] * (3 * cells)
    at_s[:microbatches] = [0.0] * microbatches  # inputs of the first stage
    at_s[2 * cells :] = [0.0] * cells  # W waits for nothing
    starts_s: list[list[float]] = [[] for _ in program.needs]
    waiting: dict[int, _Actor] = {}
    runnable: list[_Actor] = []
    free_s = [0.0] * len(costs.ends)
    for actor in range(len(program.needs) - 1, -1, -1):
        runnable.append(_run(program, costs, actor, at_s, free_s, waiting, runnable, starts_s[actor]))
    while runnable:
        running = runnable.pop()
        slot = next(running, None)
        if slot is not None:
            waiting[slot] = running
    if waiting:
        raise inconsistent(program.schedule)
    return starts_s


_Actor = Iterator[int]


def _run(
    program: Program,
    costs: Costs,
    actor: int,
    at_s: list[float],
    free_s: list[float],
    waiting: dict[int, "_Actor"],
    runnable: list["_Actor"],
    starts_s: list[float],
) -> "_Actor":
    """Runs one actor; yields the slot that it waits for whenever that is empty.

    Args:
        program, costs, actor: what to run.
        at_s: when the input of each slot arrives; below 0: not yet.
        free_s: from when on each link is free.
        waiting: actors by the slot that they wait for; taken out when it is filled, and put on `runnable`.
        runnable: actors to call next.
        starts_s: where to note the start of each action.
    """
    link_of, wire_s, latency_s = costs.link_of, costs.wire_s, costs.latency_s
    clock_s = 0.0
    actions = zip(program.needs[actor], costs.durations_s[actor], program.fills[actor], costs.routes[actor])
    for need, duration_s, fill, route in actions:
        ready_s = at_s[need]
        if ready_s < 0.0:
            yield need
            ready_s = at_s[need]
        if ready_s > clock_s:
            clock_s = ready_s
        starts_s.append(clock_s)
        clock_s += duration_s
        if fill >= 0:
            if route:
                link = link_of[route]
                sent_s = free_s[link]
                if clock_s > sent_s:
                    sent_s = clock_s
                free_s[link] = sent_s = sent_s + wire_s[route]
                at_s[fill] = sent_s + latency_s[route]
            else:
                at_s[fill] = clock_s
            if fill in waiting:
                runnable.append(waiting.pop(fill))

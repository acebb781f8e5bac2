"""Simulation of a schedule: when each action runs, how long the step takes, how long each actor waits.

Each actor runs its list strictly in order, one action at a time. Activations and gradients are sent as soon as they
exist, without holding up compute; a link (one direction between two actors) carries one message at a time, in the
order of sending. An action starts when the actor's previous action has ended and its input has arrived. After its last
action an actor reduces gradients, exchanges them with the other groups of its stage, waits for other stages where the
update joins their values (a norm of all gradients), and updates its parameters. On request messages contend for shared
resources, compute slows down beside communication (`Contention`), and all times jitter.

Time is linear in the number of actions: well over a million actions a second, and with contention 0.6 to 1.2 million,
or where numba is installed (`meshplan[fast]`), as soon as a process has simulated a million, 1.3 to 1.8 million; see
`costmodel.simulation.strict`, `events` and `compiled`.
"""

from collections.abc import Mapping
from operator import add, sub

from costmodel.schedule.actions import Schedule
from costmodel.simulation.contended import Contention, run_contended
from costmodel.simulation.costs import Sends, Times, costs_of
from costmodel.simulation.ending import endings_of
from costmodel.simulation.program import Program, flatten
from costmodel.simulation.records import (
    ActorUse,
    Ending,
    Message,
    SendTimes,
    StageTimes,
    TimelineEntry,
    UpdateWait,
)
from costmodel.simulation.result import Simulation
from costmodel.simulation.strict import run_strict


def simulate(
    schedule: Schedule | Program,
    times: Times,
    sends: Sends | None = None,
    *,
    waits: Mapping[int, UpdateWait] | None = None,
    contention: Contention | None = None,
    jitter: float = 0.0,
    seed: int = 0,
    keep_timeline: bool = True,
) -> Simulation:
    """Runs `schedule`.

    Args:
        schedule: what each actor runs. What is simulated many times may be given as `flatten(schedule)`.
        times: costs by (stage, group); under virtual stages by (virtual stage, group of the actor).
        sends: costs by (actor of a stage, actor of the next stage), one entry for both directions; None if every send
            is free. Consecutive virtual stages on one actor need no entry.
        waits: by stage, what its update waits for besides its own gradients.
        contention: shared resources and compute beside communication; None if links are private and compute is
            undisturbed.
        jitter: every action and every message takes a factor of its time, uniform in [1 - jitter, 1 + jitter].
        seed: of the jitter; one seed gives one result.
        keep_timeline: whether to keep when each action ran and what was sent; without it the simulation is faster.

    Returns:
        Times in seconds from the start of the step.

    Raises:
        InputError: MP145 if times of an actor, or of a link that the schedule uses, are missing; MP147 if a time is
            negative or not finite; MP148 if the schedule is inconsistent or deadlocks, with the grid; MP191 for a bad
            jitter.
    """
    program = schedule if isinstance(schedule, Program) else flatten(schedule)
    costs = costs_of(program, times, sends, jitter, seed)
    if contention is None:
        starts_s = run_strict(program, costs)
        busy_s = list(map(sum, costs.durations_s))
        last_s = [own[-1] + times_s[-1] if own else 0.0 for own, times_s in zip(starts_s, costs.durations_s)]
        ends_s = [list(map(add, *pair)) for pair in zip(starts_s, costs.durations_s)] if keep_timeline else []
        reductions, wires_s = None, []
    else:
        starts_s, ends_s, wires_s, reductions = run_contended(program, costs, contention)
        busy_s = [sum(map(sub, *pair)) for pair in zip(ends_s, starts_s)]
        last_s = [own[-1] if own else 0.0 for own in ends_s]
    endings = endings_of(program, costs, last_s, waits or {}, reductions)
    first_s = [own[0] if own else 0.0 for own in starts_s]
    uses = _uses(program, first_s, last_s, busy_s, endings)
    return Simulation(
        makespan_s=max(use.step_end_s for use in uses),
        pipeline_s=max(last_s),
        actors=uses,
        endings=endings,
        program=program,
        costs=costs,
        waits=waits or {},
        starts_s=starts_s if keep_timeline else [],
        ends_s=ends_s if keep_timeline else [],
        wires_s=wires_s if keep_timeline else [],
    )


def _uses(
    program: Program, first_s: list[float], last_s: list[float], busy_s: list[float], endings: tuple[Ending, ...]
) -> tuple[ActorUse, ...]:
    uses = []
    for index, actor in enumerate(program.schedule.actors):
        bubble_s = last_s[index] - first_s[index] - busy_s[index]
        uses.append(
            ActorUse(
                actor=actor,
                first_start_s=first_s[index],
                last_end_s=last_s[index],
                busy_s=busy_s[index],
                bubble_s=bubble_s if bubble_s > 1e-12 * last_s[index] else 0.0,  # rounding is no bubble
                joined_s=endings[index].update_start_s - endings[index].exchange_end_s,
                step_end_s=endings[index].update_end_s,
                peak_in_flight=program.peaks[index],
            )
        )
    return tuple(uses)


__all__ = [
    "ActorUse",
    "Contention",
    "Message",
    "SendTimes",
    "Simulation",
    "StageTimes",
    "TimelineEntry",
    "UpdateWait",
    "flatten",
    "simulate",
]

"""Event simulation of a schedule: when each action runs, how long the step takes, how long each actor waits.

Each actor runs its list strictly in order, one action at a time. Activations and gradients are sent as soon as they
exist, without holding up compute; a link (one direction between two actors) carries one message at a time, in the order
of sending. An action starts when the actor's previous action has ended and its input has arrived. After its last action
an actor reduces gradients, exchanges them with the other groups of its stage, waits for other stages where the update
joins their values (a norm of all gradients), and updates its parameters.

One pass over the actions in dependency order, so the time is linear in the number of actions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import NamedTuple

from costmodel.errors import InputError
from costmodel.schedule.actions import Action, Actor, Schedule
from costmodel.schedule.validate import DependencyOrder, dependency_order, in_flight, validate_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """What one stage costs on one group.

    Args:
        forward_s: F of one microbatch.
        backward_s: B of one microbatch: activation gradient.
        weight_s: W of one microbatch: weight gradient. Where the schedule does not split backwards, B takes
            `backward_s + weight_s`, so a backward known only as a whole goes into `backward_s`.
        reduce_s: once a step after the last backward: reduction of gradients within the group.
        exchange_s: once a step: transfer and addition of gradients between the groups of the stage, which begins when
            all of them have reduced. 0 for a stage with one group.
        update_s: once a step, at the end: the optimizer.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    reduce_s: float = 0.0
    exchange_s: float = 0.0
    update_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWait:
    """What a stage's update waits for, where the optimizer joins values of several stages (a norm of all gradients).

    Args:
        stages: those that must have reduced and exchanged their gradients, the stage itself among them.
        time_s: what it takes from then to bring the values together and back.
    """

    stages: frozenset[int]
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTimes:
    """What it costs to hand one microbatch from a group of one stage to a group of the next, and its gradient back.

    Args:
        activation_s: time for which the forward direction is occupied by one microbatch's activations.
        gradient_s: the same for gradients in the backward direction.
        latency_s: added to each arrival in either direction; it does not occupy the link.
    """

    activation_s: float
    gradient_s: float
    latency_s: float = 0.0


class TimelineEntry(NamedTuple):
    """One action that ran."""

    actor: Actor
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorUse:
    """How one actor spent the step.

    Args:
        actor: stage and group.
        first_start_s: start of its first action; 0 if it has none.
        last_end_s: end of its last action; 0 if it has none.
        busy_s: sum of its actions' times.
        bubble_s: time between `first_start_s` and `last_end_s` in which it ran nothing.
        joined_s: time from when its gradients were ready to its update, for what the update joins of other stages.
        step_end_s: end of its parameter update.
        peak_in_flight: most microbatches whose activations it held at one time.
    """

    actor: Actor
    first_start_s: float
    last_end_s: float
    busy_s: float
    bubble_s: float
    joined_s: float
    step_end_s: float
    peak_in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a schedule does under given times.

    Args:
        makespan_s: end of the last parameter update.
        pipeline_s: end of the last action, before gradient reductions and updates.
        actors: one record an actor, in the schedule's order.
        timeline: every action, by actor in the schedule's order, then by time; empty if it was not asked for.
    """

    makespan_s: float
    pipeline_s: float
    actors: tuple[ActorUse, ...]
    timeline: tuple[TimelineEntry, ...]

    def use(self, stage: int, group: int = 0) -> ActorUse:
        """The record of one actor. Raises KeyError if the schedule has no such actor."""
        for use in self.actors:
            if use.actor == (stage, group):
                return use
        raise KeyError(Actor(stage, group))


def simulate(
    schedule: Schedule,
    times: Mapping[Actor, StageTimes],
    sends: Mapping[tuple[Actor, Actor], SendTimes] | None = None,
    *,
    waits: Mapping[int, UpdateWait] | None = None,
    keep_timeline: bool = True,
) -> Simulation:
    """Runs `schedule`.

    Args:
        schedule: what each actor runs.
        times: costs by (stage, group); under virtual stages by (virtual stage, group of the actor).
        sends: costs by (actor of a stage, actor of the next stage), one entry for both directions; None if every send
            is free. Consecutive virtual stages on one actor need no entry.
        waits: by stage, what its update waits for besides its own gradients.
        keep_timeline: whether to return the timeline; without it the simulation is faster.

    Returns:
        Times in seconds from the start of the step.

    Raises:
        InputError: MP145 if times of an actor, or of a link that the schedule uses, are missing; MP147 if a time is
            negative or not finite; MP148 if the schedule is inconsistent or deadlocks, with the grid.
    """
    stages, microbatches, count = schedule.stages, schedule.microbatches, len(schedule.actions)
    owners = _owners(schedule, stages)
    order = _runnable(schedule, stages)
    costs = [_costs_of(schedule, times, index) for index in range(count)]
    split = schedule.splits_backward
    forward_s = [[0.0] * stages for _ in range(count)]
    backward_s = [[0.0] * stages for _ in range(count)]
    weight_s = [[0.0] * stages for _ in range(count)]
    for index in range(count):
        for stage, cost in costs[index].items():
            if stage < stages:
                forward_s[index][stage] = cost.forward_s
                backward_s[index][stage] = cost.backward_s if split else cost.backward_s + cost.weight_s
                weight_s[index][stage] = cost.weight_s

    clock_s, busy_s, first_s = [0.0] * count, [0.0] * count, [-1.0] * count
    # when the input of F (the gradient for B) of a (stage, microbatch) arrives
    activation_at_s, gradient_at_s = [0.0] * (stages * microbatches), [0.0] * (stages * microbatches)
    links = _Links(schedule, sends) if sends is not None else None
    timelines: list[list[TimelineEntry]] = [[] for _ in range(count)]
    actors = schedule.actors
    last_stage = stages - 1
    for index, action in order.order:
        stage, kind = action.stage, action.kind
        cell = stage * microbatches + action.microbatch
        start_s = clock_s[index]
        if kind == "F":
            ready_s, duration_s = activation_at_s[cell], forward_s[index][stage]
        elif kind == "B":
            ready_s, duration_s = gradient_at_s[cell], backward_s[index][stage]
        else:
            ready_s, duration_s = 0.0, weight_s[index][stage]
        if ready_s > start_s:
            start_s = ready_s
        end_s = start_s + duration_s
        clock_s[index] = end_s
        busy_s[index] += duration_s
        if first_s[index] < 0:
            first_s[index] = start_s
        if kind == "F":
            if stage < last_stage:
                cell += microbatches
                target = owners[cell]
                activation_at_s[cell] = end_s if links is None else links.arrival_s(stage, index, target, end_s, False)
        elif kind == "B" and stage:
            cell -= microbatches
            target = owners[cell]
            gradient_at_s[cell] = end_s if links is None else links.arrival_s(stage - 1, index, target, end_s, True)
        if keep_timeline:
            timelines[index].append(TimelineEntry(actors[index], action, start_s, end_s))

    joined_s, step_end_s = _step_ends_s(schedule, costs, clock_s, waits or {})
    peaks = in_flight(schedule)
    uses = tuple(
        ActorUse(
            actor=actor,
            first_start_s=max(first, 0.0),
            last_end_s=last,
            busy_s=busy,
            bubble_s=max(last - max(first, 0.0) - busy, 0.0),
            joined_s=joined,
            step_end_s=end,
            peak_in_flight=peaks[actor],
        )
        for actor, first, last, busy, joined, end in zip(actors, first_s, clock_s, busy_s, joined_s, step_end_s)
    )
    return Simulation(
        makespan_s=max(step_end_s),
        pipeline_s=max(clock_s),
        actors=uses,
        timeline=tuple(entry for entries in timelines for entry in entries),
    )


class _Links:
    """The directed links between actors: when each is free, and what a message costs."""

    __slots__ = ("actors", "costs", "free_s", "sends")

    def __init__(self, schedule: Schedule, sends: Mapping[tuple[Actor, Actor], SendTimes]):
        self.actors, self.sends = schedule.actors, sends
        self.free_s: dict[tuple[int, int], float] = {}
        self.costs: dict[tuple[int, int, int], tuple[float, float, float]] = {}

    def arrival_s(self, lower: int, source: int, target: int, sent_s: float, is_gradient: bool) -> float:
        """When a message between stages `lower` and `lower + 1` arrives; occupies the link from `source` to `target`.

        Messages of a link have one source, which sends in order of time, so first come is first served.
        """
        if source == target:
            return sent_s
        cost = self.costs.get((lower, source, target))
        if cost is None:
            cost = self.costs[lower, source, target] = self._cost(lower, source, target, is_gradient)
        link = (source, target)
        free_s = self.free_s.get(link, 0.0)
        free_s = (free_s if free_s > sent_s else sent_s) + cost[is_gradient]
        self.free_s[link] = free_s
        return free_s + cost[2]

    def _cost(self, lower: int, source: int, target: int, is_gradient: bool) -> tuple[float, float, float]:
        before, after = (target, source) if is_gradient else (source, target)
        edge = (Actor(lower, self.actors[before].group), Actor(lower + 1, self.actors[after].group))
        if edge not in self.sends:
            raise InputError(
                "MP145",
                f"no send times from {edge[0]} to {edge[1]}, {len(self.sends)} other links are given",
                "give send times for every link that the schedule uses, or none at all if sends are free",
            )
        send = self.sends[edge]
        _check_times(send, f"link from {edge[0]} to {edge[1]}")
        return send.activation_s, send.gradient_s, send.latency_s


def _owners(schedule: Schedule, stages: int) -> list[int]:
    """Index of the actor that runs each (stage, microbatch), at stage · m + microbatch."""
    microbatches = schedule.microbatches
    owners = [-1] * (stages * microbatches)
    for index, row in enumerate(schedule.actions):
        for action in row.actions:
            if action.microbatch >= microbatches:
                raise _inconsistent(schedule, stages)
            if action.kind == "F":
                cell = action.stage * microbatches + action.microbatch
                if owners[cell] >= 0:
                    raise _inconsistent(schedule, stages)
                owners[cell] = index
    return owners


def _runnable(schedule: Schedule, stages: int) -> DependencyOrder:
    order = dependency_order(schedule, stages)
    if order.stuck:
        raise _inconsistent(schedule, stages)
    return order


def _inconsistent(schedule: Schedule, stages: int) -> InputError:
    findings = validate_schedule(schedule, stages)
    first = f"{findings[0].code}: {findings[0].message}" if findings else "it cannot run"
    return InputError("MP148", f"schedule {schedule.name!r} cannot be simulated: {first}")


def _costs_of(schedule: Schedule, times: Mapping[Actor, StageTimes], index: int) -> dict[int, StageTimes]:
    """Costs of the actor's (virtual) stages."""
    row = schedule.actions[index]
    costs = {}
    for stage in sorted({action.stage for action in row.actions}) or [row.stage]:
        key = Actor(stage, row.group)
        if key not in times:
            raise InputError(
                "MP145", f"no times for {key}, {len(times)} others are given", "give times for every actor"
            )
        costs[stage] = times[key]
        _check_times(times[key], str(key))
    return costs


def _check_times(record: StageTimes | SendTimes | UpdateWait, where: str) -> None:
    for field in fields(record):
        time_s = getattr(record, field.name)
        if isinstance(time_s, float | int) and not 0.0 <= time_s < inf:
            raise InputError("MP147", f"{where}: {field.name} is {time_s}, it must be finite and not negative")


def _step_ends_s(
    schedule: Schedule, costs: list[dict[int, StageTimes]], ends_s: list[float], waits: Mapping[int, UpdateWait]
) -> tuple[list[float], list[float]]:
    """For each actor, how long its update waits for other stages, and its end: reduce, meet the stage's other groups,
    exchange, (wait,) update."""
    for stage, wait in waits.items():
        _check_times(wait, f"update of stage {stage}")
    met_s: dict[int, float] = {}
    for row, cost, end_s in zip(schedule.actions, costs, ends_s):
        reduced_s = end_s + sum(stage.reduce_s for stage in cost.values())
        met_s[row.stage] = max(met_s.get(row.stage, 0.0), reduced_s)
    exchanged_s = [
        met_s[row.stage] + sum(stage.exchange_s for stage in cost.values())
        for row, cost in zip(schedule.actions, costs)
    ]
    ready_s: dict[int, float] = {}
    for row, time_s in zip(schedule.actions, exchanged_s):
        ready_s[row.stage] = max(ready_s.get(row.stage, 0.0), time_s)
    joined_s = []
    for row, time_s in zip(schedule.actions, exchanged_s):
        wait = waits.get(row.stage)
        start_s = time_s if wait is None else max(ready_s[s] for s in wait.stages) + wait.time_s
        joined_s.append(max(0.0, start_s - time_s))
    updates_s = [sum(stage.update_s for stage in cost.values()) for cost in costs]
    return joined_s, [a + b + c for a, b, c in zip(exchanged_s, joined_s, updates_s)]

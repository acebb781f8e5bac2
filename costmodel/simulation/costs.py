"""Prices of a program: how long each of its actions and messages takes, from the times of stages and links."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf

from costmodel.errors import InputError
from costmodel.schedule.actions import Action, Actor
from costmodel.simulation.noise import check_jitter, factors
from costmodel.simulation.program import BACKWARD, FORWARD, Program
from costmodel.simulation.records import SendTimes, StageTimes, UpdateWait

Times = Mapping[Actor, StageTimes]
Sends = Mapping[tuple[Actor, Actor], SendTimes]

LONGEST_S = 1e302  # all actions and messages of a step one after the other: it is still a number in microseconds
STAYS = 0  # the route of an output that stays where it is, or of which sending is free


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a program costs. A *route* is a link with what a message costs on it.

    Args:
        stages: for each actor, times by (virtual) stage.
        durations_s: of each action, by actor, then by step.
        routes: for each action, that of its output, or STAYS.
        link_of, wire_s, latency_s: for each route its link, the time for which a message occupies that, and the time
            that it then takes to arrive; the entries of STAYS are 0.
        ends: for each link (index of the sender, index of the receiver); link 0 stands for none.
    """

    stages: list[dict[int, StageTimes]]
    durations_s: list[list[float]]
    routes: list[list[int]]
    link_of: list[int]
    wire_s: list[float]
    latency_s: list[float]
    ends: list[tuple[int, int]]


def costs_of(program: Program, times: Times, sends: Sends | None, jitter: float = 0.0, seed: int = 0) -> Costs:
    """Costs of every action and message.

    Args:
        program: what is run.
        times: by (stage, group); under virtual stages by (virtual stage, group of the actor).
        sends: by (actor of a stage, actor of the next); None if sends are free.
        jitter: each action and each message takes a factor in [1 - jitter, 1 + jitter] of its time.
        seed: of the jitter.

    Raises:
        InputError: MP145 for missing times, MP147 for one that is negative or not finite, and for times that
            together are more than numbers hold, MP191 for a bad jitter.
    """
    check_jitter(jitter)
    stages = [_stages_of(program, times, index) for index in range(len(program.needs))]
    durations_s = [_durations_s(program, keys, stages[index]) for index, keys in enumerate(program.keys)]
    for own_s, own, row in zip(durations_s, stages, program.schedule.actions):
        _vary_chunks(own_s, own, row.actions)
    costs = Costs(
        stages=stages, durations_s=durations_s, routes=[], link_of=[0], wire_s=[0.0], latency_s=[0.0], ends=[(-1, -1)]
    )
    if sends is None:
        costs.routes.extend([STAYS] * len(own) for own in program.needs)
    else:
        _add_routes(costs, program, sends)
    if jitter:
        _add_jitter(costs, jitter, seed)
    _check_together(costs)
    return costs


def _check_together(costs: Costs) -> None:
    """Raises MP147 if all actions and messages one after the other take longer than LONGEST_S."""
    actions_s = sum(map(sum, costs.durations_s))
    ends_s = sum(cost.reduce_s + cost.exchange_s + cost.update_s for own in costs.stages for cost in own.values())
    sends_s = sum(costs.wire_s[route] + costs.latency_s[route] for routes in costs.routes for route in routes)
    if actions_s + ends_s + sends_s > LONGEST_S:
        message = f"actions take {actions_s:.3g} s together, messages {sends_s:.3g} s, "
        message += f"reductions and updates {ends_s:.3g} s"
        raise InputError("MP147", f"{message}: more than {LONGEST_S:g} s", "correct the times: they are in seconds")


def check_times(record: StageTimes | SendTimes | UpdateWait, where: str) -> None:
    """Raises MP147 if a time of the record is negative or not finite."""
    for field in fields(record):
        found = getattr(record, field.name)
        for time_s in found if isinstance(found, tuple) else (found,):
            if isinstance(time_s, float | int) and not 0.0 <= time_s < inf:
                raise InputError("MP147", f"{where}: {field.name} is {time_s}, it must be finite and not negative")


def _stages_of(program: Program, times: Times, index: int) -> dict[int, StageTimes]:
    """Times of the actor's (virtual) stages."""
    row, count = program.schedule.actions[index], len(program.needs)
    found = {}
    for stage in sorted({key // count % program.stages for key in set(program.keys[index])}) or [row.stage]:
        key = Actor(stage, row.group)
        if key not in times:
            raise InputError(
                "MP145", f"no times for {key}, {len(times)} others are given", "give times for every actor"
            )
        check_times(times[key], str(key))
        found[stage] = times[key]
    return found


def _durations_s(program: Program, keys: list[int], stages: dict[int, StageTimes]) -> list[float]:
    table = {}
    for stage, cost in stages.items():
        backward_s = cost.backward_s if program.split else cost.backward_s + cost.weight_s
        for kind, time_s in enumerate((cost.forward_s, backward_s, cost.weight_s)):
            table[kind * program.stages + stage] = time_s
    count = len(program.needs)
    by_key = {key: table[key // count] for key in set(keys)}
    return list(map(by_key.__getitem__, keys))


def _vary_chunks(durations_s: list[float], stages: dict[int, StageTimes], actions: Sequence[Action]) -> None:
    """Has each chunk of a sequence take its own time, where stages say what that is."""
    if not any(cost.forward_factors or cost.backward_factors for cost in stages.values()):
        return
    for step, action in enumerate(actions):
        cost = stages[action.stage]
        factors_of = cost.forward_factors if action.kind == "F" else cost.backward_factors
        if factors_of:
            durations_s[step] *= factors_of[action.microbatch % len(factors_of)]


def _add_routes(costs: Costs, program: Program, sends: Sends) -> None:
    """Links are one direction between two actors, whatever virtual stages and kinds of messages use them."""
    count = len(program.needs)
    links: dict[tuple[int, int], int] = {}
    for source, keys in enumerate(program.keys):
        numbers = {}
        for key in sorted(set(keys)):
            kind_and_stage, target = divmod(key, count)
            price = None
            if target != source and target >= 0:
                price = _price(program, sends, source, target, *divmod(kind_and_stage, program.stages))
            if price is None:
                numbers[key] = STAYS
                continue
            link = links.setdefault((source, target), len(costs.ends))
            if link == len(costs.ends):
                costs.ends.append((source, target))
            numbers[key] = len(costs.link_of)
            costs.link_of.append(link)
            costs.wire_s.append(price[0])
            costs.latency_s.append(price[1])
        costs.routes.append(list(map(numbers.__getitem__, keys)))


def _add_jitter(costs: Costs, jitter: float, seed: int) -> None:
    """Noise on every action; and on every message, which becomes a route of its own for that."""
    for actor, (durations_s, routes) in enumerate(zip(costs.durations_s, costs.routes)):
        noise = factors(len(durations_s), jitter, seed, actor, 0)
        durations_s[:] = [time_s * factor for time_s, factor in zip(durations_s, noise)]
        noise = factors(len(routes), jitter, seed, actor, 1)
        for step, route in enumerate(routes):
            if route != STAYS:
                routes[step] = len(costs.link_of)
                costs.link_of.append(costs.link_of[route])
                costs.wire_s.append(costs.wire_s[route] * noise[step])
                costs.latency_s.append(costs.latency_s[route])


def _price(
    program: Program, sends: Sends, source: int, target: int, kind: int, stage: int
) -> tuple[float, float] | None:
    """(seconds that the link is occupied, latency) of the outputs of a stage; None if they go nowhere."""
    rows = program.schedule.actions
    if kind == FORWARD and stage + 1 < program.stages:
        edge = (Actor(stage, rows[source].group), Actor(stage + 1, rows[target].group))
    elif kind == BACKWARD and stage > 0:
        edge = (Actor(stage - 1, rows[target].group), Actor(stage, rows[source].group))
    else:
        return None
    if edge not in sends:
        raise InputError(
            "MP145",
            f"no send times from {edge[0]} to {edge[1]}, {len(sends)} other links are given",
            "give send times for every link that the schedule uses, or none at all if sends are free",
        )
    send = sends[edge]
    check_times(send, f"link from {edge[0]} to {edge[1]}")
    return (send.gradient_s if kind == BACKWARD else send.activation_s), send.latency_s

"""What if something is slower, faster, late or gone: a problem in, the changed problem out.

A failed group is taken out of the schedule and its microbatches are dealt to its *peers*, the other groups of its
stage, as ReCycle does: each runs the adopted actions at the time at which the failed group would have run them. Sorted
by such times every action still comes after all that it needs, so the changed schedule cannot deadlock.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from costmodel.errors import InputError
from costmodel.schedule.actions import Action, Actor, ActorActions, Schedule
from costmodel.schedule.generate import spread_shares
from costmodel.schedule.validate import dependency_order
from costmodel.simulation.costs import costs_of
from costmodel.simulation.program import flatten
from costmodel.simulation.records import SendTimes, StageTimes, UpdateWait
from costmodel.simulation.strict import run_strict

PARTS = ("F", "B", "W", "reduce", "exchange", "update")
"""What takes a stage's time: actions by kind, and what is done once a step."""

_FIELDS = {"F": "forward_s", "B": "backward_s", "W": "weight_s"} | {
    p: f"{p}_s" for p in ("reduce", "exchange", "update")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What `costmodel.simulate.simulate` takes."""

    schedule: Schedule
    times: Mapping[Actor, StageTimes]
    sends: Mapping[tuple[Actor, Actor], SendTimes] | None = None
    waits: Mapping[int, UpdateWait] | None = None


def scale_stage(
    problem: Problem, stage: int, factor: float, *, group: int | None = None, part: str | None = None
) -> Problem:
    """Has a stage take `factor` times as long: above 1 slower, below faster.

    Args:
        problem: what to change.
        stage: of actors; all virtual stages that they run change.
        factor: positive and finite.
        group: one of its groups, or None for all.
        part: one of PARTS, or None for all of them.

    Raises:
        InputError: MP190 if there is no such stage, group or part; MP193 for a bad factor.
    """
    _check_factor(factor)
    if part is not None and part not in _FIELDS:
        raise InputError("MP190", f"{part!r} is no part of a stage", f"parts are {', '.join(PARTS)}")
    homes = problem.schedule.homes
    chosen = {
        actor
        for actor in problem.times
        if homes.get(actor.stage, actor.stage) == stage and group in (None, actor.group)
    }
    if not chosen:
        raise _no_such(problem, f"stage {stage}" + ("" if group is None else f" group {group}"))
    names = [_FIELDS[part]] if part else list(_FIELDS.values())
    times = {
        actor: replace(cost, **{name: getattr(cost, name) * factor for name in names}) if actor in chosen else cost
        for actor, cost in problem.times.items()
    }
    return replace(problem, times=times)


def scale_link(problem: Problem, ends: tuple[int, int], factor: float) -> Problem:
    """Has messages between the actors of two stages occupy their links `factor` times as long, both ways.

    Raises:
        InputError: MP190 if there is no such link; MP193 for a bad factor.
    """
    _check_factor(factor)
    return _change_link(
        problem,
        ends,
        lambda send: replace(send, activation_s=send.activation_s * factor, gradient_s=send.gradient_s * factor),
    )


def delay_link(problem: Problem, ends: tuple[int, int], delay_s: float) -> Problem:
    """Has every message between the actors of two stages arrive `delay_s` later, both ways, without occupying the link.

    Raises:
        InputError: MP190 if there is no such link; MP193 if the delay is negative or not finite.
    """
    if not 0.0 <= delay_s < inf:
        raise InputError("MP193", f"the delay is {delay_s} s, it must be finite and not negative")
    return _change_link(problem, ends, lambda send: replace(send, latency_s=send.latency_s + delay_s))


def fail_group(problem: Problem, stage: int, group: int) -> Problem:
    """Takes a group out and reroutes its microbatches to its peers, in proportion to their speed.

    The step that is simulated is a steady one: what it takes to notice the failure and to load parameters is not in it.
    The exchange of gradients keeps its time, though fewer groups take part.

    Raises:
        InputError: MP190 if there is no such group; MP194 if it has no peer.
    """
    failed = Actor(stage, group)
    rows = {row.actor: row for row in problem.schedule.actions}
    if failed not in rows:
        raise _no_such(problem, str(failed))
    peers = [actor for actor in rows if actor.stage == stage and actor != failed]
    if not peers:
        raise InputError(
            "MP194",
            f"{failed} has no peers to take over its microbatches: its stage has no other group",
            "only a stage with several groups goes on without one of them; plan again without the failed devices",
        )
    own = rows[failed].actions
    microbatches = sorted({action.microbatch for action in own})
    takers = _deal(problem, microbatches, peers, rows)
    rank = _ranks(problem)
    actions = []
    for row in problem.schedule.actions:
        if row.actor in peers:
            adopted = tuple(action for action in own if takers[action.microbatch] == row.actor)
            merged = tuple(sorted((*row.actions, *adopted), key=rank.__getitem__))
            actions.append(ActorActions(stage=row.stage, group=row.group, actions=merged))
        elif row.actor != failed:
            actions.append(row)
    times = {actor: cost for actor, cost in problem.times.items() if not _runs(rows[failed], actor)}
    schedule = replace(problem.schedule, actions=tuple(actions))
    return replace(problem, schedule=schedule, times=times)


def _runs(row: ActorActions, actor: Actor) -> bool:
    """Whether times of `actor` are those of the row's (virtual) stages."""
    stages = {action.stage for action in row.actions} or {row.stage}
    return actor.group == row.group and actor.stage in stages


def _deal(
    problem: Problem, microbatches: Sequence[int], peers: Sequence[Actor], rows: Mapping[Actor, ActorActions]
) -> dict[int, Actor]:
    """Which peer takes which microbatch: each in turn goes to the one that would be done first, then they are mixed."""

    def cost_s(peer: Actor) -> float:
        stages = {action.stage for action in rows[peer].actions} or {peer.stage}
        keys = [Actor(stage, peer.group) for stage in stages]
        found = [problem.times[key] for key in keys if key in problem.times]
        return sum(cost.forward_s + cost.backward_s + cost.weight_s for cost in found)

    each_s = [cost_s(peer) for peer in peers]
    load_s = [time_s * len({action.microbatch for action in rows[peer].actions}) for time_s, peer in zip(each_s, peers)]
    counts = [0] * len(peers)
    for _ in microbatches:
        taker = min(range(len(peers)), key=lambda at: (load_s[at] + each_s[at], counts[at], at))
        load_s[taker] += each_s[taker]
        counts[taker] += 1
    if not microbatches:
        return {}
    shares = spread_shares(counts)
    return {microbatches[at]: peer for peer, share in zip(peers, shares) for at in share}


def _ranks(problem: Problem) -> dict[Action, tuple[float, int]]:
    """For each action (start, place in an order of dependencies): a rank under which each comes after all it needs, as
    nothing starts before what it needs."""
    program = flatten(problem.schedule)
    starts_s = run_strict(program, costs_of(program, problem.times, problem.sends))
    begun_s = [dict(zip(row.actions, own)) for row, own in zip(problem.schedule.actions, starts_s)]
    order = dependency_order(problem.schedule, program.stages).order
    return {action: (begun_s[index][action], place) for place, (index, action) in enumerate(order)}


def _change_link(problem: Problem, ends: tuple[int, int], change: Callable[[SendTimes], SendTimes]) -> Problem:
    homes, sends = problem.schedule.homes, problem.sends or {}
    chosen = {edge for edge in sends if sorted(homes.get(actor.stage, actor.stage) for actor in edge) == sorted(ends)}
    if not chosen:
        raise _no_such(problem, f"link {ends[0]}-{ends[1]}")
    return replace(problem, sends={edge: change(send) if edge in chosen else send for edge, send in sends.items()})


def _check_factor(factor: float) -> None:
    if not 0.0 < factor < inf:
        raise InputError(
            "MP193",
            f"the factor is {factor:g}, it must be above 0 and finite",
            "write 1.5x for half again as long, 0.5x for half the time",
        )


def _no_such(problem: Problem, what: str) -> InputError:
    counts = Counter(row.stage for row in problem.schedule.actions)
    last = max(counts)
    several = ", ".join(f"{count} groups of stage {stage}" for stage, count in sorted(counts.items()) if count > 1)
    have = f"stages are 0 to {last}" + (f", links 0-1 to {last - 1}-{last}" if last else "")
    return InputError("MP190", f"there is no {what}", have + (f"; there are {several}" if several else ""))

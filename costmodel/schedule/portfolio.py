"""Candidates for a straight pipeline: every fixed schedule within the caps, and list schedules under many policies."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from costmodel.schedule.actions import Schedule
from costmodel.schedule.early_backward import dapple_pb, warm_ups_for_delays
from costmodel.schedule.generate import gpipe, one_f_one_b
from costmodel.schedule.goal import Goal, better
from costmodel.schedule.greedy import Policy, list_schedule
from costmodel.schedule.straight import StraightCosts, W, Word, WordTimes, fits, time_words, words_of
from costmodel.schedule.straight_bounds import most_in_flight
from costmodel.schedule.zero_bubble import split_backward, zb_h1, zb_h2


def fixed_candidates(costs: StraightCosts, microbatches: int) -> Iterator[tuple[str, tuple[Word, ...], WordTimes]]:
    """Names, words and times of fixed schedules that fit.

    Fused backwards are split in place, which is never slower.
    """
    p, m = costs.stages, microbatches
    made: list[Schedule] = [one_f_one_b(p, m), zb_h1(p, m), zb_h2(p, m), dapple_pb(p, m), gpipe(p, m)]
    if any(costs.send_s) and all(cap >= p - stage for stage, cap in enumerate(costs.memory_cap)):
        stage_times_s = [sum(times) for times in zip(costs.forward_s, costs.backward_s, costs.weight_s)]
        chosen = warm_ups_for_delays(stage_times_s, costs.send_s, weight_s=costs.weight_s, memory_cap=costs.memory_cap)
        hidden = one_f_one_b(p, m, windows=chosen.windows)
        made.append(Schedule(name="hetero-1f1b", microbatches=m, actions=hidden.actions))
    for schedule in made:
        words = words_of(split_backward(schedule))
        if costs.fused:
            words = tuple(word.replace(bytes((W,)), b"") for word in words)
        if fits(costs, words) and (times := time_words(costs, words)) is not None:
            yield schedule.name, words, times


def policies(costs: StraightCosts, microbatches: int) -> Iterator[Policy]:
    """Policies alike on all stages but for their limits, those that win most often first."""
    p = costs.stages
    for patience in (1.0, 0.5, 0.0):
        for forward_first in (False, True):
            for limits in _limits(costs, microbatches):
                yield Policy(limits=limits, forward_first=(forward_first,) * p, patience=(patience,) * p)


def _limits(costs: StraightCosts, microbatches: int) -> list[tuple[int, ...]]:
    """Limits of microbatches between F and B, within caps: as many forwards as end before the first gradient is back
    (also: and more than on the next stage), all that caps allow, shares of 1F1B's, and enough to keep the slowest stage
    busy (Little's law)."""
    p = costs.stages
    most = [max(1, most_in_flight(costs, stage, microbatches)) for stage in range(p)]
    trips_s = [costs.round_trip_s(stage) for stage in range(p)]
    fill = [1 + int(trip_s / took_s) if took_s else k for trip_s, took_s, k in zip(trips_s, costs.forward_s, most)]
    falling = list(map(min, fill, most))
    for stage in range(1, p):
        falling[stage] = max(1, min(falling[stage], falling[stage - 1] - 1))
    limits = [falling, fill, most, [ceil(1.5 * (p - i) - 0.5) for i in range(p)], [p - i for i in range(p)]]
    slowest_s = max(sum(times) for times in zip(costs.forward_s, costs.backward_s, costs.weight_s))
    if slowest_s > 0.0:
        holds_s = map(sum, zip(costs.forward_s, trips_s, costs.backward_s))
        limits.insert(3, [1 + ceil(hold_s / slowest_s) for hold_s in holds_s])
    return list(dict.fromkeys(tuple(map(min, most, limit)) for limit in limits))


def improve_policy(
    costs: StraightCosts,
    microbatches: int,
    start: tuple[Policy, tuple[Word, ...], Sequence[float]],
    goal: Goal,
    evaluations: int,
) -> tuple[tuple[Word, ...], Sequence[float]]:
    """Changes one stage's limit, patience or preference at a time, keeping what is better, until nothing is.

    Returns:
        Words, and when each stage ends.
    """
    policy, words, ends_s = start
    key = goal.key(ends_s)
    most = [max(1, most_in_flight(costs, stage, microbatches)) for stage in range(costs.stages)]
    spent, improved = 0, True
    while improved:
        improved = False
        for stage in range(costs.stages):
            for other in _neighbours(policy, stage, most[stage]):
                if spent >= evaluations or goal.reached(key):
                    return words, ends_s
                spent += 1
                tried, tried_ends_s = list_schedule(costs, microbatches, other)
                tried_key = goal.key(tried_ends_s)
                if better(tried_key, key) or (not better(key, tried_key) and sum(tried_ends_s) < sum(ends_s)):
                    improved = improved or better(tried_key, key)
                    policy, words, ends_s, key = other, tried, tried_ends_s, tried_key
    return words, ends_s


def _neighbours(policy: Policy, stage: int, most: int) -> Iterator[Policy]:
    def changed(values: tuple, value: object) -> tuple:
        return (*values[:stage], value, *values[stage + 1 :])

    for limit in sorted({min(most, max(1, policy.limits[stage] + step)) for step in (-2, -1, 1, 2)}):
        if limit != policy.limits[stage]:
            yield replace(policy, limits=changed(policy.limits, limit))
    for patience in (0.0, 0.3, 0.6, 1.0):
        if patience != policy.patience[stage]:
            yield replace(policy, patience=changed(policy.patience, patience))
    yield replace(policy, forward_first=changed(policy.forward_first, not policy.forward_first[stage]))

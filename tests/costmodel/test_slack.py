"""Slack of borders against the slow-link law and against simulation at and beyond it."""

import random
from dataclasses import replace

import pytest

from costmodel.errors import InputError
from costmodel.schedule.actions import Actor, ActorActions, Schedule
from costmodel.schedule.early_backward import warm_ups_for_delays
from costmodel.schedule.generate import one_f_one_b, spread_shares
from costmodel.schedule.registry import make_schedule
from costmodel.schedule.zero_bubble import split_backward
from costmodel.simulate import SendTimes, StageTimes, UpdateWait, simulate
from costmodel.simulation.changes import Problem
from costmodel.simulation.slack import border_slacks


def alike(schedule, forward_s, backward_s, weight_s, send_s=0.0):
    stages = schedule.stages
    times = StageTimes(forward_s=forward_s, backward_s=backward_s, weight_s=weight_s)
    send = SendTimes(activation_s=0.0, gradient_s=0.0, latency_s=send_s)
    return Problem(
        schedule=schedule,
        times={Actor(s, 0): times for s in range(stages)},
        sends={(Actor(s, 0), Actor(s + 1, 0)): send for s in range(stages - 1)},
    )


def borders_of_link(problem, border):
    """The borders between (virtual) stages that are on the same two stages of actors."""
    homes = problem.schedule.homes
    ends = [{homes[stage], homes[stage + 1]} for stage in range(len(homes) - 1)]
    return [at for at, pair in enumerate(ends) if pair == ends[border]]


def delayed_s(problem, border, delay_s):
    """The step if messages over the link between two (virtual) stages arrive later."""
    chosen = borders_of_link(problem, border)
    late = {
        (one, other): replace(send, latency_s=send.latency_s + (delay_s if one.stage in chosen else 0.0))
        for (one, other), send in problem.sends.items()
    }
    return simulate(problem.schedule, problem.times, late, waits=problem.waits).makespan_s


@pytest.mark.parametrize("gap", [1, 2, 3])
@pytest.mark.parametrize("link", [0, 1, 2])
def test_absorbed_delay_is_that_of_the_slow_link_law(gap, link):
    """Order B, W, F: ((Δ - 1)·T + W)/2."""
    rng = random.Random(10 * gap + link)
    forward_s, backward_s, weight_s = (rng.uniform(0.5, 2.0) for _ in range(3))
    windows = [1] * 4
    windows[link + 1] = gap
    problem = alike(split_backward(one_f_one_b(4, 96, windows=windows)), forward_s, backward_s, weight_s)
    total_s = forward_s + backward_s + weight_s
    law_s = ((gap - 1) * total_s + weight_s) / 2
    assert law_s - 1e-9 <= border_slacks(problem)[link].absorbs_s <= law_s + 4 * total_s / 96


def random_problem(rng, schedule):
    def some(low, high):
        return rng.uniform(low, high)

    actors = sorted({Actor(action.stage, row.group) for row in schedule.actions for action in row.actions})
    times = {
        actor: StageTimes(
            forward_s=some(1, 3), backward_s=some(1, 3), weight_s=some(0, 3), reduce_s=some(0, 2), update_s=some(0, 2)
        )
        for actor in actors
    }
    sends = {
        (one, other): SendTimes(activation_s=some(0, 2), gradient_s=some(0, 5), latency_s=some(0, 1))
        for one in actors
        for other in actors
        if other.stage == one.stage + 1
    }
    stages = sorted({row.stage for row in schedule.actions})
    waits = {s: UpdateWait(stages=frozenset(stages), time_s=0.3) for s in stages} if rng.random() < 0.5 else {}
    return Problem(schedule=schedule, times=times, sends=sends, waits=waits)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-h2", "interleaved", "zb-v", "groups"])
def test_slack_is_exact_on_random_schedules(name):
    """Of straight and looped ones, of stages of several groups, on links that messages occupy."""
    rng = random.Random(name)
    for _ in range(8):
        p, m = rng.randint(2, 4), rng.randint(2, 12)
        if name == "groups":
            shares = [spread_shares((m - m // 2, m // 2)) if rng.random() < 0.6 else [range(m)] for _ in range(p)]
            problem = random_problem(rng, one_f_one_b(p, m, shares))
        else:
            problem = random_problem(rng, make_schedule(name, p, m))
        base_s = simulate(problem.schedule, problem.times, problem.sends, waits=problem.waits).makespan_s
        found = border_slacks(problem)
        assert found
        for slack in found:
            for largest_s, slope in (
                (slack.free_s, 0),
                (slack.absorbs_s, 2 * len(borders_of_link(problem, slack.stage))),
            ):
                if largest_s == float("inf"):
                    assert delayed_s(problem, slack.stage, 1e6) <= (base_s + slope * 1e6) * (1 + 1e-9)
                    continue
                assert delayed_s(problem, slack.stage, largest_s) <= base_s + slope * largest_s + 1e-6
                more_s = largest_s * 1.01 + 1e-3
                assert delayed_s(problem, slack.stage, more_s) > base_s + slope * more_s
            assert slack.free_s <= slack.absorbs_s + 1e-9


def test_no_border_inside_one_actor():
    """The way of a V turns on the last stage's devices: nothing is sent there."""
    problem = random_problem(random.Random(3), make_schedule("zb-v", 3, 6))
    assert [slack.stage for slack in border_slacks(problem)] == [0, 1, 3, 4]


def test_chosen_warm_ups_give_the_slack_that_they_promise():
    delays_s, total_s = [1.0, 4.0, 0.0], 3.0
    chosen = warm_ups_for_delays([total_s] * 4, delays_s)
    assert chosen.absorbs_s == (1.5, 4.5, 0.0)
    problem = alike(split_backward(one_f_one_b(4, 96, windows=chosen.windows)), 1.0, 2.0, 0.0)
    for slack, promised_s in zip(border_slacks(problem), chosen.absorbs_s, strict=True):
        assert promised_s - 1e-9 <= slack.absorbs_s <= promised_s + 4 * total_s / 96


def test_deadlock_has_no_slack():
    made = make_schedule("1f1b", 2, 2)
    first = made.actions[0]
    turned = ActorActions(
        stage=0, group=0, actions=(first.actions[0], first.actions[2], first.actions[1], *first.actions[3:])
    )
    stuck = Schedule(
        name="x",
        microbatches=2,
        actions=(turned, ActorActions(stage=1, group=0, actions=made.actions[1].actions[::-1])),
    )
    with pytest.raises(InputError, match="MP148"):
        border_slacks(alike(stuck, 1.0, 1.0, 0.0))

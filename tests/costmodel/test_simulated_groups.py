"""Stages of several groups, each with a share of the microbatches."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.pipeline import (
    pipeline_lower_bound_s,
)
from costmodel.schedule.actions import Action, Actor
from costmodel.schedule.generate import gpipe, one_f_one_b, spread_shares
from costmodel.simulate import SendTimes, StageTimes, simulate
from tests.costmodel.pipelines import EXACT, POSITIVE, TIME, at_most


def test_groups_run_side_by_side():
    """Two groups of half speed do the work of one; the last stage has both."""
    m = 40
    shares = [[range(m)], spread_shares([m // 2, m // 2])]
    times = {
        Actor(0, 0): StageTimes(forward_s=1.0, backward_s=2.0),
        Actor(1, 0): StageTimes(forward_s=2.0, backward_s=4.0),
        Actor(1, 1): StageTimes(forward_s=2.0, backward_s=4.0),
    }
    result = simulate(one_f_one_b(2, m, shares), times)
    assert result.makespan_s <= 3.0 * m + 6.0
    load_s = [3.0 * m, 6.0 * m / 2]
    assert at_most(pipeline_lower_bound_s([1.0, 2.0], [2.0, 4.0], m, load_s=load_s), result.makespan_s)


@pytest.mark.parametrize("speeds", [[[1], [3, 1]], [[3, 1], [5, 2, 1]], [[1, 1], [1, 1], [1, 1]], [[1, 1], [3, 1]]])
def test_shares_in_proportion_to_speed_keep_groups_busy(speeds):
    m = 120
    shares, times = [], {}
    for stage, row in enumerate(speeds):
        shares.append(spread_shares([m * speed // sum(row) for speed in row]))
        for group, speed in enumerate(row):
            times[Actor(stage, group)] = StageTimes(forward_s=sum(row) / speed, backward_s=2 * sum(row) / speed)
    assert simulate(one_f_one_b(len(speeds), m, shares), times).makespan_s <= 1.05 * 3 * m


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_random_shares_simulate_consistently(data):
    stages, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    shares, times = [], {}
    for stage in range(stages):
        groups = data.draw(st.integers(1, 4))
        owner = data.draw(st.lists(st.integers(0, groups - 1), min_size=m, max_size=m))
        shares.append([[k for k in range(m) if owner[k] == g] for g in range(groups)])
        for group in range(groups):
            times[Actor(stage, group)] = StageTimes(forward_s=data.draw(POSITIVE), backward_s=data.draw(POSITIVE))
    sends = {
        (a, b): SendTimes(activation_s=data.draw(TIME), gradient_s=data.draw(TIME))
        for a in times
        for b in times
        if b.stage == a.stage + 1
    }
    for schedule in (gpipe(stages, m, shares), one_f_one_b(stages, m, shares)):
        result = simulate(schedule, times, sends)
        assert result == simulate(schedule, times, sends)
        spans = {entry.action: entry for entry in result.timeline}
        assert len(spans) == 2 * stages * m
        for action, entry in spans.items():
            if action.kind == "F" and action.stage:
                sender = spans[Action(action.stage - 1, "F", action.microbatch)]
                least_s = sends[sender.actor, entry.actor].activation_s
            elif action.kind == "B" and action.stage < stages - 1:
                sender = spans[Action(action.stage + 1, "B", action.microbatch)]
                least_s = sends[entry.actor, sender.actor].gradient_s
            else:
                continue
            assert entry.start_s >= sender.end_s + least_s - 1e-9
        for use in result.actors:
            own = [entry for entry in result.timeline if entry.actor == use.actor]
            assert all(a.end_s <= b.start_s for a, b in pairwise(own))
            gaps_s = sum(b.start_s - a.end_s for a, b in pairwise(own))
            assert use.bubble_s == pytest.approx(gaps_s, abs=1e-9)
            assert use.busy_s + use.bubble_s == pytest.approx(use.last_end_s - use.first_start_s, **EXACT)
        least = [
            [min(getattr(times[a], name) for a in times if a.stage == s) for s in range(stages)]
            for name in ("forward_s", "backward_s")
        ]
        load_s = [max(use.busy_s for use in result.actors if use.actor.stage == s) for s in range(stages)]
        links = [[e for (a, _), e in sends.items() if a.stage == s] for s in range(stages - 1)]
        send_s = [min(e.activation_s for e in link) for link in links]
        gradient_s = [min(e.gradient_s for e in link) for link in links]
        bound_s = pipeline_lower_bound_s(*least, m, send_s, gradient_s, load_s=load_s)
        assert at_most(bound_s, result.makespan_s)

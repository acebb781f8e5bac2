"""The simulator against the formulas of the literature, and the closed forms against the simulator."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.errors import InputError
from costmodel.pipeline import (
    gpipe_time_s,
    one_f_one_b_lower_bound_s,
    pipeline_lower_bound_s,
    pipeline_time_s,
)
from costmodel.schedule.actions import Actor, parse_schedule
from costmodel.schedule.generate import gpipe, one_f_one_b
from costmodel.simulate import SendTimes, StageTimes, simulate
from tests.costmodel.pipelines import EXACT, POSITIVE, TIME, at_most, chain, pipelines


@given(st.integers(1, 16), st.integers(1, 64), POSITIVE, POSITIVE)
@settings(max_examples=40, deadline=None)
def test_bubble_and_peak_of_uniform_stages(stages, microbatches, forward_s, backward_s):
    """schedules.md: bubble (p-1)·T at most; peak m for GPipe, p - i for 1F1B, whose bubble falls to 0 on the last."""
    times, _ = chain([forward_s] * stages, [backward_s] * stages)
    total_s = forward_s + backward_s
    filled = simulate(gpipe(stages, microbatches), times)
    steady = simulate(one_f_one_b(stages, microbatches), times)
    for result in (filled, steady):
        assert result.makespan_s == pytest.approx((microbatches + stages - 1) * total_s, **EXACT)
        assert result.pipeline_s == result.makespan_s
        assert max(use.bubble_s for use in result.actors) == pytest.approx((stages - 1) * total_s, **EXACT)
        for use in result.actors:
            assert use.busy_s == pytest.approx(microbatches * total_s, **EXACT)
            assert use.first_start_s == pytest.approx(use.actor.stage * forward_s, **EXACT)
    fraction = filled.use(0).bubble_s / filled.makespan_s
    assert fraction == pytest.approx((stages - 1) / (microbatches + stages - 1), **EXACT)
    assert [use.peak_in_flight for use in filled.actors] == [microbatches] * stages
    assert [use.peak_in_flight for use in steady.actors] == [min(stages - i, microbatches) for i in range(stages)]
    if microbatches >= stages:
        for use in steady.actors:
            assert use.bubble_s == pytest.approx((stages - 1 - use.actor.stage) * total_s, **EXACT)
    assert float(pipeline_time_s([total_s] * stages, microbatches)) == pytest.approx(steady.makespan_s, **EXACT)
    bound_s = one_f_one_b_lower_bound_s([forward_s] * stages, [backward_s] * stages, microbatches)
    assert float(bound_s) == pytest.approx(steady.makespan_s, **EXACT)


@given(pipelines())
@settings(max_examples=200, deadline=None)
def test_e2_is_exact_for_gpipe(pipeline):
    forward_s, backward_s, send_s, gradient_s, m = pipeline
    result = simulate(gpipe(len(forward_s), m), *chain(forward_s, backward_s, send_s, gradient_s))
    assert float(gpipe_time_s(forward_s, backward_s, m, send_s, gradient_s)) == pytest.approx(
        result.makespan_s, **EXACT
    )


@given(pipelines(), st.data())
@settings(max_examples=300, deadline=None)
def test_bounds_never_exceed_the_simulation(pipeline, data):
    forward_s, backward_s, send_s, gradient_s, m = pipeline
    stages = len(forward_s)
    windows = data.draw(st.none() | st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    latency_s = data.draw(TIME)
    times, sends = chain(forward_s, backward_s, send_s, gradient_s, latency_s)
    late, late_gradient = np.add(send_s, latency_s), np.add(gradient_s, latency_s)
    filled_s = simulate(gpipe(stages, m), times, sends).makespan_s
    steady_s = simulate(one_f_one_b(stages, m, windows=windows), times, sends).makespan_s
    bound_s = pipeline_lower_bound_s(forward_s, backward_s, m, late, late_gradient)
    tight_s = one_f_one_b_lower_bound_s(forward_s, backward_s, m, late, late_gradient, windows=windows)
    assert at_most(bound_s, filled_s)
    assert at_most(bound_s, steady_s)
    assert float(tight_s) >= float(bound_s)
    assert at_most(tight_s, steady_s)
    estimate_s = pipeline_time_s(np.add(forward_s, backward_s), m, late + late_gradient)
    assert at_most(estimate_s, filled_s)
    totals = np.add(forward_s, backward_s)
    if totals[-1] == max(totals):
        assert at_most(estimate_s, steady_s)
    after = np.flatnonzero(totals == max(totals))[-1]
    slack_s = totals[after + 1 :].sum() + (late + late_gradient)[after:].sum()
    assert at_most(float(estimate_s) - slack_s, steady_s)
    if m == 1:
        assert steady_s == pytest.approx(float(bound_s), **EXACT)


def test_the_usual_formula_is_no_bound_of_1f1b():
    result = simulate(one_f_one_b(2, 4), chain([10.0, 1.0], [10.0, 1.0])[0])
    assert result.makespan_s == 80.0
    assert float(pipeline_time_s([20.0, 2.0], 4)) == 82.0
    assert float(one_f_one_b_lower_bound_s([10.0, 1.0], [10.0, 1.0], 4)) == 80.0


@given(pipelines(), st.lists(st.tuples(TIME, TIME, TIME, TIME), min_size=6, max_size=6), st.booleans())
@settings(max_examples=150, deadline=None)
def test_bound_with_step_times_and_split_backward(pipeline, extra, split):
    forward_s, backward_s, send_s, gradient_s, m = pipeline
    stages = len(forward_s)
    _, sends = chain(forward_s, backward_s, send_s, gradient_s)
    weight_s = [row[0] for row in extra[:stages]]
    step_s = [sum(row[1:]) for row in extra[:stages]]
    times = {
        Actor(i, 0): StageTimes(
            forward_s=forward_s[i],
            backward_s=backward_s[i],
            weight_s=weight_s[i],
            reduce_s=extra[i][1],
            exchange_s=extra[i][2],
            update_s=extra[i][3],
        )
        for i in range(stages)
    }
    schedule = one_f_one_b(stages, m)
    if split:  # every W right after its B
        lines = [f"schedule split microbatches {m}"]
        for row in schedule.actions:
            text = " ".join(f"{a} {a.stage}W{a.microbatch}" if a.kind == "B" else str(a) for a in row.actions)
            lines.append(f"{row.stage}.0: {text}")
        schedule = parse_schedule("\n".join(lines))
        bound_s = pipeline_lower_bound_s(forward_s, backward_s, m, send_s, gradient_s, weight_s=weight_s, step_s=step_s)
    else:
        bound_s = pipeline_lower_bound_s(forward_s, np.add(backward_s, weight_s), m, send_s, gradient_s, step_s=step_s)
    assert at_most(bound_s, simulate(schedule, times, sends).makespan_s)


def test_closed_forms_broadcast_over_candidates():
    rng = np.random.default_rng(0)
    forward_s, backward_s, send_s = rng.random((5, 3, 4)), rng.random((5, 3, 4)), rng.random((3, 3))
    for form in (gpipe_time_s, pipeline_lower_bound_s, one_f_one_b_lower_bound_s):
        together = form(forward_s, backward_s, 8, send_s)
        assert together.shape == (5, 3)
        for a in range(5):
            for b in range(3):
                assert together[a, b] == pytest.approx(float(form(forward_s[a, b], backward_s[a, b], 8, send_s[b])))
    assert pipeline_time_s(forward_s + backward_s, 8, send_s).shape == (5, 3)


@pytest.mark.parametrize("gap", [1, 2, 3])
@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.parametrize("delay_s", [0.3, 1.7, 4.1, 9.0])
def test_slow_link_law_of_fused_1f1b(gap, slow, delay_s):
    """schedules.md: period max(T, (2T + 2c)/(Δ + 1)) with a one-way delay c on one link, Δ its warm-up difference."""
    forward_s, backward_s, stages, m = 1.0, 1.6, 4, 240
    total_s = forward_s + backward_s
    windows = [1] * stages
    windows[slow + 1] = gap
    times, sends = chain([forward_s] * stages, [backward_s] * stages)
    sends[Actor(slow, 0), Actor(slow + 1, 0)] = SendTimes(activation_s=0.0, gradient_s=0.0, latency_s=delay_s)
    result = simulate(one_f_one_b(stages, m, windows=windows), times, sends)
    ends = [e.end_s for e in result.timeline if e.actor == (0, 0) and e.action.kind == "B"]
    window = 120  # a multiple of every Δ + 1
    period_s = (ends[200] - ends[200 - window]) / window
    assert period_s == pytest.approx(max(total_s, (2 * total_s + 2 * delay_s) / (gap + 1)), rel=0.02)
    delays = [delay_s if link == slow else 0.0 for link in range(stages - 1)]
    bound_s = float(one_f_one_b_lower_bound_s([forward_s] * stages, [backward_s] * stages, m, delays, windows=windows))
    assert 0.95 * result.makespan_s <= bound_s <= result.makespan_s + 1e-9


@pytest.mark.parametrize(
    "call",
    [
        lambda: pipeline_time_s([1.0, 1.0], 0),
        lambda: gpipe_time_s([1.0, 1.0], [1.0, 1.0], 2, [1.0, 1.0]),
        lambda: one_f_one_b_lower_bound_s([1.0, 1.0], [1.0, 1.0], 2, windows=[1]),
    ],
)
def test_bad_input_to_closed_forms(call):
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.code == "MP143"

"""The simulator against the formulas of the literature, and the closed forms against the simulator."""

from itertools import pairwise

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
from costmodel.schedule.actions import Action, Actor, parse_schedule
from costmodel.schedule.generate import gpipe, one_f_one_b, spread_shares
from costmodel.simulate import SendTimes, StageTimes, UpdateWait, simulate

TIME = st.floats(0.0, 10.0)
POSITIVE = st.floats(0.1, 10.0)
EXACT = {"rel": 1e-9, "abs": 1e-9}


def chain(forward_s, backward_s, send_s=0.0, gradient_s=None, latency_s=0.0):
    """Times and sends of a pipeline with one group a stage."""
    stages = len(forward_s)
    times = {Actor(i, 0): StageTimes(forward_s=f, backward_s=b) for i, (f, b) in enumerate(zip(forward_s, backward_s))}
    send = np.broadcast_to(send_s, stages - 1)
    gradient = np.broadcast_to(send_s if gradient_s is None else gradient_s, stages - 1)
    sends = {
        (Actor(i, 0), Actor(i + 1, 0)): SendTimes(
            activation_s=float(send[i]), gradient_s=float(gradient[i]), latency_s=latency_s
        )
        for i in range(stages - 1)
    }
    return times, sends


@st.composite
def pipelines(draw):
    """(F, B, c, g, m): unequal stages and links."""
    stages = draw(st.integers(1, 6))
    work = st.lists(TIME, min_size=stages, max_size=stages)
    link = st.lists(TIME, min_size=stages - 1, max_size=stages - 1)
    return draw(work), draw(work), draw(link), draw(link), draw(st.integers(1, 16))


def at_most(bound_s, simulated_s):
    return float(bound_s) <= simulated_s * (1 + 1e-9) + 1e-9


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


def test_a_link_carries_one_message_at_a_time():
    """Two microbatches leave stage 0 at 1 and 2; each occupies the link for 3 and then travels for 10."""
    times, sends = chain([1.0, 1.0], [1.0, 1.0], 3.0, 0.0, 10.0)
    result = simulate(gpipe(2, 2), times, sends)
    starts = [e.start_s for e in result.timeline if e.actor == (1, 0) and e.action.kind == "F"]
    assert starts == [1 + 3 + 10, 1 + 3 + 3 + 10]


def test_directions_do_not_share_a_link():
    times, sends = chain([1.0, 1.0], [1.0, 1.0], 5.0)
    result = simulate(one_f_one_b(2, 2), times, sends)
    starts = {e.action: e.start_s for e in result.timeline}
    assert starts[Action(0, "B", 0)] == 1 + 5 + 1 + 1 + 5  # while the activation of microbatch 1 is on its way until 11


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


def test_groups_of_a_stage_meet_before_they_update():
    times = {
        Actor(0, 0): StageTimes(forward_s=1.0, backward_s=1.0, reduce_s=2.0, exchange_s=3.0, update_s=4.0),
        Actor(0, 1): StageTimes(forward_s=5.0, backward_s=5.0, reduce_s=1.0, exchange_s=3.0, update_s=1.0),
    }
    result = simulate(gpipe(1, 2, [[(0,), (1,)]]), times)
    assert [use.step_end_s for use in result.actors] == [11 + 3 + 4, 11 + 3 + 1]
    assert (result.pipeline_s, result.makespan_s) == (10.0, 18.0)


def test_global_norm_makes_every_stage_wait_for_the_first():
    """1F1B ends on stage 0; without a barrier the last stage updates long before."""
    times = {Actor(i, 0): StageTimes(forward_s=1.0, backward_s=1.0, reduce_s=0.5, update_s=0.25) for i in range(3)}
    free = simulate(one_f_one_b(3, 4), times)
    assert [use.step_end_s for use in free.actors] == [12.75, 11.75, 10.75]
    every = UpdateWait(stages=frozenset({0, 1, 2}), time_s=0.125)
    tied = simulate(one_f_one_b(3, 4), times, waits=dict.fromkeys(range(3), every))
    assert [use.step_end_s for use in tied.actors] == [12 + 0.5 + 0.125 + 0.25] * 3
    assert [use.joined_s for use in tied.actors] == [0.125, 1.125, 2.125]


def test_an_update_waits_for_those_stages_only_that_it_reads():
    """Stages of unequal speed; the second and the third share a leaf that the optimizer takes the norm of."""
    times = {
        Actor(i, 0): StageTimes(forward_s=t, backward_s=t, reduce_s=r, update_s=0.25)
        for i, (t, r) in enumerate([(1.0, 0.0), (3.0, 4.0), (2.0, 0.5)])
    }
    free = simulate(one_f_one_b(3, 4), times)
    pair = UpdateWait(stages=frozenset({1, 2}), time_s=0.5)
    tied = simulate(one_f_one_b(3, 4), times, waits={1: pair, 2: pair})
    ready = [use.step_end_s - 0.25 for use in free.actors]
    assert ready[1] > ready[2]
    assert [use.step_end_s for use in tied.actors] == [free.actors[0].step_end_s, *[ready[1] + 0.5 + 0.25] * 2]
    assert tied.makespan_s == free.makespan_s + 0.5 and tied.pipeline_s == free.pipeline_s


def test_backward_is_whole_unless_the_schedule_splits_it():
    times = {Actor(0, 0): StageTimes(forward_s=1.0, backward_s=2.0, weight_s=4.0)}
    fused = simulate(parse_schedule("schedule x microbatches 1\n0.0: 0F0 0B0"), times)
    split = simulate(parse_schedule("schedule x microbatches 1\n0.0: 0F0 0B0 0W0"), times)
    assert [(str(e.action), e.start_s, e.end_s) for e in fused.timeline] == [("0F0", 0, 1), ("0B0", 1, 7)]
    assert [(str(e.action), e.start_s, e.end_s) for e in split.timeline] == [
        ("0F0", 0, 1),
        ("0B0", 1, 3),
        ("0W0", 3, 7),
    ]


def test_virtual_stages_on_one_actor_send_nothing():
    """The turn of a V-shape needs no link; the two chunks' messages share the link between the actors."""
    schedule = parse_schedule("schedule v microbatches 1\n0.0: 0F0 3F0 3B0 0B0\n1.0: 1F0 2F0 2B0 1B0")
    times = {Actor(stage, 0): StageTimes(forward_s=1.0, backward_s=1.0) for stage in range(4)}
    sends = {(Actor(a, 0), Actor(a + 1, 0)): SendTimes(activation_s=2.0, gradient_s=2.0) for a in (0, 2)}
    result = simulate(schedule, times, sends)
    assert result.makespan_s == 8 + 4 * 2.0
    assert result.use(0).peak_in_flight == 2


def test_an_actor_without_actions_only_updates():
    times = {Actor(0, g): StageTimes(forward_s=1.0, backward_s=1.0, update_s=1.0) for g in range(2)}
    use = simulate(gpipe(1, 3, [[range(3), ()]]), times).use(0, 1)
    assert (use.first_start_s, use.last_end_s, use.busy_s, use.bubble_s, use.peak_in_flight) == (0, 0, 0, 0, 0)
    assert use.step_end_s == 6 + 1


def test_timeline_is_optional():
    times, sends = chain([1.0, 2.0], [2.0, 1.0], 0.5)
    with_timeline = simulate(one_f_one_b(2, 4), times, sends)
    without = simulate(one_f_one_b(2, 4), times, sends, keep_timeline=False)
    assert without.timeline == ()
    assert (without.makespan_s, without.actors) == (with_timeline.makespan_s, with_timeline.actors)


def test_missing_times_and_links_are_named():
    times, sends = chain([1.0, 1.0], [1.0, 1.0], 1.0)
    with pytest.raises(InputError, match="no times for stage 1 group 0") as caught:
        simulate(gpipe(2, 2), {Actor(0, 0): times[Actor(0, 0)]})
    assert caught.value.code == "MP145"
    with pytest.raises(InputError, match="no send times from stage 0 group 0 to stage 1 group 0") as caught:
        simulate(gpipe(2, 2), times, {})
    assert caught.value.code == "MP145"
    with pytest.raises(KeyError):
        simulate(gpipe(2, 2), times, sends).use(2)


@pytest.mark.parametrize("time_s", [-1.0, float("nan"), float("inf")])
def test_times_must_be_finite_and_not_negative(time_s):
    times, sends = chain([1.0, time_s], [1.0, 1.0])
    with pytest.raises(InputError, match=f"stage 1 group 0: forward_s is {time_s}") as caught:
        simulate(gpipe(2, 2), times)
    assert caught.value.code == "MP147"
    times, sends = chain([1.0, 1.0], [1.0, 1.0], latency_s=time_s)
    with pytest.raises(InputError, match=f"latency_s is {time_s}"):
        simulate(gpipe(2, 2), times, sends)
    wait = UpdateWait(stages=frozenset({0, 1}), time_s=time_s)
    with pytest.raises(InputError, match=f"update of stage 0: time_s is {time_s}"):
        simulate(gpipe(2, 2), times, waits={0: wait})


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("0.0: 0F0 0B0 0F1 0B1\n1.0: 1F0 1F1 1B0 1B1", "MP613"),
        ("0.0: 0F0 0F1 0B0 0B1\n1.0: 1F0 1B0 1B1", "MP610"),
        ("0.0: 0F0 0F0 0F1 0B0 0B1\n1.0: 1F0 1B0 1F1 1B1", "MP611"),
        ("0.0: 0F0 0F1 0B0 0B1 0F2\n1.0: 1F0 1B0 1F1 1B1", "MP614"),
    ],
)
def test_a_schedule_that_cannot_run_is_rejected_with_the_grid(text, code):
    schedule = parse_schedule(f"schedule broken microbatches 2\n{text}")
    with pytest.raises(InputError) as caught:
        simulate(schedule, chain([1.0, 1.0], [1.0, 1.0])[0])
    assert caught.value.code == "MP148"
    assert f"{code}: " in caught.value.message
    assert "stage 1 group 0 | " in caught.value.message


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


def test_forwards_that_nobody_takes_go_nowhere():
    schedule = parse_schedule("schedule x microbatches 2\n0.0: 0F0 0F1\n1.0: 1F1")
    times, sends = chain([1.0, 1.0], [1.0, 1.0], 1.0)
    result = simulate(schedule, times, sends)
    assert [(str(m.action), m.start_s) for m in result.messages] == [("0F1", 2.0)]
    assert result.makespan_s == 4.0

"""Faults, what-ifs, critical paths and memory curves, by hand and against the simulation."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.errors import InputError
from costmodel.schedule.actions import Actor, parse_schedule
from costmodel.schedule.generate import gpipe, one_f_one_b, spread_shares
from costmodel.schedule.schedules import NAMES, by_name
from costmodel.schedule.validate import validate_schedule
from costmodel.simulate import Contention, SendTimes, StageTimes, UpdateWait, simulate
from costmodel.simulation.changes import Problem, delay_link, fail_group, scale_link, scale_stage
from costmodel.simulation.critical_path import critical_path, path_shares
from costmodel.simulation.memory import HeldBytes, memory_over_time
from costmodel.simulation.what_if import what_ifs
from tests.costmodel.pipelines import chain
from tests.costmodel.test_contention import cases

GROUPS = [(1, [1.0]), (3, [1.0, 1.0, 2.0]), (2, [1.0, 3.0])]


def problem(m=24, schedule=one_f_one_b, send_s=0.25):
    """Three stages of 1, 3 and 2 groups."""
    shares = [spread_shares([m // count] * count) for count, _ in GROUPS]
    times = {
        Actor(stage, group): StageTimes(forward_s=factor, backward_s=2 * factor, exchange_s=1.0, update_s=0.5)
        for stage, (_, factors) in enumerate(GROUPS)
        for group, factor in enumerate(factors)
    }
    sends = {
        (a, b): SendTimes(activation_s=send_s, gradient_s=send_s, latency_s=0.125)
        for a in times
        for b in times
        if b.stage == a.stage + 1
    }
    return Problem(schedule=schedule(len(GROUPS), m, shares), times=times, sends=sends)


def run(p, **options):
    return simulate(p.schedule, p.times, p.sends, **options)


def test_a_slow_stage_and_a_fast_one():
    p = Problem(schedule=gpipe(2, 4), times=chain([1.0, 1.0], [2.0, 2.0])[0])
    assert run(scale_stage(p, 1, 1.5)).makespan_s == (1 + 4 * 1.5) + (4 * 3.0 + 2.0)
    assert run(scale_stage(p, 1, 1.5, part="F")).makespan_s == (1 + 4 * 1.5) + (4 * 2 + 2)
    assert run(scale_stage(p, 0, 0.5)).makespan_s == 0.5 + 4 + 4 * 2 + 1
    unequal = problem()
    slow = scale_stage(unequal, 1, 3.0, group=2)
    assert {actor for actor in slow.times if slow.times[actor] != unequal.times[actor]} == {(1, 2)}


def test_slow_links_and_delays():
    times, sends = chain([1.0, 1.0], [2.0, 2.0], 1.0)
    p = Problem(schedule=gpipe(2, 1), times=times, sends=sends)
    assert run(p).makespan_s == 6 + 2
    assert run(scale_link(p, (0, 1), 2.0)).makespan_s == 6 + 4
    assert run(delay_link(p, (1, 0), 0.25)).makespan_s == 6 + 2 + 0.5


@given(st.sampled_from([(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]), st.sampled_from([gpipe, one_f_one_b]))
@settings(max_examples=10, deadline=None)
def test_a_failed_group_is_replaced_by_its_peers(failed, schedule):
    p = problem(schedule=schedule)
    q = fail_group(p, *failed)
    assert failed not in q.schedule.actors and len(q.schedule.actors) == 5
    assert validate_schedule(q.schedule, 3) == ()
    assert {a for row in p.schedule.actions for a in row.actions} == {
        a for row in q.schedule.actions for a in row.actions
    }
    peers = [actor for actor in q.schedule.actors if actor.stage == failed[0]]
    before, after = run(p), run(q)
    assert any(after.use(*peer).busy_s > before.use(*peer).busy_s for peer in peers)
    untouched = [row for row in q.schedule.actions if row.stage != failed[0]]
    assert untouched == [row for row in p.schedule.actions if row.stage != failed[0]]
    assert q.times == {actor: cost for actor, cost in p.times.items() if actor != failed}


def test_faster_peers_adopt_more():
    q = fail_group(problem(), 1, 0)
    counts = {row.group: len(row.actions) // 2 for row in q.schedule.actions if row.stage == 1}
    assert counts == {1: 16, 2: 8}  # speeds 2 : 1


@given(cases(), st.data())
@settings(max_examples=60, deadline=None)
def test_any_failure_leaves_a_schedule_that_runs(case, data):
    schedule, times, sends = case
    p = Problem(schedule=schedule, times=times, sends=sends)
    actor = data.draw(st.sampled_from(schedule.actors))
    if sum(other.stage == actor.stage for other in schedule.actors) == 1:
        with pytest.raises(InputError, match="no peers") as caught:
            fail_group(p, *actor)
        assert caught.value.code == "MP194"
        return
    q = fail_group(p, *actor)
    assert validate_schedule(q.schedule, schedule.stages) == ()
    assert run(q).makespan_s > 0 or run(p).makespan_s == 0


@given(cases(), st.floats(1.0, 2.0), st.booleans(), st.none() | st.floats(0.0, 5.0))
@settings(max_examples=150, deadline=None)
def test_c1_the_critical_path_adds_up(case, slowdown, share, norm_s):
    schedule, times, sends = case
    shared = {pair: ("nic",) for edge in sends for pair in (edge, edge[::-1])} if share else {}
    stages = range(schedule.stages)
    waits = {s: UpdateWait(stages=frozenset((0, s)), time_s=norm_s) for s in stages} if norm_s is not None else None
    for contention in (None, Contention(shared=shared, compute_slowdown=slowdown, early_reduction=0.5)):
        result = simulate(schedule, times, sends, contention=contention, waits=waits)
        path = critical_path(result)
        assert sum(s.end_s - s.start_s for s in path) == pytest.approx(result.makespan_s, rel=1e-9, abs=1e-9)
        assert all(one.end_s == other.start_s for one, other in pairwise(path))
        assert sum(share.time_s for share in path_shares(path)) == pytest.approx(result.makespan_s, rel=1e-9, abs=1e-9)


def test_the_critical_path_of_one_microbatch_is_everything():
    times, sends = chain([1.0, 2.0], [3.0, 4.0], 0.5, 0.25, 0.125)
    path = critical_path(simulate(gpipe(2, 1), times, sends))
    assert [(s.part, s.actor.stage, s.end_s - s.start_s) for s in path] == [
        ("F", 0, 1.0), ("send", 0, 0.5), ("latency", 0, 0.125), ("F", 1, 2.0), ("B", 1, 4.0), ("send", 1, 0.25),
        ("latency", 1, 0.125), ("B", 0, 3.0),
    ]  # fmt: skip
    assert path_shares(path)[0].part == "B" and path_shares(path)[0].time_s == 4.0


@given(cases(), st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_w1_bounds_what_is_not_tried(case, most):
    """The best few are those of trying everything."""
    schedule, times, sends = case
    p = Problem(schedule=schedule, times=times, sends=sends)
    result = run(p)
    found = what_ifs(p, result, critical_path(result), most=most)
    gains = []
    stages = schedule.stages
    gains += [result.makespan_s - run(scale_link(p, (s, s + 1), 0.5)).makespan_s for s in range(stages - 1)]
    for part in ("F", "B", "reduce"):
        gains += [result.makespan_s - run(scale_stage(p, s, 0.7, part=part)).makespan_s for s in range(stages)]
    best = sorted((g for g in gains if g > 1e-9 * result.makespan_s), reverse=True)[:most]
    assert [entry.gain_s for entry in found] == pytest.approx(best, rel=1e-6, abs=1e-9)


def test_what_ifs_name_the_slow_link():
    times, sends = chain([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.0, 9.0])
    p = Problem(schedule=one_f_one_b(3, 8), times=times, sends=sends)
    result = run(p)
    assert what_ifs(p, result, critical_path(result))[0].what == "link 1-2 twice as fast"


def test_memory_follows_the_microbatches_in_flight():
    times, _ = chain([1.0, 1.0], [2.0, 2.0])
    result = simulate(one_f_one_b(2, 3), times)
    held = {Actor(s, 0): HeldBytes(always_bytes=100, saved_bytes={s: 10}, limit_bytes=125) for s in range(2)}
    first, last = memory_over_time(result, held)
    assert (first.peak_bytes, last.peak_bytes) == (120, 110)
    # at 6 microbatch 0 goes and microbatch 2 comes
    assert list(zip(first.times_s, first.bytes)) == [(0.0, 110), (1.0, 120), (9.0, 110), (12.0, 100)]
    assert first.bytes[-1] == 100 and first.times_s[-1] == result.use(0).last_end_s
    assert max(first.bytes) == 100 + 10 * result.use(0).peak_in_flight


def test_between_its_b_and_its_w_a_microbatch_may_hold_less_or_more():
    schedule = parse_schedule("schedule x microbatches 1\n0.0: 0F0 0B0 0W0")
    result = simulate(schedule, {Actor(0, 0): StageTimes(forward_s=1.0, backward_s=2.0, weight_s=4.0)})
    whole, half, remat = (
        memory_over_time(
            result, {Actor(0, 0): HeldBytes(always_bytes=0, saved_bytes={0: 10}, until_weights_bytes=until)}
        )[0]
        for until in ({}, {0: 5}, {0: 30})
    )
    assert list(zip(whole.times_s, whole.bytes)) == [(0.0, 10), (7.0, 0)]
    assert list(zip(half.times_s, half.bytes)) == [(0.0, 10), (3.0, 5), (7.0, 0)]
    assert list(zip(remat.times_s, remat.bytes)) == [(0.0, 10), (3.0, 30), (7.0, 0)] and remat.peak_bytes == 30
    with pytest.raises(InputError, match="no memory for stage 0 group 0"):
        memory_over_time(result, {})


def test_schedules_by_name():
    assert by_name("gpipe", 2, 3) == gpipe(2, 3) and by_name("1f1b", 2, 3) == one_f_one_b(2, 3)
    assert {"gpipe", "1f1b"} <= set(NAMES)
    with pytest.raises(InputError, match="no schedule 'gpip'") as caught:
        by_name("gpip", 2, 3)
    assert caught.value.code == "MP146" and "did you mean gpipe?" in caught.value.hint


@pytest.mark.parametrize(
    ("call", "code", "part"),
    [
        (lambda p: scale_stage(p, 3, 2.0), "MP190", "no stage 3"),
        (lambda p: scale_stage(p, 1, 2.0, group=3), "MP190", "no stage 1 group 3"),
        (lambda p: scale_stage(p, 1, 2.0, part="G"), "MP190", "'G' is no part"),
        (lambda p: scale_stage(p, 1, 0.0), "MP193", "factor is 0"),
        (lambda p: scale_stage(p, 1, float("nan")), "MP193", "factor is nan"),
        (lambda p: scale_link(p, (2, 3), 2.0), "MP190", "no link 2-3"),
        (lambda p: scale_link(p, (1, 2), -1.0), "MP193", "factor is -1"),
        (lambda p: delay_link(p, (1, 2), -1.0), "MP193", "delay is -1.0 s"),
        (lambda p: delay_link(p, (0, 2), 1.0), "MP190", "no link 0-2"),
        (lambda p: fail_group(p, 0, 0), "MP194", "stage 0 group 0 has no peers"),
        (lambda p: fail_group(p, 0, 1), "MP190", "no stage 0 group 1"),
    ],
)
def test_bad_input(call, code, part):
    with pytest.raises(InputError) as caught:
        call(problem())
    assert caught.value.code == code and part in caught.value.message


def test_updates_that_wait_show_who_was_late():
    times = {Actor(i, 0): StageTimes(forward_s=1.0, backward_s=1.0, reduce_s=0.5, update_s=0.25) for i in range(3)}
    every = UpdateWait(stages=frozenset(range(3)), time_s=0.125)
    path = critical_path(simulate(one_f_one_b(3, 4), times, waits={2: every, 0: every}))
    assert [(s.part, s.actor.stage, s.end_s - s.start_s) for s in path[-4:]] == [
        ("B", 0, 1.0), ("reduce", 0, 0.5), ("join", 0, 0.125), ("update", 0, 0.25),
    ]  # fmt: skip

"""Shared links, compute beside communication and jitter: against the simple simulation, and by hand."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.errors import InputError
from costmodel.schedule.actions import Action, Actor
from costmodel.schedule.generate import gpipe, one_f_one_b
from costmodel.schedule.zero_bubble import split_backward
from costmodel.simulate import Contention, StageTimes, flatten, simulate
from costmodel.simulation.contended import run_contended
from costmodel.simulation.costs import costs_of
from costmodel.simulation.noise import factors
from tests.costmodel.event_by_event import EventByEvent
from tests.costmodel.pipelines import cases, chain


@given(cases(), st.sampled_from((0.0, 0.3)), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_nothing_shared_is_the_simple_simulation_to_the_last_bit(case, jitter, seed):
    simple = simulate(*case, jitter=jitter, seed=seed)
    events = simulate(*case, jitter=jitter, seed=seed, contention=Contention())
    assert events.makespan_s == simple.makespan_s and events.endings == simple.endings
    assert events.timeline == simple.timeline and events.messages == simple.messages


@given(cases(), st.floats(0.0, 1.0), st.booleans(), st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_without_a_slowdown_the_short_loop_does_what_the_events_do(case, early, split, seed):
    schedule, times, sends = case
    rng = random.Random(seed)
    schedule = split_backward(schedule) if split else schedule
    times = {actor: replace(cost, weight_s=rng.choice([0.0, 1.0, rng.random()])) for actor, cost in times.items()}
    shared = {
        pair: tuple(rng.sample(["a", "b", "c"], rng.randint(0, 3))) for edge in sends for pair in (edge, edge[::-1])
    }
    program = flatten(schedule)
    costs = costs_of(program, times, sends)
    contention = Contention(shared=shared, early_reduction=early)
    assert run_contended(program, costs, contention) == EventByEvent(program, costs, contention).run()


@given(cases(), st.sampled_from((2.0, 4.0)), st.sampled_from((0.0, 0.5, 1.0)), st.booleans(), st.integers(0, 10**6))
@settings(max_examples=300, deadline=None)
def test_slowed_down_the_short_loop_does_what_the_events_do(case, slow, early, split, seed):
    """Times are such that no sum or quotient is rounded, so that both see the same messages first."""
    schedule, times, sends = case
    rng = random.Random(seed)
    schedule = split_backward(schedule) if split else schedule

    def exact(record, *names):
        return replace(record, **{name: rng.randint(1, 1000) / 64 for name in names})

    times = {at: exact(cost, "forward_s", "backward_s", "weight_s", "reduce_s") for at, cost in times.items()}
    sends = {edge: exact(send, "activation_s", "gradient_s", "latency_s") for edge, send in sends.items()}
    shared = {
        pair: tuple(rng.sample(["a", "b", "c"], rng.randint(0, 2))) for edge in sends for pair in (edge, edge[::-1])
    }
    program = flatten(schedule)
    costs = costs_of(program, times, sends)
    contention = Contention(shared=shared, compute_slowdown=slow, early_reduction=early)
    assert run_contended(program, costs, contention) == EventByEvent(program, costs, contention).run()


@given(cases(), st.floats(1.0, 3.0), st.floats(0.0, 1.0), st.booleans())
@settings(max_examples=100, deadline=None)
def test_contention_keeps_order_and_dependencies(case, slowdown, early, share):
    schedule, times, sends = case
    shared = {pair: ("nic",) for edge in sends for pair in (edge, edge[::-1])} if share else {}
    contention = Contention(shared=shared, compute_slowdown=slowdown, early_reduction=early)
    result = simulate(schedule, times, sends, contention=contention)
    assert result == simulate(schedule, times, sends, contention=contention)
    spans = {entry.action: entry for entry in result.timeline}
    for message in result.messages:
        assert message.ready_s <= message.start_s <= message.end_s <= message.arrival_s
        step = 1 if message.action.kind == "F" else -1
        follower = spans[Action(message.action.stage + step, message.action.kind, message.action.microbatch)]
        assert follower.start_s >= message.arrival_s
    for entry in result.timeline:
        cost = times[entry.actor]
        least_s = cost.forward_s if entry.action.kind == "F" else cost.backward_s
        assert least_s - 1e-9 <= entry.end_s - entry.start_s <= slowdown * least_s + 1e-9
    if share:
        ordered = sorted(result.messages, key=lambda message: (message.start_s, message.end_s))
        assert all(one.end_s <= other.start_s for one, other in pairwise(ordered))
    for ending, use in zip(result.endings, result.actors):
        assert ending.reduce_end_s - ending.reduce_start_s >= times[use.actor].reduce_s - 1e-9
        assert ending.reduce_end_s >= use.last_end_s


@given(cases(), st.floats(1.1, 3.0), st.floats(0.0, 1.0))
@settings(max_examples=100, deadline=None)
def test_work_is_done_at_full_speed_or_slowed_down_while_something_runs_beside_it(case, slowdown, early):
    """Each action's time, less what its actor's messages and reduction took of it, is what it takes alone."""
    schedule, times, sends = case
    contention = Contention(compute_slowdown=slowdown, early_reduction=early)
    result = simulate(schedule, times, sends, contention=contention)
    beside = {actor: [] for actor in schedule.actors}
    for message in result.messages:
        for actor in (message.source, message.target):
            beside[actor].append((message.start_s, message.end_s))
    for use, ending in zip(result.actors, result.endings):
        if ending.reduce_start_s < use.last_end_s:
            early_s = early * times[use.actor].reduce_s
            beside[use.actor].append((ending.reduce_start_s, ending.reduce_start_s + early_s))
    for actor, action, start_s, end_s in result.timeline:
        covered_s, reached_s = 0.0, start_s
        for begin_s, stop_s in sorted(beside[actor]):
            begin_s, stop_s = max(begin_s, reached_s), min(stop_s, end_s)
            if stop_s > begin_s:
                covered_s, reached_s = covered_s + stop_s - begin_s, stop_s
        cost = times[actor]
        alone_s = cost.forward_s if action.kind == "F" else cost.backward_s
        assert end_s - start_s - covered_s + covered_s / slowdown == pytest.approx(alone_s, rel=1e-9, abs=1e-9)


def test_two_links_of_one_card_take_turns():
    """Stage 1 sends an activation to stage 2 and, later, a gradient to stage 0, over one card."""
    times, sends = chain([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], 4.0)
    schedule = gpipe(3, 2)
    out = {(Actor(1, 0), Actor(0, 0)): ("node 1 out",), (Actor(1, 0), Actor(2, 0)): ("node 1 out",)}
    shared = simulate(schedule, times, sends, contention=Contention(shared=out))
    private = simulate(schedule, times, sends)
    assert shared.makespan_s == private.makespan_s  # all forwards are through before a gradient comes
    steady = simulate(one_f_one_b(3, 2), times, sends, contention=Contention(shared=out))
    sent = {(m.source.stage, str(m.action)): (m.ready_s, m.start_s) for m in steady.messages}
    assert steady.makespan_s >= simulate(one_f_one_b(3, 2), times, sends).makespan_s
    from_one = sorted(start for (stage, _), (_, start) in sent.items() if stage == 1)
    assert all(later - earlier >= 4.0 for earlier, later in pairwise(from_one))


def test_compute_slows_down_while_its_actor_sends():
    """Stage 0 sends microbatch 0 from 1.5 to 3.5, and does half of its second forward meanwhile."""
    times, sends = chain([1.5, 1.0], [1.0, 1.0], 2.0, 0.0)
    result = simulate(gpipe(2, 2), times, sends, contention=Contention(compute_slowdown=2.0))
    spans = {entry.action: (entry.start_s, entry.end_s) for entry in result.timeline}
    assert spans[Action(0, "F", 0)] == (0.0, 1.5)
    assert spans[Action(0, "F", 1)] == (1.5, 3.5 + 0.5)  # 2 s at half speed, then the 0.5 s that are left
    # the receiver is slowed down as well: microbatch 1 arrives from 4 to 6 while it runs microbatch 0 from 3.5
    assert spans[Action(1, "F", 0)] == (3.5, 0.5 + 3.5 + 2 * 0.5)


def test_part_of_the_reduction_runs_beside_the_last_backward():
    times = {Actor(0, 0): StageTimes(forward_s=1.0, backward_s=4.0, reduce_s=6.0, update_s=1.0)}
    schedule = gpipe(1, 1)

    def ends(**options):
        ending = simulate(schedule, times, contention=Contention(**options)).endings[0]
        return ending.reduce_start_s, ending.reduce_end_s

    assert ends() == (5.0, 11.0)
    assert ends(early_reduction=0.5) == (1.0, 5.0 + 3.0)
    assert ends(early_reduction=1.0) == (1.0, 7.0)
    # compute at half speed for 3 s does 1.5 s of 4 s; it ends at 1 + 3 + 2.5
    assert ends(early_reduction=0.5, compute_slowdown=2.0) == (1.0, 6.5 + 3.0)


def test_jitter_is_repeatable_and_bounded():
    times, sends = chain([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], 0.5)
    schedule = one_f_one_b(3, 16)
    one, again, other = (simulate(schedule, times, sends, jitter=0.1, seed=seed) for seed in (1, 1, 2))
    assert one == again and one.makespan_s != other.makespan_s
    plain = simulate(schedule, times, sends).makespan_s
    assert 0.9 * plain <= one.makespan_s <= 1.1 * plain
    noise = factors(4000, 0.1, 3, 0)
    assert all(0.9 <= factor <= 1.1 for factor in noise)
    assert sum(noise) / len(noise) == pytest.approx(1.0, abs=0.005)
    assert noise[:10] == factors(10, 0.1, 3, 0) and noise[:10] != factors(10, 0.1, 3, 1)
    # noise belongs to an actor and a step: a slower stage elsewhere does not change it
    slower = {**times, Actor(2, 0): StageTimes(forward_s=9.0, backward_s=2.0)}
    longest = simulate(schedule, slower, sends, jitter=0.1, seed=1)
    first = [entry.end_s - entry.start_s for entry in one.timeline if entry.actor == (0, 0)]
    assert first == pytest.approx([e.end_s - e.start_s for e in longest.timeline if e.actor == (0, 0)])


def test_a_program_can_be_run_again():
    times, sends = chain([1.0, 2.0], [2.0, 1.0], 0.5)
    schedule = one_f_one_b(2, 4)
    program = flatten(schedule)
    assert simulate(program, times, sends) == simulate(schedule, times, sends) == simulate(program, times, sends)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: Contention(compute_slowdown=0.9), "MP192"),
        (lambda: Contention(compute_slowdown=float("inf")), "MP192"),
        (lambda: Contention(early_reduction=1.5), "MP192"),
        (lambda: simulate(gpipe(1, 1), chain([1.0], [1.0])[0], jitter=1.0), "MP191"),
        (lambda: simulate(gpipe(1, 1), chain([1.0], [1.0])[0], jitter=float("nan")), "MP191"),
    ],
)
def test_bad_input(call, code):
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.code == code

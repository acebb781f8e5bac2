"""Words, bounds and synthesis of straight pipelines, against brute force, fixed schedules and published makespans."""

import dataclasses
import itertools
import random
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.errors import InputError
from costmodel.schedule.actions import Actor
from costmodel.schedule.extend import extended_words
from costmodel.schedule.generate import one_f_one_b
from costmodel.schedule.greedy import Policy, list_schedule
from costmodel.schedule.local_search import swapped
from costmodel.schedule.portfolio import fixed_candidates, policies
from costmodel.schedule.registry import make_schedule
from costmodel.schedule.straight import (
    B,
    F,
    StraightCosts,
    W,
    fits,
    peak_memory,
    schedule_of,
    time_words,
    words_of,
)
from costmodel.schedule.straight_bounds import span_lower_bounds_s, step_lower_bounds_s
from costmodel.schedule.synthesize import synthesize
from costmodel.schedule.validate import in_flight, validate_schedule
from costmodel.schedule.zero_bubble import split_backward, zb_h1, zb_h2
from costmodel.simulate import SendTimes, StageTimes, simulate
from tests.words import every_word

DELTAS = [(1.0, 0.0, -1.0), (1.0, -0.5, -0.5), (1.0, 0.25, -1.25)]


def alike(p, forward_s=1.0, backward_s=1.0, weight_s=1.0, *, cap=inf, delta=(1.0, 0.0, -1.0), send_s=0.0):
    return StraightCosts(
        forward_s=(forward_s,) * p,
        backward_s=(backward_s,) * p,
        weight_s=(weight_s,) * p,
        send_s=(send_s,) * (p - 1),
        memory_cap=(cap,) * p,
        memory_delta=delta,
    )


def random_costs(rng, p, least_cap=1.0):
    forward_s = tuple(rng.uniform(1.0, 4.0) for _ in range(p))
    backward_s = tuple(t * rng.uniform(0.8, 1.2) for t in forward_s)
    weight_s = tuple(t * rng.uniform(0.3, 2.0) for t in backward_s)
    slowest_s = max(map(sum, zip(forward_s, backward_s, weight_s)))
    return StraightCosts(
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=weight_s,
        send_s=tuple(rng.uniform(0.0, slowest_s / 2) for _ in range(p - 1)),
        memory_cap=tuple(max(least_cap, p * rng.uniform(1.0, 2.0)) for _ in range(p)),
        memory_delta=rng.choice(DELTAS[:2]),
    )


def simulated(costs, schedule):
    times = {
        Actor(i, 0): StageTimes(forward_s=f, backward_s=b, weight_s=w)
        for i, (f, b, w) in enumerate(zip(costs.forward_s, costs.backward_s, costs.weight_s))
    }
    sends = {
        (Actor(i, 0), Actor(i + 1, 0)): SendTimes(activation_s=0.0, gradient_s=0.0, latency_s=c)
        for i, c in enumerate(costs.send_s)
    }
    return simulate(schedule, times, sends)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_words_take_the_time_that_the_simulator_says(p, m, seed):
    costs = random_costs(random.Random(seed), p)
    for schedule in (zb_h1(p, m), zb_h2(p, m), split_backward(one_f_one_b(p, m))):
        words = words_of(schedule)
        assert schedule_of(words, m, schedule.name) == schedule
        times, result = time_words(costs, words), simulated(costs, schedule)
        assert times.makespan_s == pytest.approx(result.makespan_s, rel=1e-12)
        spans = [use.last_end_s - use.first_start_s for use in result.actors]
        assert times.longest_span_s == pytest.approx(max(spans), rel=1e-12)
        assert [peak_memory(word, (1, 0, -1)) for word in words] == list(in_flight(schedule).values())


def wires(rng, costs):
    """For how long a message occupies each link: not at all, or a part of its delay."""
    return rng.choice([(), tuple(rng.uniform(0.0, 1.0) * send_s for send_s in costs.send_s)])


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-h2", "dapple-pb"])
def test_messages_that_occupy_their_links_take_what_the_simulator_says(name):
    rng = random.Random(name)
    for _ in range(20):
        p, m = rng.randint(2, 6), rng.randint(1, 12)
        costs = random_costs(rng, p)
        send_s = tuple(rng.uniform(0.0, 9.0) for _ in range(p - 1))
        costs = dataclasses.replace(costs, send_s=send_s, wire_s=tuple(rng.uniform(0.3, 1.0) * s for s in send_s))
        schedule = split_backward(make_schedule(name, p, m))
        times = {
            Actor(s, 0): StageTimes(forward_s=f, backward_s=b, weight_s=w)
            for s, (f, b, w) in enumerate(zip(costs.forward_s, costs.backward_s, costs.weight_s, strict=True))
        }
        sends = {
            (Actor(s, 0), Actor(s + 1, 0)): SendTimes(activation_s=wire, gradient_s=wire, latency_s=send - wire)
            for s, (send, wire) in enumerate(zip(costs.send_s, costs.wire_s, strict=True))
        }
        timed = time_words(costs, words_of(schedule))
        assert timed is not None
        result = simulate(schedule, times, sends)
        assert timed.makespan_s == pytest.approx(result.makespan_s, rel=1e-12)
        assert timed.starts_s == tuple(pytest.approx(starts) for starts in result.starts_s)


def test_a_link_slower_than_its_stages_bounds_the_step():
    costs = dataclasses.replace(alike(2), send_s=(7.0,), wire_s=(7.0,), memory_cap=(9.0, 9.0))
    made = synthesize(costs, 9)
    assert max(step_lower_bounds_s(costs, 9)) >= 9 * 7.0 and made.makespan_s >= 9 * 7.0
    assert made.gap <= 0.02
    assert synthesize(dataclasses.replace(costs, wire_s=()), 9).makespan_s < 0.8 * made.makespan_s


def test_words_that_deadlock_have_no_time():
    assert time_words(alike(2), [bytes((F, B, W, F, B, W)), bytes((F, F, B, B, W, W))]) is None


@given(st.integers(1, 7), st.integers(1, 20), st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_list_schedules_are_valid_and_within_caps_down_to_one_microbatch(p, m, seed):
    rng = random.Random(seed)
    costs = random_costs(rng, p)
    delta = rng.choice(DELTAS)
    costs = StraightCosts(
        forward_s=costs.forward_s,
        backward_s=costs.backward_s,
        weight_s=costs.weight_s,
        send_s=costs.send_s,
        memory_cap=tuple(rng.uniform(max(1.0, 1.0 + delta[1]), m + 1.0) for _ in range(p)),
        memory_delta=delta,
        wire_s=wires(rng, costs),
    )
    for policy in itertools.islice(policies(costs, m), 0, None, 3):
        words, ends_s = list_schedule(costs, m, policy)
        assert validate_schedule(schedule_of(words, m, "x"), p) == ()
        assert fits(costs, words)
        times = time_words(costs, words)
        assert list(times.last_end_s) == pytest.approx(ends_s)
        assert times.makespan_s >= max(step_lower_bounds_s(costs, m)) * (1 - 1e-9)
        assert times.longest_span_s >= max(span_lower_bounds_s(costs, m)) * (1 - 1e-9)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 3), (3, 2), (2, 2)])
def test_bounds_are_never_above_the_best_of_all_schedules(p, m):
    rng = random.Random(10 * p + m)
    for _ in range(12):
        costs, delta = random_costs(rng, p), rng.choice(DELTAS)
        caps = tuple(rng.uniform(max(1.0, 1.0 + delta[1]), m + 1.0) for _ in range(p))
        costs = StraightCosts(
            forward_s=costs.forward_s,
            backward_s=costs.backward_s,
            weight_s=costs.weight_s,
            send_s=costs.send_s,
            memory_cap=caps,
            memory_delta=delta,
            wire_s=wires(rng, costs),
        )
        every = [time_words(costs, words) for words in itertools.product(*(every_word(m, cap, delta) for cap in caps))]
        runs = [times for times in every if times is not None]
        best_s, best_span_s = min(t.makespan_s for t in runs), min(t.longest_span_s for t in runs)
        assert max(step_lower_bounds_s(costs, m)) <= best_s * (1 + 1e-9)
        assert max(span_lower_bounds_s(costs, m)) <= best_span_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("p", "m", "memory", "span_s"),
    [(4, 8, 1, 27), (4, 8, 2, 24), (8, 16, 1, 55), (8, 16, 2, 48), (16, 32, 1, 111), (16, 32, 2, 96)],
)
def test_never_worse_than_the_reference_schedulers_makespans(p, m, memory, span_s):
    """F = B = W = 1, delta (1, -0.5, -0.5): the longest span that the zero-bubble authors' scheduler reaches."""
    made = synthesize(alike(p, cap=float(memory * p), delta=(1.0, -0.5, -0.5)), m)
    assert made.longest_stage_span_s <= span_s
    assert made.gap == pytest.approx(0.0, abs=1e-12)
    if memory == 2:
        assert made.makespan_s == 3 * m + p - 1


# p, m, and mean times (µs) of F, B, W and a message; sail-sg/zero-bubble-pipeline-parallelism, efficiency.py.
PROFILED = [
    (8, 64, (18546, 18097, 9321, 762)),
    (8, 64, (29935, 29621, 19388, 535)),
    (16, 64, (11307, 11254, 8101, 379)),
]


@pytest.mark.parametrize(("p", "m", "times_us"), PROFILED)
@pytest.mark.parametrize("memory", [1, 2])
def test_profiled_times_reach_the_bound(p, m, times_us, memory):
    forward_s, backward_s, weight_s, send_s = (float(t) for t in times_us)
    costs = alike(p, forward_s, backward_s, weight_s, cap=float(memory * p), delta=(1.0, -0.5, -0.5), send_s=send_s)
    made = synthesize(costs, m)
    assert made.gap == pytest.approx(0.0, abs=1e-9)
    span_bound_s = max(span_lower_bounds_s(costs, m))
    assert made.longest_stage_span_s <= 1.006 * span_bound_s


def test_random_pipelines_beat_every_fixed_schedule():
    """A handful; benchmarks/schedule_synthesis.py runs a thousand."""
    rng, gaps = random.Random(11), []
    for _ in range(12):
        p = rng.randint(2, 8)
        m = rng.randint(p, 3 * p)
        costs = random_costs(rng, p)
        made = synthesize(costs, m)
        assert validate_schedule(made.schedule, p) == ()
        assert fits(costs, words_of(made.schedule))
        assert made.peak_activations == tuple(peak_memory(w, costs.memory_delta) for w in words_of(made.schedule))
        assert simulated(costs, made.schedule).makespan_s == pytest.approx(made.makespan_s, rel=1e-12)
        for _, _, times in fixed_candidates(costs, m):
            assert made.makespan_s <= times.makespan_s * (1 + 1e-12)
        assert made.lower_bound_s <= made.makespan_s
        gaps.append(made.gap)
    gaps.sort()
    assert gaps[6] <= 0.01
    assert gaps[-1] <= 0.08


def test_never_fails_where_1f1b_fits():
    """Caps of 1F1B's own need on each stage, and down to one microbatch everywhere."""
    rng = random.Random(12)
    for p in (1, 2, 5, 9):
        costs = random_costs(rng, p)
        for caps in ([float(p - i) for i in range(p)], [1.0] * p):
            tight = StraightCosts(
                forward_s=costs.forward_s,
                backward_s=costs.backward_s,
                weight_s=costs.weight_s,
                send_s=costs.send_s,
                memory_cap=tuple(caps),
                memory_delta=(1.0, 0.0, -1.0),
            )
            made = synthesize(tight, 2 * p)
            assert validate_schedule(made.schedule, p) == ()
            assert all(peak <= cap for peak, cap in zip(made.peak_activations, caps))


def test_the_barrier_before_the_optimizer_is_charged():
    """H2's bubble-free spans are worth the fill only if no stage waits for the last one."""
    costs = alike(4, cap=8.0)
    waits = synthesize(costs, 12, optimizer_s=[1.0, 2.0, 1.0, 1.0], global_norm_s=0.5)
    assert waits.makespan_s == 3 * 12 + 3 + 0.5 + 2.0
    assert waits.lower_bound_s == waits.makespan_s
    free = synthesize(costs, 12, optimizer_s=[1.0, 2.0, 1.0, 1.0], global_norm_s=0.5, post_validation=True)
    assert free.longest_stage_span_s == 3 * 12 + 2.0
    assert free.lower_bound_s == free.longest_stage_span_s


def test_fused_backwards_have_no_w():
    costs = alike(3, 1.0, 2.0, 0.0, delta=(1.0, -1.0, 0.0), cap=3.0)
    made = synthesize(costs, 9)
    assert not made.schedule.splits_backward
    assert validate_schedule(made.schedule, 3) == ()
    assert made.makespan_s == 3 * (9 + 2)
    assert made.gap == 0.0


def test_same_input_same_schedule():
    costs = random_costs(random.Random(1), 6)
    assert synthesize(costs, 13) == synthesize(costs, 13)


def test_extended_words_repeat_the_steady_state():
    words = words_of(zb_h1(3, 10))
    longer = [w for w in extended_words(words, 10, 31) if time_words(alike(3), w) is not None]
    assert words_of(zb_h1(3, 31)) in longer
    for extended in longer:
        assert validate_schedule(schedule_of(extended, 31, "x"), 3) == ()
        assert [peak_memory(w, (1, 0, -1)) for w in extended] == [3, 3, 3]
    assert list(extended_words(words, 10, 10)) == []


def test_swaps_keep_what_needs_what():
    word = bytes((F, B, W, F, B, W))
    assert swapped(word, 0) is None
    assert swapped(word, 1) is None
    assert swapped(word, 2) == bytes((F, B, F, W, B, W))
    assert swapped(bytes((F, F, B, B, W, W)), 1) == bytes((F, B, F, B, W, W))


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (
            {"memory_cap": (2.0, 0.5)},
            "MP149",
            ["needs 1 activations", "0.5 on stage 1", "1 on every stage is the smallest"],
        ),
        ({"memory_cap": (2.0, float("nan"))}, "MP149", ["memory_cap[1] is nan"]),
        ({"memory_delta": (1.0, 0.0, 0.0)}, "MP149", ["memory_delta"]),
        ({"forward_s": (1.0, float("nan"))}, "MP147", ["forward_s[1] is nan"]),
        ({"weight_s": (-1.0, 1.0)}, "MP147", ["weight_s[0] is -1.0"]),
        ({"send_s": (inf,)}, "MP147", ["send_s[0] is inf"]),
        ({"send_s": (1.0, 1.0)}, "MP143", ["send_s has 2 entries for 2 stages, expected 1"]),
        ({"forward_s": ()}, "MP143", ["stages is 0"]),
    ],
)
def test_bad_input(change, code, words):
    given_costs = {
        "forward_s": (1.0, 1.0),
        "backward_s": (1.0, 1.0),
        "weight_s": (1.0, 1.0),
        "send_s": (0.0,),
        "memory_cap": (2.0, 2.0),
    }
    with pytest.raises(InputError) as caught:
        synthesize(StraightCosts(**(given_costs | change)), 4)
    assert caught.value.code == code
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("keywords", [{"optimizer_s": [1.0]}, {"optimizer_s": [1.0, inf]}, {"global_norm_s": -1.0}])
def test_bad_optimizer_times(keywords):
    with pytest.raises(InputError):
        synthesize(alike(2), 4, **keywords)


def test_edge_sizes():
    one = synthesize(alike(1, cap=1.0), 5)
    assert (one.makespan_s, one.gap, one.peak_activations) == (15.0, 0.0, (1.0,))
    single = synthesize(alike(4), 1)
    assert (single.makespan_s, single.gap) == (4 + 4 + 1, 0.0)
    nothing = synthesize(alike(3, 0.0, 0.0, 0.0), 2)
    assert (nothing.makespan_s, nothing.gap) == (0.0, 0.0)
    some = synthesize(
        StraightCosts(
            forward_s=(1.0, 0.0), backward_s=(0.0, 2.0), weight_s=(0.0, 1.0), send_s=(0.0,), memory_cap=(2.0, 2.0)
        ),
        4,
    )
    assert some.makespan_s == 13.0
    assert Policy(limits=(1,), forward_first=(False,), patience=(0.0,)).limits == (1,)

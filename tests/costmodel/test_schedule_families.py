"""Every named schedule: valid for all sizes, and on its published formulas for random times."""

import doctest
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.errors import InputError
from costmodel.schedule import registry, sequence
from costmodel.schedule.actions import Action, Actor, format_actions, format_schedule, parse_schedule
from costmodel.schedule.early_backward import hetero_1f1b, warm_ups_for_delays
from costmodel.schedule.generate import one_f_one_b, spread_shares
from costmodel.schedule.looped import breadth_first, interleaved, layer_major
from costmodel.schedule.registry import FAMILIES, make_schedule
from costmodel.schedule.sequence import keeps_causal_order, sequence_chunks
from costmodel.schedule.v_shape import v_half, v_min, zb_v
from costmodel.schedule.validate import in_flight, validate_schedule
from costmodel.schedule.zero_bubble import split_backward, zb_h1, zb_h2
from costmodel.simulate import SendTimes, StageTimes, simulate

EXACT = {"rel": 1e-9, "abs": 1e-9}
SIZES = [(1, 1), (1, 5), (2, 1), (2, 3), (3, 2), (3, 7), (4, 4), (5, 13), (7, 9), (8, 32)]


def parameters_of(name, stages):
    return {
        "hetero-1f1b": {"delays_s": [0.7 * i for i in range(stages - 1)], "stage_times_s": 1.0},
        "layer-major": {"layers": 3 * stages},
        "interleaved": {"chunks": 3},
    }.get(name, {})


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "shares" in family.optional])
@given(st.integers(1, 5), st.integers(1, 14), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_stages_of_several_groups_run_every_schedule_that_takes_shares(name, stages, microbatches, seed):
    rng = random.Random(seed)
    counts = [[0] * rng.randint(1, 3) for _ in range(stages)]
    for groups in counts:
        for _ in range(microbatches):
            groups[rng.randrange(len(groups))] += 1
    shares = [spread_shares(groups) for groups in counts]
    parameters = parameters_of(name, stages)
    schedule = make_schedule(name, stages, microbatches, shares=shares, **parameters)
    virtual = FAMILIES[name].virtual_stages(stages, **parameters)
    assert validate_schedule(schedule, virtual) == ()
    homes = schedule.homes
    run = {
        (stage, row.group): tuple(a.microbatch for a in row.actions if a.kind == "F" and a.stage == stage)
        for stage, home in homes.items()
        for row in schedule.actions
        if row.stage == home
    }
    chunks = 4 if FAMILIES[name].slices else 1
    units = [[sequence.units_of(own, chunks) for own in groups] for groups in shares]
    assert run == {(s, g): own for s, home in homes.items() for g, own in enumerate(units[home])}
    alone = make_schedule(name, stages, microbatches, **parameters)
    assert make_schedule(name, stages, microbatches, shares=[[range(microbatches)]] * stages, **parameters) == alone
    with pytest.raises(InputError, match="MP144"):
        make_schedule(name, stages, microbatches, shares=[[()]] * stages, **parameters)


def alike(stages, forward_s, backward_s, weight_s=0.0):
    times = StageTimes(forward_s=forward_s, backward_s=backward_s, weight_s=weight_s)
    return {Actor(stage, 0): times for stage in range(stages)}


def random_cases(seed, count, most_stages=32, most_microbatches=128):
    """(p, m, F, B, W) with W ≤ F and m ≥ 2p."""
    rng = random.Random(seed)
    for _ in range(count):
        p = rng.randint(1, most_stages)
        m = rng.randint(2 * p, max(most_microbatches, 2 * p))
        forward_s, backward_s = rng.uniform(0.1, 3.0), rng.uniform(0.1, 3.0)
        yield p, m, forward_s, backward_s, rng.uniform(0.0, 1.0) * forward_s


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_every_family_is_valid_and_goes_through_text(name, stages, microbatches):
    parameters = parameters_of(name, stages)
    schedule = make_schedule(name, stages, microbatches, **parameters)
    family = FAMILIES[name]
    assert validate_schedule(schedule, family.virtual_stages(stages, **parameters)) == ()
    assert schedule.name == name
    assert schedule.splits_backward == family.splits_backward
    assert [tuple(actor) for actor in schedule.actors] == [(stage, 0) for stage in range(stages)]
    assert parse_schedule(format_schedule(schedule)) == schedule


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_looped_and_v_schedules_are_valid_for_any_size(stages, microbatches, chunks):
    for schedule, virtual in (
        (interleaved(stages, microbatches, chunks), stages * chunks),
        (breadth_first(stages, microbatches, chunks), stages * chunks),
        (zb_v(stages, microbatches), 2 * stages),
        (v_half(stages, microbatches), 2 * stages),
        (v_min(stages, microbatches), 2 * stages),
    ):
        assert validate_schedule(schedule, virtual) == (), schedule.name


def test_zb_h1_is_1f1b_with_late_weight_gradients():
    assert [format_actions(row.actions) for row in zb_h1(2, 3).actions] == [
        "0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2",
        "1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2",
    ]


@pytest.mark.parametrize("seed", range(4))
def test_zero_bubble_formulas(seed):
    """H1: bubble (p-1)(F+B-W), p activations on every stage; H2: (p-1)(F+B-2W), 2p-1; iff W ≤ F."""
    for p, m, forward_s, backward_s, weight_s in random_cases(seed, 12):
        times = alike(p, forward_s, backward_s, weight_s)
        first = simulate(zb_h1(p, m), times, keep_timeline=False)
        bubble_s = (p - 1) * (forward_s + backward_s - weight_s)
        assert max(use.bubble_s for use in first.actors) == pytest.approx(bubble_s, **EXACT), (p, m)
        assert {use.peak_in_flight for use in first.actors} == {p}
        second = simulate(zb_h2(p, m), times, keep_timeline=False)
        bubble_s = (p - 1) * max(0.0, forward_s + backward_s - 2 * weight_s)
        assert max(use.bubble_s for use in second.actors) == pytest.approx(bubble_s, **EXACT), (p, m)
        assert {use.peak_in_flight for use in second.actors} == {2 * p - 1}


@pytest.mark.parametrize("p", [2, 4, 9, 32])
def test_zb_h2_keeps_the_fill_of_the_pipeline(p):
    """No stage has a bubble, but the makespan has (p-1)·F."""
    result = simulate(zb_h2(p, 4 * p), alike(p, 1.0, 1.0, 1.0))
    assert max(use.bubble_s for use in result.actors) == pytest.approx(0.0, abs=1e-9)
    assert result.makespan_s == pytest.approx(3 * 4 * p + p - 1, **EXACT)


def test_zero_bubble_formulas_fail_beyond_their_condition():
    """With W > F the simulated value holds, not the closed form."""
    result = simulate(zb_h1(4, 12), alike(4, 1.0, 1.0, 1.5))
    assert max(use.bubble_s for use in result.actors) > 3 * (1.0 + 1.0 - 1.5) + 0.1


@pytest.mark.parametrize("seed", range(3))
def test_looped_formulas(seed):
    """Bubble (p-1)·T/v; interleaved holds p·v + p - 1 chunk activations on stage 0, the others all m·v."""
    for p, m, forward_s, backward_s, _ in random_cases(seed, 6, most_microbatches=96):
        m, chunks = max(1, m // p) * p, 1 + p % 4
        total_s = chunks * (forward_s + backward_s)
        times = alike(p * chunks, forward_s, backward_s)
        made = {
            "interleaved": interleaved(p, m, chunks),
            "breadth-first": breadth_first(p, m, chunks),
            "layer-major": layer_major(p, m, p * chunks),
        }
        for name, schedule in made.items():
            result = simulate(schedule, times, keep_timeline=False)
            bubble_s = max(use.bubble_s for use in result.actors)
            assert bubble_s == pytest.approx((p - 1) * total_s / chunks, **EXACT), (name, p, m, chunks)
            assert result.makespan_s == pytest.approx(m * total_s + (p - 1) * total_s / chunks, **EXACT)
            if name != "interleaved":
                assert {use.peak_in_flight for use in result.actors} == {m * chunks}
            elif chunks > 1:
                share = 1 + (p - 1) / (p * chunks)
                assert result.use(0).peak_in_flight == pytest.approx(share * p * chunks, **EXACT)


def test_layer_major_finishes_a_layer_before_the_next():
    for row in layer_major(2, 5, 6).actions:
        layers = [action.stage for action in row.actions]
        assert layers == [row.stage + 2 * c for c in (0, 1, 2, 2, 1, 0) for _ in range(5)]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7, 16, 32])
def test_zb_v_has_no_bubble_in_the_memory_of_1f1b(p):
    for m in (2 * p, 4 * p):
        result = simulate(zb_v(p, m), alike(2 * p, 1.0, 1.0, 1.0), keep_timeline=False)
        assert max(use.bubble_s for use in result.actors) == pytest.approx(0.0, abs=1e-9)
        assert {use.peak_in_flight for use in result.actors} == {2 * p}


@pytest.mark.parametrize("p", [4, 6, 8, 15, 32])
def test_v_half_and_v_min_trade_memory_for_a_bubble_below_1f1bs(p):
    m, bubbles = 4 * p, []
    for schedule, most in ((v_half(p, m), p + 3), (v_min(p, m), 2 * p / 3 + 4)):
        result = simulate(schedule, alike(2 * p, 1.0, 1.0, 1.0), keep_timeline=False)
        assert max(use.peak_in_flight for use in result.actors) <= most
        bubbles.append(max(use.bubble_s for use in result.actors))
    assert 0 < bubbles[0] <= bubbles[1] < 6 * (p - 1)


@pytest.mark.parametrize("p", [1, 3, 8])
def test_dapples_policies(p):
    assert list(in_flight(make_schedule("dapple-pa", p, 40)).values()) == [p - i for i in range(p)]
    assert list(in_flight(make_schedule("dapple-pb", p, 40)).values()) == [2 * (p - i) - 1 for i in range(p)]


def steady_period_s(schedule, times, sends, start=120, window=120):
    """Time per microbatch on stage 0 between two backwards far from both ends; 120 is a multiple of small Δ + 1."""
    result = simulate(schedule, times, sends)
    ends = [e.end_s for e in result.timeline if e.actor == (0, 0) and e.action.kind == "B"]
    return (ends[start + window] - ends[start]) / window


def delays(values_s):
    return {
        (Actor(i, 0), Actor(i + 1, 0)): SendTimes(activation_s=0.0, gradient_s=0.0, latency_s=delay_s)
        for i, delay_s in enumerate(values_s)
    }


@pytest.mark.parametrize("split", [False, True])
def test_slow_link_law(split):
    """One slow link: T' = max(T, (2T+2c)/(Δ+1)) fused, max(T, (2F+2B+W+2c)/(Δ+1)) in the order B, W, F."""
    rng = random.Random(5)
    for _ in range(12):
        forward_s, backward_s, weight_s = (rng.uniform(0.5, 2.0) for _ in range(3))
        gap, slow = rng.choice([1, 2, 3]), rng.randrange(3)
        total_s = forward_s + backward_s + weight_s
        delay_s = rng.uniform(0.0, 2.5) * total_s
        schedule = one_f_one_b(4, 300, windows=[1, *(gap if i == slow else 1 for i in range(3))])
        given_s = [delay_s if i == slow else 0.0 for i in range(3)]
        period_s = steady_period_s(
            split_backward(schedule) if split else schedule,
            alike(4, forward_s, backward_s, weight_s),
            delays(given_s),
        )
        trip_s = 2 * total_s + 2 * delay_s - (weight_s if split else 0.0)
        assert period_s == pytest.approx(max(total_s, trip_s / (gap + 1)), rel=0.02)


@pytest.mark.parametrize("split", [False, True])
def test_warm_up_rule_absorbs_every_delay(split):
    """Δ = max(1, 1 + ⌈(2c - free)/T⌉) with all links slow at once keeps the period of compute alone."""
    rng = random.Random(7)
    for _ in range(10):
        forward_s, backward_s, weight_s = (rng.uniform(0.5, 2.0) for _ in range(3))
        total_s = forward_s + backward_s + weight_s
        given_s = [rng.uniform(0.0, 2.0) * total_s for _ in range(3)]
        chosen = warm_ups_for_delays([total_s] * 4, given_s, weight_s=[weight_s] * 4 if split else None)
        free_s = weight_s if split else 0.0
        rule = [max(1, 1 + int(np.ceil((2 * delay - free_s) / total_s))) for delay in given_s]
        assert list(chosen.windows) == [1, *rule]
        assert chosen.absorbed
        assert chosen.period_s == total_s
        assert all(absorbs >= delay - 1e-9 for absorbs, delay in zip(chosen.absorbs_s, given_s))
        schedule = one_f_one_b(4, 300, windows=chosen.windows)
        period_s = steady_period_s(
            split_backward(schedule) if split else schedule,
            alike(4, forward_s, backward_s, weight_s),
            delays(given_s),
        )
        assert period_s == pytest.approx(total_s, rel=1e-3)


def test_warm_ups_within_memory_spend_it_where_it_helps():
    free = warm_ups_for_delays([3.0] * 4, [0.0, 6.0, 0.0])
    assert free.counts == (8, 7, 2, 1)
    held = warm_ups_for_delays([3.0] * 4, [0.0, 6.0, 0.0], memory_cap=[6, 5, 2, 1])
    assert held.counts == (6, 5, 2, 1)
    assert not held.absorbed
    assert held.period_s == pytest.approx((2 * 3.0 + 2 * 6.0) / 4)
    schedule = hetero_1f1b(4, 40, [0.0, 6.0, 0.0], 3.0, memory_cap=[6, 5, 2, 1])
    assert list(in_flight(schedule).values()) == [6, 5, 2, 1]


def test_hetero_1f1b_keeps_the_period_that_1f1b_loses():
    times, sends = alike(4, 1.0, 2.0), delays([0.0, 4.0, 0.0])
    assert steady_period_s(one_f_one_b(4, 300), times, sends) == pytest.approx(7.0, rel=0.02)
    assert steady_period_s(hetero_1f1b(4, 300, [0.0, 4.0, 0.0], 3.0), times, sends) == pytest.approx(3.0, rel=1e-3)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_sequence_chunks_keep_causal_order(stages, sequences, chunks):
    schedule = sequence_chunks(stages, sequences, chunks)
    assert validate_schedule(schedule, stages) == ()
    assert keeps_causal_order(schedule, chunks)
    held = [min(chunks + stages - 1 - i, sequences * chunks) for i in range(stages)]
    assert list(in_flight(schedule).values()) == held
    if chunks > 1:
        assert not keeps_causal_order(one_f_one_b(stages, sequences * chunks), chunks)


def test_sequence_chunks_shrink_the_bubble_of_one_sequence():
    """Balanced chunks of one sequence: bubble ratio (p - 1)/(c + p - 1)."""
    for chunks in (1, 2, 8):
        result = simulate(sequence_chunks(4, 1, chunks), alike(4, 1.0, 2.0))
        assert result.use(0).bubble_s / result.makespan_s == pytest.approx(3 / (chunks + 3), **EXACT)


def test_later_chunks_cost_more_under_causal_attention():
    """Alike chunks take the simulator's time; growth adds to the work of every stage, and a deadlock is said."""
    schedule = sequence_chunks(3, 2, 4)
    flat = sequence.sequence_times_s(schedule, [[1.0] * 4] * 3, [[2.0] * 4] * 3)
    result = simulate(schedule, alike(3, 1.0, 2.0))
    assert [ends[-1] for ends in flat] == [use.last_end_s for use in result.actors]
    grown = sequence.causal_times_s(4, 1.0, 0.5)
    steep = sequence.sequence_times_s(schedule, [grown] * 3, [[2 * t for t in grown]] * 3, send_s=0.25)
    assert max(map(max, steep)) >= 2 * 3 * sum(grown) + 2 * grown[0]
    assert max(map(max, steep)) > max(map(max, flat))
    with pytest.raises(InputError, match="deadlocks"):
        text = "schedule x microbatches 2\n0.0: 0F0 0B0 0F1 0B1\n1.0: 1F0 1F1 1B1 1B0"
        sequence.sequence_times_s(parse_schedule(text), [[1.0] * 2] * 2, [[1.0] * 2] * 2)
    with pytest.raises(InputError, match="3 stages"):
        sequence.sequence_times_s(sequence_chunks(2, 1, 2), [[1.0] * 2] * 3, [[1.0] * 2] * 3)


def test_chunks_of_unequal_times_are_simulated_as_such():
    """The simulator takes the mean of the chunks and each one's factor; times are those of `sequence_times_s`."""
    schedule, stages = sequence_chunks(3, 2, 4), range(3)
    ahead = [sequence.causal_times_s(4, 1.0 + stage, 0.5) for stage in stages]
    back = [tuple(2.0 * time_s for time_s in times) for times in ahead]
    mean = [(sum(a) / 4, sum(b) / 4) for a, b in zip(ahead, back)]
    times = {
        Actor(stage, 0): StageTimes(
            forward_s=mean[stage][0],
            backward_s=mean[stage][1],
            forward_factors=tuple(t / mean[stage][0] for t in ahead[stage]),
            backward_factors=tuple(t / mean[stage][1] for t in back[stage]),
        )
        for stage in stages
    }
    result = simulate(schedule, times)
    expected = sequence.sequence_times_s(schedule, ahead, back)
    assert [use.last_end_s for use in result.actors] == pytest.approx([ends[-1] for ends in expected], **EXACT)
    with pytest.raises(InputError, match="MP147"):
        simulate(schedule, {**times, Actor(1, 0): StageTimes(forward_s=1.0, backward_s=1.0, forward_factors=(-1.0,))})


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        (lambda: make_schedule("zb-h3", 2, 4), "MP146", ["no schedule 'zb-h3'", "zb-h"]),
        (lambda: make_schedule("zb-v", 2, 4, chunks=3), "MP146", ["zb-v takes no chunks"]),
        (lambda: make_schedule("layer-major", 2, 4), "MP146", ["needs layers"]),
        (lambda: make_schedule("layer-major", 2, 4, layers=5), "MP146", ["5 layers", "2 stages"]),
        (lambda: make_schedule("interleaved", 2, 4, chunks=0), "MP143", ["chunks is 0"]),
        (lambda: make_schedule("zb-h1", 0, 4), "MP143", ["stages is 0"]),
        (lambda: make_schedule("v-min", 2, 0), "MP143", ["microbatches is 0"]),
        (lambda: hetero_1f1b(3, 4, [0.0], 1.0), "MP143", ["1 delays", "3 stages"]),
        (lambda: hetero_1f1b(2, 4, [float("nan")], 1.0), "MP147", ["delays_s[0] is nan"]),
        (lambda: hetero_1f1b(2, 4, [0.0], 1.0, memory_cap=[1, 1]), "MP149", ["stage 0", "needs 2", "[2, 1]"]),
        (lambda: sequence.causal_times_s(2, -1.0, 0.0), "MP147", ["first_s is -1.0"]),
    ],
)
def test_bad_input(call, code, words):
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.code == code
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_zero_times_are_no_obstacle():
    chosen = warm_ups_for_delays([0.0] * 3, [0.0, 1.0])
    assert (chosen.windows, chosen.absorbed) == ((1, 1, 1), False)
    result = simulate(zb_h1(3, 4), alike(3, 0.0, 0.0))
    assert result.makespan_s == 0.0


def test_examples_in_docstrings():
    assert doctest.testmod(registry).failed == 0
    assert doctest.testmod(sequence).failed == 0
    assert Action(5, "B", 2) in make_schedule("zb-v", 3, 4).actions[0].actions

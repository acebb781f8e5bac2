"""`planner.synthesize_schedule`: optimal where all schedules can be enumerated, and the same each time."""

import itertools
import random

import pytest

import planner
from costmodel.errors import InputError
from costmodel.schedule.straight import StraightCosts, time_words
from planner.search import schedule_synthesis
from tests.words import every_word

HALVES = (1, -0.5, -0.5)


@pytest.mark.parametrize(("p", "m", "cases"), [(1, 4, 4), (2, 3, 14), (3, 2, 14), (2, 4, 2), (4, 1, 4)])
@pytest.mark.parametrize("post_validation", [False, True])
def test_optimal_wherever_all_schedules_can_be_enumerated(p, m, cases, post_validation):
    rng = random.Random(100 * p + m)
    for case in range(cases):
        draw = rng.uniform if case % 2 else lambda low, high: float(rng.randint(low, high))
        delta = rng.choice([(1.0, 0.0, -1.0), (1.0, -0.5, -0.5), (1.0, 0.25, -1.25)])
        given = {
            "forward_s": [draw(1, 4) for _ in range(p)],
            "backward_s": [draw(1, 5) for _ in range(p)],
            "weight_s": [draw(0, 6) for _ in range(p)],
            "send_s": [draw(0, 5) for _ in range(p - 1)],
            "memory_cap": [rng.uniform(max(1.0, 1.0 + delta[1]), m + 1.0) for _ in range(p)],
            "memory_delta": delta,
        }
        if case % 3 == 0:
            given["wire_s"] = [rng.choice([0.5, 1.0]) * send_s for send_s in given["send_s"]]
        costs = StraightCosts(**{name: tuple(values) for name, values in given.items()})
        all_words = itertools.product(*(every_word(m, cap, delta) for cap in given["memory_cap"]))
        runs = [times for words in all_words if (times := time_words(costs, words)) is not None]
        best_s = min(times.longest_span_s if post_validation else times.makespan_s for times in runs)
        made = planner.synthesize_schedule(**given, microbatches=m, post_validation=post_validation)
        found_s = made.longest_stage_span_s if post_validation else made.makespan_s
        assert found_s == pytest.approx(best_s, rel=1e-9), (given, made.method)
        assert made.lower_bound_s <= best_s * (1 + 1e-9)
        assert made.gap <= 1e-5


def test_more_memory_is_never_slower():
    """Of forty random pipelines those in which single searches were slower with more memory."""
    rng = random.Random(1)
    for case in range(40):
        p, m = rng.randint(2, 8), rng.choice([4, 8, 16, 32])
        given = {
            name: [rng.uniform(low, high) for _ in range(p)]
            for name, low, high in (("forward_s", 1, 4), ("backward_s", 1, 4), ("weight_s", 0.5, 3))
        }
        given |= {"microbatches": m, "send_s": rng.uniform(0, 2), "memory_delta": rng.choice([(1, 0, -1), HALVES])}
        caps = {18: (4, 4.5), 23: (8, 8.5, 10, 11, 12), 36: (7.5, 8), 39: (7, 7.5, 11.5, 12, 13)}.get(case, ())
        times_s = [planner.synthesize_schedule(**given, memory_cap=cap).makespan_s for cap in caps]
        assert times_s == sorted(times_s, reverse=True), case


def test_caps_between_two_multiples_of_what_memory_changes_by_are_the_lower_one():
    given = {
        "forward_s": [1.3, 1.1, 1.7],
        "backward_s": [1.2, 2.1, 1.9],
        "weight_s": [0.7, 1.4, 0.4],
        "microbatches": 9,
    }
    for delta, caps in (((1, 0, -1), (3, 3.7)), (HALVES, (2.5, 2.9))):
        low, high = (planner.synthesize_schedule(**given, memory_cap=cap, memory_delta=delta) for cap in caps)
        assert low == high
    thirds = {"memory_delta": (1, -1 / 3, -2 / 3)}  # 1 and 2/3 fit into 1.7
    low, high = (planner.synthesize_schedule(**given, **thirds, memory_cap=cap) for cap in (1.5, 1.7))
    assert high.makespan_s < low.makespan_s


def test_the_exact_solver_is_deterministic():
    given = {
        "forward_s": [2.31, 3.7, 1.9],
        "backward_s": [2.9, 3.3, 2.2],
        "weight_s": [1.1, 4.4, 3.9],
        "send_s": [1.7, 2.6],
        "memory_cap": [3, 3, 3],
        "microbatches": 7,
    }
    assert planner.synthesize_schedule(**given) == planner.synthesize_schedule(**given)


def test_without_weight_gradients_backwards_stay_whole():
    made = planner.synthesize_schedule(forward_s=[1, 1], backward_s=[2, 2], microbatches=3, memory_cap=2)
    assert not made.schedule.splits_backward
    assert made.makespan_s == 12.0


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"microbatches": 0}, "MP143", "microbatches is 0"),
        ({"forward_s": [], "backward_s": [], "weight_s": []}, "MP143", "stages is 0"),
        ({"backward_s": [1.0]}, "MP143", "backward_s has 1 entries for 2 stages"),
        ({"forward_s": [1.0, float("nan")]}, "MP147", "forward_s[1] is nan"),
        ({"memory_cap": 0.5}, "MP149", "1 on every stage is the smallest that works"),
        ({"memory_cap": [3.0]}, "MP143", "memory_cap has 1 entries"),
        ({"memory_cap": [2.0, 0.3]}, "MP149", "the caps are 0.3 on stage 1"),
        ({"memory_cap": float("nan")}, "MP149", "memory_cap[0] is nan"),
        ({"microbatches": float("nan")}, "MP143", "microbatches is nan"),
        ({"microbatches": 2.5}, "MP143", "microbatches is 2.5"),
        ({"send_s": float("nan")}, "MP147", "send_s[0] is nan"),
        ({"optimizer_s": [1.0, float("nan")]}, "MP147", "optimizer_s[1] is nan"),
        ({"send_s": 1.0, "wire_s": 2.0}, "MP147", "wire_s[0] is 2.0, more than the delay send_s[0], 1.0"),
        ({"memory_delta": (1.0, 0.0)}, "MP143", "memory_delta has 2 entries"),
    ],
)
def test_bad_input(change, code, words):
    given = {"forward_s": [1.0, 1.0], "backward_s": [1.0, 1.0], "weight_s": [1.0, 1.0], "microbatches": 4}
    with pytest.raises(InputError) as caught:
        planner.synthesize_schedule(**(given | change))
    assert caught.value.code == code
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "makespan_s"),
    [
        ({"forward_s": [1], "backward_s": [2], "weight_s": [3], "microbatches": 1}, 6.0),
        ({"forward_s": [1], "backward_s": [2], "weight_s": [3], "microbatches": 5.0, "memory_cap": 1}, 30.0),
        ({"forward_s": [1, 1], "backward_s": [1, 1], "weight_s": [1, 1], "microbatches": 1, "send_s": 3}, 11.0),
        ({"forward_s": [0, 1], "backward_s": [0, 1], "weight_s": [0, 1], "microbatches": 4}, 12.0),
        ({"forward_s": [0, 0], "backward_s": [0, 0], "weight_s": [0, 0], "microbatches": 4}, 0.0),
    ],
    ids=["one stage and microbatch", "one stage", "one microbatch", "a stage without time", "no time at all"],
)
def test_the_smallest_pipelines(given, makespan_s):
    made = planner.synthesize_schedule(**given)
    assert (made.makespan_s, made.gap) == (makespan_s, 0.0)


def test_example_in_the_docstring():
    import doctest

    assert doctest.testmod(schedule_synthesis).failed == 0

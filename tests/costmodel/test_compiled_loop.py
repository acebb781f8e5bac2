"""The compiled loop of the contended simulation against the same loop as it stands, and when which of them runs."""

import errno
import os
import random
import sys
from dataclasses import replace
from functools import cache
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.errors import InputError
from costmodel.schedule.actions import Actor, parse_schedule
from costmodel.schedule.generate import one_f_one_b
from costmodel.schedule.looped import interleaved
from costmodel.schedule.v_shape import zb_v
from costmodel.schedule.zero_bubble import split_backward
from costmodel.simulate import Contention, SendTimes, StageTimes, flatten, simulate
from costmodel.simulation import compiled
from costmodel.simulation.contended import work_of
from costmodel.simulation.costs import costs_of
from costmodel.simulation.events import run_events
from tests.costmodel.pipelines import cases, chain

numba = pytest.importorskip("numba", reason="pip install 'meshplan[fast]'")


@st.composite
def looped(draw):
    """A schedule with several parts a stage, its times and its sends."""
    stages, rng = draw(st.integers(2, 4)), random.Random(draw(st.integers(0, 10**6)))
    make = draw(st.sampled_from((interleaved, zb_v)))
    times = {
        Actor(i, 0): StageTimes(forward_s=rng.random(), backward_s=rng.random(), weight_s=rng.random(), reduce_s=1.0)
        for i in range(2 * stages)
    }
    sends = {
        (Actor(i, 0), Actor(i + 1, 0)): SendTimes(activation_s=rng.random(), gradient_s=rng.random(), latency_s=0.1)
        for i in range(2 * stages - 1)
    }
    return make(stages, stages * draw(st.integers(1, 3))), times, sends


@given(
    cases() | looped(),
    st.sampled_from((1.0, 1.1, 3.0)),
    st.sampled_from((0.0, 0.3, 1.0)),
    st.sampled_from((0.0, 0.2)),
    st.integers(0, 10**6),
)
@settings(max_examples=400, deadline=None)
def test_compiled_it_does_the_same_to_the_last_bit(case, slow, early, jitter, seed):
    schedule, times, sends = case
    rng = random.Random(seed)
    if not schedule.splits_backward and rng.random() < 0.5:
        schedule = split_backward(schedule)
        times = {actor: replace(cost, weight_s=rng.choice([0.0, rng.random()])) for actor, cost in times.items()}
    shared = {pair: rng.sample(["a", "b", "c"], rng.randint(0, 3)) for pair in permutations(schedule.actors, 2)}
    program = flatten(schedule)
    contention = Contention(shared=shared, compute_slowdown=slow, early_reduction=early)
    work = work_of(program, costs_of(program, times, sends, jitter, seed), contention)
    expected = run_events(work)
    assert compiled.load()(work) == expected
    assert expected[-1] and compiled.load() is not run_events


def test_compiled_it_runs_what_sends_nothing():
    program = flatten(one_f_one_b(1, 3))
    costs = costs_of(program, chain([1.0], [2.0])[0], None)
    work = work_of(program, costs, Contention(compute_slowdown=2.0, early_reduction=0.5))
    assert compiled.load()(work) == run_events(work)


@pytest.fixture
def fresh(monkeypatch):
    """As in a process that has simulated nothing, and compiles from the 100th action on."""
    monkeypatch.setattr(compiled, "load", cache(compiled.load.__wrapped__))
    monkeypatch.setattr(compiled, "_PROCESS", compiled._Process())
    monkeypatch.setattr(compiled, "LOAD_FROM", 100)


def test_it_is_compiled_when_that_has_paid(fresh):
    assert compiled.loop_for(60) is run_events
    assert compiled.loop_for(39) is run_events
    assert compiled.loop_for(80) is compiled.load() is not run_events
    assert compiled.loop_for(compiled.CALL_FROM) is compiled.load()
    assert compiled.loop_for(compiled.CALL_FROM - 1) is run_events


def test_a_deadlock_says_the_same(fresh, monkeypatch):
    text = "schedule broken microbatches 2\n0.0: 0F0 0B0 0F1 0B1\n1.0: 1F0 1F1 1B0 1B1"
    case = parse_schedule(text), *chain([1.0, 1.0], [1.0, 1.0], 0.5)
    said = []
    for least in (100, 0):  # interpreted, then compiled
        monkeypatch.setattr(compiled, "LOAD_FROM", least)
        monkeypatch.setattr(compiled, "CALL_FROM", least)
        with pytest.raises(InputError) as caught:
            simulate(*case, contention=Contention(compute_slowdown=1.5))
        said.append((caught.value.code, caught.value.message, compiled.load.cache_info().currsize))
    assert said == [("MP148", said[0][1], 0), ("MP148", said[0][1], 1)]


def simulated():
    times, sends = chain([1.0] * 4, [1.5] * 4, 0.3)
    return simulate(one_f_one_b(4, 32), times, sends, contention=Contention(compute_slowdown=1.3))


def test_without_numba_it_runs_as_it_stands(fresh, monkeypatch):
    expected = simulated()
    assert compiled.load() is not run_events
    monkeypatch.setattr(compiled, "load", cache(compiled.load.__wrapped__))
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    assert simulated() == expected and compiled.load() is run_events


def test_a_numba_that_cannot_be_imported_is_warned_of_once(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(compiled, "find_spec", lambda name: "here")
    with pytest.warns(RuntimeWarning, match="without numba: import of numba halted") as caught:
        assert simulated() == simulated()
    assert len(caught) == 1


@pytest.mark.parametrize("fails", ["no place", "no room"])
def test_a_cache_that_cannot_be_written_is_done_without(fresh, monkeypatch, fails):
    if fails == "no place":
        monkeypatch.setattr(numba.config, "CACHE_LOCATOR_CLASSES", "UserProvidedCacheLocator")
        monkeypatch.setattr(numba.config, "CACHE_DIR", os.path.join(__file__, "below a file"))
    else:

        def save(*arguments):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(numba.core.caching.FunctionCache, "save_overload", save)
        monkeypatch.setattr(numba.core.caching.FunctionCache, "load_overload", lambda *arguments: None)
    expected = simulated()
    assert compiled.load() is not run_events
    assert simulated() == expected

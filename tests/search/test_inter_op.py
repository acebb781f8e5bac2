"""The stage search against enumeration."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from planner.search.bruteforce import all_stage_plans, best_stages
from planner.search.inter_op import plan_stages
from planner.search.problem import SearchBudget, SearchStatus
from planner.search.stage_bounds import PricedStages
from planner.search.stage_tables import stage_excess, stage_tables
from planner.search.stages import GroupCosts, StageOption, StageProblem, score_stages
from tests.search.pipelines import random_stage_problem, small_stage_problems

EXACT = settings(derandomize=True, deadline=None, max_examples=250)
FEWER = settings(derandomize=True, deadline=None, max_examples=100)


def uniform(blocks, devices, options, microbatches, *, schedule="1f1b", max_stages=8, send_s=0.0):
    """Equal blocks; options are (devices, seconds a block, state bytes, saved bytes, limit)."""
    made = [
        StageOption(
            name=f"o{index}",
            devices=taken,
            groups=(
                GroupCosts(
                    forward_s=np.array([seconds / 3]),
                    backward_s=np.array([seconds * 2 / 3]),
                    once_s=np.array([0.0]),
                    state_bytes=np.array([state]),
                    saved_bytes=np.array([saved]),
                    transient_bytes=np.array([0.0]),
                    memory_limit_bytes=limit,
                ),
            ),
        )
        for index, (taken, seconds, state, saved, limit) in enumerate(options)
    ]
    return StageProblem(
        blocks=(0,) * blocks,
        devices=devices,
        options=tuple(made),
        boundary_bytes=np.ones(blocks - 1),
        send_latency_s=np.zeros((len(made), len(made))),
        send_s_per_byte=np.full((len(made), len(made)), send_s),
        microbatches=microbatches,
        schedule=schedule,
        max_stages=max_stages,
    )


def check_against_enumeration(case, found):
    plans = [plan for plan in all_stage_plans(case) if math.isfinite(plan.step_time_s)]
    best = min((plan.step_time_s for plan in plans if plan.fits), default=None)
    if best is None:
        assert found.plans == () and not found.status.found
        misses = [plan.worst.excess_bytes for plan in plans]
        if misses:
            assert found.status is SearchStatus.infeasible_memory
            assert found.nearest is not None
            assert found.nearest.worst.excess_bytes == pytest.approx(min(misses))
        else:
            assert found.status is SearchStatus.infeasible_devices and found.nearest is None
        return
    assert found.status is SearchStatus.optimal
    assert found.plans[0].step_time_s == pytest.approx(best, rel=2e-6)
    assert found.bound_s <= best * (1 + 1e-9)
    assert len({plan.spans for plan in found.plans}) == len(found.plans)
    for plan in found.plans:
        assert plan.fits and plan == score_stages(case, plan.spans)
        assert [stage.first for stage in plan.stages] == [0, *(stage.end for stage in plan.stages[:-1])]
        assert plan.stages[-1].end == len(case.blocks)
    times = [plan.step_time_s for plan in found.plans]
    assert times == sorted(times)


@EXACT
@given(small_stage_problems())
def test_S1_plan_equals_enumeration(case):
    check_against_enumeration(case, plan_stages(case, keep=4))


@FEWER
@given(small_stage_problems())
def test_single_device_labels_equal_enumeration(case):
    """A dense grid of one cell sends every question to the partial plans on single devices."""
    found = plan_stages(case, budget=SearchBudget(stage_cells=1, stage_runs=400))
    best = best_stages(case)
    if best is None:
        assert not found.plans and not found.status.found
    else:
        assert found.status is SearchStatus.optimal
        assert found.plans[0].step_time_s == pytest.approx(best.step_time_s, rel=2e-6)


@pytest.mark.parametrize("seed", range(6))
def test_three_pools_equal_enumeration(seed):
    case = random_stage_problem(
        np.random.default_rng(seed),
        blocks=4,
        options=4,
        pools=3,
        microbatches=3,
        schedule="1f1b",
        max_stages=4,
        tightness=1.0,
    )
    check_against_enumeration(case, plan_stages(case))


@FEWER
@given(small_stage_problems())
def test_B2_and_B4_bounds_hold_for_every_plan(case):
    tables = stage_tables(case)
    priced = PricedStages(tables, tables.time_s, min(case.max_stages, len(case.blocks)))
    found = priced.bound(None)
    fitting = [plan for plan in all_stage_plans(case) if plan.fits]
    costs = [plan.fill_s + plan.sends_s for plan in fitting]
    assert all(found.bound_s <= cost * (1 + 1e-9) for cost in costs)
    if fitting:
        through_s = priced.through(tables.time_s, found.prices[0])
        for plan, cost in zip(fitting, costs, strict=True):
            for first, end, option in plan.spans:
                assert through_s[option, first, end] <= cost * (1 + 1e-9) + 1e-9


@FEWER
@given(small_stage_problems())
def test_S3_tables_equal_scores(case):
    tables = stage_tables(case)
    for plan in all_stage_plans(case):
        for stage in plan.stages:
            at = (stage.option, stage.first, stage.end)
            if math.isfinite(stage.time_s):
                assert (stage.excess_bytes <= 0) == (tables.room[at] >= stage.in_flight)
                assert stage_excess(case, stage.in_flight)[at] == pytest.approx(stage.excess_bytes)
            if math.isfinite(tables.time_s[at]):
                assert tables.time_s[at] == pytest.approx(stage.time_s)
                assert tables.once_s[at] == pytest.approx(stage.once_s)


def test_in_flight_microbatches_shift_blocks_to_the_end():
    """1F1B holds more microbatches in the first stage, so that memory makes the first stage the smaller one."""
    case = uniform(8, (2,), [((1,), 1.0, 1.0, 1.0, 11.0)], 8)
    plan = plan_stages(case).plans[0]
    assert [stage.end - stage.first for stage in plan.stages] == [3, 5]
    assert [stage.in_flight for stage in plan.stages] == [2, 1]
    assert plan.stages[0].memory_bytes == (9.0,) and plan.stages[1].memory_bytes == (10.0,)
    assert plan.step_time_s == 8.0 + 7 * 5.0
    gpipe = plan_stages(uniform(8, (2,), [((1,), 1.0, 1.0, 1.0, 12.0)], 2, schedule="gpipe"))
    assert [stage.in_flight for stage in gpipe.plans[0].stages] == [2, 2]


@pytest.mark.parametrize("devices", [3, 5, 6, 7])
def test_uneven_counts_are_used(devices):
    case = uniform(21, (devices,), [((1,), 1.0, 1.0, 0.0, 99.0), ((2,), 0.55, 1.0, 0.0, 99.0)], 32)
    found = plan_stages(case)
    used = sum(case.options[stage.option].devices[0] for stage in found.plans[0].stages)
    assert found.status is SearchStatus.optimal and used == devices


def test_two_kinds_share_the_blocks_by_speed():
    case = uniform(12, (1, 1), [((1, 0), 1.0, 1.0, 0.0, 99.0), ((0, 1), 2.0, 1.0, 0.0, 99.0)], 16)
    plan = plan_stages(case).plans[0]
    blocks = {case.options[stage.option].devices: stage.end - stage.first for stage in plan.stages}
    assert blocks == {(1, 0): 8, (0, 1): 4}


def test_groups_of_a_stage_split_the_microbatches():
    """One stage on both kinds, three quarters of the microbatches on the faster: the slower of the two counts."""
    fast, slow = (uniform(4, (1,), [((1,), seconds, 1.0, 1.0, 50.0)], 1).options[0].groups[0] for seconds in (1.0, 2.5))
    both = StageOption(
        name="both",
        devices=(1, 1),
        groups=(
            replace(fast, share_numerator=3, share_denominator=4),
            replace(slow, share_numerator=1, share_denominator=4),
        ),
    )
    case = replace(uniform(4, (1, 1), [((1, 0), 1.0, 1.0, 1.0, 50.0)], 4, max_stages=1), options=(both,))
    plan = plan_stages(case).plans[0]
    assert plan.stages[0].time_s == pytest.approx(max(0.75 * 4.0, 0.25 * 10.0))
    assert plan.step_time_s == pytest.approx(4 * 3.0)
    piped = plan_stages(replace(case, schedule="gpipe")).plans[0]
    assert piped.stages[0].memory_bytes == (4.0 + 3 * 4.0, 4.0 + 1 * 4.0)


def test_infeasible_names_the_stage_and_the_bytes():
    case = uniform(6, (2,), [((1,), 1.0, 10.0, 0.0, 25.0)], 4)
    found = plan_stages(case)
    assert found.status is SearchStatus.infeasible_memory and found.bound_s == math.inf
    assert found.nearest is not None
    worst = found.nearest.worst
    assert worst.excess_bytes == 5.0 and worst.memory_bytes == (30.0,)
    assert case.options[worst.option].name == "o0"
    none = plan_stages(uniform(6, (1,), [((2,), 1.0, 1.0, 0.0, 25.0)], 4))
    assert none.status is SearchStatus.infeasible_devices and none.nearest is None


def test_same_input_same_output_and_a_looser_gap_keeps_its_promise():
    case = random_stage_problem(
        np.random.default_rng(7),
        blocks=24,
        options=8,
        pools=2,
        microbatches=8,
        schedule="1f1b",
        max_stages=8,
        tightness=0.5,
    )
    exact = plan_stages(case, keep=3)
    assert exact == plan_stages(case, keep=3) and exact.status is SearchStatus.optimal
    loose = plan_stages(case, budget=SearchBudget(relative_gap=0.05))
    assert loose.bound_s <= exact.plans[0].step_time_s <= loose.plans[0].step_time_s
    assert loose.plans[0].step_time_s <= loose.bound_s / (1 - 0.05) * (1 + 1e-9)


def test_work_limit_is_reported_with_a_bound():
    case = random_stage_problem(
        np.random.default_rng(3),
        blocks=40,
        options=10,
        pools=2,
        microbatches=16,
        schedule="1f1b",
        max_stages=8,
        tightness=0.6,
        coarse=False,
    )
    case = replace(case, devices=(23, 19))
    exact = plan_stages(case)
    stopped = plan_stages(case, budget=SearchBudget(stage_cells=4, stage_labels=1))
    assert stopped.limit_fired and stopped.status is SearchStatus.feasible_limit
    assert stopped.bound_s <= exact.plans[0].step_time_s * (1 + 1e-9)
    assert exact.bound_s <= stopped.plans[0].step_time_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"boundary_bytes": np.ones(1)}, "3 boundaries"),
        ({"microbatches": 0}, "start at 1"),
        ({"devices": (1, 1)}, "takes devices"),
        ({"send_latency_s": np.ones((2, 2))}, "matrix of costs"),
        ({"blocks": (0, 0, 0, 1)}, "needs 2 costs"),
    ],
)
def test_bad_problems_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        replace(uniform(4, (1,), [((1,), 1.0, 1.0, 0.0, 9.0)], 2), **change)

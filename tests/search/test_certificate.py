"""Bounds never exceed the best plan, and gaps say what they mean."""

import math

import numpy as np
import pytest
from hypothesis import given, settings

from planner.search.bruteforce import all_stage_plans
from planner.search.certificate import certify, free_bound_s, gap, stage_bound_s
from planner.search.inter_op import plan_stages
from planner.search.stages import GroupCosts, StageOption, StageProblem
from tests.search.pipelines import small_stage_problems


@settings(derandomize=True, deadline=None, max_examples=200)
@given(small_stage_problems())
def test_C5_bound_never_exceeds_the_best_plan(case):
    best = min((plan.step_time_s for plan in all_stage_plans(case)), default=math.inf)
    assert stage_bound_s(case) <= best * (1 + 1e-9)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(small_stage_problems(), small_stage_problems())
def test_certificate_of_a_space_of_two_problems(one, other):
    found = [plan_stages(case) for case in (one, other)]
    plans = [result.plans[0] for result in found if result.plans]
    if plans:
        best = min(plan.step_time_s for plan in plans)
        exact = certify(best, [result.bound_s for result in found])
        assert exact.bound_s <= best and exact.gap <= 1.1e-6
        quick = certify(best, [stage_bound_s(case) for case in (one, other)])
        assert 0 <= quick.gap <= 1 and quick.bound_s <= best


def test_gap_and_free_bound():
    assert gap(3.0, 4.0) == 0.25
    assert gap(4.0, 4.0) == 0.0 and gap(0.0, 4.0) == 1.0 and gap(5.0, math.inf) == 1.0
    assert free_bound_s(1e15, (4, 2), (1e14, 5e13)) == pytest.approx(2.0)
    assert free_bound_s(1.0, (), ()) == math.inf
    made = certify(4.0, [3.0, 3.5], free_bound_s=2.0)
    assert made.gap == 0.25 and made.free_gap == 0.5
    with pytest.raises(ValueError, match="exceeds the plan's"):
        certify(4.0, [5.0])


def test_C3_two_groups_count_their_sums_not_each_block():
    """One stage of two groups, each slow on another block: it takes the larger sum, not the sum of the larger ones."""
    zero = np.zeros(2)
    groups = tuple(
        GroupCosts(
            forward_s=np.array(forward_s),
            backward_s=zero,
            once_s=zero,
            state_bytes=zero,
            saved_bytes=zero,
            transient_bytes=zero,
            memory_limit_bytes=1.0,
            share_denominator=2,
        )
        for forward_s in ([8.0, 1.0], [1.0, 8.0])
    )
    case = StageProblem(
        blocks=(0, 1),
        devices=(1, 1),
        options=(StageOption(name="both", devices=(1, 1), groups=groups),),
        boundary_bytes=np.zeros(1),
        send_latency_s=np.zeros((1, 1)),
        send_s_per_byte=np.zeros((1, 1)),
        microbatches=2,
        schedule="1f1b",
        max_stages=2,
    )
    assert plan_stages(case).plans[0].step_time_s == 2 * 4.5
    assert stage_bound_s(case) == 2 * 4.5

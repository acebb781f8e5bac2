"""Customary names of what mesh axes do, read off the specs."""

import msgspec
import pytest

from planner.planfile.schema import ValuePlan
from planner.report.degrees import group_degrees, plan_degrees
from tests.plans import tiny_plan

replace = msgspec.structs.replace


def group(**kwargs):
    return tiny_plan(**kwargs).stages[0].groups[0]


def with_outputs(record, dims):
    value = ValuePlan(dims=dims)
    return replace(
        record, strategies=tuple(replace(s, inputs={"x": value}, outputs={"y": value}) for s in record.strategies)
    )


@pytest.mark.parametrize(
    ("zero", "labels"),
    [
        (0, ("dp=2", "tp=2")),
        (1, ("dp=2", "zero=1", "tp=2")),
        (2, ("dp=2", "zero=2", "tp=2")),
        (3, ("dp=2", "zero=3", "tp=2")),
    ],
)
def test_zero_levels(zero, labels):
    assert group_degrees(group(zero=zero)) == labels


def test_axes_of_one_device_have_no_label():
    assert group_degrees(group(data=1, model=1)) == ()
    assert group_degrees(group(data=1, model=4)) == ("tp=4",)


def test_sequence_parallel():
    split = with_outputs(group(zero=0), (("data",), ("model",), ()))
    assert group_degrees(split) == ("dp=2", "tp=2", "sp")


def test_context_parallel():
    record = group(zero=0)
    whole = tuple(replace(p, value=((),) * len(p.shape), gradient=((),) * len(p.shape)) for p in record.parameters)
    split = with_outputs(replace(record, parameters=whole), (("data",), ("model",), ()))
    assert group_degrees(split) == ("dp=2", "cp=2")


def test_expert_parallel():
    record = group(zero=3)
    collectives = {"forward all_to_all data": 2, "backward all_to_all data": 2}
    assert group_degrees(replace(record, time=replace(record.time, collectives=collectives))) == (
        "dp=2",
        "ep=2",
        "tp=2",
    )


def test_an_axis_that_splits_nothing():
    record = group(zero=0)
    whole = tuple(replace(p, value=((),) * len(p.shape), reduced_over=()) for p in record.parameters)
    assert group_degrees(with_outputs(replace(record, parameters=whole), ((), (), ()))) == ("copy=2", "copy=2")


def test_data_parallel_stage_whose_activations_stay_inside():
    record = replace(group(zero=1), strategies=())
    assert group_degrees(record) == ("dp=2", "zero=1", "tp=2")


def test_pipeline():
    assert plan_degrees(tiny_plan(stages=2)) == ("pp=2",) and plan_degrees(tiny_plan(stages=1)) == ()

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
    assert group_degrees(with_outputs(replace(record, parameters=whole), ((), (), ()))) == ("copy=4",)


def stored(record, *levels, axes=("data",)):
    """The group with its parameters stored at these ZeRO levels in turn, over the axes, and split by nothing else."""

    def dims(parameter, role):
        split = tuple(axis for axis, level in zip(axes, levels_of[parameter.path]) if level >= role)
        return (split, *((),) * (len(parameter.shape) - 1))

    levels_of = {}
    for at, parameter in enumerate(record.parameters):
        own = levels[at % len(levels)]
        levels_of[parameter.path] = own if isinstance(own, tuple) else (own,)
    return replace(
        record,
        parameters=tuple(
            replace(p, value=dims(p, 3), gradient=dims(p, 2), optimizer=dims(p, 1), reduced_over=axes)
            for p in record.parameters
        ),
    )


def test_data_parallel_axes_count_together_and_each_says_its_level():
    both = with_outputs(group(stages=1, data=2, model=2), (("data", "model"), (), ()))
    axes = ("data", "model")
    assert group_degrees(stored(both, (3, 3), axes=axes)) == ("dp=4", "zero=3")
    assert group_degrees(stored(both, (0, 0), axes=axes)) == ("dp=4",)
    sized = replace(both, mesh=(replace(both.mesh[0], size=2), replace(both.mesh[1], size=8)))
    assert group_degrees(stored(sized, (1, 3), axes=axes)) == ("dp=16", "zero=1 over 2, 3 over 8")
    assert group_degrees(stored(sized, (1, 3), (1, 1), axes=axes)) == ("dp=16", "zero=1 over 2, 1..3 over 8")


def test_levels_that_differ_between_parameters_are_a_range():
    record = group(stages=1, data=8, model=1, devices=8)
    assert group_degrees(stored(record, 1, 3)) == ("dp=8", "zero=1..3")
    small = replace(record.parameters[0], path="scale", shape=(64,))
    with_vector = replace(record, parameters=(*record.parameters, small))
    assert group_degrees(stored(with_vector, 3, 3, 3, 0)) == ("dp=8", "zero=3")


def test_sequence_parallelism_on_one_of_two_tensor_axes():
    record = with_outputs(group(zero=0, stages=1), ((), ("model",), ()))
    axes = ("data", "model")
    split = stored(record, (3, 3), axes=axes)
    split = replace(split, parameters=tuple(replace(p, reduced_over=()) for p in split.parameters))
    assert group_degrees(split) == ("tp=4", "sp over 2")


def test_data_parallel_stage_whose_activations_stay_inside():
    record = replace(group(zero=1), strategies=())
    assert group_degrees(record) == ("dp=2", "zero=1", "tp=2")


def test_pipeline():
    assert plan_degrees(tiny_plan(stages=2)) == ("pp=2",) and plan_degrees(tiny_plan(stages=1)) == ()

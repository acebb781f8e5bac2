"""A training function that changed since it was planned: what changed is named."""

import msgspec
import pytest

from planner.check.drift import drift
from tests.plans import tiny_plan

replace = msgspec.structs.replace
PLAN = tiny_plan()
SHAPES = PLAN.model.parameter_shapes
NEW = {"fingerprint": "sha256:new"}


def codes(**changes):
    return {finding.code: finding for finding in drift(PLAN, replace(PLAN.model, **NEW, **changes))}


def test_the_same_model():
    assert drift(PLAN, PLAN.model) == ()
    assert drift(PLAN, replace(PLAN.model, name="renamed", spec="x.py:task")) == ()


def test_only_the_function_changed():
    found = codes()
    assert list(found) == ["MP630"] and "computes something else" in found["MP630"].message
    assert found["MP630"].severity == "error" and found["MP630"].hint


@pytest.mark.parametrize(
    ("blocks", "part"),
    [
        (("embedding", "layers[0:5]", "head"), "new: layers[4]"),
        (("embedding", "layers[0:3]", "head"), "gone: layers[3]"),
        (("embedding", "layers[0:4]", "tail"), "gone: head; new: tail"),
        (("layers[0:4]", "embedding", "head"), "order differs"),
        (("layers[4:0]",), "layers[4:0]"),
    ],
)
def test_blocks(blocks, part):
    found = codes(blocks=blocks)
    assert part in found["MP631"].message and "MP632" not in found


@pytest.mark.parametrize(
    ("shapes", "part"),
    [
        ({**SHAPES, "layers/w": (4, 64, 128)}, "layers/w [4, 64, 256] -> [4, 64, 128]"),
        ({k: v for k, v in SHAPES.items() if k != "head/kernel"}, "head/kernel is gone"),
        ({**SHAPES, "bias": (3,)}, "bias [3] is new"),
    ],
)
def test_parameters(shapes, part):
    found = codes(parameter_shapes=shapes)
    assert part in found["MP632"].message and "MP631" not in found


def test_parameters_by_count_where_shapes_are_not_recorded():
    assert "5 parameters" in codes(parameter_shapes={}, parameters=5)["MP632"].message
    assert "MP632" not in codes(parameter_shapes={})


def test_reduction():
    assert "'sum'" in codes(reduction="sum")["MP633"].message

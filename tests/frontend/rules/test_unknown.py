"""Primitives without a rule, and callbacks: planned whole, reported, and still right."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from costmodel.sharding import REPLICATED, strategies
from planner.frontend.flat import flatten
from planner.frontend.ops import op_from_equation
from planner.frontend.rules.base import REGISTRY, rule_for
from tests.frontend.rules.harness import check_rule

OPERAND = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)


def one_op(fn: Any, *args: Any) -> Any:
    (eqn,) = flatten(jax.make_jaxpr(fn)(*args), [f"arg{i}" for i in range(len(args))]).equations
    return op_from_equation(eqn, rule_for(eqn.primitive.name), lambda value: True)


def test_a_primitive_without_a_rule_runs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(REGISTRY, "atan2", raising=False)
    assert (
        check_rule(jnp.arctan2, OPERAND, OPERAND + 1) == 1 + 1 + 1
    )  # replicated on every axis, on each of three meshes
    op = one_op(lambda a, b: jnp.arctan2(a, b), OPERAND, OPERAND)
    assert not op.known and op.work == "opaque" and not op.fuses
    assert op.flops == OPERAND.size  # assumed, never free
    assert op.saves == ("arg0", "arg1")
    assert strategies(op, (2,)) == ((REPLICATED,),)
    assert op.source.startswith("test_unknown.py:")


def test_callbacks_run_whole_and_are_reported() -> None:
    def call(a: Any) -> Any:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((4, 6), np.float32), a)

    assert check_rule(call, OPERAND, grads=False, meshes=[(2,)]) == 1
    assert not one_op(call, OPERAND).known

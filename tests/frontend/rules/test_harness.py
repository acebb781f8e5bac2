"""The harness finds what is wrong with a rule: a test of rules that could not fail would prove nothing."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from costmodel.graph import Factor
from planner.frontend.flat import Equation
from planner.frontend.rules.base import REGISTRY, Factorisation, Placement, Rule
from tests.frontend.rules.harness import check_rule

OPERAND = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)


class Changed(Rule):
    """A right rule with some of its facts replaced."""

    def __init__(self, name: str, **facts: Any):
        self.right, self.facts = REGISTRY[name], facts

    def factorise(self, eqn: Equation) -> Factorisation:
        return replace(self.right.factorise(eqn), **self.facts)

    def local(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        return self.right.local(eqn, place, args)


def test_a_dim_that_must_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "cumsum", Changed("cumsum", factors=(Factor("d0", 4), Factor("d1", 6))))
    with pytest.raises(AssertionError, match=r"result 0 .* of cumsum .* under d1"):
        check_rule(lambda a: lax.cumsum(a, 1), OPERAND, meshes=[(2,)])


def test_an_operation_that_is_not_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "exp", Changed("exp", linear=((0,),)))
    with pytest.raises(AssertionError, match="result 0"):
        check_rule(jnp.exp, OPERAND, meshes=[(2,)])


def test_a_sum_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = (Factor("r0", 4, "same"), Factor("d1", 6))
    monkeypatch.setitem(REGISTRY, "reduce_sum", Changed("reduce_sum", factors=factors))
    with pytest.raises(AssertionError, match="devices differ"):
        check_rule(lambda a: lax.reduce_sum(a, (0,)), OPERAND, meshes=[(2,)])


def test_a_gradient_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoGradient(Changed):
        def local(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
            return super().local(eqn, place, [lax.stop_gradient(arg) for arg in args])

    monkeypatch.setitem(REGISTRY, "sin", NoGradient("sin"))
    with pytest.raises(AssertionError, match="cotangent of operand 0"):
        check_rule(jnp.sin, OPERAND, meshes=[(2,)])


def test_a_gradient_that_is_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward the sum is right; its cotangent goes through an all-reduce too many."""

    class Twice(Changed):
        def local(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
            (result,) = super().local(eqn, place, args)
            axes = place.axes_of(0)
            if not axes:
                return [result]
            total = lax.pcast(lax.psum(result, axes), axes, to="varying")
            return [jnp.where(place.part_index(0) == 0, total, jnp.zeros_like(total)) + 0 * lax.stop_gradient(total)]

    monkeypatch.setitem(REGISTRY, "reduce_sum", Twice("reduce_sum"))
    assert check_rule(lambda a: lax.reduce_sum(a, (0,)), OPERAND, meshes=[(2,)])  # a sum on one device is legal

    class OnOne(Twice):
        def local(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
            (result,) = Changed.local(self, eqn, place, args)
            return [2 * result - lax.stop_gradient(result)]

    monkeypatch.setitem(REGISTRY, "reduce_sum", OnOne("reduce_sum"))
    with pytest.raises(AssertionError, match="cotangent of operand 0"):
        check_rule(lambda a: lax.reduce_sum(a, (0,)), OPERAND, meshes=[(2,)])


def test_factors_that_do_not_fill_a_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "sin", Changed("sin", factors=(Factor("d0", 2), Factor("d1", 6))))
    with pytest.raises(AssertionError, match="multiply to 2"):
        check_rule(jnp.sin, OPERAND, meshes=[(2,)])

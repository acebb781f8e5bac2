"""From equations to priced ops: names, what backward reads, which pending sums may pass."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from costmodel.graph import Op
from planner.frontend.flat import Value, flatten
from planner.frontend.ops import op_from_equation, rule_for

X, Y = np.zeros((8, 16), np.float32), np.zeros((16, 4), np.float32)


def ops_of(fn: Callable[..., Any], *args: Any, needs_grad: Callable[[Value], bool] = lambda value: True) -> list[Op]:
    program = flatten(jax.make_jaxpr(fn)(*args), [f"arg{i}" for i in range(len(args))])
    return [op_from_equation(eqn, rule_for(eqn.primitive.name), needs_grad) for eqn in program.equations]


def test_a_product_saves_the_operand_that_the_others_cotangent_reads() -> None:
    (op,) = ops_of(lambda a, b: a @ b, X, Y)
    assert (op.name, op.inputs, op.outputs) == ("dot_general.0", ("arg0", "arg1"), ("dot_general.0",))
    assert op.saves == ("arg1", "arg0") and op.backward_flops == 2 * op.flops
    assert op.key == "dot_general f32[8,16] f32[16,4] -> f32[8,4]"
    (frozen,) = ops_of(lambda a, b: a @ b, X, Y, needs_grad=lambda value: value.name != "arg1")
    assert frozen.saves == ("arg1",) and frozen.backward_flops == frozen.flops


def test_a_constant_is_never_a_summand() -> None:
    (op,) = ops_of(lambda a: a + 1.0, X)
    assert op.inputs == ("arg0", "") and op.linear == ()
    (scaled,) = ops_of(lambda a: a * 2.0, X)
    assert scaled.linear == ((0,),) and scaled.saves == ()


def test_an_all_reduced_maximum_splits_only_without_a_gradient() -> None:
    def fn(a: Any) -> Any:
        return lax.reduce_max(a, (1,))

    (op,) = ops_of(fn, X)
    assert not op.factors[1].splits and "gradient" in op.factors[1].reason
    (free,) = ops_of(fn, X, needs_grad=lambda value: False)
    assert free.factors[1].splits and free.factors[1].combine == "max" and free.saves == ()


def test_the_outermost_remat_scope_and_the_users_line() -> None:
    inner = jax.checkpoint(lambda a: jnp.sin(a))
    sin, cos = ops_of(jax.checkpoint(lambda a: jnp.cos(inner(a))), X)
    assert (sin.scope, cos.scope) == (0, 0)  # what counts is what the outermost remat keeps
    assert sin.source.startswith("test_ops.py:")
    (plain,) = ops_of(lambda a: jnp.sin(a), X)
    assert plain.scope == -1


def test_an_operand_that_repeats_is_saved_once() -> None:
    (op,) = ops_of(lambda a: a * a, X)
    assert op.inputs == ("arg0", "arg0") and op.saves == ("arg0",)

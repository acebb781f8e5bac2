"""Elementwise rules: every strategy runs and equals the whole op, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import planner.frontend.rules  # noqa: F401  (fills the registry)
from planner.frontend.flat import Equation, flatten
from planner.frontend.ops import op_from_equation
from planner.frontend.rules.base import REGISTRY, rule_for
from tests.frontend.rules.harness import check_rule

X, Y = (np.random.default_rng(seed).uniform(0.2, 0.9, (6, 4)).astype(np.float32) for seed in (0, 1))
M, N = (np.random.default_rng(seed).integers(1, 9, (6, 4)).astype(np.int32) for seed in (2, 3))

UNARY = {
    **{
        name: getattr(lax, name) for name in ("neg", "abs", "sign", "floor", "ceil", "round", "square", "sqrt", "rsqrt")
    },
    **{
        name: getattr(lax, name) for name in ("cbrt", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf")
    },
    **{
        name: getattr(lax, name) for name in ("erfc", "erf_inv", "lgamma", "digamma", "bessel_i0e", "bessel_i1e", "tan")
    },
    **{name: getattr(lax, name) for name in ("sin", "cos", "sinh", "cosh", "asin", "acos", "atan", "asinh", "atanh")},
    "acosh": lambda x: lax.acosh(x + 1.5),
    "is_finite": lax.is_finite,
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 21),
    "name": lambda x: checkpoint_name(x, "saved"),
    "copy": lambda x: jnp.array(x, copy=True),
    "stop_gradient": lambda x: x * lax.stop_gradient(x),
    "device_put": jax.device_put,
}
BINARY = {
    **{name: getattr(lax, name) for name in ("add", "sub", "mul", "div", "rem", "max", "min", "pow", "atan2")},
    **{name: getattr(lax, name) for name in ("eq", "ne", "ge", "gt", "le", "lt")},
    "eq_to": lax.eq_to_p.bind,
    "le_to": lax.le_to_p.bind,
    "lt_to": lax.lt_to_p.bind,
    "complex": lambda x, y: jnp.real(lax.complex(x, y) * 2) + jnp.imag(lax.conj(lax.complex(y, x))),
}
SPECIAL = {
    "nextafter": lax.nextafter,
    "igamma": lax.igamma,
    "igammac": lax.igammac,
    "igamma_grad_a": lax.igamma_grad_a,
    "zeta": lambda x, y: lax.zeta(x + 2, y),
    "polygamma": lambda x, y: lax.polygamma(jnp.round(x + 1), y),
}
INTEGER = {
    **{name: getattr(lax, f"bitwise_{name}") for name in ("and", "or", "xor")},
    **{
        name: getattr(lax, name)
        for name in ("shift_left", "shift_right_logical", "shift_right_arithmetic", "rem", "div")
    },
    "not": lambda x, y: lax.bitwise_not(x) + lax.population_count(y) + lax.clz(x),
    "pow": lambda x, y: lax.pow(lax.convert_element_type(x, jnp.float32), y),
}


def equations(fn, *args) -> list[Equation]:
    return list(flatten(jax.make_jaxpr(fn)(*args), [f"arg{i}" for i in range(len(args))]).equations)


def op_of(fn, *args, primitive: str):
    eqn = next(e for e in equations(fn, *args) if e.primitive.name == primitive)
    return op_from_equation(eqn, rule_for(primitive), lambda value: jnp.issubdtype(value.aval.dtype, jnp.inexact))


def all_of(table):
    return lambda *values: [fn(*values) for fn in table.values()]


@pytest.mark.parametrize("names", [list(UNARY)[::2], list(UNARY)[1::2]], ids=["first", "second"])
def test_unary(names):
    table = {name: UNARY[name] for name in names}
    assert check_rule(all_of(table), X, meshes=((2,),), rtol=1e-4) >= len(table) * 4


def test_binary():
    assert check_rule(all_of(BINARY), X, Y, meshes=((2,),), rtol=1e-4) >= len(BINARY) * 4


def test_three_meshes():
    """All elementwise rules are one class: a few of them stand for splits by more than one axis."""
    fn = lambda x, y: [x + y, x * y, x / y, jnp.exp(x)]  # noqa: E731
    assert check_rule(fn, X, Y) == (5 + 6 + 5 + 4) + (4 + 5 + 4 + 3) + (24 + 35 + 24 + 15)


def test_special_functions():
    """Forward only: JAX has no derivative of them, or not by their parameters."""
    assert check_rule(all_of(SPECIAL), X, Y, grads=False, meshes=((2,),), rtol=1e-4) >= len(SPECIAL) * 4


def test_integers_and_booleans():
    assert check_rule(all_of(INTEGER), M, N, meshes=((2,),)) >= len(INTEGER) * 4
    flags, others = M > 4, N > 4
    assert (
        check_rule(lambda a, b: [a & b, a | b, a ^ b, ~a, jnp.where(a, a, b)], flags, others, meshes=((2,),)) >= 4 * 4
    )


def test_operands_of_size_one_and_scalars():
    row, scalar = X[:1, :1], np.float32(0.3)
    count = check_rule(
        lambda x, r, s: [lax.mul(x, r), x * s, x + 2.0, 1.0 / x, lax.clamp(0.3, x, 0.7), lax.clamp(x, x * 2, x + 1)],
        X, row, scalar,
    )  # fmt: skip
    assert count > 200


def test_select_with_predicates_of_both_shapes():
    flags, which = X > 0.5, M % 3
    count = check_rule(
        lambda p, w, x, y: [lax.select_n(p, x, y), lax.select_n(w, x, y, x * y), lax.select_n(jnp.all(p), x, y)],
        flags, which, X, Y,
    )  # fmt: skip
    assert count > 60


def test_casts_of_types():
    def fn(x, i):
        bits = lax.bitcast_convert_type(x, jnp.int32)
        halves = lax.bitcast_convert_type(x, jnp.int16)
        return [
            bits,
            halves,
            lax.bitcast_convert_type(halves, jnp.float32),
            x.astype(jnp.bfloat16),
            x.astype(jnp.bfloat16).astype(jnp.float32) * 2,
            i.astype(jnp.float32),
            x.astype(jnp.int32),
        ]

    assert check_rule(fn, X, M, rtol=2e-2) > 80


def test_barrier_splits_what_all_values_share():
    count = check_rule(lambda x, y, z: lax.optimization_barrier((x, y, z)), X, X[:, :1] + 1, np.ones((6,), np.float32))
    assert count == 4 + 4 + 15  # whole, varying, the shared dim of 6, all pending; 6 does not divide by 2 x 2
    assert check_rule(lambda x, i: lax.optimization_barrier((x, i)), X, M) > 30


def test_equinox_guards():
    internal = pytest.importorskip("equinox.internal")
    assert check_rule(lambda x: internal.nonbatchable(x), X, grads=False, meshes=((2,),)) == 5
    assert check_rule(lambda x: internal.nondifferentiable_backward(x), X, grads=False, meshes=((2,),)) == 5


def test_linear_sets_and_residuals():
    product = op_of(lambda x, y: x * y, X, Y, primitive="mul")
    assert (product.linear, product.saves) == (((0,), (1,)), ("arg1", "arg0"))
    assert op_of(lambda x: x * 2.0, X, primitive="mul").linear == ((0,),)
    assert op_of(lambda x: x + 2.0, X, primitive="add").linear == ()
    assert op_of(lambda x: x.astype(jnp.int32), X, primitive="convert_element_type").linear == ()
    assert op_of(lambda x: x.astype(jnp.bfloat16), X, primitive="convert_element_type").linear == ((0,),)
    exponential = op_of(jnp.exp, X, primitive="exp")
    assert (exponential.saves, exponential.linear) == (exponential.outputs, ())
    assert op_of(lambda x, y: jnp.where(x > y, x, y), X, Y, primitive="select_n").linear == ((1, 2),)
    assert op_of(lambda i, j: lax.div(i, j), M, N, primitive="div").linear == ()
    assert op_of(lambda x: x + x, X, primitive="add").saves == ()


def test_booleans_are_never_pending():
    assert op_of(lambda a, b: jnp.where(a, a, b), X > 0.5, X > 0.6, primitive="select_n").linear == ()


def test_tables_name_what_they_run():
    """A name in the tables above that runs another primitive would test nothing."""
    for table, args in ((UNARY, (X,)), (BINARY, (X, Y)), (SPECIAL, (X, Y)), (INTEGER, (M, N))):
        for name, fn in table.items():
            ran = {e.primitive.name for e in equations(fn, *args)}
            assert name in ran, (name, ran)
            assert all(primitive in REGISTRY for primitive in ran), ran

"""Reductions, arg-reductions, scans and windows: every strategy equals the unsharded op."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.frontend.rules.harness import check_rule

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("fn", "operand", "grads", "counts"),
    [
        (lambda a: lax.reduce_sum(a, (0, 2)), normal(4, 6, 12), True, 46),
        (lambda a: lax.reduce_sum(a, (0, 1)), np.arange(24).reshape(4, 6), False, 33),
        (lambda a: lax.reduce_max(a, (0, 2)), normal(4, 6, 12), True, 14),
        (lambda a: lax.reduce_max(a, (0, 2)), normal(4, 6, 12), False, 33),
        (lambda a: lax.reduce_min(a, (0,)), normal(4, 6), False, 22),
        (lambda a: lax.reduce_prod(a, (0,)), normal(4, 6), True, 14),
        (lambda a: (lax.reduce_or(a, (0,)), lax.reduce_and(a, (0,))), normal(4, 6) > 0, False, 44),
        (lambda a: lax.reduce_xor(a, (0,)), normal(4, 6) > 0, False, 14),
        (lambda a: (lax.reduce_or(a, (0,)), lax.reduce_and(a, (0,))), np.arange(24).reshape(4, 6), False, 28),
        (lambda a: (lax.argmax(a, 1, np.int32), lax.argmin(a, 0, np.int32)), normal(4, 6, 12), False, 46),
    ],
    ids=["sum", "sum of ints", "max", "max without gradient", "min", "prod", "or and", "xor", "bits", "arg"],
)
def test_reduction(fn: Callable[..., Any], operand: np.ndarray, grads: bool, counts: int) -> None:
    """Where no gradient crosses it, a maximum splits its reduced dims too."""
    assert check_rule(fn, operand, grads=grads) >= counts


def test_reduction_by_the_users_function() -> None:
    def one(a: Any) -> Any:
        return lax.reduce(a, np.float32(1.0), lambda x, y: x * y * 2, (1,))

    def two(a: Any, init: Any) -> Any:
        return lax.reduce((a, a), (np.float32(1.0), init), lambda x, y: (x[0] * y[0], x[1] + y[1] * x[0]), (1,))

    assert check_rule(one, normal(4, 6, 12), grads=False) >= 23
    assert check_rule(two, normal(4, 6, 12), np.float32(2.0), grads=False) >= 23


def test_scans() -> None:
    operand = normal(4, 6)
    assert check_rule(lambda a: lax.cumsum(a, 1), operand) >= 21

    def others(a: Any) -> Any:
        return lax.cumprod(a, 0), lax.cummax(a, 0), lax.cummin(a, 0, reverse=True), lax.cumlogsumexp(a, 0)

    assert check_rule(others, operand, rtol=1e-4, meshes=[(3,)]) >= 4 * 3


def pool(reducer: Any, init: float) -> Callable[..., Any]:
    return lambda a: lax.reduce_window(a, np.float32(init), reducer, (1, 2, 1), (1, 2, 1), "VALID")


@pytest.mark.parametrize(
    ("fn", "grads", "counts"),
    [
        (pool(lax.add, 0.0), True, 29),
        (pool(lax.max, -np.inf), True, 22),
        (pool(lax.min, np.inf), True, 22),
        (pool(lambda a, b: a * b * 2, 1.0), False, 22),
        (jax.grad(lambda a: pool(lax.max, -np.inf)(a).sum()), True, 56),
        (lambda a: jax.jvp(pool(lax.max, -np.inf), (a,), (a,)), True, 55),
    ],
    ids=["sum", "max", "min", "user", "scatter", "gather"],
)
def test_windows(fn: Callable[..., Any], grads: bool, counts: int) -> None:
    """A dim splits where its window is one element."""
    assert check_rule(fn, normal(4, 6, 6), grads=grads) >= counts


def test_padded_and_strided_windows_stay_whole() -> None:
    def padded(a: Any) -> Any:
        return lax.reduce_window(a, 0.0, lax.add, (1, 1, 1), (1, 2, 1), ((0, 0), (0, 0), (1, 1)))

    assert check_rule(padded, normal(4, 6, 6), meshes=[(2,)]) == 4  # replicated, varying, the first dim, a pending sum


def test_a_nan_on_one_device_reaches_the_reduced_maximum() -> None:
    operand = normal(4, 6)
    operand[1, 2], operand[2, 3], operand[3] = np.nan, np.inf, -np.inf
    for fn in (lambda a: lax.reduce_max(a, (1,)), lambda a: lax.reduce_min(a, (1,))):
        assert check_rule(fn, operand, grads=False, meshes=[(3,)]) >= 3
    low = jnp.asarray(normal(4, 6), jnp.bfloat16)
    assert check_rule(lambda a: lax.reduce_max(a, (1,)), low, grads=False, meshes=[(3,)]) >= 3
    whole = np.arange(24).reshape(4, 6)
    assert check_rule(lambda a: (lax.reduce_max(a, (1,)), lax.reduce_min(a, (1,))), whole, meshes=[(3,)]) >= 6

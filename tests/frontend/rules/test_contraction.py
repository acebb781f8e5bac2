"""Products, convolutions, factorisations and Fourier transforms: every strategy equals the unsharded op."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from planner.frontend.flat import flatten
from planner.frontend.rules.base import rule_for
from tests.frontend.rules.harness import check_rule

RNG = np.random.default_rng(0)
SIZES = np.array([2, 0, 3, 4, 1, 1], np.int32)  # one row of twelve belongs to no group


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    out = RNG.standard_normal(shape)
    return (out + 1j * RNG.standard_normal(shape) if np.issubdtype(dtype, np.complexfloating) else out).astype(dtype)


def positive(n: int, *batch: int) -> np.ndarray:
    a = normal(*batch, n, n)
    return a @ a.swapaxes(-1, -2) + n * np.eye(n, dtype=np.float32)


def dot(contract: Any, batch: Any = ((), ()), dtype: Any = None) -> Callable[..., Any]:
    return lambda a, b: lax.dot_general(a, b, (contract, batch), preferred_element_type=dtype)


def ragged(contract: Any, batch: Any, rows: Any, groups: Any) -> Callable[..., Any]:
    numbers = lax.RaggedDotDimensionNumbers((contract, batch), rows, groups)
    return lambda a, b, sizes: lax.ragged_dot_general(a, b, sizes, numbers)


@pytest.mark.parametrize(
    ("fn", "args", "at_least", "rtol"),
    [
        (dot(((2,), (1,)), ((0,), (0,))), (normal(4, 6, 12), normal(4, 12, 6)), 77, 1e-5),
        (dot(((2, 1), (1, 0))), (normal(4, 6, 12), normal(6, 12, 6)), 77, 1e-5),
        (dot(((1,), (0,))), (normal(4, 6, dtype=np.complex64), normal(6, 12, dtype=np.complex64)), 61, 1e-5),
        (dot(((0,), (0,))), (normal(6), normal(6)), 33, 1e-5),
    ],
    ids=["batched", "two contracted", "complex", "vectors"],
)
def test_dot(fn: Callable[..., Any], args: tuple[Any, ...], at_least: int, rtol: float) -> None:
    assert check_rule(fn, *args, rtol=rtol) >= at_least


def test_dot_of_low_precision_accumulates_in_the_stated_dtype() -> None:
    low = [jnp.asarray(normal(4, 6), jnp.bfloat16), jnp.asarray(normal(6, 12), jnp.bfloat16)]
    assert check_rule(dot(((1,), (0,)), dtype=jnp.float32), *low, rtol=2e-2, meshes=[(2,), (3,)]) == 13


def test_integer_summands_do_not_pass_into_a_wider_product() -> None:
    """Summands of int8 wrap around, and an int32 product would not."""
    small = np.arange(24, dtype=np.int8)
    widened = dot(((1,), (0,)), dtype=np.int32)
    assert check_rule(widened, small.reshape(4, 6), small.reshape(6, 4), meshes=[(2,)]) == 5
    assert check_rule(dot(((1,), (0,))), small.reshape(4, 6), small.reshape(6, 4), meshes=[(2,)]) == 7


@pytest.mark.parametrize(
    ("fn", "args", "at_least", "grads"),
    [
        (ragged(((1,), (1,)), ((), ()), (0,), (0,)), (normal(12, 4), normal(6, 4, 6), SIZES), 13, True),
        (ragged(((2,), (1,)), ((), ()), (1,), (0,)), (normal(4, 12, 4), normal(6, 4, 6), SIZES), 14, True),
        (
            ragged(((2,), (2,)), ((0,), (0,)), (1,), (1,)),
            (normal(4, 12, 4), normal(4, 6, 4, 6), np.tile(SIZES, (4, 1))),
            11,
            True,
        ),
        (ragged(((0,), (0,)), ((), ()), (0,), ()), (normal(12, 4), normal(12, 6), SIZES), 11, False),
        (ragged(((2,), (1,)), ((0,), (0,)), (0,), ()), (normal(12, 2, 4), normal(12, 4, 6), SIZES), 12, False),
    ],
    ids=["rows", "rows of a batch", "sizes by batch", "ragged contraction", "ragged batch"],
)
def test_ragged_dot(fn: Callable[..., Any], args: tuple[Any, ...], at_least: int, grads: bool) -> None:
    assert check_rule(fn, *args, grads=grads, meshes=[(2,), (3,)]) >= at_least


def test_groups_of_a_ragged_dot_split_on_two_axes() -> None:
    fn = ragged(((1,), (1,)), ((), ()), (0,), (0,))
    sizes = np.array([2, 0, 4, 5], np.int32)
    assert check_rule(fn, normal(12, 2), normal(4, 2, 2), sizes, meshes=[(2, 2)]) >= 36


def conv(strides: Any, padding: Any, layout: Any = None, **groups: int) -> Callable[..., Any]:
    return lambda a, b: lax.conv_general_dilated(a, b, strides, padding, dimension_numbers=layout, **groups)


@pytest.mark.parametrize(
    ("fn", "args", "at_least"),
    [
        (conv((1,), "SAME"), (normal(4, 6, 5), normal(12, 6, 3)), 61),
        (conv((1, 2), "SAME", ("NHWC", "HWIO", "NHWC")), (normal(4, 6, 4, 6), normal(1, 3, 6, 4)), 76),
        (conv((1,), "SAME", feature_group_count=6), (normal(4, 12, 5), normal(24, 2, 3)), 46),
        (conv((1,), "SAME", feature_group_count=6), (normal(4, 6, 5), normal(6, 1, 3)), 46),
        (conv((1,), "SAME", batch_group_count=6), (normal(24, 4, 5), normal(12, 4, 3)), 46),
    ],
    ids=["plain", "pointwise dim", "feature groups", "depthwise", "batch groups"],
)
def test_convolution(fn: Callable[..., Any], args: tuple[Any, ...], at_least: int) -> None:
    assert check_rule(fn, *args) >= at_least


@pytest.mark.parametrize(
    ("fn", "args", "at_least"),
    [
        (lambda a: lax.linalg.cholesky(a, symmetrize_input=False), (positive(4, 6),), 6),
        (lax.linalg.lu, (positive(4, 6),), 6),
        (lambda a: lax.linalg.eigh(a, symmetrize_input=False), (positive(4, 6),), 6),
        (lambda a: lax.linalg.qr(a, full_matrices=False), (positive(4, 6),), 6),
        (lambda a: lax.linalg.svd(a, full_matrices=False), (positive(4, 6),), 6),
        (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), (positive(4, 6), normal(6, 4, 12)), 10),
        (lambda a, b: lax.linalg.triangular_solve(a, b), (positive(4, 6), normal(6, 12, 4)), 10),
        (lax.linalg.tridiagonal_solve, (normal(6, 4), normal(6, 4) + 5, normal(6, 4), normal(6, 4, 12)), 10),
    ],
    ids=["cholesky", "lu", "eigh", "qr", "svd", "solve left", "solve right", "tridiagonal solve"],
)
def test_linear_algebra(fn: Callable[..., Any], args: tuple[Any, ...], at_least: int) -> None:
    assert check_rule(fn, *args, rtol=1e-3, meshes=[(2,), (3,)]) >= at_least


def test_factorisations_without_a_derivative() -> None:
    def all_of(a: Any, taus: Any, pivots: Any) -> Any:
        f = lax.linalg
        made = f.eig(a), f.schur(a), f.hessenberg(a), f.tridiagonal(a), f.householder_product(a, taus)
        return made, f.lu_pivots_to_permutation(pivots, 4)

    pivots = np.array([[1, 2, 3, 3]] * 6, np.int32)
    found = check_rule(all_of, positive(4, 6), normal(6, 4), pivots, rtol=1e-3, grads=False, meshes=[(2,), (2, 2)])
    assert found >= 6 * (3 + 8)


@pytest.mark.parametrize(
    ("kind", "lengths", "operand", "at_least"),
    [
        (lax.FftType.FFT, (6, 6), normal(4, 6, 6, dtype=np.complex64), 23),
        (lax.FftType.RFFT, (6,), normal(4, 6, 6), 33),
        (lax.FftType.IRFFT, (6,), normal(4, 6, 4, dtype=np.complex64), 33),
    ],
)
def test_fourier(kind: lax.FftType, lengths: tuple[int, ...], operand: np.ndarray, at_least: int) -> None:
    assert check_rule(lambda a: lax.fft(a, kind, lengths), operand) >= at_least


def flops(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> float:
    closed = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes))
    program = flatten(closed, [f"arg{i}" for i in range(len(shapes))])
    return sum(rule_for(eqn.primitive.name).factorise(eqn).flops for eqn in program.equations)


def test_flops() -> None:
    assert flops(lambda a, b: a @ b, (8, 16), (16, 4)) == 2 * 8 * 16 * 4
    assert flops(conv((1,), "SAME"), (4, 6, 10), (12, 6, 3)) == 2 * (4 * 12 * 10) * 6 * 3
    assert flops(conv((1,), "SAME", feature_group_count=6), (4, 6, 10), (6, 1, 3)) == 2 * (4 * 6 * 10) * 3
    sizes = jnp.asarray(SIZES)
    assert flops(lambda a, b: lax.ragged_dot(a, b, sizes), (12, 4), (6, 4, 8)) == 2 * 12 * 4 * 8

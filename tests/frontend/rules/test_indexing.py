"""Gather and scatter: every strategy runs and equals the whole op, in and out of bounds, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import planner.frontend.rules  # noqa: F401  (fills the registry)
from costmodel.graph import Op
from planner.frontend.flat import flatten
from planner.frontend.ops import op_from_equation
from planner.frontend.rules.base import rule_for
from tests.frontend.rules.harness import check_rule

MODES = ["clip", "fill", "promise_in_bounds"]
INSIDE = np.array([0, 5, 3, 3, 2, 1], np.int32)
OUTSIDE = np.array([-7, 5, 6, 3, -1, 2**31 - 1], np.int32)


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def op_of(fn, *args, primitive: str) -> Op:
    program = flatten(jax.make_jaxpr(fn)(*args), [f"arg{i}" for i in range(len(args))])
    eqn = next(e for e in program.equations if e.primitive.name == primitive)
    return op_from_equation(eqn, rule_for(primitive), lambda value: jnp.issubdtype(value.aval.dtype, jnp.inexact))


def rows(x, i, mode, **more):
    """Rows of a matrix as one gather and nothing else."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(x, i[:, None], numbers, (1, x.shape[1]), mode=mode, **more)


def kinds(op: Op) -> dict[str, str]:
    """How each factor may be split."""
    return {f.name: f.combine if f.splits else "fixed" for f in op.factors}


@pytest.mark.parametrize("mode", MODES)
def test_rows(mode):
    def fn(x, inside, outside):
        given = [rows(x, inside, mode)]
        # What is out of bounds under a promise is undefined.
        return given if mode == "promise_in_bounds" else [*given, rows(x, outside, mode)]

    assert check_rule(fn, array(6, 4), INSIDE, OUTSIDE) > 40
    op = op_of(lambda x, i: rows(x, i, mode), array(6, 4), INSIDE, primitive="gather")
    assert kinds(op) == {"index0": "none", "row0": "sum", "d1": "none"}
    assert op.linear == ((0,),) and len(op.saves) == 1


def test_fill_values():
    def fn(x, i):
        return [rows(x, i, "fill", fill_value=value) for value in (0, 2.5, None)]

    assert check_rule(fn, array(6, 4), OUTSIDE, meshes=((2,), (3,))) > 20
    filled = op_of(lambda x, i: rows(x, i, "fill", fill_value=2.5), array(6, 4), OUTSIDE, primitive="gather")
    assert filled.linear == ()  # each summand would bring its own 2.5


def test_integers_and_small_indices():
    table = np.arange(24, dtype=np.int32).reshape(6, 4)

    def fn(x, small, unsigned, plain):
        return [
            rows(x, small, "fill"),
            rows(x, unsigned, "clip"),
            rows(x, unsigned, "fill"),
            rows(x.astype(jnp.uint8), plain, "fill"),
        ]

    small, unsigned = np.array([-128, 127, 4, 0], np.int8), np.array([2**32 - 1, 3, 5, 6], np.uint32)
    assert check_rule(fn, table, small, unsigned, OUTSIDE, meshes=((2,), (3,))) > 20


def test_more_rows_than_small_indices_reach():
    table = array(384, 2)
    i = np.array([0, 127, 200, 255], np.uint8)
    assert check_rule(lambda x, i: [rows(x, i, mode) for mode in MODES], table, i, meshes=((2,), (3,))) > 10


def test_booleans_and_keys_split_by_index_only():
    flags, keys = array(6, 4) > 0, jax.random.split(jax.random.key(0), 6)
    assert check_rule(lambda p, k, i: (rows(p, i, "fill"), k[i]), flags, keys, INSIDE, meshes=((2,),)) > 6
    assert kinds(op_of(lambda p, i: rows(p, i, "fill"), flags, INSIDE, primitive="gather"))["row0"] == "fixed"
    assert kinds(op_of(lambda k, i: k[i], keys, INSIDE, primitive="gather"))["row0"] == "fixed"


def test_numpy_style_indexing():
    def fn(x, i, j):
        at = lambda *places: x.at[places].get(mode="promise_in_bounds", wrap_negative_indices=False)  # noqa: E731
        return [
            at(slice(None), j),  # columns, window first
            at(i, j),  # points: two indexed dims
            at(i, slice(None), slice(1, 3)),
            jnp.take(x, i, axis=2, mode="clip"),
        ]

    i, j = np.array([[0, 3], [2, 1]], np.uint32), np.array([[1, 0], [3, 2]], np.uint32)
    assert check_rule(fn, array(4, 4, 6), i, j, meshes=((2,),)) > 50


def test_points_of_a_matrix_split_both_ways():
    def fn(x, places):
        numbers = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(0, 1))
        return [lax.gather(x, places, numbers, (1, 1), mode=mode) for mode in ("clip", "fill")]

    assert check_rule(fn, array(6, 4), np.array([[0, 3], [5, 4], [-1, 0], [3, 2]], np.int32), meshes=((2, 2),)) > 40


def test_labels_are_picked_from_split_logits():
    def fn(logits, labels):
        return jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]

    assert check_rule(fn, array(2, 4, 6), np.array([[0, 5, 6, 2], [1, 1, -6, -7]], np.int32)) > 60
    op = op_of(fn, array(2, 4, 6), np.zeros((2, 4), np.int32), primitive="gather")
    assert kinds(op) == {"batch0": "none", "batch1": "none", "row2": "sum"}


def test_partial_windows_stay_whole():
    numbers = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0, 1))

    def fn(x, i):
        return [lax.gather(x, i, numbers, (2, 4), mode=mode) for mode in MODES[:2]]

    i = np.array([[0, 0], [3, 0], [5, 0], [2, 1]], np.int32)  # the last two reach out of bounds
    assert check_rule(fn, array(6, 4), i, meshes=((2,), (2, 2))) > 20


def scattered(name, x, i, u, mode, **more):
    """One scatter of rows and nothing else."""
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    fn = {"add": lax.scatter_add, "sub": lax.scatter_sub, "mul": lax.scatter_mul, "set": lax.scatter}
    fn |= {"max": lax.scatter_max, "min": lax.scatter_min}
    return fn[name](x, i[:, None], u, numbers, mode=mode, **more)


DISTINCT = np.array([4, 0, 5, 2], np.int32)
DISTINCT_OUTSIDE = np.array([4, -3, 6, 2], np.int32)


@pytest.mark.parametrize("mode", MODES)
def test_scattered_rows(mode):
    def fn(x, u, distinct, outside):
        out = [
            scattered(name, x, distinct, u, mode, unique_indices=True) for name in ("add", "sub", "mul", "set", "max")
        ]
        # Undefined out of bounds: promises, and JAX's own derivative of clipped extrema and overwriting.
        beyond = {"clip": ("add",), "fill": ("add", "mul", "set", "min")}.get(mode, ())
        return [*out, *(scattered(name, x, outside, u, mode, unique_indices=True) for name in beyond)]

    meshes = ((2,), (3,)) if mode == "fill" else ((2,),)
    assert check_rule(fn, array(6, 4), array(4, 4, seed=1), DISTINCT, DISTINCT_OUTSIDE, meshes=meshes) > 20


def test_scatter_on_two_axes():
    """Rows, updates and columns on one axis each, and pending operands."""
    fn = lambda x, u, i: scattered("add", x, i, u, "fill")  # noqa: E731
    assert check_rule(fn, array(6, 4), array(4, 4, seed=1), DISTINCT, meshes=((2, 2),)) == 35 + 16
    # Six choices an axis, without both axes on six rows; and four to make the index a column.


@pytest.mark.parametrize("name", ["add", "sub", "set", "max"])
def test_updates_that_meet(name):
    met = np.array([3, 3, 0, 3], np.int32)
    assert (
        check_rule(
            lambda x, u, i: scattered(name, x, i, u, "fill"), array(6, 4), array(4, 4, seed=1), met, meshes=((2,),)
        )
        >= 4
    )


def test_forward_only_extremes_out_of_bounds():
    def fn(x, u, i):
        return [scattered(name, x, i, u, mode) for name in ("max", "min", "set", "mul") for mode in MODES[:2]]

    assert check_rule(fn, array(6, 4), array(4, 4), DISTINCT_OUTSIDE, grads=False, meshes=((2,), (3,))) > 40


def test_updates_split_where_they_are_added():
    add = op_of(
        lambda x, u, i: scattered("add", x, i, u, "fill"), array(6, 4), array(4, 4), DISTINCT, primitive="scatter-add"
    )
    assert kinds(add) == {"index0": "sum", "row0": "none", "d1": "none"}
    assert add.linear == ((0, 2),)
    put = op_of(
        lambda x, u, i: scattered("set", x, i, u, "fill"), array(6, 4), array(4, 4), DISTINCT, primitive="scatter"
    )
    assert kinds(put) == {"index0": "fixed", "row0": "none", "d1": "none"}
    assert put.linear == ()


def test_numpy_style_updates():
    def fn(x, u, i):
        return [
            x.at[i, i].add(u, wrap_negative_indices=False),
            x.at[:, i].add(1.0, wrap_negative_indices=False),
            x.at[2].set(u[0]),
            x.at[i, :, 1:3].add(0.5, wrap_negative_indices=False),
            x.at[i, 1:3].add(0.5, wrap_negative_indices=False),
        ]

    assert check_rule(fn, array(4, 4, 6), array(2, 6), np.array([3, 1], np.uint32), meshes=((2,),)) > 50


def test_batched_updates():
    def fn(x, u, i):
        return jax.vmap(lambda a, b, c: a.at[c].add(b, wrap_negative_indices=False))(x, u, i)

    i = np.array([[0, 1, 5, 5], [2, 2, 0, 6]], np.int32)
    assert check_rule(fn, array(2, 6, 3), array(2, 4, 3), i, meshes=((2,), (2, 2))) > 30


def test_function_applied_in_place():
    assert check_rule(lambda x, i: x.at[i].apply(jnp.sin), array(6, 4), DISTINCT, grads=False, meshes=((2,),)) > 10

"""Structural rules: every strategy runs and equals the whole op, forward and backward."""

import math

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
from planner.frontend.rules.factors import FactorList
from planner.frontend.rules.structure import common_factors
from tests.frontend.rules.harness import check_rule


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def op_of(fn, *args, primitive: str) -> Op:
    program = flatten(jax.make_jaxpr(fn)(*args), [f"arg{i}" for i in range(len(args))])
    eqn = next(e for e in program.equations if e.primitive.name == primitive)
    return op_from_equation(eqn, rule_for(primitive), lambda value: jnp.issubdtype(value.aval.dtype, jnp.inexact))


def splits(op: Op) -> set[str]:
    return {factor.name for factor in op.factors if factor.splits}


RESHAPES = [
    ((24,), (4, 6)),
    ((4, 6), (24,)),
    ((6, 4), (4, 6)),
    ((2, 6, 4), (12, 4)),
    ((12, 4), (6, 8)),
    ((3, 4, 6), (2, 6, 6)),
    ((1, 4, 1, 6), (4, 1, 6, 1)),
    ((4, 6), (2, 2, 2, 3)),
    ((1,), ()),
]


@pytest.mark.parametrize("shapes", [RESHAPES[:5], RESHAPES[5:]], ids=["merge", "mix"])
def test_reshape(shapes):
    def fn(*values):
        return [lax.reshape(x, target) for x, (_, target) in zip(values, shapes, strict=True)]

    assert check_rule(fn, *(array(*source) for source, _ in shapes)) > 20 * len(shapes)


def test_reshape_with_dimensions():
    def fn(x):
        return lax.reshape(x, (24,), (1, 0)), lax.reshape(x, (4, 3, 2), (1, 0))

    assert check_rule(fn, array(6, 4)) > 40


@pytest.mark.parametrize(
    "source, target", [*RESHAPES, ((8, 6, 10), (4, 12, 10)), ((2, 6, 5, 4), (3, 4, 20)), ((0, 3), (3, 0))]
)
def test_common_factors_multiply_to_both_shapes(source, target):
    factors = FactorList()
    operand, result = common_factors(source, target, factors)
    made = factors.done()
    for shape, dims in ((source, operand), (target, result)):
        assert len(dims) == len(shape)
        for n, parts in zip(shape, dims, strict=True):
            assert math.prod(made[f].size for f in parts) == n or (0 in source and not parts)


def test_heads_split_and_head_dim_does_not():
    op = op_of(lambda x: x.reshape(2, 5, 12), array(2, 5, 4, 3), primitive="reshape")
    heads, head_dim = op.out_dims[0][2]
    assert (op.factors[heads].size, op.factors[head_dim].size) == (4, 3)
    assert op.work == "view" and op.linear == ((0,),)


def test_broadcast():
    def fn(x, row, s):
        return [
            lax.broadcast_in_dim(x, (2, 6, 3, 4), (1, 3)),
            lax.broadcast_in_dim(row, (6, 4), (0, 1)),
            lax.broadcast_in_dim(s, (6, 4), ()),
            lax.broadcast_in_dim(2.0, (6, 4), ()),
            lax.broadcast_in_dim(x, (6, 4), (0, 1)),
        ]

    assert check_rule(fn, array(6, 4), array(1, 4), np.float32(0.5)) == 133


def test_dims_move():
    def fn(x):
        return [
            lax.transpose(x, (2, 0, 1)),
            lax.squeeze(x[:, :1], (1,)),
            lax.squeeze(x[:, 1:2], (-2,)),
            lax.rev(x, (0, 2)),
            lax.expand_dims(x, (0, 2)),
            lax.tile(x, (1, 2, 3)),
            lax.tile(x[:, :1], (2, 6, 1)),
        ]

    assert check_rule(fn, array(4, 3, 6)) > 200


def test_tiles_split_by_repeats():
    op = op_of(lambda x: lax.tile(x, (6, 1)), array(4, 3), primitive="tile")
    assert [[op.factors[f].size for f in dim] for dim in op.out_dims[0]] == [[6, 4], [3]]


def test_joining_and_cutting():
    def fn(x, y, z):
        return [
            lax.concatenate([x, y, z], 1),
            lax.concatenate([x, x], 0),
            *lax.split(x, (1, 3), 1),
            jnp.stack([x, x * 2, x], 1),
            *jnp.unstack(x, axis=1),
        ]

    assert check_rule(fn, array(6, 4), array(6, 1), array(6, 2)) > 150


@pytest.mark.parametrize(
    "config", [((0, 0, 0), (1, 2, 0)), ((0, 0, 0), (0, 1, 2)), ((-1, 2, 0), (0, 0, 0)), ((0, 0, 0), (0, 0, 0))], ids=str
)
def test_pad(config):
    def fn(x, p):
        return [lax.pad(x, np.float32(0), config), lax.pad(x, np.float32(3), config), lax.pad(x, p, config)]

    assert check_rule(fn, array(6, 4), np.float32(0.7), meshes=((2,), (2, 2))) > 15


def test_padding_with_zero_passes_sums():
    config = ((0, 0, 0), (1, 0, 0))
    assert op_of(lambda x: lax.pad(x, 0.0, config), array(6, 4), primitive="pad").linear == ((0,),)
    assert op_of(lambda x: lax.pad(x, 1.0, config), array(6, 4), primitive="pad").linear == ()
    assert op_of(lambda x, p: lax.pad(x, p, config), array(6, 4), np.float32(0), primitive="pad").linear == ((0, 1),)


def test_static_windows():
    def fn(x):
        return [x[:, 1:3], x[::2], x[1:2, :, ::3], lax.slice(x, (0, 0, 0), (4, 3, 6)), x[:, 2]]

    assert check_rule(fn, array(4, 3, 6)) > 100
    op = op_of(lambda x: x[:, 1:3], array(4, 3, 6), primitive="slice")
    assert splits(op) == {"d0", "d2"}


def test_windows_placed_at_run_time():
    def fn(x, i, u, v):
        return [
            lax.dynamic_slice(x, (i, 0, i), (4, 3, 2)),
            lax.dynamic_slice(x, (-1, i, 99), (4, 1, 5)),
            lax.dynamic_index_in_dim(x, i, 1, keepdims=False),
            lax.dynamic_update_slice(x, u, (i, i, 0)),
            lax.dynamic_update_slice(x, v, (3, 1, i)),
        ]

    assert check_rule(fn, array(4, 3, 6), np.int32(2), array(4, 1, 6), array(4, 3, 2)) > 100


def test_counts_start_at_each_part():
    def fn():
        return [lax.broadcasted_iota(dtype, (6, 4), d) for dtype in (jnp.int32, jnp.float32, jnp.uint8) for d in (0, 1)]

    assert check_rule(fn) == 6 * (4 + 3 + 15)  # whole, varying and both dims; 3 divides 6 only; 2 x 2 does not divide 6
    assert check_rule(lambda: jnp.arange(12)) > 10


def test_booleans_and_keys_move_and_are_never_pending():
    flags = array(6, 4) > 0
    count = check_rule(
        lambda p, k: [p.T, p.reshape(24), p[:, 1:], k[::2], k.reshape(3, 2), jnp.stack([k, k]), k[:, None]],
        flags,
        jax.random.split(jax.random.key(0), 6),
        meshes=((2,), (3,)),
    )
    assert count > 25
    assert op_of(lambda p: p.T, flags, primitive="transpose").linear == ()

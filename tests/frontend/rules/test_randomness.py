"""Random rules: a device draws its slice of what one device would draw, bit for bit."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import planner.frontend.rules  # noqa: F401  (fills the registry)
from planner.frontend.flat import flatten
from planner.frontend.ops import op_from_equation
from planner.frontend.rules.base import rule_for
from planner.frontend.rules.randomness import _positions, _wide_product
from tests.frontend.rules.harness import check_rule

KEY, KEYS = jax.random.key(7), jax.random.split(jax.random.key(8), 6)


def op_of(fn, *args, primitive: str):
    program = flatten(jax.make_jaxpr(fn)(*args), [f"arg{i}" for i in range(len(args))])
    eqn = next(e for e in program.equations if e.primitive.name == primitive)
    return op_from_equation(eqn, rule_for(primitive), lambda value: False)


def test_bits_of_every_width():
    def fn(key):
        return [jax.random.bits(key, (6, 4), dtype) for dtype in (jnp.uint8, jnp.uint16, jnp.uint32)]

    assert check_rule(fn, KEY) == 3 * (4 + 3 + 15)


def test_bits_of_many_keys():
    def fn(keys):
        return jax.vmap(lambda k: jax.random.bits(k, (4, 1, 3)))(keys), jax.vmap(jax.random.bits)(keys)

    assert check_rule(fn, KEYS) > 30


def test_bits_of_64():
    with jax.enable_x64(True):
        assert check_rule(lambda key: jax.random.bits(key, (6, 4), jnp.uint64), KEY, meshes=((2,),)) == 4


def test_distributions():
    def fn(key):
        drop = jax.random.bernoulli(key, 0.9, (6, 4))
        return drop, jax.random.normal(key, (6, 4)), jax.random.randint(key, (12,), 0, 9)

    assert check_rule(fn, KEY, rtol=1e-4, meshes=((2,),)) > 60


def test_gamma():
    shape = np.full((4, 3), 0.7, np.float32)
    count = check_rule(lambda k, a: jax.vmap(jax.random.gamma)(k, a), KEYS[:4], shape, meshes=((2,),), rtol=1e-4)
    assert count >= 3  # whole, varying, by keys
    op = op_of(jax.random.gamma, KEY, shape, primitive="random_gamma")
    assert not any(factor.splits for factor in op.factors)


def test_keys():
    def fn(key, keys, words, seed):
        return [
            jax.random.split(key, 6),
            jax.random.split(keys[0], (2, 3)),
            jax.vmap(jax.random.split)(keys),
            jax.random.fold_in(key, seed),
            jax.vmap(jax.random.fold_in)(keys, jnp.arange(6)),
            jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(6)),
            jax.random.wrap_key_data(words),
            jax.random.key_data(keys),
            jax.random.clone(key),
            jax.random.key(seed),
            jax.vmap(jax.random.key)(jnp.arange(6)),
        ]

    assert check_rule(fn, KEY, KEYS, jax.random.key_data(KEYS), np.int32(3)) > 100


def test_raw_hash():
    from jax.extend.random import threefry2x32_p

    words = np.arange(24, dtype=np.uint32).reshape(6, 4)
    assert check_rule(lambda k, x: threefry2x32_p.bind(k, k, x, x), np.uint32(5), words) == 4 + 3 + 15


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_other_generators_run_whole(impl):
    op = op_of(lambda key: jax.random.bits(key, (6, 4)), jax.random.key(0, impl=impl), primitive="random_bits")
    assert not any(factor.splits for factor in op.factors)
    assert all("sequence" in factor.reason for factor in op.factors)
    fn = lambda key: jax.random.bits(key, (6, 4))  # noqa: E731
    assert check_rule(fn, jax.random.key(0, impl=impl), meshes=((2,),)) == 2


def test_without_partitionable_threefry_bits_are_made_whole():
    with jax.threefry_partitionable(False):
        op = op_of(lambda key: jax.random.bits(key, (6, 4)), KEY, primitive="random_bits")
        assert not any(factor.splits for factor in op.factors)
        assert check_rule(lambda key: jax.random.bits(key, (6, 4)), KEY, meshes=((2,),)) == 2


@pytest.mark.parametrize("factor", [1, 0xFFFF, 0x1_0000, 0x1_2345_6789, 0xFEDC_BA98_7654])
def test_wide_products(factor):
    values = np.array([0, 1, 77, 0xFFFF, 0x10000, 0x89ABCDEF, 0xFFFFFFFF], np.uint32)
    high, low = _wide_product(jnp.asarray(values), factor)
    for value, h, w in zip(values.tolist(), np.asarray(high).tolist(), np.asarray(low).tolist(), strict=True):
        assert h << 32 | w == value * factor % (1 << 64)


@pytest.mark.parametrize("whole", [(40, 6), (100_000, 3, 70_000), (5, 2**31 - 1, 3)])
def test_positions_beyond_32_bits(whole):
    """Shapes are of a whole that no machine here could hold; each device's part is small."""
    part = tuple(min(n, 2) for n in whole)
    index = [n // p - 1 for n, p in zip(whole, part, strict=True)]
    high, low = (np.asarray(half).astype(object) for half in _positions(whole, part, index))
    for place in np.ndindex(part):
        at = [i * p + o for i, p, o in zip(index, part, place, strict=True)]
        position = sum(a * math.prod(whole[d + 1 :]) for d, a in enumerate(at))
        assert int(high[place]) << 32 | int(low[place]) == position

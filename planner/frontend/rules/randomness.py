"""Random bits and keys. What a device draws is its slice of what one device would draw: splits never change numbers.

With JAX's partitionable threefry the bits of an element are a hash of the key and of the element's row-major position,
so a device hashes the positions that it holds. Other generators run on every device whole; a consumer that wants a part
slices it, which costs nothing in the backward pass. Keys have their logical shape: the words of a key are no dims.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

from costmodel.graph import Work
from planner.frontend.flat import Equation
from planner.frontend.rules.base import Factorisation, Placement, Rule, elements, register
from planner.frontend.rules.elementwise import MOVE, Elementwise
from planner.frontend.rules.factors import FactorList

# A threefry block: 20 rounds of add, rotate (three operations) and xor, five key injections of three additions, and the
# position that is hashed. One block gives one element, whatever its width, and one key.
HASH = 120.0
# Marsaglia and Tsang's rejection method draws about two normals and a few hashes for one gamma variate (assumed).
GAMMA = 10 * HASH


class KeyOp(Elementwise):
    """Random ops that map each key (and number beside it) to one result."""

    def __init__(self, *, flops: float, work: Work = "random"):
        super().__init__(flops=flops, work=work)


register("random_seed", "random_fold_in", "threefry2x32")(KeyOp(flops=HASH))
register("random_clone")(KeyOp(flops=MOVE, work="view"))


@register("random_gamma")
class RandomGamma(Rule):
    """Gamma variates: each key serves the minor dims of the shape, by keys that the primitive splits from it inside."""

    def factorise(self, eqn: Equation) -> Factorisation:
        keys, shape = eqn.in_shapes
        factors = FactorList()
        fixed = "the variates of one key are drawn together"
        dims = tuple(factors.add(f"d{d}", n, fixed=fixed if d >= len(keys) else "") for d, n in enumerate(shape))
        return Factorisation(
            factors=factors.done(),
            in_dims=(dims[: len(keys)], dims),
            out_dims=(dims,),
            residuals=((), (1, ~0)),
            flops=GAMMA * elements(shape),
            work="random",
        )


@register("random_wrap", "random_unwrap")
class Words(Rule):
    """Between keys and their words, which are the minor dims of one side."""

    def factorise(self, eqn: Equation) -> Factorisation:
        source, target = eqn.in_shapes[0], eqn.out_shapes[0]
        factors = FactorList()
        keys = factors.dims(min(source, target, key=len))
        longer = max(source, target, key=len)
        words = (*keys, *(factors.add("words", n, fixed="the words of one key") for n in longer[len(keys) :]))
        return Factorisation(
            factors=factors.done(),
            in_dims=(words if len(source) > len(target) else keys,),
            out_dims=(words if len(target) > len(source) else keys,),
            work="view",
        )


@register("random_split")
class RandomSplit(Rule):
    """New keys of each key. They are few: every device makes all that its keys give."""

    def factorise(self, eqn: Equation) -> Factorisation:
        factors = FactorList()
        keys = factors.dims(eqn.in_shapes[0])
        fixed = "the new keys of one key are made together"
        new = tuple(factors.add(f"new{d}", n, fixed=fixed) for d, n in enumerate(eqn.params["shape"]))
        return Factorisation(
            factors=factors.done(),
            in_dims=(keys,),
            out_dims=((*keys, *new),),
            flops=HASH * elements(eqn.out_shapes[0]),
            work="random",
        )


@register("random_bits")
class RandomBits(Rule):
    """Bits of a shape for every key; the shape's dims split where bits can be made by position."""

    def factorise(self, eqn: Equation) -> Factorisation:
        fixed = "" if _by_position(eqn) else "this generator makes its bits in one sequence"
        factors = FactorList()
        keys = factors.dims(eqn.in_shapes[0], "key")
        bits = tuple(factors.add(f"d{d}", n, fixed=fixed) for d, n in enumerate(eqn.params["shape"]))
        return Factorisation(
            factors=factors.done(),
            in_dims=(keys,),
            out_dims=((*keys, *bits),),
            flops=HASH * elements(eqn.out_shapes[0]),
            work="random",
        )

    def local(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        rank = len(eqn.in_shapes[0])
        dims = place.op.out_dims[0][rank:]
        if all(place.parts(dim[0]) == 1 for dim in dims if dim):
            return super().local(eqn, place, args)
        shape = place.local_out(0, eqn.out_shapes[0])[rank:]
        high, low = _positions(eqn.params["shape"], shape, [place.part_index(d[0]) if d else 0 for d in dims])
        words = jax.random.key_data(args[0])
        keys = jnp.expand_dims(words, tuple(range(rank, rank + len(shape))))
        operands = jnp.broadcast_arrays(keys[..., 0], keys[..., 1], high, low)
        return [_bits(operands, eqn.params["bit_width"])]


def _by_position(eqn: Equation) -> bool:
    """Whether an element's bits depend on its key and position only."""
    return bool(jax.config.jax_threefry_partitionable) and str(eqn.inputs[0].aval.dtype) == "key<fry>"


def _positions(whole: tuple[int, ...], part: tuple[int, ...], index: list[Any]) -> tuple[Any, Any]:
    """Row-major positions in an array of shape `whole` of the elements that this device holds, as 32-bit halves."""
    wide = math.prod(whole) > 1 << 32
    high, low = jnp.zeros(part, jnp.uint32), jnp.zeros(part, jnp.uint32)
    for d, size in enumerate(part):
        along = jnp.asarray(index[d]).astype(jnp.uint32) * jnp.uint32(size) + jnp.arange(size, dtype=jnp.uint32)
        along = along.reshape(-1, *(1 for _ in part[d + 1 :]))
        stride = math.prod(whole[d + 1 :])
        if wide:
            more_high, more_low = _wide_product(along, stride)
            low = low + more_low
            high = high + more_high + (low < more_low).astype(jnp.uint32)
        else:
            low = low + along * jnp.uint32(stride)
    return high, low


def _wide_product(x: Any, factor: int) -> tuple[Any, Any]:
    """The 64-bit product of uint32 values and a number, as 32-bit halves, by products of 16-bit halves."""
    mask, shift = jnp.uint32(0xFFFF), jnp.uint32(16)
    f_low, f_mid = jnp.uint32(factor & 0xFFFF), jnp.uint32(factor >> 16 & 0xFFFF)
    x_low, x_high = x & mask, x >> shift
    low, across, athwart = x_low * f_low, x_low * f_mid, x_high * f_low
    middle = (low >> shift) + (across & mask) + (athwart & mask)
    high = x_high * f_mid + (across >> shift) + (athwart >> shift) + (middle >> shift)
    return high + x * jnp.uint32(factor >> 32 & 0xFFFFFFFF), (low & mask) | (middle << shift)


def _bits(operands: list[Any], width: int) -> Any:
    """JAX's own choice of bits from a hashed block."""
    first, second = threefry2x32_p.bind(*operands)
    dtype = jnp.dtype(f"uint{width}")
    if width == 64:
        return (first.astype(dtype) << 32) | second.astype(dtype)
    return (first ^ second).astype(dtype)

"""Casts as they run: each step of `costmodel.sharding.cast` is one JAX collective whose transpose is its backward.

These run inside a fully manual ``jax.shard_map`` with ``check_vma=True``, where JAX knows REPLICATED values as
invariant and all others as varying. A test reads the compiled HLO and finds the collectives of `CastStep.forward` and
`CastStep.backward`, with their bytes, and no others.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from costmodel.sharding import CastStep
from planner.frontend import jax_compat as jc


def apply_cast(x: Any, steps: Sequence[CastStep], axis_names: Sequence[str], mesh: Sequence[int]) -> Any:
    """Runs the steps of a cast on one device's part of a tensor."""
    for step in steps:
        x = _apply(x, step, axis_names[step.axis], mesh[step.axis])
    return x


def _apply(x: Any, step: CastStep, axis: str, size: int) -> Any:
    match step.kind:
        case "vary":
            return lax.pcast(x, (axis,), to="varying")
        case "slice":
            return (
                _slice_of_invariant(x, axis, size, step.dim) if step.invariant else _own_part(x, axis, size, step.dim)
            )
        case "all_gather":
            if step.invariant:
                return jc.all_gather_invariant(x, axis, step.dim)
            return lax.all_gather(x, axis, axis=step.dim, tiled=True)
        case "reduce_scatter":
            return lax.psum_scatter(x, axis, scatter_dimension=step.dim, tiled=True)
        case "all_reduce":
            total = lax.psum(x, axis)
            return total if step.invariant else lax.pcast(total, (axis,), to="varying")
        case "settle":
            first = jnp.where(lax.axis_index(axis) == 0, x, jnp.zeros_like(x))
            return lax.psum(first, axis)
        case "all_to_all":
            return lax.all_to_all(x, axis, split_axis=step.dim, concat_axis=step.from_dim, tiled=True)


def _own_part(x: Any, axis: str, size: int, dim: int) -> Any:
    part = x.shape[dim] // size
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * part, part, dim)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _slice_of_invariant(x: Any, axis: str, size: int, dim: int) -> Any:
    """This device's part of an invariant value.

    JAX would mark the operand varying and transpose to an all-reduce of zero-padded parts; the parts are disjoint, so
    gathering them moves half the bytes and is exact.
    """
    return _own_part(x, axis, size, dim)


def _slice_forward(x: Any, axis: str, size: int, dim: int) -> tuple[Any, None]:
    return _own_part(x, axis, size, dim), None


def _slice_backward(axis: str, size: int, dim: int, _: None, cotangent: Any) -> tuple[Any]:
    return (jc.all_gather_invariant(cotangent, axis, dim),)


_slice_of_invariant.defvjp(_slice_forward, _slice_backward)

"""Concrete parameters, state and batches for a task: small tests and real runs start from these.

Each leaf is drawn from its own generator, seeded by the leaf's path, so that it does not change when others do. The
leaf's name decides, for the families here and, where names follow custom (kernel, bias, scale, embedding), for others.
"""

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from costmodel.errors import InputError
from planner.frontend.task import PyTree, TrainingTask, path_string

EMBEDDING_STD = 0.02
# A unit normal cut at two standard deviations has this standard deviation.
TRUNCATED_STD = 0.87962566
MASKED_SHARE = 0.15
# Parts of a path under which leaves are stacked along a leading dim.
STACKED = ("layers", "rest")
# Batch leaf -> the parameter whose size along a dim bounds its ids.
ID_BOUNDS = {
    "tokens": ("token_embedding", 0),
    "targets": ("token_embedding", 0),
    "inputs": ("token_embedding", 0),
    "decoder_inputs": ("token_embedding", 0),
    "token_types": ("type_embedding", 0),
    "labels": ("head/kernel", 1),
}


def init_params(task: TrainingTask, seed: int = 0) -> PyTree:
    """Random parameters: ones for gains, zeros for biases, embeddings of std 0.02, the rest scaled by fan-in."""

    def one(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        # Flax's variables end in their field `value`.
        name = path_string(path).removesuffix("/value")
        last = name.rsplit("/", 1)[-1]
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or last.endswith("bias"):
            return jnp.zeros(leaf.shape, leaf.dtype)
        if last in ("scale", "gain") or (last == "weight" and len(leaf.shape) < 2):
            return jnp.ones(leaf.shape, leaf.dtype)
        if last.endswith("embedding"):
            std = EMBEDDING_STD
        else:
            std = 1 / math.sqrt(fan_in(name, leaf.shape))
        return jnp.asarray(_truncated_normal(_generator(seed, name), leaf.shape) * (std / TRUNCATED_STD), leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, task.params)


def fan_in(name: str, shape: tuple[int, ...]) -> int:
    """How many inputs each output of a weight sums over, from its path and shape.

    Args:
        name: path such as ``layers/attention/wq``.
        shape: with the leading stack dim, if the path has one.
    """
    *parts, last = name.split("/")
    own = shape[1:] if any(part in STACKED for part in parts) else shape
    if len(own) < 2:
        return max(1, math.prod(own))
    if last in ("wq", "wk", "wv"):
        return own[0]
    if last in ("gate", "up", "down"):
        # Experts are separate weights, not inputs.
        return own[-2]
    return math.prod(own[:-1])


def init_state(task: TrainingTask) -> PyTree:
    """Carried state before the first step: variances are one, everything else zero; None where the task has none."""

    def one(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        last = path_string(path).rsplit("/", 1)[-1]
        return jnp.full(leaf.shape, 1 if last.startswith("var") else 0, leaf.dtype)

    return None if task.state is None else jax.tree_util.tree_map_with_path(one, task.state)


def example_batch(task: TrainingTask, batch_size: int | None = None, seed: int = 0) -> PyTree:
    """A random batch of `batch_size` examples (default: the task's own).

    Integer leaves are ids below their table's size where the name tells the table (`ID_BOUNDS`), else 0 or 1, which
    are legal rows of any table. A leaf named ``mask`` marks about 15% of the positions, at least one an example. Other
    leaves are unit normal.
    """
    size = task.batch_size if batch_size is None else batch_size
    if size < 1:
        raise InputError("MP122", f"batch_size={size} must be at least 1", "give the number of examples")
    sizes = {path_string(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(task.params)}

    def one(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = path_string(path)
        last = name.rsplit("/", 1)[-1]
        generator = _generator(seed, name)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            table, dim = ID_BOUNDS.get(last, ("", 0))
            bound = sizes[table][dim] if table in sizes else 2
            return jnp.asarray(generator.integers(0, bound, leaf.shape), leaf.dtype)
        if last == "mask" and len(leaf.shape) == 2:
            mask = generator.random(leaf.shape) < MASKED_SHARE
            mask[np.arange(leaf.shape[0]), generator.integers(0, leaf.shape[1], leaf.shape[0])] = True
            return jnp.asarray(mask, leaf.dtype)
        if leaf.dtype == jnp.bool_:
            return jnp.asarray(generator.random(leaf.shape) < 0.5)
        return jnp.asarray(generator.standard_normal(leaf.shape, np.float32), leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, task.with_batch_size(size))


def _truncated_normal(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    draws = np.asarray(generator.standard_normal(shape, np.float32))
    while (outside := np.abs(draws) > 2).any():
        draws[outside] = generator.standard_normal(int(outside.sum()), np.float32)
    return draws


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])

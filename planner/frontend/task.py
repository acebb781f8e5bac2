"""The training task as the user states it, and what a microbatch of it means.

A step over a global batch of `m` microbatches computes, with ``fn`` the user's function and ``b_i`` the i-th slice of
every batch leaf along its batch dim:

    mean      loss = sum_i fn(b_i) / m                 sum       loss = sum_i fn(b_i)
    weighted  loss = sum_i s_i / sum_i w_i             where fn returns the pair (s_i, w_i)

carried state goes from microbatch to microbatch in order, and microbatch ``i`` sees ``jax.random.fold_in(rng, i)``.
The executed plan and the one-device reference (`lowering.reference`) both follow exactly this.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from costmodel.errors import InputError

Reduction = Literal["mean", "sum", "weighted"]
PyTree = Any


def abstract(tree: PyTree) -> PyTree:
    """Shapes and dtypes of a pytree; no array is made or kept."""

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        if not hasattr(leaf, "dtype"):
            leaf = np.asarray(leaf)
        dtype = (
            jax.dtypes.canonicalize_dtype(leaf.dtype)
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
            else leaf.dtype
        )
        return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype, weak_type=False)

    return jax.tree.map(one, tree)


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """One training step: ``loss_fn(params, batch[, state=...][, rng=...])`` and an optax optimizer.

    The function returns the loss (or the pair ``(sum, weight)`` when ``reduction="weighted"``); with `state` it
    returns ``(loss, new_state)``; with ``has_aux`` it returns one more element, ``(loss, aux)`` or
    ``(loss, new_state, aux)``.

    Args:
        loss_fn: the user's function of one microbatch.
        params: pytree of arrays or ShapeDtypeStructs. Never materialised for planning.
        batch: pytree of the batch leaves. Sizes along batch dims are placeholders: the plan decides the microbatch.
        optimizer: an optax ``GradientTransformation``.
        reduction: how the loss reduces over the batch.
        batch_dims: pytree prefix of `batch` with each leaf's batch dim, or None for leaves that every microbatch sees
            whole. Default: dim 0 of every leaf with at least one dim.
        frozen: predicate on a parameter's path string (``"layers/attention/wq"``); frozen leaves get no gradient.
        state: carried state (batch statistics), or None.
        rng: True when the function takes ``rng=``, a typed PRNG key.
        has_aux: whether the function returns aux outputs.
        independent_microbatches: each microbatch's own statistics (batch norm, expert capacity) are what is wanted:
            skips the check that microbatches keep the loss's meaning.
        name: for plan files and reports.
        tokens_per_example: for throughput in tokens; None means throughput in examples.
    """

    loss_fn: Callable[..., Any]
    params: PyTree
    batch: PyTree
    optimizer: Any
    reduction: Reduction = "mean"
    batch_dims: PyTree = field(default=0)
    frozen: Callable[[str], bool] | None = None
    state: PyTree = None
    rng: bool = False
    has_aux: bool = False
    independent_microbatches: bool = False
    name: str = "task"
    tokens_per_example: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", abstract(self.params))
        object.__setattr__(self, "batch", abstract(self.batch))
        if self.state is not None:
            object.__setattr__(self, "state", abstract(self.state))
        if self.reduction not in ("mean", "sum", "weighted"):
            raise InputError(
                "MP110",
                f"reduction={self.reduction!r} is not one of 'mean', 'sum', 'weighted'",
                "return (sum, weight) from the loss and declare reduction='weighted' for masked means",
            )
        sizes = {
            shape[dim] for shape, dim in zip(self.batch_shapes, self.batch_dim_list, strict=True) if dim is not None
        }
        if len(sizes) != 1:
            raise InputError(
                "MP111",
                f"batch leaves disagree on the batch size: {sorted(sizes)}",
                "give batch_dims=, a prefix pytree with each leaf's batch dim (None for unsplit leaves)",
            )

    @property
    def batch_shapes(self) -> list[tuple[int, ...]]:
        return [leaf.shape for leaf in jax.tree.leaves(self.batch)]

    @property
    def batch_dim_list(self) -> list[int | None]:
        """Batch dim of every flattened batch leaf; scalars and leaves marked None are seen whole."""
        marks = jax.tree.broadcast(self.batch_dims, self.batch, is_leaf=lambda x: x is None)
        dims = jax.tree.leaves(marks, is_leaf=lambda x: x is None)
        return [dim if shape else None for dim, shape in zip(dims, self.batch_shapes, strict=True)]

    @property
    def batch_size(self) -> int:
        """Size of the batch dim of the example batch."""
        pairs = zip(self.batch_shapes, self.batch_dim_list, strict=True)
        return next(shape[dim] for shape, dim in pairs if dim is not None)

    def with_batch_size(self, size: int) -> PyTree:
        """The abstract batch with `size` examples along every batch dim."""
        leaves, tree = jax.tree.flatten(self.batch)
        resized = [
            leaf if dim is None else jax.ShapeDtypeStruct((*leaf.shape[:dim], size, *leaf.shape[dim + 1 :]), leaf.dtype)
            for leaf, dim in zip(leaves, self.batch_dim_list, strict=True)
        ]
        return jax.tree.unflatten(tree, resized)


def path_string(path: tuple[Any, ...]) -> str:
    """``layers/attention/wq`` for a JAX key path; the name of a parameter everywhere in plans and messages."""
    return jax.tree_util.keystr(path, simple=True, separator="/")

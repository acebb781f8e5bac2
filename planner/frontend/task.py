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
from planner.frontend.user_code import first_line, user_line

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
        frozen: predicate on a parameter's path string (``"layers/attention/wq"``), or a pytree of booleans that is a
            prefix of `params`; frozen leaves get no gradient.
        state: carried state (batch statistics), or None.
        rng: True when the function takes ``rng=``, a typed PRNG key.
        has_aux: whether the function returns aux outputs.
        independent_microbatches: each microbatch's own statistics (batch norm, expert capacity) are what is wanted:
            skips the check that microbatches keep the loss's meaning.
        name: for plan files and reports.
        tokens_per_example: for throughput in tokens; None means throughput in examples.
    """

    loss_fn: Callable[..., Any] = field(kw_only=False)
    params: PyTree
    batch: PyTree
    optimizer: Any
    reduction: Reduction = "mean"
    batch_dims: PyTree = field(default=0)
    frozen: Callable[[str], bool] | PyTree | None = None
    state: PyTree = None
    rng: bool = False
    has_aux: bool = False
    independent_microbatches: bool = False
    name: str = "task"
    tokens_per_example: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise InputError(
                "MP114",
                f"loss_fn is a {type(self.loss_fn).__name__}, not a function",
                "give the function itself: TrainingTask(loss_fn, params=..., batch=..., optimizer=...)",
            )
        if not all(callable(getattr(self.optimizer, name, None)) for name in ("init", "update")):
            raise InputError(
                "MP115",
                f"the optimizer is a {type(self.optimizer).__name__} without the functions init and update",
                "give an optax GradientTransformation, such as optax.adamw(1e-4)",
            )
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
        if self.frozen is not None:
            frozen = self.frozen if callable(self.frozen) else _frozen_paths(self.frozen, self.params).__contains__
            object.__setattr__(self, "frozen", frozen)
            _try_predicate(frozen, self.params)
        self._check_batch()

    def _check_batch(self) -> None:
        hint = "give batch_dims=, a prefix pytree with each leaf's batch dim (None for unsplit leaves)"
        try:
            dims = self.batch_dim_list
        except ValueError as error:
            raise InputError("MP111", f"batch_dims is no prefix of the batch: {first_line(error)}", hint) from None
        paths = [path_string(path) or "batch" for path, _ in jax.tree_util.tree_leaves_with_path(self.batch)]
        sizes = {}
        for path, shape, dim in zip(paths, self.batch_shapes, dims, strict=True):
            if dim is None:
                continue
            if isinstance(dim, bool) or not isinstance(dim, int) or not 0 <= dim < len(shape):
                message = f"batch_dims of {path} is {dim!r}; the leaf of shape {shape} has dims 0 to {len(shape) - 1}"
                raise InputError("MP111", message, hint)
            sizes[path] = shape[dim]
        if not sizes:
            raise InputError("MP111", "no leaf of the batch has a batch dim, so there is nothing to split", hint)
        if len(set(sizes.values())) != 1:
            found = ", ".join(f"{path} has {size}" for path, size in list(sizes.items())[:6])
            raise InputError("MP111", f"batch leaves disagree on the batch size: {found}", hint)

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


def _frozen_paths(marks: PyTree, params: PyTree) -> frozenset[str]:
    """Paths of the parameters that a pytree of booleans, a prefix of the parameters, marks as frozen."""
    hint = (
        'frozen=lambda path: path.startswith("embedding"), or a pytree of booleans that is a prefix of the parameters'
    )
    wrong = [mark for mark in jax.tree.leaves(marks) if not isinstance(mark, bool | np.bool_)]
    if wrong or not jax.tree.leaves(marks):
        got = f"it holds {wrong[0]!r}" if wrong else f"got {marks!r}"
        message = f"frozen is a predicate on a parameter's path string, or a pytree of booleans; {got}"
        raise InputError("MP114", message, hint)
    try:
        spread = jax.tree.leaves(jax.tree.broadcast(marks, params))
    except ValueError as error:
        message = f"frozen has not the structure of the parameters: {first_line(error)}"
        raise InputError("MP114", message, hint) from None
    paths = [path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return frozenset(path for path, mark in zip(paths, spread, strict=True) if mark)


def _try_predicate(frozen: Callable[[str], bool], params: PyTree) -> None:
    paths = [path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    marks = []
    for text in paths:
        try:
            marks.append(bool(frozen(text)))
        except Exception as error:  # whatever the user's function raises
            message = f"frozen({text!r}) failed{user_line(error)}: {first_line(error)}"
            hint = "frozen is a predicate on a parameter's path string, which has its keys joined by /"
            raise InputError("MP114", message, hint) from error
    if marks and all(marks):
        message = f"frozen says that all {len(marks)} parameters are frozen, so that nothing is trained"
        raise InputError("MP114", message, "frozen is true of those that stay as they are; leave it out to train all")


def path_string(path: tuple[Any, ...]) -> str:
    """``layers/attention/wq`` for a JAX key path; the name of a parameter everywhere in plans and messages."""
    return jax.tree_util.keystr(path, simple=True, separator="/")

"""The user's loss function as a flat program: its leaves by name, traced on abstract values. No array is ever made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from costmodel.errors import InputError
from costmodel.graph import Role
from planner.frontend import jax_compat as jc
from planner.frontend.flat import Program, flatten
from planner.frontend.task import TrainingTask, path_string
from planner.frontend.user_code import first_line, user_line


@dataclass(frozen=True, eq=False)
class InputInfo:
    """A leaf of the task: what it is, and its place in its own pytree."""

    role: Role
    path: str
    leaf: int
    trained: bool = False


def input_names(task: TrainingTask) -> dict[str, InputInfo]:
    """Name of every leaf of the task, in the order of the traced function's arguments."""
    names: dict[str, InputInfo] = {}
    for role, tree in (("param", task.params), ("batch", task.batch), ("state", task.state)):
        prefix = "" if role == "param" else f"{role}:"
        for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
            text = path_string(path)
            floating = role == "param" and jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
            trained = floating and not (task.frozen is not None and task.frozen(text))
            names[f"{prefix}{text}" or f"{role}"] = InputInfo(role, text, i, trained)  # type: ignore[arg-type]
    if task.rng:
        names["rng"] = InputInfo("rng", "rng", 0)
    return names


def trace(task: TrainingTask, microbatch: int) -> tuple[Program, Any, int]:
    """The flat program of one microbatch, the aux tree, and the number of aux leaves."""
    found: dict[str, Any] = {}
    run = flat_function(task, found)
    try:
        closed = jax.make_jaxpr(run)(*_abstract_leaves(task, microbatch))
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            "MP113",
            f"tracing the loss function with a microbatch of {microbatch} failed{user_line(error)}: "
            f"{first_line(error)}",
            "the function must trace under jax.make_jaxpr with ShapeDtypeStructs; "
            "sizes along batch dims must not be hard-wired",
        ) from error
    return flatten(closed, list(input_names(task))), found["aux_tree"], found["aux_tree"].num_leaves


def flat_function(task: TrainingTask, found: dict[str, Any]) -> Callable[..., list[Any]]:
    """The user's function on flat leaves -> [loss or sum, weight; state leaves; aux leaves]. Fills
    `found["aux_tree"]`."""
    trees = [jax.tree.structure(t) for t in (task.params, task.batch, task.state)]
    sizes = np.cumsum([t.num_leaves for t in trees])

    def run(*leaves: Any) -> list[Any]:
        params, batch, state = (
            jax.tree.unflatten(t, leaves[end - t.num_leaves : end]) for t, end in zip(trees, sizes, strict=True)
        )
        extra: dict[str, Any] = {}
        if task.state is not None:
            extra["state"] = state
        if task.rng:
            extra["rng"] = leaves[sizes[-1]]
        result = task.loss_fn(params, batch, **extra)
        parts = list(result) if task.state is not None or task.has_aux else [result]
        expected = 1 + (task.state is not None) + task.has_aux
        if len(parts) != expected:
            raise InputError(
                "MP112",
                f"the loss function returned {len(parts)} values where this task declares {expected}",
                "state= adds one returned value and has_aux=True another: (loss, new_state, aux)",
            )
        loss = parts.pop(0)
        if task.reduction == "weighted":
            if not (isinstance(loss, tuple) and len(loss) == 2):
                raise InputError(
                    "MP112",
                    "reduction='weighted' needs the loss function to return the pair (sum, weight)",
                    "return (jnp.sum(per_token * mask), jnp.sum(mask))",
                )
            losses = [loss[0], _real_weight(loss[1])]
        else:
            losses = [loss]
        for what, value in zip(("loss", "weight"), losses, strict=False):
            if np.shape(value) != ():
                raise InputError(
                    "MP112",
                    f"the {what} has shape {np.shape(value)}; a {what} is a scalar",
                    "reduce it (jnp.mean), or declare reduction='weighted' and return (sum, weight)",
                )
            dtype = jax.numpy.asarray(value).dtype
            if not jax.numpy.issubdtype(dtype, jax.numpy.floating):
                hint = f"make it a float32, such as {what}.astype(jnp.float32)"
                raise InputError("MP112", f"the {what} has dtype {dtype}; a {what} is a real number", hint)
        new_state = jax.tree.leaves(parts.pop(0)) if task.state is not None else []
        if task.state is not None and len(new_state) != trees[2].num_leaves:
            raise InputError(
                "MP112",
                f"the new state has {len(new_state)} leaves, the old one {trees[2].num_leaves}",
                "return the state with the structure it came in",
            )
        aux, found["aux_tree"] = jax.tree.flatten(parts.pop(0) if task.has_aux else None)
        return _distinct([*losses, *new_state, *aux], leaves)

    return run


def _real_weight(weight: Any) -> Any:
    """A weight that was counted (the sum of a boolean mask) as a real number."""
    dtype = jnp.asarray(weight).dtype
    counted = dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer)
    return jnp.asarray(weight, jnp.promote_types(dtype, jnp.float32)) if counted else weight


def _distinct(outputs: list[Any], leaves: Sequence[Any]) -> list[Any]:
    """Outputs that are values of their own: one that is an input, or an earlier output too (the loss as an aux output),
    is copied, so that each can be handed out in its own sharding."""
    seen = {id(x) for x in leaves}
    result = []
    for x in outputs:
        if id(x) in seen and isinstance(x, jax.Array) and not jc.is_key(x.dtype):
            x = jnp.copy(x)
        seen.add(id(x))
        result.append(x)
    return result


def _abstract_leaves(task: TrainingTask, microbatch: int) -> list[Any]:
    leaves = [
        *jax.tree.leaves(task.params),
        *jax.tree.leaves(task.with_batch_size(microbatch)),
        *jax.tree.leaves(task.state),
    ]
    if task.rng:
        leaves.append(jax.eval_shape(lambda: jax.random.key(0)))
    return leaves

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
        at = _user_line(error)
        raise InputError(
            "MP113",
            f"tracing the loss function with a microbatch of {microbatch} failed{at}: "
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
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
            losses = list(loss)
        else:
            losses = [loss]
        for value in losses:
            if np.shape(value) != ():
                raise InputError(
                    "MP112",
                    f"the loss has shape {np.shape(value)}; a loss is a scalar",
                    "reduce it (jnp.mean), or declare reduction='weighted' and return (sum, weight)",
                )
            if not jax.numpy.issubdtype(jax.numpy.asarray(value).dtype, jax.numpy.floating):
                raise InputError(
                    "MP112", f"the loss has dtype {jax.numpy.asarray(value).dtype}; a loss is a real number", ""
                )
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


def _user_line(error: BaseException) -> str:
    """`` at file.py:12 (function)``: the innermost frame outside JAX and meshplan."""
    trace_, found = error.__traceback__, ""
    while trace_ is not None:
        code = trace_.tb_frame.f_code
        if "site-packages/jax" not in code.co_filename and "planner/frontend" not in code.co_filename:
            found = f" at {code.co_filename.rsplit('/', 1)[-1]}:{trace_.tb_lineno} ({code.co_name})"
        trace_ = trace_.tb_next
    return found

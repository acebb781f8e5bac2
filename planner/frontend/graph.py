"""The JAX-free record of a capture, with the facts of parameters and optimizer state that memory needs."""

from collections import Counter

import jax
import jax.numpy as jnp
import optax

import costmodel.graph as pure
from planner.frontend.capture import Capture
from planner.frontend.flat import Value
from planner.frontend.optimizer import abstract_state
from planner.frontend.task import TrainingTask, path_string
from planner.frontend.update_joins import update_joins


def model_graph(capture: Capture, joins: pure.UpdateJoins | None = None) -> pure.ModelGraph:
    """The pure graph of a capture.

    Args:
        joins: what the optimizer joins, where it is known (it is the same at every microbatch size).
    """
    classes = {
        key: pure.BlockClass(
            key=key,
            ops=tuple(cls.ops.values()),
            tensors=cls.tensors,
            inputs=tuple(v.name for v in cls.program.inputs),
            outputs=tuple(o.name if isinstance(o, Value) else "" for o in cls.program.outputs),
        )
        for key, cls in capture.classes.items()
    }
    blocks = tuple(
        pure.Block(name=b.name, class_key=b.cls.key, inputs=b.inputs, outputs=b.outputs) for b in capture.blocks
    )
    dims = capture.task.batch_dim_list
    return pure.ModelGraph(
        name=capture.task.name,
        microbatch=capture.microbatch,
        classes=classes,
        blocks=blocks,
        values=dict(capture.values),
        batch_dims={name: dims[info.leaf] for name, info in capture.inputs.items() if info.role == "batch"},
        params=parameter_facts(capture.task),
        loss=tuple(o.name if isinstance(o, Value) else "" for o in capture.loss),
        results=tuple(o.name for o in (*capture.state, *capture.aux) if isinstance(o, Value)),
        carried=_carried(capture),
        joins=_joins(capture) if joins is None else joins,
    )


def _joins(capture: Capture) -> pure.UpdateJoins:
    leaves = {path or "param": leaf for path, leaf in trained_tree(capture.task).items()}
    stacks = {s.value for b in capture.blocks for s in b.inputs if s.index is not None and s.value in leaves}
    return update_joins(capture.task, leaves, {name: leaves[name].shape[0] for name in sorted(stacks)})


def _carried(capture: Capture) -> dict[str, str]:
    leaves = [name for name, info in capture.inputs.items() if info.role == "state"]
    return {name: o.name for name, o in zip(leaves, capture.state, strict=True) if isinstance(o, Value)}


def parameter_facts(task: TrainingTask) -> dict[str, pure.Parameter]:
    """Facts of every parameter leaf by name."""
    leaves = [(path_string(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(task.params)]
    state_bytes = optimizer_bytes(task)
    facts = {}
    for path, leaf in leaves:
        floating = jnp.issubdtype(leaf.dtype, jnp.inexact)
        trained = floating and not (task.frozen is not None and task.frozen(path))
        elements = max(1, leaf.size)
        facts[path or "param"] = pure.Parameter(
            path=path,
            shape=tuple(leaf.shape),
            dtype=str(leaf.dtype),
            itemsize=leaf.dtype.itemsize,
            trained=trained,
            gradient_dtype=str(leaf.dtype),
            gradient_itemsize=leaf.dtype.itemsize,
            optimizer_bytes_per_element=state_bytes.get(path, 0) / elements if trained else 0.0,
        )
    return facts


def trained_tree(task: TrainingTask) -> dict[str, jax.ShapeDtypeStruct]:
    """The trained leaves by path: what the optimizer sees (a flat dict, so that frozen leaves need no mask)."""
    return {
        path_string(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(task.params)
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not (task.frozen is not None and task.frozen(path_string(path)))
    }


def abstract_optimizer_state(task: TrainingTask) -> optax.OptState:
    """The optimizer's state for the trained leaves, abstractly."""
    return abstract_state(task, trained_tree(task))


def optimizer_bytes(task: TrainingTask) -> Counter[str]:
    """Bytes of optimizer state that belong to each parameter, by path: leaves under that name in the state tree."""
    found: Counter[str] = Counter()
    trained = trained_tree(task)
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_optimizer_state(task)):
        owner = next(
            (str(key.key) for key in reversed(path) if isinstance(key, jax.tree_util.DictKey) and key.key in trained),
            None,
        )
        if owner is not None:
            found[owner] += leaf.size * leaf.dtype.itemsize
    return found

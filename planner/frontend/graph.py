"""The JAX-free record of a capture, with the facts of parameters and optimizer state that memory needs."""

from collections import Counter
from dataclasses import dataclass, field

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
    state = optimizer_bytes(capture.task)
    return pure.ModelGraph(
        name=capture.task.name,
        microbatch=capture.microbatch,
        classes=classes,
        blocks=blocks,
        values=dict(capture.values),
        batch_dims={name: dims[info.leaf] for name, info in capture.inputs.items() if info.role == "batch"},
        params=parameter_facts(capture.task, state),
        loss=tuple(o.name if isinstance(o, Value) else "" for o in capture.loss),
        results=tuple(o.name for o in (*capture.state, *capture.aux) if isinstance(o, Value)),
        carried=_carried(capture),
        joins=_joins(capture) if joins is None else joins,
        optimizer_bytes=state.unowned,
    )


def _joins(capture: Capture) -> pure.UpdateJoins:
    leaves = {path or "param": leaf for path, leaf in trained_tree(capture.task).items()}
    stacks = {s.value for b in capture.blocks for s in b.inputs if s.index is not None and s.value in leaves}
    return update_joins(capture.task, leaves, {name: leaves[name].shape[0] for name in sorted(stacks)})


def _carried(capture: Capture) -> dict[str, str]:
    leaves = [name for name, info in capture.inputs.items() if info.role == "state"]
    return {name: o.name for name, o in zip(leaves, capture.state, strict=True) if isinstance(o, Value)}


def parameter_facts(task: TrainingTask, state: "OptimizerBytes") -> dict[str, pure.Parameter]:
    """Facts of every parameter leaf by name."""
    leaves = [(path_string(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(task.params)]
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
            optimizer_bytes_per_element=state.alike[path] / elements if trained else 0.0,
            optimizer_whole_bytes=state.others[path] if trained else 0,
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


@dataclass
class OptimizerBytes:
    """Bytes of optimizer state.

    Attributes:
        alike, others: parameter path -> bytes of leaves under that name, in the parameter's shape and in other shapes.
        unowned: of leaves that are under no parameter's name.
    """

    alike: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    unowned: int = 0


def optimizer_bytes(task: TrainingTask) -> OptimizerBytes:
    """What the optimizer's state takes, by whose it is: a leaf belongs to the parameter whose name is in its path."""
    found = OptimizerBytes()
    trained = trained_tree(task)
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_optimizer_state(task)):
        keys = (str(key.key) for key in reversed(path) if isinstance(key, jax.tree_util.DictKey))
        owner = next((key for key in keys if key in trained), None)
        size = leaf.size * leaf.dtype.itemsize
        if owner is None:
            found.unowned += size
        elif leaf.shape == trained[owner].shape:
            found.alike[owner] += size
        else:
            found.others[owner] += size
    return found

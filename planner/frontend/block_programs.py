"""The block classes of captured models as exported programs, for a profiler that knows nothing of captures.

Of each class, whole and on one device: F makes its results and what the backward pass keeps; the backward pass makes
all cotangents of it, or those of activations alone (B), so that W is the difference; the update is the optimizer's, of
the parameters that one block reads. Of layers that the model runs in a loop, the passes run over several.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax

from planner.frontend import jax_compat as jc
from planner.frontend.block_passes import LayerLoop, Passes
from planner.frontend.blocks import BlockClass
from planner.frontend.capture import Capture
from planner.frontend.flat import Value
from planner.frontend.op_programs import index_bound, serialised
from profiles.blockbench import BlockProgram

MOST_LAYERS = 4
"""Layers in a loop that is timed: with eight, one of gpt's, llama's and bert's took as long on a CPU as with four."""

MOST_BYTES = 2 << 30
"""Of what the blocks of such a loop take, make and keep; more might not fit where one block does."""


def block_programs(
    captures: Capture | Iterable[Capture], *, platforms: Sequence[str] | None = None
) -> tuple[BlockProgram, ...]:
    """Programs of every block class.

    Args:
        captures: of one model at the microbatch sizes of interest.
        platforms: what to export for (``cpu``, ``cuda``, ``rocm``, ``tpu``); the default backend's if None.

    Returns:
        One entry a class and size. A class that does not export is there with its `problem`.
    """
    listed = (captures,) if isinstance(captures, Capture) else tuple(captures)
    return tuple(_program(one, key, platforms) for one in listed for key in one.classes)


def _program(capture: Capture, key: str, platforms: Sequence[str] | None) -> BlockProgram:
    cls = capture.classes[key]
    counts = Counter(block.cls.key for block in capture.blocks)
    values = [*cls.program.inputs, *(v for v in cls.program.outputs if isinstance(v, Value))]
    facts: dict[str, Any] = {
        "block_class": key,
        "name": next((block.name for block in capture.blocks if block.cls.key == key), key),
        "microbatch": capture.microbatch,
        "count": counts[key],
        "flops": cls.flops,
        "memory_bytes": sum(prod(v.shape) * jc.itemsize(v.aval.dtype) for v in values),
        "dtype": _dtype(cls),
        "below": _below(cls),
    }
    try:
        one = Passes(cls)
        loop = _loop(capture, cls, int(facts["memory_bytes"]) + one.saved_bytes)
        passes = one if loop is None else Passes(cls, loop)
        forward, backward, activations = passes.exported(platforms)
        facts |= {"saved_bytes": one.saved_bytes, "taken": tuple(passes.taken)}
        facts |= {} if loop is None else {"layers": loop.length}
    except Exception as error:  # whatever a primitive's tracing or lowering throws: the profile records it as a gap
        return BlockProgram(problem=_not_exported(error), **facts)
    try:
        update = _update(capture, cls, platforms)
    except Exception as error:  # the user's optimizer, given the parameters of one block alone
        return BlockProgram(
            forward=forward,
            backward=backward,
            backward_activations=activations,
            update_problem=_not_exported(error),
            **facts,
        )
    return BlockProgram(forward=forward, backward=backward, backward_activations=activations, update=update, **facts)


def _loop(capture: Capture, cls: BlockClass, each_bytes: int) -> LayerLoop | None:
    """The loop in which the model has blocks of a class, shortened to `MOST_LAYERS` and `MOST_BYTES`; None where it has
    them on their own, or two are too large.

    Args:
        each_bytes: of what a block takes, makes and keeps.
    """
    counts = Counter(block.run for block in capture.blocks if block.cls.key == cls.key and block.run >= 0)
    if not counts:
        return None
    run, count = counts.most_common(1)[0]
    length = min(count, MOST_LAYERS, MOST_BYTES // max(1, each_bytes))
    return LayerLoop(capture.runs[run].kinds, length, capture.runs[run].reverse) if length > 1 else None


def _not_exported(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"not exported: {type(error).__name__}: {text[0] if text else ''}"


def _dtype(cls: BlockClass) -> str:
    """That of the products; of the first floating input where there are none."""
    for equation in cls.program.equations:
        if cls.ops[equation.name].work in ("matmul", "conv"):
            return next(str(one.aval.dtype) for one in equation.inputs if isinstance(one, Value))
    floats = (str(v.aval.dtype) for v in cls.program.inputs if jnp.issubdtype(v.aval.dtype, jnp.floating))
    return next(floats, "float32")


def _below(cls: BlockClass) -> int:
    """What integers in a block stay below: the size of the smallest dim that is indexed, else 2."""
    bounds = [
        index_bound(e, 0) for e in cls.program.equations if e.primitive.name in ("gather", "scatter", "scatter-add")
    ]
    return min((bound for bound in bounds if bound > 1), default=2)


def _update(capture: Capture, cls: BlockClass, platforms: Sequence[str] | None) -> bytes | None:
    """The optimizer's update of the parameters that one block reads; None where it trains none."""
    params = {
        value.name: jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype)
        for value in cls.program.inputs
        if cls.tensors[value.name].role == "param" and cls.tensors[value.name].needs_grad
    }
    if not params:
        return None
    optimizer = capture.task.optimizer
    state = jax.eval_shape(optimizer.init, params)
    arguments, tree = jax.tree.flatten((params, params, state))

    def update(*leaves: Any) -> list[Any]:
        values, gradients, old = jax.tree.unflatten(tree, leaves)
        changes, new = optimizer.update(gradients, old, values)
        return jax.tree.leaves((optax.apply_updates(values, changes), new))

    return serialised(update, arguments, platforms)

"""A model's chunks run one after the other on one device, without a pipeline."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from planner.frontend.capture import capture
from planner.frontend.chunks.rewrite import slice_name
from planner.frontend.chunks.walk import ChunkedModel, chunked_model
from planner.frontend.flat import Value
from planner.frontend.task import TrainingTask
from planner.lowering.spmd import LocalProgram


def loss_in_chunks(task: TrainingTask, examples: int, chunks: int) -> Callable[..., Any]:
    """The loss parts of one microbatch, each summed over chunks, as a function of parameters, batch (and key)."""
    model = chunked_model(capture(task, examples), chunks)

    def loss(params: Any, batch: Any, rng: Any = None) -> list[Any]:
        leaves = {"param": jax.tree.leaves(params), "batch": jax.tree.leaves(batch), "rng": [rng]}
        given = {name: leaves[info.role][info.leaf] for name, info in model.capture.inputs.items()}
        held: dict[str, Any] = {}
        totals: list[Any] = []
        for at in range(chunks):
            parts = _run_chunk(model, at, dict(given), held)
            totals = parts if at == 0 else [a + b for a, b in zip(totals, parts, strict=True)]
        return totals

    return loss


def _run_chunk(model: ChunkedModel, at: int, env: dict[str, Any], held: dict[str, Any]) -> list[Any]:
    env.update({v.name: jnp.asarray(x) for v, x in model.capture.program.constants.items()})
    stacks: dict[str, dict[int, Any]] = {}
    for block in model.capture.blocks:
        found = model.chunk_class(block, at)
        args = []
        for source in block.inputs:
            if source.value in stacks:
                env[source.value] = jnp.stack([x for _, x in sorted(stacks.pop(source.value).items())])
            x = env[source.value]
            args.append(x if source.index is None else x[source.index])
        args += [held[f"{block.name}.{slice_name(name, chunk)}"] for name, chunk in found.earlier.values()]
        program = found.cls.program
        local = LocalProgram(program=program, ops=found.cls.ops, strategies={}, mesh=(), axis_names=())
        outs, _ = local(args, [()] * len(args))
        assert [x.shape for x in outs] == [o.shape for o in program.outputs]
        for source, x in zip(block.outputs, outs, strict=False):
            if source.index is None:
                env[source.value] = x
            else:
                stacks.setdefault(source.value, {})[source.index] = x
        for name, x in zip(found.own, outs[len(block.outputs) :], strict=True):
            held[f"{block.name}.{slice_name(name, at)}"] = x
    return [env[o.name] if isinstance(o, Value) else jnp.asarray(o.value) / model.chunks for o in model.capture.loss]

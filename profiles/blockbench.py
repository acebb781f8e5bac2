"""Times of whole blocks of a model, which come as `jax.export` artefacts: forward, backward and update apart."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import export

from profiles.device_loop import DeviceLoop
from profiles.opbench import time_exported
from profiles.schema import BlockTime, Sample
from profiles.timing import MeasurementError, combine, rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProgram:
    """A block class of a model on one device, to be timed.

    Attributes:
        block_class: `costmodel.graph.BlockClass.key`; name: of the first of its blocks, for people.
        microbatch: examples; count: blocks of the class in the model.
        layers: blocks that the passes run over, in a loop as the model has them in.
        forward: exported: inputs to results and what the backward pass keeps.
        backward: exported: the inputs at the places `taken`, what else is kept, and cotangents of the results, to all
            cotangents; None where it makes none.
        backward_activations: the same to cotangents of activations alone; None where there are none.
        update: exported: the optimizer's, of the block's own parameters; None with the `update_problem`, if it has any.
        below: what integer arguments stay below, as they index.
        saved_bytes: what a block keeps and is no parameter.
        flops, memory_bytes: of a block's forward pass; dtype: of its products.
        problem: why there is no program, where there is none.
    """

    block_class: str
    name: str = ""
    microbatch: int
    count: int = 1
    layers: int = 1
    forward: bytes = b""
    backward: bytes | None = None
    backward_activations: bytes | None = None
    taken: tuple[int, ...] = ()
    update: bytes | None = None
    update_problem: str = ""
    below: int = 2
    saved_bytes: int = 0
    flops: float = 0.0
    memory_bytes: int = 0
    dtype: str = "float32"
    problem: str = ""


def time_block(program: BlockProgram, loop: DeviceLoop, runs_s: float) -> BlockTime:
    """Times a block with every device running it whole, and what it reads in memory: the others ran since it last did.

    W is what the whole backward pass takes longer than the part that makes the cotangents of activations.

    Raises:
        MeasurementError: it has no program, does not fit, or is too short to tell.
    """
    if program.problem:
        raise MeasurementError(program.problem)

    def timed(artefact: bytes | None, share: float, runs: int) -> Sample | None:
        if artefact is None:
            return None
        arguments = len(export.deserialize(bytearray(artefact)).in_avals)
        sample = time_exported(artefact, (program.below,) * arguments, loop, runs_s * share, cold=True)
        return combine(sample, repeats=runs, call_s=0.0, each_s=0.0)

    forward = timed(program.forward, 0.25, program.layers)
    assert forward is not None
    whole = timed(program.backward, 0.4, program.layers)
    activations = timed(program.backward_activations, 0.25, program.layers)
    update = timed(program.update, 0.1, 1)
    samples = [one for one in (forward, whole, activations, update) if one is not None]
    whole_s = whole.time_s if whole is not None else 0.0
    backward_s = min(activations.time_s, whole_s) if activations is not None else 0.0
    return BlockTime(
        block_class=program.block_class,
        mesh=(1,),
        microbatch=program.microbatch,
        layers=program.layers,
        forward_s=forward.time_s,
        backward_s=backward_s,
        weight_s=rounded(whole_s - backward_s),
        update_s=update.time_s if update is not None else None,
        saved_bytes=program.saved_bytes,
        peak_bytes=max(peak_bytes(one) for one in (program.forward, program.backward) if one is not None),
        spread_s=rounded(math.hypot(*(one.spread_s for one in samples))),
        drift=max((one.drift for one in samples), key=abs),
    )


def peak_bytes(artefact: bytes) -> int:
    """What an exported program takes on a device at most, arguments and results included, as its compiler says."""
    program = export.deserialize(bytearray(artefact))
    arguments: Sequence[Any] = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals]
    stats = jax.jit(program.call).lower(*arguments).compile().memory_analysis()
    if stats is None:
        raise MeasurementError("the compiler does not say what memory it takes")
    whole = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    return int(whole - stats.alias_size_in_bytes)

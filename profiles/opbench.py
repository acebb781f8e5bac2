"""Op times on the attached devices: a grid of matrix products, ops bound by memory, and the ops of a model.

A model's ops come as `jax.export` artefacts (`OpProgram`), so that nothing here knows how a model is captured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from profiles.device_loop import DeviceLoop, Input
from profiles.schema import BandwidthOp, BandwidthSample, MatmulSample, OpTime, Sample
from profiles.timing import LEAST, MeasurementError, rounded

EIGHT_BITS: dict[str, tuple[str, Any]] = {
    "float8": ("float8_e4m3fn", jnp.bfloat16),
    "int8": ("int8", jnp.int32),
}
"""JAX's dtype of the operands, and the result's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpProgram:
    """An op of a model, to be timed.

    Attributes:
        key: `costmodel.graph.Op.key`.
        forward: exported program of the op on one device.
        forward_backward: of its value and the cotangents that the model needs, given the cotangents of the results;
            None where it needs none.
        below: for each argument of `forward_backward` (those of `forward` come first), what an integer argument stays
            below: the size of the dim that it indexes.
        count: times that a step of one microbatch runs it.
        microbatch: examples of the microbatch that it was captured at; 0 where that is not known.
        flops, memory_bytes: of one run, forward.
        dtype: of the first operand: the products' rate is that of this dtype.
        problem: why there is no program, where there is none.
    """

    key: str
    forward: bytes = b""
    forward_backward: bytes | None = None
    below: tuple[int, ...] = ()
    count: int = 1
    microbatch: int = 0
    flops: float = 0.0
    memory_bytes: int = 0
    dtype: str = "float32"
    problem: str = ""


def time_matmul(
    dtype: str, shape: tuple[int, int, int], loop: DeviceLoop, runs_s: float, batch: int = 1
) -> MatmulSample:
    """Times ``[m, k] @ [k, n]`` on every device, or `batch` of them at once.

    Args:
        dtype: of both operands, as in `costmodel.device_kind.PEAK_DTYPES`. The result is of the same, but for eight
            bits: bfloat16 of float8, int32 of int8.
    """
    m, k, n = shape
    lead = (batch,) if batch > 1 else ()
    stored, result = EIGHT_BITS.get(dtype, (dtype, None))

    def call(one: Any, other: Any) -> Any:
        return jnp.matmul(one, other, preferred_element_type=result)

    sample = loop.time(call, [Input((*lead, m, k), stored), Input((*lead, k, n), stored)], runs_s)
    return MatmulSample(dtype=dtype, shape=shape, batch=batch, **sample.figures)


def time_bandwidth(
    op: BandwidthOp, dtype: str, shape: tuple[int, ...], loop: DeviceLoop, runs_s: float
) -> BandwidthSample:
    """Times an op that reads and writes arrays of `shape`: two in and one out (add), else one in and one out."""
    rows = shape[0]
    array, index = Input(shape, dtype), Input((rows,), "int32", below=rows)
    call, inputs = {
        "add": (lambda a, b: a + b, [array, array]),
        "normalise": (_normalise, [array]),
        "gather": (lambda table, rows: jnp.take(table, rows, axis=0, mode="clip"), [array, index]),
    }[op]
    memory_bytes = sum(one.memory_bytes for one in inputs) + array.memory_bytes
    sample = loop.time(call, inputs, runs_s)
    return BandwidthSample(op=op, dtype=dtype, shape=shape, memory_bytes=memory_bytes, **sample.figures)


def _normalise(x: Any) -> Any:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)


def time_op(program: OpProgram, loop: DeviceLoop, runs_s: float, estimate_s: float | None = None) -> OpTime:
    """Times a model's op, forward and backward.

    Args:
        estimate_s: of the forward pass.

    Raises:
        MeasurementError: it has no program, does not fit, or is too short to tell.
    """
    if program.problem:
        raise MeasurementError(program.problem)
    forward = time_exported(program.forward, program.below, loop, runs_s / 3, estimate_s)
    if program.forward_backward is None:
        return OpTime(forward_s=forward.time_s, spread_s=forward.spread_s, drift=forward.drift)
    both = time_exported(program.forward_backward, program.below, loop, runs_s * 2 / 3, 2 * forward.time_s)
    return OpTime(
        forward_s=forward.time_s,
        backward_s=rounded(max(0.0, both.time_s - forward.time_s)),
        spread_s=rounded(math.hypot(forward.spread_s, both.spread_s)),
        drift=max(forward.drift, both.drift, key=abs),
    )


def least_s(program: OpProgram, estimate_s: float) -> float:
    """About what the fewest runs of an op take, with backward passes of twice its forward pass.

    Args:
        estimate_s: of the forward pass.
    """
    return LEAST * estimate_s * (1.0 if program.forward_backward is None else 1.0 + 3.0)


def time_exported(
    artefact: bytes,
    below: Sequence[int],
    loop: DeviceLoop,
    runs_s: float,
    estimate_s: float | None = None,
    *,
    cold: bool = False,
) -> Sample:
    """Times an exported single-device program on every device.

    Args:
        artefact: `jax.export.Exported.serialize()`.
        below: per argument, what integers stay below.
        cold: with its inputs in memory, not in a cache.
    """
    program = export.deserialize(bytearray(artefact))
    bounds = (*below, *(2 for _ in program.in_avals))
    inputs = [Input(tuple(aval.shape), str(aval.dtype), bound) for aval, bound in zip(program.in_avals, bounds)]
    result_bytes = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in program.out_avals)
    return loop.time(program.call, inputs, runs_s, estimate_s=estimate_s, result_bytes=result_bytes, cold=cold)

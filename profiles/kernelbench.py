"""Kernels that a model's layers have beside products: attention, convolutions, and what only moves data.

The rates of large products and long streams are in `opbench`; what is here says how far from them real shapes stay.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from profiles.device_loop import Call, DeviceLoop, Input
from profiles.schema import BandwidthOp, BandwidthSample, KernelOp, KernelSample


def time_kernel(
    op: KernelOp, dtype: str, shape: tuple[int, int, int, int], backward: bool, loop: DeviceLoop, runs_s: float
) -> KernelSample:
    """Times causal self-attention or a 3 x 3 convolution on every device.

    Raises:
        MeasurementError: it does not fit; or whatever the device says of a fused kernel that it does not have.
    """
    call, inputs, flops = _attention(op, dtype, shape) if "attention" in op else _convolution(dtype, shape)

    def with_gradients(*arrays: Any) -> Any:
        result, pull = jax.vjp(call, *arrays)
        return (result, *pull(jnp.ones_like(result)))

    sample = loop.time(with_gradients if backward else call, inputs, runs_s)
    whole = 3.0 * flops if backward else flops
    return KernelSample(op=op, dtype=dtype, shape=shape, backward=backward, flops=whole, **sample.figures)


def _attention(op: KernelOp, dtype: str, shape: tuple[int, int, int, int]) -> tuple[Call, list[Input], float]:
    batch, length, heads, size = shape
    implementation = "cudnn" if op == "fused_attention" else "xla"

    def call(query: Any, key: Any, value: Any) -> Any:
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=implementation)

    return call, [Input(shape, dtype)] * 3, 4.0 * batch * heads * length * length * size


def _convolution(dtype: str, shape: tuple[int, int, int, int]) -> tuple[Call, list[Input], float]:
    batch, height, width, channels = shape
    layout = ("NHWC", "HWIO", "NHWC")

    def call(image: Any, window: Any) -> Any:
        return lax.conv_general_dilated(image, window, (1, 1), "SAME", dimension_numbers=layout)

    inputs = [Input(shape, dtype), Input((3, 3, channels, channels), dtype)]
    return call, inputs, 2.0 * 9 * batch * height * width * channels * channels


def time_moved(op: BandwidthOp, dtype: str, shape: tuple[int, int], loop: DeviceLoop, runs_s: float) -> BandwidthSample:
    """Times an op of `moved_shapes`; its bytes are its operands' and results'."""
    array, vector = Input(shape, dtype), Input(shape[1:], dtype)
    index = Input(shape[:1], "int32", below=shape[0])
    state = Input(shape, "float32")
    call, inputs, results = {
        "rms_normalise": (_rms_normalise, [array, vector], [array]),
        "softmax": (lambda x: jax.nn.softmax(x, axis=-1), [array], [array]),
        "scatter_add": (lambda x, at, rows: x.at[at].add(rows), [array, index, array], [array]),
        "transpose": (lambda x: x.T + jnp.ones((), x.dtype), [array], [array]),
        "reduce": (lambda x: jnp.sum(x, axis=0), [array], [vector]),
        "update": (_update, [state] * 4, [state] * 3),
    }[op]
    memory_bytes = sum(one.memory_bytes for one in (*inputs, *results))
    sample = loop.time(call, inputs, runs_s)
    return BandwidthSample(op=op, dtype=dtype, shape=shape, memory_bytes=memory_bytes, **sample.figures)


def _rms_normalise(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def _update(value: Any, gradient: Any, mean: Any, square: Any) -> tuple[Any, Any, Any]:
    """A step of Adam without its bias corrections."""
    mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient * gradient
    return value - 1e-3 * mean * lax.rsqrt(square + 1e-8), mean, square

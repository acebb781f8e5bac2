"""What one op costs on one device: a roofline with a launch floor.

    R1  time = max(flops / (peak * matmul_efficiency),  bytes / (bandwidth * bandwidth_efficiency),  launch)

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model" (2009). The efficiencies are the
achieved shares that the device kind states. Vector ops are bound by the float32 vector rate (float64's for float64),
taken as it is: they are almost always bound by bandwidth.
"""

from typing import overload

import numpy as np
from numpy.typing import NDArray

from costmodel.device_kind import DeviceKind
from costmodel.provenance import Figure, Provenance, weakest

Floats = NDArray[np.float64]


def peak_flops_per_s(dtype: str, kind: DeviceKind, *, is_matmul: bool) -> Figure:
    """Peak FLOP/s of `kind` for ops on `dtype`, and where that comes from.

    Matrix products: float32 runs on the matrix unit as XLA's default precision does (`tfloat32` on GPUs that have it,
    one bfloat16 pass on TPUs); any float8 is `float8`, int8 and uint8 are `int8`; the rest have a peak of their own.
    Other ops run at the vector rate: float64's for float64 and complex128, else float32's. **A dtype without a peak is
    priced at float32's, marked `assumed`**: bfloat16 on a V100 is not float16.

    Args:
        dtype: JAX name, such as ``bfloat16``.
        kind: the device kind.
        is_matmul: True for matrix products and convolutions.
    """
    peaks = kind.peak_flops_per_s
    key = matmul_peak_key(dtype, kind) if is_matmul else "float64" if dtype in ("float64", "complex128") else "float32"
    if key in peaks:
        return Figure(peaks[key], kind.provenance_of(f"peak_flops_per_s.{key}"))
    return Figure(peaks["float32"], "assumed")


def utilisation_peak(dtype: str, kind: DeviceKind, rated: DeviceKind) -> float:
    """FLOP/s that utilisation (MFU) is a share of: the kind's own peak of matrix products or, where a profile measured
    more (a kind whose peak is a guess), what it reached.

    Args:
        kind: as the cluster has it; rated: with a profile's rates in place of its own.
    """
    reached = peak_flops_per_s(dtype, rated, is_matmul=True).value * rated.matmul_efficiency
    return max(peak_flops_per_s(dtype, kind, is_matmul=True).value, reached)


def matmul_peak_key(dtype: str, kind: DeviceKind) -> str:
    """The key of `DeviceKind.peak_flops_per_s` that bounds matrix products of a dtype on this kind."""
    if dtype in ("float32", "complex64"):
        if kind.platform == "gpu" and "tfloat32" in kind.peak_flops_per_s:
            return "tfloat32"
        return "bfloat16" if kind.platform == "tpu" and "bfloat16" in kind.peak_flops_per_s else "float32"
    if dtype.startswith("float8"):
        return "float8"
    return {"uint8": "int8", "complex128": "float64"}.get(dtype, dtype)


@overload
def op_time_s(
    flops: float, memory_bytes: float, dtype: str, kind: DeviceKind, *, is_matmul: bool, launch_s: float | None = None
) -> float: ...
@overload
def op_time_s(
    flops: Floats, memory_bytes: Floats, dtype: str, kind: DeviceKind, *, is_matmul: bool, launch_s: float | None = None
) -> Floats: ...
def op_time_s(
    flops: float | Floats,
    memory_bytes: float | Floats,
    dtype: str,
    kind: DeviceKind,
    *,
    is_matmul: bool,
    launch_s: float | None = None,
) -> float | Floats:
    """Seconds that an op takes on one device (R1).

    Args:
        flops: floating-point operations of the local shard; a number or an array.
        memory_bytes: bytes read and written in device memory; a number or an array.
        dtype: JAX name of the type that is computed in.
        kind: the device kind.
        is_matmul: True for matrix products and convolutions.
        launch_s: shortest time of an op; the kind's own if None.

    Returns:
        Seconds; 0 for an op of no FLOPs and no bytes, which is none.
    """
    peak = peak_flops_per_s(dtype, kind, is_matmul=is_matmul).value
    rate = peak * kind.matmul_efficiency if is_matmul else peak
    bandwidth = kind.memory_bandwidth_bytes_per_s * kind.bandwidth_efficiency
    floor = kind.launch_s if launch_s is None else launch_s
    if isinstance(flops, np.ndarray) or isinstance(memory_bytes, np.ndarray):
        work, traffic = np.asarray(flops, dtype=np.float64), np.asarray(memory_bytes, dtype=np.float64)
        busy = (work > 0) | (traffic > 0)
        return np.where(busy, np.maximum(np.maximum(work / rate, traffic / bandwidth), floor), 0.0)
    return max(flops / rate, memory_bytes / bandwidth, floor) if flops > 0 or memory_bytes > 0 else 0.0


def roofline_provenance(dtype: str, kind: DeviceKind, *, is_matmul: bool) -> Provenance:
    """How far R1's result can be trusted: the weakest of the figures that it is computed from."""
    peak = peak_flops_per_s(dtype, kind, is_matmul=is_matmul).provenance
    shares = ("matmul_efficiency",) if is_matmul else ()
    fields = (*shares, "memory_bandwidth_bytes_per_s", "bandwidth_efficiency", "launch_s")
    sources: list[Provenance] = [peak, *map(kind.provenance_of, fields)]
    return weakest(*sources)

"""Seconds of one op on one device by the roofline, from its FLOPs and what it moves.

    R1  time = max(flops / rate, bytes / bandwidth, launch)                       `costmodel.compute`, one kind of work
    R2  time = max(sum of flops / rate by kind of work, bytes / bandwidth, launches * launch)      what holds programs

R2 prices loops, branches and functions: their matrix products run at the rate of the matrix unit in their own dtype,
all else at the vector rate, and each trip launches its kernels.
"""

from collections.abc import Mapping

from costmodel.compute import op_time_s, roofline_provenance
from costmodel.device_kind import DeviceKind
from costmodel.graph import Inside, Op, Tensor
from costmodel.provenance import Provenance, weakest


def op_dtype(op: Op, tensors: Mapping[str, Tensor]) -> str:
    """The dtype that an op computes in: a matrix product's first operand's, else the first result's."""
    if is_matmul(op) and op.inputs[0]:
        return tensors[op.inputs[0]].dtype
    return tensors[op.outputs[0]].dtype


def is_matmul(op: Op) -> bool:
    """Whether an op as a whole runs on the matrix unit."""
    return op.work in ("matmul", "conv")


def forward_s(op: Op, dtype: str, kind: DeviceKind, share: float, memory_bytes: float, launch_s: float) -> float:
    """Seconds forward of the `share` of an op that one device runs (R1, R2); `launch_s` of one kernel."""
    if op.inside is not None:
        return _inside_s(op.inside, op.flops, dtype, kind, share, memory_bytes)
    return op_time_s(op.flops * share, memory_bytes, dtype, kind, is_matmul=is_matmul(op), launch_s=launch_s)


def backward_s(op: Op, dtype: str, kind: DeviceKind, share: float, memory_bytes: float, launch_s: float) -> float:
    """The same for the backward pass."""
    if op.inside_backward is not None:
        return _inside_s(op.inside_backward, op.backward_flops, dtype, kind, share, memory_bytes)
    return op_time_s(op.backward_flops * share, memory_bytes, dtype, kind, is_matmul=is_matmul(op), launch_s=launch_s)


def provenance(op: Op, dtype: str, kind: DeviceKind) -> Provenance:
    """The weakest of the figures that an op's roofline is computed from."""
    found = roofline_provenance(dtype, kind, is_matmul=is_matmul(op))
    for name, _ in op.inside.matmul_flops if op.inside is not None else ():
        found = weakest(found, roofline_provenance(name, kind, is_matmul=True))
    return found


def _inside_s(inside: Inside, flops: float, dtype: str, kind: DeviceKind, share: float, memory_bytes: float) -> float:
    """R2. Bytes are at least those of the operands and results around the programs."""
    products = dict(inside.matmul_flops)
    busy_s = sum(
        op_time_s(count * share, 0.0, name, kind, is_matmul=True, launch_s=0.0) for name, count in products.items()
    )
    rest = max(0.0, flops - sum(products.values()))
    busy_s += op_time_s(rest * share, 0.0, dtype, kind, is_matmul=False, launch_s=0.0)
    moved_s = op_time_s(0.0, max(memory_bytes, inside.memory_bytes * share), dtype, kind, is_matmul=False, launch_s=0.0)
    return max(busy_s, moved_s, inside.launches * kind.launch_s)

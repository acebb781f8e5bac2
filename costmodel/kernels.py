"""What an op runs on one device, as kernels whose seconds follow from a few constants of the device kind.

    R1  time = max(matmul / (efficiency * shape) + vector,  memory / bandwidth_efficiency,  launches * launch)
    R2  shape = k/(k + k0) * a/(a + a0)                      of products [m, k] @ [k, n] whose results have a elements,
                1/(1 + sqrt(k0 a0/(k a)))^2                  where a0/a > k0/k, their contraction split;
                                                             times `misaligned_efficiency` where k or n is no multiple
                                                             of 8 elements of 16 bits

with `matmul`, `vector` and `memory` the seconds at full rate of the matrix unit, the vector unit and the memory. R1 is
the roofline of Williams, Waterman and Patterson (2009) with a launch floor. R2 is a saturation law: a product's start
(filling pipelines, loading the first tiles) costs as much as `k0` more steps of its contraction; and its result is made
in waves of tiles, one for each multiprocessor, the last of which is half empty on average, so that `a0` is half a wave
(108 multiprocessors with tiles of 128 x 256 are 1.8e6 elements). A deep product of few results, as weight gradients
are, is split along its contraction: in s parts it makes s a elements of depth k/s, which is fastest at
s^2 = k a0/(k0 a); adding the parts up is not counted.

Where products were measured on the device, one of their range takes what `matmul_table` interpolates between them (L4),
in place of its part of R1 and of R2.

A matrix product's backward pass is a product for each operand that needs a cotangent, with the roles of m, k and n
exchanged; that of other ops is one kernel. Loops, branches and functions (`Op.inside`) are one kernel whose products
run without R2, and each of whose launches counts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from costmodel.compute import matmul_peak_key, peak_flops_per_s, roofline_provenance
from costmodel.device_kind import DeviceKind
from costmodel.graph import Inside, Op, Tensor
from costmodel.matmul_table import MatmulTable
from costmodel.provenance import Provenance, weakest
from costmodel.sharding import Strategy

Floats = NDArray[np.float64]
Dims = tuple[float, float]  # elements of the results, depth k
Shape = tuple[float, float, float, float]  # count, m, k, n of products [m, k] @ [k, n]

ALIGNMENT = 8  # elements of 16 bits: 16 bytes, what tensor cores load at once


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of an op on one device.

    Attributes:
        matmul_s, vector_s, memory_s: seconds at the full rate of each unit.
        launches: kernels that are launched; 0 for an op that is fused into a neighbour's.
        dims: (a, k) of a matrix product, None where R2 does not apply.
        misaligned: whether its operands cannot be loaded in whole 16 bytes.
    """

    matmul_s: float
    vector_s: float
    memory_s: float
    launches: float
    dims: Dims | None = None
    misaligned: bool = False

    def scaled(self, factor: float) -> "Kernel":
        """One that takes so many times as long, whatever binds it."""
        return replace(
            self,
            matmul_s=self.matmul_s * factor,
            vector_s=self.vector_s * factor,
            memory_s=self.memory_s * factor,
            launches=self.launches * factor,
        )


def kernel_s(kernel: Kernel, kind: DeviceKind) -> float:
    """Seconds of one kernel (R1)."""
    busy_s = kernel.vector_s
    if kernel.matmul_s:
        busy_s += kernel.matmul_s / (kind.matmul_efficiency * shape_share(kernel, kind))
    return max(busy_s, kernel.memory_s / kind.bandwidth_efficiency, kernel.launches * kind.launch_s)


def shape_share(kernel: Kernel, kind: DeviceKind) -> float:
    """Share of the large-product rate that a product of this shape achieves (R2)."""
    share = kind.misaligned_efficiency if kernel.misaligned else 1.0
    if kernel.dims is not None:
        area, depth = kernel.dims
        few, shallow = kind.matmul_half_area / area, kind.matmul_half_depth / depth
        share /= (1.0 + math.sqrt(few * shallow)) ** 2 if few > shallow else (1.0 + few) * (1.0 + shallow)
    return share


@dataclass(frozen=True)
class KernelTable:
    """Many kernels as arrays of shape (n,); `dims` is (n, 2), infinite where R2 does not apply."""

    matmul_s: Floats
    vector_s: Floats
    memory_s: Floats
    launches: Floats
    dims: Floats
    misaligned: NDArray[np.bool_]

    @staticmethod
    def of(kernels: Sequence[Kernel]) -> "KernelTable":
        return KernelTable(
            matmul_s=np.array([k.matmul_s for k in kernels]),
            vector_s=np.array([k.vector_s for k in kernels]),
            memory_s=np.array([k.memory_s for k in kernels]),
            launches=np.array([k.launches for k in kernels]),
            dims=np.array([k.dims or (math.inf,) * 2 for k in kernels]).reshape(-1, 2),
            misaligned=np.array([k.misaligned for k in kernels], dtype=bool),
        )

    def seconds(self, kind: DeviceKind) -> Floats:
        """`kernel_s` of each."""
        return kernels_s(
            self.matmul_s,
            self.vector_s,
            self.memory_s,
            self.launches,
            self.dims,
            self.misaligned,
            kind,
        )


def kernels_s(
    matmul_s: Floats,
    vector_s: Floats,
    memory_s: Floats,
    launches: Floats,
    dims: Floats,
    misaligned: NDArray[np.bool_],
    kind: DeviceKind,
) -> Floats:
    """R1 and R2 for arrays that broadcast against each other; `dims` has a and k along its last dim."""
    halves = np.array([kind.matmul_half_area, kind.matmul_half_depth])
    lost = halves / dims
    split = (1.0 + np.sqrt(np.prod(lost, axis=-1))) ** 2
    slower = np.where(lost[..., 0] > lost[..., 1], split, np.prod(1.0 + lost, axis=-1))
    share = np.where(misaligned, kind.misaligned_efficiency, 1.0) / slower
    busy_s = matmul_s / (kind.matmul_efficiency * share) + vector_s
    return np.maximum(np.maximum(busy_s, memory_s / kind.bandwidth_efficiency), launches * kind.launch_s)


def op_dtype(op: Op, tensors: Mapping[str, Tensor]) -> str:
    """The dtype that an op computes in: a matrix product's first operand's, else the first result's."""
    if is_matmul(op) and op.inputs[0]:
        return tensors[op.inputs[0]].dtype
    return tensors[op.outputs[0]].dtype


def is_matmul(op: Op) -> bool:
    """Whether an op as a whole runs on the matrix unit."""
    return op.work in ("matmul", "conv")


def forward_kernels(
    op: Op,
    dtype: str,
    kind: DeviceKind,
    share: float,
    memory_bytes: float,
    strategy: Strategy,
    mesh: Sequence[int],
    products: MatmulTable | None = None,
) -> tuple[Kernel, ...]:
    """Kernels of the `share` of an op's forward pass that one device runs.

    Args:
        memory_bytes: read and written in device memory.
        strategy, mesh: how the op is split, for the shape of its product.
        products: measured on the device.
    """
    if op.inside is not None:
        return (_inside(op.inside, op.flops, dtype, kind, share, memory_bytes),)
    shape = product_shape(op, strategy, mesh) if is_matmul(op) else None
    return (_kernel(op, op.flops * share, memory_bytes, dtype, kind, shape, products=products),)


def backward_kernels(
    op: Op,
    dtype: str,
    kind: DeviceKind,
    share: float,
    memory_bytes: float,
    strategy: Strategy,
    mesh: Sequence[int],
    tensors: Mapping[str, Tensor],
    *,
    products: MatmulTable | None = None,
    launched: bool = False,
) -> tuple[Kernel, ...]:
    """The same for its backward pass; `launched` where it runs in a kernel of its own though the op itself is fused."""
    if op.inside_backward is not None:
        return (_inside(op.inside_backward, op.backward_flops, dtype, kind, share, memory_bytes),)
    shapes = backward_shapes(op, strategy, mesh, tensors)
    if not shapes:
        return (_kernel(op, op.backward_flops * share, memory_bytes, dtype, kind, None, launched=launched),)
    each = len(shapes)
    flops, moved = op.backward_flops * share / each, memory_bytes / each
    return tuple(_kernel(op, flops, moved, dtype, kind, shape, products=products) for shape in shapes)


def backward_shapes(
    op: Op, strategy: Strategy, mesh: Sequence[int], tensors: Mapping[str, Tensor]
) -> tuple[Shape, ...]:
    """`product_shape` of each product of a product's backward pass; none for other ops."""
    wanted = [i for i, name in enumerate(op.inputs[:2]) if name and tensors[name].needs_grad]
    if not is_matmul(op) or len(op.inputs) != 2 or not wanted:
        return ()
    count, m, k, n = product_shape(op, strategy, mesh)
    return tuple((count, m, n, k) if operand == 0 else (count, k, m, n) for operand in wanted)


def product_shape(op: Op, strategy: Strategy, mesh: Sequence[int]) -> Shape:
    """How many products [m, k] @ [k, n] one device computes in an op, and m, k, n: rows are loop dims of the first
    operand and the result, columns of the second, the depth is what is summed over, and dims of both operands and the
    result count products."""
    parts: dict[int, int] = {}
    for axis, code in enumerate(strategy):
        if code >= 0:
            parts[code] = parts.get(code, 1) * mesh[axis]
    one, other = ({f for dim in dims for f in dim} for dims in op.in_dims[:2])
    result = {f for dim in op.out_dims[0] for f in dim}
    count = m = k = n = 1.0
    for index, factor in enumerate(op.factors):
        size = factor.size / parts.get(index, 1)
        if index not in result:
            k *= size if index in other else 1.0  # not the positions of an image: a window's are in the other operand
        elif index in other and index not in one:
            n *= size
        elif index in other:
            count *= size
        else:  # of the first operand, or of neither: positions that a window is moved to
            m *= size
    return count, m, k, n


def measured_product_s(products: MatmulTable | None, shape: Shape, dtype: str) -> tuple[float, Provenance] | None:
    """Seconds of the products of a `product_shape`, from measured ones; None outside of their range, and for parts of
    an element, which ops that are split unevenly would have."""
    if products is None or any(side % 1 or side < 1 for side in shape):
        return None
    count, m, k, n = map(int, shape)
    return products.seconds(m, k, n, dtype, count)


def _kernel(
    op: Op,
    flops: float,
    memory_bytes: float,
    dtype: str,
    kind: DeviceKind,
    shape: Shape | None,
    *,
    products: MatmulTable | None = None,
    launched: bool = False,
) -> Kernel:
    at_peak_s = flops / peak_flops_per_s(dtype, kind, is_matmul=is_matmul(op)).value
    memory_s = memory_bytes / kind.memory_bandwidth_bytes_per_s
    launches = 1.0 if (launched or not op.fuses) and (flops > 0 or memory_bytes > 0) else 0.0
    if not is_matmul(op):
        return Kernel(0.0, at_peak_s, memory_s, launches)
    narrow = matmul_peak_key(dtype, kind) in ("bfloat16", "float16", "float8", "int8")
    if shape is None:
        return Kernel(at_peak_s, 0.0, memory_s, launches)
    count, m, k, n = shape
    timed = measured_product_s(products, shape, dtype)
    if timed is not None:
        return Kernel(timed[0] * kind.matmul_efficiency, 0.0, memory_s, launches)
    return Kernel(
        at_peak_s, 0.0, memory_s, launches, (count * m * n, k), narrow and bool(k % ALIGNMENT or n % ALIGNMENT)
    )


def _inside(inside: Inside, flops: float, dtype: str, kind: DeviceKind, share: float, memory_bytes: float) -> Kernel:
    """Bytes are at least those of the operands and results around the programs."""
    products = dict(inside.matmul_flops)
    matmul_s = sum(
        count * share / peak_flops_per_s(name, kind, is_matmul=True).value for name, count in products.items()
    )
    rest = max(0.0, flops - sum(products.values()))
    return Kernel(
        matmul_s=matmul_s,
        vector_s=rest * share / peak_flops_per_s(dtype, kind, is_matmul=False).value,
        memory_s=max(memory_bytes, inside.memory_bytes * share) / kind.memory_bandwidth_bytes_per_s,
        launches=inside.launches,
    )


def provenance(op: Op, dtype: str, kind: DeviceKind) -> Provenance:
    """The weakest of the figures that an op's kernels are computed from."""
    found = roofline_provenance(dtype, kind, is_matmul=is_matmul(op))
    for name, _ in op.inside.matmul_flops if op.inside is not None else ():
        found = weakest(found, roofline_provenance(name, kind, is_matmul=True))
    return found

"""The single entry point of prices: what an op under a strategy and a cast cost on a mesh of one device kind.

Everything that is scored (plans, baselines, a user's strategy) is scored here. An op's time comes from the profile
where it has the op's shape, else from the kernels of its local shard (`kernels.py`) with the bytes that it moves there
(`traffic.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from costmodel.collective_lines import CollectiveLines
from costmodel.collectives import AxisLink
from costmodel.compute import op_time_s
from costmodel.device_kind import DeviceKind
from costmodel.graph import Op, Tensor
from costmodel.kernels import (
    Kernel,
    backward_kernels,
    backward_shapes,
    forward_kernels,
    is_matmul,
    kernel_s,
    measured_product_s,
    op_dtype,
    product_shape,
    provenance,
)
from costmodel.matmul_table import MatmulTable
from costmodel.provenance import Provenance
from costmodel.resharding import CastTable
from costmodel.sharding import REPLICATED, Spec, Strategy, internal_reductions, local_fraction
from costmodel.traffic import Traffic, has_backward


@dataclass(frozen=True, slots=True)
class OpCost:
    """Seconds of one op on one device, forward and backward, with where the figure comes from."""

    forward_s: float
    backward_s: float
    provenance: Provenance = "datasheet"


@dataclass(frozen=True)
class MeasuredOp:
    """An op's seconds as measured whole on one device, and where from."""

    forward_s: float
    backward_s: float
    provenance: Provenance = "measured"


OpTimes = Mapping[str, MeasuredOp]  # `Op.key` -> seconds of the whole op on one device


@dataclass(kw_only=True)
class Pricing:
    """Prices on one mesh of one kind.

    Args:
        kind: the device kind.
        mesh, axis_names, links: the mesh, without axes of size one, and what each axis sees.
        op_times: measured ops by key; a split op is charged its share.
        products: measured matrix products, for products that were not measured as ops.
        collective_lines: measured collectives inside a node, from a profile.
        slowdown: of the slowest device in the mesh (1 = as the kind states).
    """

    kind: DeviceKind
    mesh: tuple[int, ...]
    axis_names: tuple[str, ...]
    links: tuple[AxisLink, ...]
    op_times: OpTimes = field(default_factory=dict)
    products: MatmulTable | None = None
    collective_lines: CollectiveLines = field(default_factory=CollectiveLines)
    slowdown: float = 1.0
    casts: CastTable = field(init=False)
    _provenances: dict[tuple[str, str, tuple[str, ...]], Provenance] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.casts = CastTable(self.mesh, self.links, self.collective_lines)

    def op(self, op: Op, strategy: Strategy, tensors: Mapping[str, Tensor], traffic: Traffic) -> OpCost:
        """Seconds of an op under a strategy; collectives inside the op included, casts of its operands not."""
        share = local_fraction(op, strategy, self.mesh)
        reduce_s = sum(
            self.collective_s("all_reduce", axis, sum(tensors[o].bytes for o in op.outputs) * share)
            for axis in internal_reductions(op, strategy)
        )
        measured = self.op_times.get(op.key)
        if measured is not None:
            ahead_s, back_s = self._measured_s(measured, op, strategy, share, tensors, traffic)
            return OpCost(ahead_s * self.slowdown + reduce_s, back_s * self.slowdown, measured.provenance)
        if op.work == "view":
            return OpCost(reduce_s, 0.0)
        ahead, back = self.kernels(op, strategy, tensors, traffic)
        ahead_s, back_s = (sum(kernel_s(kernel, self.kind) for kernel in run) for run in (ahead, back))
        provenance = self._provenance(op, op_dtype(op, tensors), strategy)
        return OpCost(ahead_s * self.slowdown + reduce_s, back_s * self.slowdown, provenance)

    def kernels(
        self, op: Op, strategy: Strategy, tensors: Mapping[str, Tensor], traffic: Traffic
    ) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
        """What an op runs on one device under a strategy, forward and backward."""
        if op.work == "view":
            return (), ()
        share, dtype = local_fraction(op, strategy, self.mesh), op_dtype(op, tensors)
        moved = sum(traffic.of(op, strategy, self.mesh))
        ahead = forward_kernels(op, dtype, self.kind, share, moved, strategy, self.mesh, self.products)
        if not has_backward(op, tensors):
            return ahead, ()
        moved = traffic.backward(op, strategy, self.mesh)
        by_index = any(touch.by_index for touch in op.touches)
        back = backward_kernels(
            op, dtype, self.kind, share, moved, strategy, self.mesh, tensors, products=self.products, launched=by_index
        )
        return ahead, back

    def timed_kernels(
        self, op: Op, strategy: Strategy, tensors: Mapping[str, Tensor], traffic: Traffic
    ) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
        """As `kernels`, with a measured op's seconds in place of what follows from its work."""
        measured = self.op_times.get(op.key)
        if measured is None:
            return self.kernels(op, strategy, tensors, traffic)
        share = local_fraction(op, strategy, self.mesh)
        ahead_s, back_s = self._measured_s(measured, op, strategy, share, tensors, traffic)
        back = (Kernel(0.0, back_s, 0.0, 0.0),) if has_backward(op, tensors) else ()
        return (Kernel(0.0, ahead_s, 0.0, 0.0),), back

    def _provenance(self, op: Op, dtype: str, strategy: Strategy) -> Provenance:
        """How far the price of an op can be trusted; few kinds of work differ in it."""
        if self.products is not None and op.inside is None and is_matmul(op):
            timed = measured_product_s(self.products, product_shape(op, strategy, self.mesh), dtype)
            if timed is not None:
                return timed[1]
        products = tuple(name for name, _ in op.inside.matmul_flops) if op.inside is not None else ()
        known = dtype, op.work, products
        if known not in self._provenances:
            self._provenances[known] = provenance(op, dtype, self.kind)
        return self._provenances[known]

    def _measured_s(
        self,
        measured: MeasuredOp,
        op: Op,
        strategy: Strategy,
        share: float,
        tensors: Mapping[str, Tensor],
        traffic: Traffic,
    ) -> tuple[float, float]:
        """One device's seconds of a measured op: its share, but no less than the launch.

        It was measured alone. Where it fuses, what the roofline says that fusing saves of its traffic is taken off.
        """
        ahead_share, back_share = self._shares(op, strategy, share, tensors)
        ahead_s = measured.forward_s * ahead_share
        back_s = measured.backward_s * back_share if any(tensors[n].needs_grad for n in op.inputs if n) else 0.0
        if not op.fuses:
            floor_s = self.kind.launch_s
            return max(ahead_s, floor_s), max(back_s, floor_s) if back_s else 0.0

        def moved_s(memory_bytes: float, launch_s: float) -> float:
            return op_time_s(0.0, memory_bytes, "float32", self.kind, is_matmul=False, launch_s=launch_s)

        fused_s = moved_s(sum(traffic.of(op, strategy, self.mesh)), 0.0)
        saved_s = max(0.0, moved_s(traffic.alone(op, strategy, self.mesh), self.kind.launch_s) - fused_s)
        times = max(1.0, op.backward_flops / op.flops) if op.flops else 1.0
        return max(ahead_s - saved_s, fused_s), max(back_s - times * saved_s, times * fused_s) if back_s else 0.0

    def _shares(self, op: Op, strategy: Strategy, share: float, tensors: Mapping[str, Tensor]) -> tuple[float, float]:
        """What one device's part of an op takes of the whole op's time, forward and backward: `share` of it, or more
        where measured products say that smaller ones achieve less. Never less: what the op achieved is measured, and
        that a part of it achieves more would be a guess."""
        if share == 1.0 or self.products is None or op.inside is not None or not is_matmul(op):
            return share, share
        dtype, whole = op_dtype(op, tensors), (REPLICATED,) * len(self.mesh)

        def seconds(way: Strategy) -> list[float] | None:
            shapes = (product_shape(op, way, self.mesh), *backward_shapes(op, way, self.mesh, tensors))
            timed = [measured_product_s(self.products, shape, dtype) for shape in shapes]
            return None if None in timed else [one[0] for one in timed if one is not None]

        part, all_of_it = seconds(strategy), seconds(whole)
        if part is None or all_of_it is None:
            return share, share
        ahead = max(share, part[0] / all_of_it[0])
        return ahead, max(share, sum(part[1:]) / sum(all_of_it[1:])) if len(part) > 1 else ahead

    def cast_matrix(
        self, tensor: Tensor, sources: Sequence[Spec], targets: Sequence[Spec]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Forward and backward seconds of casting a tensor from each source to each target; infinite without a cast."""
        return self.casts.prices(len(tensor.shape)).matrix(sources, targets, tensor.bytes, tensor.needs_grad)

    def cast(self, tensor: Tensor, source: Spec, target: Spec) -> tuple[float, float]:
        """The same for one pair."""
        forward, backward = self.cast_matrix(tensor, [source], [target])
        return float(forward[0, 0]), float(backward[0, 0])

    def collective_s(self, kind: str, axis: int, size_bytes: float) -> float:
        """Seconds of one collective on a mesh axis."""
        fixed, slope = self.casts.line(kind, axis)
        return fixed + slope * size_bytes

    def accumulate_s(self, touched_bytes: float) -> float:
        """Seconds of reading and writing so many bytes of gradients on one device, in kernels that run anyway."""
        return op_time_s(0.0, touched_bytes, "float32", self.kind, is_matmul=False, launch_s=0.0) * self.slowdown

    def update_s(self, touched_bytes: float) -> float:
        """Seconds of an optimizer update that reads and writes so many bytes on one device."""
        return op_time_s(0.0, touched_bytes, "float32", self.kind, is_matmul=False) * self.slowdown

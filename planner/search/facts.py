"""What is known of one device kind when candidates are priced: measured where a profile says so."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from costmodel.block_times import BlockScale, BlockScales, BlockTimes, block_scales, carried_scales
from costmodel.collective_lines import CollectiveLines
from costmodel.device_kind import DeviceKind
from costmodel.estimator import MeasuredOp
from costmodel.graph import ModelGraph
from costmodel.matmul_table import MatmulTable
from costmodel.op_times import scaled_op_times
from costmodel.transfers import CopyLines


@dataclass(frozen=True)
class Facts:
    """What a profile says of one device kind, ready for `Pricing`; the datasheet's kind where there is none.

    Attributes:
        measured: the model at the microbatch size at which its ops were measured, if they were.
        products: matrix products at any shape near measured ones.
        blocks: measured blocks, by class; measured_blocks: the model at the size at which most of them were measured.
    """

    kind: DeviceKind
    op_times: Mapping[str, MeasuredOp] = field(default_factory=dict)
    collective_lines: CollectiveLines = field(default_factory=CollectiveLines)
    copy_lines: CopyLines = field(default_factory=dict)
    measured: ModelGraph | None = None
    products: MatmulTable | None = None
    blocks: BlockTimes = field(default_factory=dict)
    measured_blocks: ModelGraph | None = None
    _scales: dict[int, BlockScales] = field(default_factory=dict, init=False, repr=False, compare=False)
    _scaled: dict[int, Mapping[str, MeasuredOp]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def measured_any(self) -> bool:
        """Whether products, ops or blocks were measured."""
        return bool(self.op_times or self.blocks or self.products is not None)

    def op_times_of(self, graph: ModelGraph) -> Mapping[str, MeasuredOp]:
        """Op times at the microbatch size of a graph of the model, scaled once for each size."""
        if self.measured is None:
            return self.op_times
        if graph.microbatch not in self._scaled:
            self._scaled[graph.microbatch] = scaled_op_times(self.op_times, self.measured, graph, self.products)
        return self._scaled[graph.microbatch]

    def block_scales_of(self, graph: ModelGraph) -> BlockScales:
        """What measured blocks multiply the prices of a graph's ops by; of blocks measured at its own microbatch size,
        else carried over from the other."""
        if not self.blocks:
            return {}
        if graph.microbatch not in self._scales:
            scales: dict[str, BlockScale] = {}
            if self.measured_blocks is not None:
                there = self.measured_blocks
                own = block_scales(self.blocks, there, self.kind, self.op_times_of(there), self.products)
                scales |= carried_scales(own, there, graph)
            scales |= block_scales(self.blocks, graph, self.kind, self.op_times_of(graph), self.products)
            self._scales[graph.microbatch] = scales
        return self._scales[graph.microbatch]

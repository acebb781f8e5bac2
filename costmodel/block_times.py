"""Measured blocks in prices: a block timed whole on one device corrects the prices of its ops.

What ops of a block take together is less than what they take alone, by as much as the compiler fuses and overlaps. A
measured block says by how much: where a profile has a block, its ops are priced as ever and multiplied by

* K1  scale(class) = time of the block / sum of its ops' prices, whole on one device, forward and backward apart

On one device the block then costs what was measured; split over several, each op keeps its share of that. At another
microbatch size than the measured one the same scale holds (K2), as its cause, fusion, does not depend on the size.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from costmodel.device_kind import DeviceKind
from costmodel.estimator import OpCost, OpTimes, Pricing
from costmodel.graph import BlockClass, ModelGraph
from costmodel.provenance import Provenance, weakest
from costmodel.traffic import Traffic


@dataclass(frozen=True, slots=True)
class MeasuredBlock:
    """A block's seconds for a microbatch, whole on one device; backward of all gradients."""

    forward_s: float
    backward_s: float
    provenance: Provenance = "measured"


BlockTimes = Mapping[str, MeasuredBlock]  # `BlockClass.key`, which holds the microbatch size -> seconds


@dataclass(frozen=True, slots=True)
class BlockScale:
    """What the prices of a block's ops are multiplied by."""

    forward: float
    backward: float
    provenance: Provenance

    def apply(self, cost: OpCost, *, whole: bool) -> OpCost:
        """An op's price; `whole` on one device, where the block costs what was measured."""
        source = self.provenance if whole else weakest(self.provenance, "interpolated")
        return OpCost(cost.forward_s * self.forward, cost.backward_s * self.backward, source)


BlockScales = Mapping[str, BlockScale]


def block_scales(blocks: BlockTimes, graph: ModelGraph, kind: DeviceKind, op_times: OpTimes) -> dict[str, BlockScale]:
    """Scales of the classes of a graph that were measured (K1).

    Args:
        op_times: as the ops are priced from.
    """
    pricing = Pricing(kind=kind, mesh=(), axis_names=(), links=(), op_times=op_times)
    found = {}
    for key, cls in graph.classes.items():
        if (block := blocks.get(key)) is None:
            continue
        forward_s, backward_s = _priced(cls, pricing)
        if forward_s > 0:
            backward = block.backward_s / backward_s if backward_s > 0 and block.backward_s > 0 else 1.0
            found[key] = BlockScale(block.forward_s / forward_s, backward, block.provenance)
    return found


def _priced(cls: BlockClass, pricing: Pricing) -> tuple[float, float]:
    """Seconds of a class's ops by their prices, whole on one device."""
    traffic = Traffic.of_block(cls.ops, cls.tensors, frozenset(name for name in cls.outputs if name))
    costs = [pricing.op(op, (), cls.tensors, traffic) for op in cls.ops]
    return sum(cost.forward_s for cost in costs), sum(cost.backward_s for cost in costs)


def carried_scales(scales: BlockScales, measured: ModelGraph, wanted: ModelGraph) -> dict[str, BlockScale]:
    """Scales at another microbatch size: those of the blocks in the same places (K2)."""
    found = {}
    for one, other in zip(measured.blocks, wanted.blocks, strict=False):
        if (scale := scales.get(one.class_key)) is not None:
            source = scale.provenance if one.class_key == other.class_key else weakest(scale.provenance, "interpolated")
            found[other.class_key] = BlockScale(scale.forward, scale.backward, source)
    return found


def graph_with_most_blocks(blocks: BlockTimes, graphs: Iterable[ModelGraph]) -> ModelGraph | None:
    """The graph of which most classes were measured; None where none of any was."""
    best, most = None, 0
    for graph in graphs:
        count = sum(key in blocks for key in graph.classes)
        if count > most:
            best, most = graph, count
    return best

"""Measured blocks in prices: a block timed whole on one device corrects the prices of its ops.

What ops of a block take together is less than what they take alone, by as much as the compiler fuses and overlaps. A
measured block says by how much: where a profile has a block, its ops are priced as ever and multiplied by

* K1  scale(class) = time of the block / sum of its ops' prices, whole on one device, forward and backward apart

On one device the block then costs what was measured; split over several, each op keeps its share of that. At another
microbatch size than the measured one the same scale holds (K2), as its cause, fusion, does not depend on the size.

* K3  scale(W) = measured W / what the ops' backward prices, scaled by K1, say of it: how much of a split backward pass
  only weight gradients need
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from costmodel.device_kind import DeviceKind
from costmodel.estimator import OpCost, OpTimes, Pricing
from costmodel.graph import BlockClass, ModelGraph, Op, Tensor, derived_from_parameters
from costmodel.matmul_table import MatmulTable
from costmodel.provenance import Provenance, weakest
from costmodel.traffic import Traffic


@dataclass(frozen=True, slots=True)
class MeasuredBlock:
    """A block's seconds for a microbatch, whole on one device; backward of all gradients, `weight_s` of it of weight
    gradients alone (None where that was not told apart)."""

    forward_s: float
    backward_s: float
    provenance: Provenance = "measured"
    weight_s: float | None = None


BlockTimes = Mapping[str, MeasuredBlock]  # `BlockClass.key`, which holds the microbatch size -> seconds


@dataclass(frozen=True, slots=True)
class BlockScale:
    """What the prices of a block's ops are multiplied by; `weight` the part of backward that only weights need, on top
    of `backward`."""

    forward: float
    backward: float
    provenance: Provenance
    weight: float = 1.0

    def apply(self, cost: OpCost, *, whole: bool) -> OpCost:
        """An op's price; `whole` on one device, where the block costs what was measured."""
        source = self.provenance if whole else weakest(self.provenance, "interpolated")
        return OpCost(cost.forward_s * self.forward, cost.backward_s * self.backward, source)


BlockScales = Mapping[str, BlockScale]


def block_scales(
    blocks: BlockTimes, graph: ModelGraph, kind: DeviceKind, op_times: OpTimes, products: MatmulTable | None = None
) -> dict[str, BlockScale]:
    """Scales of the classes of a graph that were measured (K1).

    Args:
        op_times, products: as the ops are priced from.
    """
    pricing = Pricing(kind=kind, mesh=(), axis_names=(), links=(), op_times=op_times, products=products)
    found = {}
    for key, cls in graph.classes.items():
        if (block := blocks.get(key)) is None:
            continue
        forward_s, backward_s, weight_s = _priced(cls, pricing)
        if forward_s > 0:
            backward = block.backward_s / backward_s if backward_s > 0 and block.backward_s > 0 else 1.0
            told = block.weight_s is not None and weight_s > 0 and block.backward_s > 0
            weight = (block.weight_s or 0.0) / (backward * weight_s) if told else 1.0
            found[key] = BlockScale(block.forward_s / forward_s, backward, block.provenance, weight)
    return found


def _priced(cls: BlockClass, pricing: Pricing) -> tuple[float, float, float]:
    """Seconds of a class's ops by their prices, whole on one device: forward, backward, and of the latter what only
    weight gradients need."""
    traffic = Traffic.of_block(cls.ops, cls.tensors, frozenset(name for name in cls.outputs if name))
    derived = derived_from_parameters(cls.ops, cls.tensors)
    costs = [pricing.op(op, (), cls.tensors, traffic) for op in cls.ops]
    weight_s = sum(
        weight_share(op, cls.tensors, derived) * cost.backward_s for op, cost in zip(cls.ops, costs, strict=True)
    )
    return sum(cost.forward_s for cost in costs), sum(cost.backward_s for cost in costs), weight_s


def weight_share(op: Op, tensors: Mapping[str, Tensor], derived: Container[str]) -> float:
    """Share of an op's backward pass that only weight gradients need.

    An op that has a cotangent to make for a parameter (or for what is made of parameters alone: `derived`) and one for
    an activation spends half on each, as a matrix product does; one with parameters alone spends all on them.
    """
    moving = [name for name in op.inputs if name and tensors[name].needs_grad]
    weights = [name for name in moving if tensors[name].role == "param" or name in derived]
    return 0.0 if not weights else 1.0 if len(weights) == len(moving) else 0.5


def carried_scales(scales: BlockScales, measured: ModelGraph, wanted: ModelGraph) -> dict[str, BlockScale]:
    """Scales at another microbatch size: those of the blocks in the same places (K2)."""
    found = {}
    for one, other in zip(measured.blocks, wanted.blocks, strict=False):
        if (scale := scales.get(one.class_key)) is not None:
            source = scale.provenance if one.class_key == other.class_key else weakest(scale.provenance, "interpolated")
            found[other.class_key] = BlockScale(scale.forward, scale.backward, source, scale.weight)
    return found


def graph_with_most_blocks(blocks: BlockTimes, graphs: Iterable[ModelGraph]) -> ModelGraph | None:
    """The graph of which most classes were measured; None where none of any was."""
    best, most = None, 0
    for graph in graphs:
        count = sum(key in blocks for key in graph.classes)
        if count > most:
            best, most = graph, count
    return best

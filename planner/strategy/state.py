"""What a stage's devices hold of its parameters, and what collectives keep it in step.

Under ZeRO-3 the planner's own programs gather a parameter of a scan, and scatter its gradient, once for each layer.
Frameworks that keep state flat do so once for a unit of it, which is counted as one start a parameter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.stack import Stack
from planner.strategy.leaves import HeldLeaf, Leaf
from planner.strategy.links import AxisLinks
from planner.strategy.strategy import ITEMSIZE, Strategy
from planner.strategy.zero import holders, state_parts


@dataclass
class State:
    """Parameters that are kept alike, in bytes on one device.

    Attributes:
        axes: whose devices use the same values (`planner.strategy.zero.holders`), with their sizes, innermost first;
            none of one device.
        split: those over which ZeRO splits.
        weights: all values; trained, gradients: of trained ones; before ZeRO splits any.
        kept_gradients: of gradients, what a device keeps where ZeRO splits them.
        moved: read and written by an update; moved_whole: if ZeRO split nothing.
        starts: collectives that reduce gradients, or renew values, all layers together; gathers, scatters: that gather
            values and scatter gradients layer by layer.
    """

    axes: tuple[tuple[str, int], ...]
    split: frozenset[str]
    weights: float = 0.0
    trained: float = 0.0
    gradients: float = 0.0
    kept_gradients: float = 0.0
    moved: float = 0.0
    moved_whole: float = 0.0
    starts: float = 0.0
    gathers: float = 0.0
    scatters: float = 0.0

    def split_s(self, links: AxisLinks, kind: str, size_bytes: float, starts: float) -> float:
        """A gather or scatter over the axes that ZeRO splits over: over the inner one all of it, over the next what a
        device of the inner one has of it."""
        total = 0.0
        for axis, size in self.axes:
            if axis in self.split:
                total += links.seconds(kind, axis, size_bytes, starts)
                size_bytes /= size
        return total

    def rest_s(self, links: AxisLinks) -> float:
        """Gradients summed over the axes that ZeRO does not split over, once a step: of what a device has of them."""
        left = [axis for axis, _ in self.axes if axis not in self.split]
        size = self.kept_gradients if self.split else self.gradients
        return sum(links.seconds("all_reduce", axis, size, self.starts) for axis in left)


def states_of(owned: Sequence[HeldLeaf], strategy: Strategy, stack: Stack) -> list[State]:
    """The parameters of a stage, by the devices that hold the same values and those that ZeRO splits them over."""
    states: dict[object, State] = {}
    for one in owned:
        leaf, facts, elements = one.leaf, one.leaf.facts, one.elements
        parts = state_parts(leaf, strategy, flat=stack.flat_state) if strategy.zero else (1, 1)
        alike, ways = (holders(leaf, strategy), parts), parts[0] * parts[1]
        if alike not in states:
            states[alike] = _empty(leaf, strategy, parts)
        found = states[alike]
        weight_bytes = facts.itemsize if stack.weight_bytes is None else stack.weight_bytes
        layers = 1.0 if stack.flat_state or not leaf.layered else float(one.reading)
        found.weights += elements * weight_bytes
        found.gathers += layers
        if not facts.trained:
            continue
        found.trained += elements * weight_bytes
        itemsize = gradient_itemsize(leaf, strategy)
        found.gradients += elements * itemsize
        found.kept_gradients += elements * itemsize / ways
        found.starts += 1.0
        found.scatters += layers
        kept = facts.optimizer_bytes_per_element if stack.optimizer_bytes is None else stack.optimizer_bytes
        moved = elements * (2 * weight_bytes + itemsize + 2 * kept)
        found.moved += moved / ways
        found.moved_whole += moved
    for found in states.values():
        if strategy.bucket_bytes:
            found.starts = found.scatters = math.ceil(found.gradients / strategy.bucket_bytes)
            found.gathers = math.ceil(found.weights / strategy.bucket_bytes)
    return list(states.values())


def gradient_itemsize(leaf: Leaf, strategy: Strategy) -> int:
    """Bytes of one element of a gradient as it is reduced."""
    return ITEMSIZE[strategy.gradient_dtype] if strategy.gradient_dtype else leaf.facts.gradient_itemsize


def _empty(leaf: Leaf, strategy: Strategy, parts: tuple[int, int]) -> State:
    """Of parameters like this one, whose state has so many parts over data and context parallelism."""
    (data, dp), (_, cp) = holders(leaf, strategy)
    axes = {"dp": (data, dp), "cp": ("cp", cp)}
    ordered = tuple(axes[name] for name in strategy.rank_order.split("-") if name in axes and axes[name][1] > 1)
    return State(ordered, frozenset(axis for axis, count in zip((data, "cp"), parts, strict=True) if count > 1))

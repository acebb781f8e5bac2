"""How much of a block is live on a device at one microbatch size, of what is live when (`planner.space.live_spans`)."""

from collections.abc import Iterable
from dataclasses import dataclass

from costmodel.graph import BlockClass
from planner.space.kernels import Floats, Value
from planner.space.live_spans import BlockSpans


@dataclass(frozen=True)
class Waiting:
    """What lies there for the weight gradients of a block that has run backward (T3).

    Attributes:
        sources_bytes: what they are made of.
        scattered: they are scatters, whose results are there from their start.
        late: they are not made by then, whatever they are made of.
    """

    sources_bytes: float
    scattered: bool
    late: bool

    def during_bytes(self, gradients: float) -> float:
        """While the block runs backward, for `gradients` bytes of weight gradients."""
        return gradients if self.scattered else 0.0

    def after_bytes(self, gradients: float) -> float:
        """Once it has."""
        if self.scattered:
            return gradients
        return self.sources_bytes if self.late else min(gradients, self.sources_bytes)


@dataclass(frozen=True)
class BlockLiveness:
    """What of a block is live on a device.

    Attributes:
        spans: when, for values of these sizes.
        elements, sizes: of each value on one device, and its bytes as it lies in memory.
        axes: of the mesh that have several devices.
    """

    spans: BlockSpans
    elements: Floats
    sizes: Floats
    axes: int

    @classmethod
    def of(cls, spans: BlockSpans, block: BlockClass, mesh: tuple[int, ...]) -> "BlockLiveness":
        """At one size.

        Args:
            spans: for exponentials of any sizes.
            block: the class at some microbatch size.
            mesh: with the axes of the spans' own.
        """
        whole = spans.value_bytes(block, mesh)
        elements = whole / spans.itemsizes
        own = spans.with_exponentials(spans.exponentials_of(elements))
        return cls(own, elements, whole * own.widths, sum(size > 1 for size in mesh))

    def peak_bytes(self, *, rerun: bool, kept: Iterable[str] = (), sliced: bool = False) -> float:
        """The most that is live at once while the block runs backward; arguments as of `BlockSpans.backward`."""
        several = self.axes > 0
        return self.spans.backward(frozenset(kept), rerun=rerun, sliced=sliced, several=several).most(self.sizes)

    def forward_bytes(self, kept: Iterable[str]) -> float:
        """The most that is live at once while a layer runs forward, what it keeps included (T4)."""
        return self.spans.forward(frozenset(kept)).most(self.sizes)

    @property
    def waiting(self) -> Waiting:
        """T3."""
        waits = self.spans.waits
        late = waits.convolutions and self.axes > 1
        return Waiting(float(self.sizes[waits.sources].sum()), waits.scattered, late)

    def lying(self) -> dict[Value, float]:
        """What lies in memory of what the backward pass reads (L6), with its bytes; parameters aside."""
        own = self.spans
        return {value: float(self.sizes[own.values[value]]) for value in own.lying(self.elements)}


__all__ = ["BlockLiveness", "Waiting"]

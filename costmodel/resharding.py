"""What casts cost on one mesh: time as ``latency + bytes x rate``, forward and backward, independent of the shape.

    time(source -> target, tensor) = sum over steps of collective_time(kind, share x bytes)

The steps of a cast and the share of the tensor that each moves depend only on the specs and the mesh, so they are worked
out once for each pair of specs (`CastTable`) and priced by evaluating the collectives' straight lines.
"""

import math
from dataclasses import dataclass, field
from typing import cast as typed

from costmodel.collectives import AxisLink, CollectiveKind, collective_time_s
from costmodel.sharding import CastStep, Spec, cast


@dataclass(frozen=True, slots=True)
class CastPrice:
    """Seconds ``fixed + bytes * per_byte`` each way; infinite where no cast exists. `bytes` are of the whole tensor."""

    forward_fixed_s: float
    forward_s_per_byte: float
    backward_fixed_s: float
    backward_s_per_byte: float

    def forward_s(self, size_bytes: float) -> float:
        return self.forward_fixed_s + size_bytes * self.forward_s_per_byte

    def backward_s(self, size_bytes: float) -> float:
        return self.backward_fixed_s + size_bytes * self.backward_s_per_byte


IMPOSSIBLE = CastPrice(math.inf, 0.0, math.inf, 0.0)
FREE = CastPrice(0.0, 0.0, 0.0, 0.0)


@dataclass
class CastTable:
    """Prices of casts on one mesh, filled as they are asked for.

    Args:
        mesh: axis sizes.
        links: what each axis sees.
    """

    mesh: tuple[int, ...]
    links: tuple[AxisLink, ...]
    _prices: dict[tuple[int, Spec, Spec], CastPrice] = field(default_factory=dict)
    _lines: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)

    def price(self, dims: int, source: Spec, target: Spec) -> CastPrice:
        """The price of a cast of a tensor with `dims` dims, all of them divisible."""
        if source == target:
            return FREE
        key = (dims, source, target)
        if key not in self._prices:
            side = math.prod(self.mesh) ** 2
            steps = cast((side,) * dims, 1, source, target, self.mesh)
            self._prices[key] = IMPOSSIBLE if steps is None else self._sum(steps, float(side) ** dims)
        return self._prices[key]

    def _sum(self, steps: tuple[CastStep, ...], whole: float) -> CastPrice:
        totals = [0.0, 0.0, 0.0, 0.0]
        for step in steps:
            for way, kind in enumerate((step.forward, step.backward)):
                if kind:
                    fixed, slope = self.line(kind, step.axis)
                    totals[2 * way] += fixed
                    totals[2 * way + 1] += slope * step.full_bytes / whole
        return CastPrice(*totals)

    def line(self, kind: str, axis: int) -> tuple[float, float]:
        """Fixed seconds and seconds per byte of a collective on an axis.

        The line through two sizes: exact for rings, and where a tree takes over for small sizes the ring's line is an
        upper bound there.
        """
        key = (kind, axis)
        if key not in self._lines:
            small, large = 1e6, 1e9
            name = typed(CollectiveKind, kind)
            low, high = (collective_time_s(name, size, self.links[axis]) for size in (small, large))
            slope = (high - low) / (large - small)
            self._lines[key] = (max(0.0, low - slope * small), slope)
        return self._lines[key]

"""Measured collectives as straight lines, and what they say of a collective that was not measured.

    L1  time(kind, n, S) = fixed + slope * S                                       as fitted to measurements
    L2  slope' = slope * share(kind', n') / share(kind, n),  fixed' = fixed        for another kind or group size

`share` is the factor of S/b in `costmodel.collectives` (C1 to C5). A line that was not measured comes from the nearest
one that was: the same kind before another, then the nearest group size, then the nearest stride. So all collectives
inside a node are priced on one footing: figures of a datasheet beside measured ones would rank by who measured what.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from costmodel.collectives import CollectiveKind
from costmodel.provenance import Provenance

LineKey = tuple[CollectiveKind, int, int]  # kind, devices in a group, distance of neighbours in consecutive devices


@dataclass(frozen=True)
class CollectiveLines:
    """Lines of the collectives inside a node.

    Attributes:
        lines: (kind, group size, stride) to (fixed seconds, seconds per byte); bytes as in `collective_time_s`.
    """

    lines: Mapping[LineKey, tuple[float, float]] = field(default_factory=dict)

    def line(self, kind: CollectiveKind, size: int, stride: int = 1) -> tuple[float, float] | None:
        """Fixed seconds and seconds per byte of a collective (L1, else L2); None where nothing was measured."""
        found = self._nearest(kind, size, stride)
        if found is None:
            return None
        fixed_s, slope = self.lines[found]
        return fixed_s, slope * _share(kind, size) / _share(found[0], found[1])

    def provenance(self, kind: CollectiveKind, size: int, stride: int = 1) -> Provenance | None:
        """``fitted`` for a line of its own, ``interpolated`` for one that comes from another, None where none is."""
        found = self._nearest(kind, size, stride)
        return None if found is None else "fitted" if found == (kind, size, stride) else "interpolated"

    def _nearest(self, kind: CollectiveKind, size: int, stride: int) -> LineKey | None:
        if (kind, size, stride) in self.lines:
            return (kind, size, stride)

        def distance(key: LineKey) -> tuple[bool, float, float, LineKey]:
            return key[0] != kind, abs(math.log(key[1] / size)), abs(math.log(key[2] / stride)), key

        return min(self.lines, key=distance, default=None)


def _share(kind: CollectiveKind, size: int) -> float:
    ring = (size - 1) / size
    return {"all_reduce": 2 * ring, "permute": 1.0}.get(kind, ring)

"""What casts cost on one mesh: time as ``fixed + bytes x rate``, forward and backward, independent of the shape.

    time(source -> target, tensor) = sum over steps of collective_time(kind, share x bytes)

The steps of a cast, and the axes that split the tensor while each of them runs, depend only on the specs. So they are
worked out once for all pairs of specs of a number of dims and axes (`_algebra`), and a mesh prices all pairs at once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import cast as typed

import numpy as np
from numpy.typing import NDArray

from costmodel.collective_lines import CollectiveLines
from costmodel.collectives import AxisLink, CollectiveKind, collective_time_s
from costmodel.provenance import Provenance
from costmodel.sharding import PARTIAL, Spec, cast

Floats = NDArray[np.float64]
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
Line = tuple[float, float]  # fixed seconds, seconds per byte


@dataclass(frozen=True)
class _Algebra:
    """Steps of every cast among all specs of some number of dims and axes, as flat arrays.

    Attributes:
        index: spec -> its number.
        pair: of each step the pair of specs, ``source * count + target``; kind, axis: of the collective.
        split: [step, axis] whether that axis splits the tensor while the step runs.
        impossible: [count, count] pairs without a cast.
    """

    index: Mapping[Spec, int]
    pair: tuple[NDArray[np.int64], NDArray[np.int64]]  # forward, backward
    line: tuple[NDArray[np.int64], NDArray[np.int64]]  # kind * axes + axis
    split: tuple[NDArray[np.bool_], NDArray[np.bool_]]
    impossible: NDArray[np.bool_]


@lru_cache(maxsize=64)
def _algebra(dims: int, axes: int) -> _Algebra:
    primes = (2, 3, 5, 7)[:axes]
    side = math.prod(primes) ** 2
    specs = list(product((*range(PARTIAL, 0), *range(dims)), repeat=axes))
    whole = side**dims
    impossible = np.zeros((len(specs), len(specs)), dtype=bool)
    rows: tuple[list[tuple[int, int, tuple[bool, ...]]], ...] = ([], [])
    for i, source in enumerate(specs):
        for j, target in enumerate(specs):
            steps = cast((side,) * dims, 1, source, target, primes)
            if steps is None:
                impossible[i, j] = True
                continue
            for step in steps:
                parts = whole // step.full_bytes
                split = tuple(parts % prime == 0 for prime in primes)
                for way, kind in enumerate((step.forward, step.backward)):
                    if kind:
                        rows[way].append((i * len(specs) + j, KINDS.index(kind) * axes + step.axis, split))
    return _Algebra(
        index={spec: i for i, spec in enumerate(specs)},
        pair=_both(rows, lambda row: np.array([r[0] for r in row], dtype=np.int64)),
        line=_both(rows, lambda row: np.array([r[1] for r in row], dtype=np.int64)),
        split=_both(rows, lambda row: np.array([r[2] for r in row], dtype=bool).reshape(len(row), axes)),
        impossible=impossible,
    )


def _both(rows: tuple[list, ...], make) -> tuple:  # type: ignore[no-untyped-def, type-arg]
    return make(rows[0]), make(rows[1])


@dataclass(frozen=True)
class CastPrices:
    """Prices of all casts of tensors with some number of dims: ``fixed + bytes * per_byte``, by numbers of specs.

    `bytes` are those of the whole tensor; infinite where there is no cast.
    """

    index: Mapping[Spec, int]
    forward_fixed_s: Floats
    forward_s_per_byte: Floats
    backward_fixed_s: Floats
    backward_s_per_byte: Floats

    def matrix(
        self, sources: Sequence[Spec], targets: Sequence[Spec], size_bytes: float, needs_grad: bool
    ) -> tuple[Floats, Floats]:
        """Forward and backward seconds from each source to each target. No cotangent, no backward."""
        at = np.ix_([self.index[s] for s in sources], [self.index[t] for t in targets])
        forward = self.forward_fixed_s[at] + size_bytes * self.forward_s_per_byte[at]
        if not needs_grad:
            return forward, np.where(np.isinf(forward), np.inf, 0.0)
        return forward, self.backward_fixed_s[at] + size_bytes * self.backward_s_per_byte[at]


@dataclass
class CastTable:
    """Prices of casts on one mesh.

    Args:
        mesh: axis sizes, all above one.
        links: what each axis sees.
        measured: collectives inside a node, from a profile; consulted before the links.
    """

    mesh: tuple[int, ...]
    links: tuple[AxisLink, ...]
    measured: CollectiveLines = field(default_factory=CollectiveLines)
    _prices: dict[int, CastPrices] = field(default_factory=dict)
    _lines: dict[tuple[str, int], Line] = field(default_factory=dict)

    def prices(self, dims: int) -> CastPrices:
        """Prices of casts of tensors with `dims` dims."""
        if dims not in self._prices:
            algebra = _algebra(dims, len(self.mesh))
            count = len(algebra.index)
            lines = np.array([self.line(kind, axis) for kind in KINDS for axis in range(len(self.mesh))]).reshape(-1, 2)
            tables = []
            for pair, line, split in zip(algebra.pair, algebra.line, algebra.split, strict=True):
                share = np.prod(np.where(split, 1.0 / np.array(self.mesh), 1.0), axis=1) if len(pair) else np.zeros(0)
                fixed, slope = (lines[line, 0], lines[line, 1] * share) if len(pair) else (share, share)
                for weight in (fixed, slope):
                    table = (
                        np.bincount(pair, weights=weight, minlength=count * count).astype(float).reshape(count, count)
                    )
                    table[algebra.impossible] = np.inf if weight is fixed else 0.0
                    tables.append(table)
            self._prices[dims] = CastPrices(algebra.index, *tables)
        return self._prices[dims]

    def line(self, kind: str, axis: int) -> Line:
        """Fixed seconds and seconds per byte of a collective on an axis.

        A measured line where the axis stays inside a node (`tree_latency_s` marks those that leave it). Else the line
        through two sizes: exact for rings, and where a tree takes over for small sizes the ring's line is an upper
        bound there.
        """
        key = (kind, axis)
        if key not in self._lines:
            name, found = typed(CollectiveKind, kind), None
            if self.links[axis].tree_latency_s is None:
                found = self.measured.line(name, self.mesh[axis], math.prod(self.mesh[axis + 1 :]))
            if found is None:
                small, large = 1e6, 1e9
                low, high = (collective_time_s(name, size, self.links[axis]) for size in (small, large))
                slope = (high - low) / (large - small)
                found = (max(0.0, low - slope * small), slope)
            self._lines[key] = found
        return self._lines[key]

    def provenance(self, kind: CollectiveKind, axis: int) -> Provenance | None:
        """Of the measured line that prices a collective on an axis; None where its link does."""
        if self.links[axis].tree_latency_s is not None:
            return None
        return self.measured.provenance(kind, self.mesh[axis], math.prod(self.mesh[axis + 1 :]))

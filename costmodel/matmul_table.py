"""Seconds of matrix products from measured ones: interpolated in log shape space, by the roofline outside of it.

    L1  roof(m, k, n)   = max(flops / rate, bytes / bandwidth, launch)       with the rates that were fitted
    L2  share           = roof / time                                        of each measured product
    L3  log share is linear in (log m, log k, log n, log batch) around the shape that is asked for: least squares over
        the measured products near it, each with the weight 1 / distance^4, so that at a measured shape it is that
        product's; never above the largest or below the smallest share of those that count
    L4  time            = roof / share                                       inside the measured range
    L5  time            = roof                                               outside

What varies with the shape (tiles that do not fill, short sums, launch) is in the share, which changes slowly, and what
grows with the work is in the roof.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from costmodel.provenance import Provenance

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}

REACH = math.log(8.0)
"""A shape counts as inside if some measured product is at most this far from it in log shape space: one side 8 times as
long, or two of them three times."""

NEIGHBOURS = 10
"""Measured products that count for a shape."""

_SAME = 1e-9
_RIDGE = 1e-6


class Product(NamedTuple):
    """A measured product: `batch` times ``[m, k] @ [k, n]``."""

    dtype: str
    m: int
    k: int
    n: int
    batch: int
    time_s: float


@dataclass(frozen=True)
class MatmulTable:
    """Measured products of one device.

    Attributes:
        products: in any order.
        flops_per_s: rate of large products by dtype; a dtype without one is not known at all.
        memory_bytes_per_s: of long streams; infinite where nobody has measured it.
        launch_s: shortest time of an op.
    """

    products: tuple[Product, ...]
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float = math.inf
    launch_s: float = 0.0
    _known: dict[tuple[int, int, int, str, int], tuple[float, Provenance] | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _points: dict[tuple[str, bool], tuple[NDArray[np.float64], NDArray[np.float64]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for key in sorted({(one.dtype, one.batch > 1) for one in self.products if one.dtype in self.flops_per_s}):
            mine = [one for one in self.products if (one.dtype, one.batch > 1) == key]
            where = np.log([[one.m, one.k, one.n, one.batch] for one in mine])
            roofs = [self.roofline_s(one.m, one.k, one.n, one.dtype, one.batch) for one in mine]
            self._points[key] = where, np.log(roofs) - np.log([one.time_s for one in mine])

    def seconds(self, m: int, k: int, n: int, dtype: str, batch: int = 1) -> tuple[float, Provenance] | None:
        """Seconds of `batch` products ``[m, k] @ [k, n]`` and where they come from (L4): `measured` at a measured
        shape, `interpolated` near some; None outside of the measured range."""
        if min(m, k, n, batch) < 1:
            raise ValueError(f"a product has sides of at least 1, got {(m, k, n)} and batch {batch}")
        key = (m, k, n, dtype, batch)
        if key not in self._known:
            self._known[key] = self._seconds(m, k, n, dtype, batch)
        return self._known[key]

    def _seconds(self, m: int, k: int, n: int, dtype: str, batch: int) -> tuple[float, Provenance] | None:
        if (dtype, batch > 1) not in self._points:
            return None
        points, shares = self._points[dtype, batch > 1]
        at = np.log([m, k, n, batch])
        distance = np.linalg.norm(points - at, axis=1)
        nearest = int(np.argmin(distance))
        roof_s = self.roofline_s(m, k, n, dtype, batch)
        if distance[nearest] < _SAME:
            return roof_s / math.exp(float(shares[nearest])), "measured"
        inside = bool(np.all((points.min(axis=0) - _SAME <= at) & (at <= points.max(axis=0) + _SAME)))
        if not inside or distance[nearest] > REACH:
            return None
        return roof_s / math.exp(_around(points - at, shares, distance)), "interpolated"

    def seconds_anywhere(self, m: int, k: int, n: int, dtype: str, batch: int = 1) -> tuple[float, Provenance] | None:
        """As `seconds`, with the roofline outside of the measured range (L5), as `fitted`; None for a dtype whose rate
        nobody has measured."""
        found = self.seconds(m, k, n, dtype, batch)
        if found is not None or dtype not in self.flops_per_s:
            return found
        return self.roofline_s(m, k, n, dtype, batch), "fitted"

    def highest_rate(self) -> float:
        """FLOP/s that no product of the table exceeds at any shape, measured or interpolated; 0 without products."""
        best = {key: float(shares.max()) for key, (_, shares) in self._points.items()}
        return max((math.exp(share) * self.flops_per_s[dtype] for (dtype, _), share in best.items()), default=0.0)

    def roofline_s(self, m: int, k: int, n: int, dtype: str, batch: int = 1) -> float:
        """L1 in seconds.

        Raises:
            KeyError: the dtype's rate is not known.
        """
        flops, item = 2.0 * batch * m * k * n, ITEM_BYTES[dtype]
        moved = float(batch * item) * (m * k + k * n + m * n)
        return max(flops / self.flops_per_s[dtype], moved / self.memory_bytes_per_s, self.launch_s)


def _around(offsets: NDArray[np.float64], shares: NDArray[np.float64], distance: NDArray[np.float64]) -> float:
    """The log share at offset 0 (L3). A small ridge on the slopes keeps directions flat that no sample tells of."""
    near = np.argsort(distance, kind="stable")[:NEIGHBOURS]
    weights = distance[near] ** -4
    weights = weights / weights.sum()
    columns = np.concatenate([np.ones((len(near), 1)), offsets[near]], axis=1)
    weighted = columns * weights[:, None]
    ridge = np.diag([0.0, *[_RIDGE] * offsets.shape[1]])
    solution = np.linalg.solve(columns.T @ weighted + ridge, weighted.T @ shares[near])
    return float(np.clip(solution[0], shares[near].min(), shares[near].max()))


def matmul_table(
    products: Iterable[Product],
    flops_per_s: Mapping[str, float],
    memory_bytes_per_s: float | None = None,
    launch_s: float | None = None,
) -> MatmulTable:
    """A table of measured products with the fitted rates; None where one was not measured."""
    return MatmulTable(tuple(products), dict(flops_per_s), memory_bytes_per_s or math.inf, launch_s or 0.0)

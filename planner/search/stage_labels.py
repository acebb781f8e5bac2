"""The stage DP of `stage_dp` on partial plans instead of dense arrays: for pools whose device counts span too many
combinations, once a good plan and tight caps leave few stages and few states of interest.

States, value and the rules D1 to D3 are those of `stage_dp`. A layer holds the partial plans with one number of stages;
each grows by every allowed stage that ends where it begins.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner.search.problem import Floats, Ints
from planner.search.stage_tables import StageTables
from planner.search.stages import Span

CHUNK = 500_000
"""Most extensions that are held at once."""

EXTENSIONS = 40
"""Extensions that one run may look at, a partial plan of its `width`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    """n partial plans.

    Attributes:
        first: first block.  option: of the first stage.  parent: row in the layer with one stage less.
        used: [n, P] devices.  total_s: Σ t + Σ send.
    """

    first: Ints
    option: Ints
    parent: Ints
    used: Ints
    total_s: Floats

    def pick(self, rows: Ints) -> "_Layer":
        """Some of the rows."""
        return _Layer(
            first=self.first[rows],
            option=self.option[rows],
            parent=self.parent[rows],
            used=self.used[rows],
            total_s=self.total_s[rows],
        )


class StageLabels:
    """One run. Arguments as in `StageDP`; `width` is the most partial plans that a layer may hold.

    Attributes:
        least_s: least Σ t + Σ send below the limit, inf for none.
        complete: False where a work limit fired, so that `least_s` may not be the least.
    """

    def __init__(
        self,
        tables: StageTables,
        time_s: Floats,
        in_flight: list[int],
        prices: Floats,
        prefix_s: Floats,
        limit_s: float,
        width: int,
        min_stages: int = 1,
    ):
        self.tables, self.in_flight, self.limit_s, self.width = tables, in_flight, limit_s, width
        self.min_stages = min_stages
        self.prices, self.prefix_s = prices, prefix_s
        self.blocks = time_s.shape[1] - 1
        order = time_s.transpose(2, 0, 1)  # stages sorted by their end
        ends, self.option, self.first = np.nonzero(np.isfinite(order))
        self.time_s = order[ends, self.option, self.first]
        self.room = tables.room[self.option, self.first, ends]
        self.begins = np.searchsorted(ends, np.arange(self.blocks + 2))
        self.radix = np.cumprod(np.concatenate([[1], tables.devices[::-1] + 1]))[::-1]
        self.reached: tuple[Ints, Floats] = (np.zeros(0, dtype=np.int64), np.zeros(0))
        self.extensions = EXTENSIONS * width
        self.least_s = np.inf
        self.complete = True

    def run(self) -> Iterator[tuple[float, tuple[Span, ...]]]:
        """The best whole plan of every number of stages, if below the limit: its Σ t + Σ send, and its stages."""
        zero = np.zeros(1, dtype=np.int64)
        start = np.zeros((1, len(self.tables.devices)), dtype=np.int64)
        layers = [
            _Layer(first=zero + self.blocks, option=zero, parent=zero - 1, used=start, total_s=np.zeros(1)),
        ]
        for stage, need in enumerate(self.in_flight):
            grown = self._grow(layers[-1], need, len(self.in_flight) - stage - 1)
            if grown is None:
                return
            whole = np.flatnonzero(grown.first == 0)
            if len(whole) and stage + 1 >= self.min_stages:
                row = int(whole[grown.total_s[whole].argmin()])
                if grown.total_s[row] < self.limit_s:
                    self.least_s = min(self.least_s, float(grown.total_s[row]))
                    yield float(grown.total_s[row]), _trace(layers, grown, row)
            layer = grown.pick(np.flatnonzero(grown.first > 0))
            if not len(layer.first):
                return
            layers.append(layer)

    def _grow(self, layer: _Layer, need: int, stages_left: int) -> _Layer | None:
        """D1 to D3: one more stage in front. None where nothing is left or a limit fires."""
        counts = self.begins[layer.first + 1] - self.begins[layer.first]
        self.extensions -= int(counts.sum())
        if self.extensions < 0:
            self.complete = False
            return None
        splits = np.searchsorted(np.cumsum(counts), np.arange(CHUNK, counts.sum() + 1, CHUNK)) + 1
        parts = [
            self._extend(layer, rows, counts[rows], need, stages_left)
            for rows in np.split(np.arange(len(counts)), splits)
            if len(rows)
        ]
        grown = _Layer(
            first=np.concatenate([part.first for part in parts]),
            option=np.concatenate([part.option for part in parts]),
            parent=np.concatenate([part.parent for part in parts]),
            used=np.concatenate([part.used for part in parts]),
            total_s=np.concatenate([part.total_s for part in parts]),
        )
        grown = grown.pick(self._undominated(grown))
        if len(grown.first) > self.width:
            self.complete = False
            return None
        return grown if len(grown.first) else None

    def _extend(self, layer: _Layer, rows: Ints, counts: Ints, need: int, stages_left: int) -> _Layer:
        tables = self.tables
        row = np.repeat(rows, counts)
        stage = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts) + self.begins[layer.first[row]]
        keep = np.flatnonzero(self.room[stage] >= need)
        row, stage = row[keep], stage[keep]
        option, first = self.option[stage], self.first[stage]
        left = tables.devices - layer.used[row] - tables.used[option]
        link = tables.link[option]
        total_s = layer.total_s[row] + self.time_s[stage]
        total_s += tables.send_s[link, tables.link[layer.option[row]], layer.first[row]]
        alive = np.flatnonzero((left >= 0).all(axis=1) & (total_s < self.limit_s))
        for prices, prefix_s in zip(self.prices, self.prefix_s, strict=True):
            left_s = left[alive] @ prices[:-1] + prices[-1] * stages_left
            bound_s = np.where(first[alive] > 0, prefix_s[link[alive], first[alive]] - left_s, 0.0)
            alive = alive[total_s[alive] + bound_s < self.limit_s]
        return _Layer(
            first=first[alive],
            option=option[alive],
            parent=row[alive],
            used=tables.devices - left[alive],
            total_s=total_s[alive],
        )

    def _undominated(self, layer: _Layer) -> Ints:
        """D2: rows that are the cheapest of their state, in this layer and all before."""
        place = layer.first * self.tables.send_s.shape[0] + self.tables.link[layer.option]
        key = place * self.radix[0] + layer.used @ self.radix[1:]
        order = np.lexsort((layer.total_s, key))
        new = np.concatenate([[True], np.diff(key[order]) != 0]) if len(order) else np.zeros(0, dtype=bool)
        rows = order[new]
        keys, totals = self.reached if self.min_stages == 1 else (np.zeros(0, dtype=np.int64), np.zeros(0))
        at = np.searchsorted(keys, key[rows])
        if len(keys):
            at = np.minimum(at, len(keys) - 1)
            rows = rows[(keys[at] != key[rows]) | (layer.total_s[rows] < totals[at])]
        keys, totals = np.concatenate([keys, key[rows]]), np.concatenate([totals, layer.total_s[rows]])
        order = np.lexsort((totals, keys))
        first = np.concatenate([[True], np.diff(keys[order]) != 0]) if len(order) else np.zeros(0, dtype=bool)
        self.reached = keys[order][first], totals[order][first]
        return rows


def _trace(layers: list[_Layer], last: _Layer, row: int) -> tuple[Span, ...]:
    """The stages of a whole plan, in pipeline order."""
    spans = []
    layer = last
    for before in reversed(layers):
        parent = int(layer.parent[row])
        spans.append((int(layer.first[row]), int(before.first[parent]), int(layer.option[row])))
        layer, row = before, parent
    return tuple(spans)

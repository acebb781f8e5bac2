"""The stage DP under caps: least Σ t + Σ send of any plan, over blocks, devices left and number of stages.

* D1  F_k(i, d, e) = least Σ t + Σ send of k stages that hold blocks i … L − 1 on at most d devices a pool, the first of
  them of link class e. Plans grow from the last stage backwards, because a stage's microbatches in flight, and so which
  ranges fit into memory, depend on the number of stages after it:
  F_{k+1}(i, d, e) = min over options o of class e, and j, of
  t(o, i, j) + min_e' (F_k(j, d − devices_o, e') + send(e, e', j))
* D2  A state that fewer stages reach at no higher cost is dropped (unless a plan must have some number of stages).
* D3  A state is dropped when F plus the bound B3 of `stage_bounds` for the blocks before it reaches the limit.

Everything is dense arrays [L + 1, devices of pool 0 + 1, devices of pool 1 + 1, …]; one numpy call serves all blocks
and device counts of one (option devices, number of blocks). Options that take the same devices are merged first: of
those that may hold a range, the fastest.
"""

from collections.abc import Callable, Iterator

import numpy as np

from planner.search.problem import Floats, Ints
from planner.search.stage_bounds import stage_kinds
from planner.search.stage_tables import StageTables
from planner.search.stages import Span


class StageDP:
    """One run of the DP.

    Args:
        time_s: [O, L + 1, L + 1] seconds of a stage by (option, first, end); inf where the caps rule it out.
        in_flight: microbatches that the last stage, the one before it, … hold; as many as stages are allowed.
        prices, prefix_s: [M, P + 1] and [M, E, L + 1], prices and their bounds B1, for D3.
        limit_s: plans whose Σ t + Σ send reaches this are of no interest; inf for none.
        min_stages: of a plan.
    """

    def __init__(
        self,
        tables: StageTables,
        time_s: Floats,
        in_flight: list[int],
        prices: Floats,
        prefix_s: Floats,
        limit_s: float,
        min_stages: int = 1,
    ):
        self.tables, self.in_flight, self.limit_s = tables, in_flight, limit_s
        self.min_stages = min_stages
        self.size = time_s.shape[1]
        self.links = tables.send_s.shape[0]
        self.grid = tuple(int(count) + 1 for count in tables.devices)
        self.kinds = stage_kinds(tables)
        widths = _widest(time_s) + 1
        self.widths = _by_width(time_s, widths, np.inf)
        self.rooms = _by_width(tables.room, widths, 0)
        self.prices, self.prefix_s = prices, prefix_s
        self.layers: list[Floats] = []
        self.least_s = np.inf

    def run(self) -> Iterator[tuple[float, tuple[Span, ...]]]:
        """The best whole plan of every number of stages, if below the limit: its Σ t + Σ send, and its stages."""
        shape = (self.links, self.size, *self.grid)
        start = np.full(shape, np.inf)
        start[:, -1] = 0.0
        self.layers = [start]
        reached = np.full(shape, np.inf)
        costs: Floats | None = None
        for stage, need in enumerate(self.in_flight):
            if costs is None or need != self.in_flight[stage - 1]:
                costs = self._costs(need)
            layer = self._grow(self.layers[-1], costs)
            whole_s = float(layer[(slice(None), 0, *(-1 for _ in self.grid))].min())
            layer[(layer >= reached) | (layer + self._rest(len(self.in_flight) - stage - 1) >= self.limit_s)] = np.inf
            self.layers.append(layer)
            if whole_s < self.limit_s and stage + 1 >= self.min_stages:
                self.least_s = min(self.least_s, whole_s)
                yield whole_s, self._trace(stage + 1)
            layer[:, 0] = np.inf
            if not np.isfinite(layer).any():
                return
            if self.min_stages == 1:
                np.minimum(reached, layer, out=reached)

    def _costs(self, need: int) -> Floats:
        """[kinds, widths, L + 1] least seconds of the options of a kind that may hold (first, first + width)."""
        return np.stack([self._option_costs(kind.options, need).min(axis=0) for kind in self.kinds])

    def _option_costs(self, options: Ints, need: int) -> Floats:
        """[options, widths, L + 1] seconds of a stage that holds `need` microbatches; inf where it does not fit."""
        return np.where(self.rooms[options] >= need, self.widths[options], np.inf)

    def _join(self, after: Floats, cost: Floats) -> Floats:
        """The value of a stage and of what follows it."""
        return after + cost

    def _send_s(self) -> Floats:
        """[E, E, L + 1] what a cut adds to the value."""
        return self.tables.send_s

    def _grow(self, layer: Floats, costs: Floats) -> Floats:
        """D1: one more stage in front."""
        grown = np.full(layer.shape, np.inf)
        rows = np.flatnonzero(np.isfinite(layer).reshape(self.links, self.size, -1).any(axis=(0, 2)))
        if not len(rows):
            return grown
        low, high = int(rows[0]), int(rows[-1]) + 1
        after = self._after(layer)
        expand = (slice(None), *(None for _ in self.grid))
        finite = np.isfinite(costs)
        for place, kind in enumerate(self.kinds):
            if any(take >= have for take, have in zip(kind.devices, self.grid, strict=True)):
                continue
            source = tuple(slice(0, have - take) for take, have in zip(kind.devices, self.grid, strict=True))
            target = tuple(slice(take, None) for take in kind.devices)
            into, come = grown[(kind.link, slice(None), *target)], after[(kind.link, slice(None), *source)]
            for width in np.flatnonzero(finite[place].any(axis=1)).tolist():
                held = np.flatnonzero(finite[place, width])
                first, end = max(int(held[0]), low - width), min(int(held[-1]) + 1, high - width)
                if first < end:
                    cost = costs[place, width, first:end][expand]
                    part = into[first:end]
                    np.minimum(part, self._join(come[first + width : end + width], cost), out=part)
        return grown

    def _after(self, layer: Floats) -> Floats:
        """[E, L + 1, …] least cost of what follows a stage of each link class, the send included."""
        send = self._send_s().reshape(self.links, self.links, self.size, *(1 for _ in self.grid))
        return (layer[None] + send).min(axis=1)

    def _rest(self, stages_left: int) -> Floats:
        """[E, L + 1, …] B3 for the blocks before a state."""
        axes = np.meshgrid(*(np.arange(count)[::-1] for count in self.grid), indexing="ij")  # devices left
        rest = np.zeros((self.links, self.size, *self.grid))
        for vector, prefix in zip(self.prices, self.prefix_s, strict=True):
            left_s = sum((price * axis for price, axis in zip(vector[:-1], axes, strict=True)), np.zeros(self.grid))
            left_s = left_s + vector[-1] * stages_left
            np.maximum(rest, prefix.reshape(self.links, self.size, *(1 for _ in self.grid)) - left_s, out=rest)
        return rest

    def _trace(self, stages: int) -> tuple[Span, ...]:
        """The best whole plan of `stages` stages."""
        left = tuple(count - 1 for count in self.grid)
        first = 0
        spans: list[Span] = []
        before = -1
        for count in range(stages, 0, -1):
            after = self._after(self.layers[count - 1])
            need = self.in_flight[count - 1]
            best: tuple[float, int, int, int, tuple[int, ...]] | None = None
            for kind in self.kinds:
                rest = tuple(have - take for have, take in zip(left, kind.devices, strict=True))
                if min(rest) < 0:
                    continue
                costs = self._option_costs(kind.options, need)[:, :, first]
                ends = np.minimum(first + np.arange(costs.shape[1]), self.size - 1)
                total = self._join(after[(kind.link, ends, *rest)], costs)
                if before >= 0:
                    total = total + self._send_s()[before, kind.link, first]
                place, width = np.unravel_index(int(total.argmin()), total.shape)
                value = float(total[place, width])
                if best is None or value < best[0]:
                    best = (value, int(kind.options[place]), first + int(width), kind.link, rest)
            assert best is not None
            _, option, end, before, left = best
            spans.append((first, end, option))
            first = end
        return tuple(spans)


class ExcessDP(StageDP):
    """The same DP for the least miss of memory: the value of a plan is the largest excess of any of its stages, or 0.

    Args:
        time_s: as in `StageDP`, memory aside.
        excess_bytes: for each number of microbatches that a stage may hold, [O, L + 1, L + 1] bytes by which the worst
            group of a stage exceeds its limit.
    """

    def __init__(
        self,
        tables: StageTables,
        time_s: Floats,
        in_flight: list[int],
        excess_bytes: Callable[[int], Floats],
        min_stages: int = 1,
    ):
        pools = len(tables.devices)
        nothing = np.zeros((0, tables.send_s.shape[0], time_s.shape[1]))
        super().__init__(tables, time_s, in_flight, np.zeros((0, pools + 1)), nothing, np.inf, min_stages)
        self.excess: dict[int, Floats] = {}
        self.excess_bytes = excess_bytes

    def _option_costs(self, options: Ints, need: int) -> Floats:
        if need not in self.excess:
            by_width = _by_width(self.excess_bytes(need), self.widths.shape[1], np.inf)
            self.excess[need] = np.where(np.isfinite(self.widths), by_width, np.inf)
        return self.excess[need][options]

    def _join(self, after: Floats, cost: Floats) -> Floats:
        return np.maximum(after, cost)

    def _send_s(self) -> Floats:
        return np.zeros(self.tables.send_s.shape)


def _by_width(values: np.ndarray, widths: int, outside: float) -> np.ndarray:
    """[O, widths, L + 1] from [O, first, end]: (o, w, i) is the range (i, i + w), `outside` where there is none."""
    size = values.shape[1]
    out = np.full((values.shape[0], widths, size), outside, dtype=values.dtype)
    for width in range(1, widths):
        out[:, width, : size - width] = np.diagonal(values, offset=width, axis1=1, axis2=2)
    return out


def _widest(time_s: Floats) -> int:
    """Most blocks of any stage that is allowed."""
    firsts, ends = np.nonzero(np.isfinite(time_s).any(axis=0))
    return int((ends - firsts).max(initial=0))

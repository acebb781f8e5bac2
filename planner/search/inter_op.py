"""Blocks to stages on pools of devices: the stage DP, exact for the closed form S1 of `planner.search.stages`.

The largest stage time is enumerated: all plans whose largest stage time lies in a range of candidate times are searched
together, under the range's upper end as a cap and with its lower end in the bound. Ranges are searched best bound
first, split where they are wide, and dropped when their bound reaches the best plan.

* D1  Within a range, partial plans grow from the last stage backwards, because a stage's microbatches in flight depend
  on the number of stages after it. The state is (stages so far, first block, devices used in each pool, link class of
  the first stage); the value is Σ t + Σ send, with the largest once-a-step time beside it.
* D2  Of the partial plans of one state only those that are not worse in both numbers stay; nor does one stay that a
  partial plan with fewer stages beats.
* D3  A partial plan is dropped when its value, the bound B3 for the blocks before it, and (m − 1) × the range's lower end
  reach the best plan.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from planner.search.problem import Floats, Ints, SearchBudget, SearchStatus
from planner.search.stage_bounds import PrefixBounds, best_prices
from planner.search.stage_tables import StageTables, stage_tables
from planner.search.stages import Span, StagePlan, StageProblem, StageResult, score_stages

ROUNDING = 1e-9
"""Relative difference that sums of floats in another order can make."""

PRICES_IN_DP = 6
"""Price vectors whose bounds prune partial plans."""

WIDE = 0.03
"""A range is split rather than searched where its width adds more than this share of its bound to the step time."""

SCOUT_LABELS = 400
"""Partial plans a layer in the quick searches that look for a first plan."""


def plan_stages(problem: StageProblem, *, keep: int = 1, budget: SearchBudget | None = None) -> StageResult:
    """The best plan by S1 (within `budget.relative_gap`), up to `keep` − 1 further good plans, and a lower bound.

    Only the first plan is proven; the others are the best that the search met with other stages or options, for a
    simulator to choose from.
    """
    return _StageSearch(problem, budget or SearchBudget()).run(keep)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    """Partial plans with one number of stages, n of them.

    Attributes:
        first: first block.  option: of the first stage.  parent: row in the layer with one stage less.
        used: [n, P] devices.  total_s: Σ t + Σ send.  once_s: max.
    """

    first: Ints
    option: Ints
    parent: Ints
    used: Ints
    total_s: Floats
    once_s: Floats

    def pick(self, rows: np.ndarray) -> "_Layer":
        """Some of the rows."""
        return _Layer(
            first=self.first[rows],
            option=self.option[rows],
            parent=self.parent[rows],
            used=self.used[rows],
            total_s=self.total_s[rows],
            once_s=self.once_s[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    """Plans whose largest stage time is one of the candidates low … high; `bound_s` bounds their step time."""

    low: int
    high: int
    bound_s: float


class _StageSearch:
    """Best plans and bounds of one call."""

    def __init__(self, problem: StageProblem, budget: SearchBudget, extra_bytes: float = 0.0):
        self.problem, self.budget = problem, budget
        self.tables = stage_tables(problem, extra_bytes)
        self.later = problem.microbatches - 1
        fits = self.tables.room >= problem.in_flight(1)
        self.time_s = np.where(fits, self.tables.time_s, np.inf)
        self.times = np.unique(self.time_s[np.isfinite(self.time_s)])
        self.once_floor_s = _once_floor_s(self.tables, self.time_s)
        self.plans: dict[tuple[Span, ...], StagePlan] = {}
        self.best_s = math.inf
        self.limit_fired = False
        self.extra_bytes = extra_bytes
        self.effort = {"labels": 0, "ranges_bounded": 0, "ranges_searched": 0}
        self._windows: dict[tuple[int, int], Ints] = {}

    def run(self, keep: int) -> StageResult:
        """Search all ranges."""
        if not len(self.times):
            return self._result(keep, math.inf)
        heap: list[tuple[float, int, _Range, Floats | None]] = []
        whole = self._scout()
        if whole is not None:
            heap.append((whole.bound_s, 0, whole, None))
        order = 0
        bound_s = math.inf
        while heap:
            bound_s, _, part, prices = heapq.heappop(heap)
            if bound_s >= self._limit():
                break
            width_s = self.later * float(self.times[part.high] - self.times[part.low])
            if part.high > part.low and width_s > WIDE * max(bound_s, 0.0):
                parts = self._split(part)
            else:
                parts = self._search(part, prices)
                if parts is None:  # a limit fired inside: the range's own bound stands
                    break
            for smaller in parts:
                bounded, prices = self._bounded(smaller, prices)
                if bounded.bound_s < self._limit():
                    order += 1
                    heapq.heappush(heap, (bounded.bound_s, order, bounded, prices))
            bound_s = math.inf
        return self._result(keep, bound_s)

    def offer(self, spans: tuple[Span, ...]) -> None:
        """Score a plan and remember it."""
        if spans not in self.plans:
            plan = score_stages(self.problem, spans)
            if math.isfinite(plan.step_time_s) and plan.worst.excess_bytes <= self.extra_bytes:
                self.plans[spans] = plan
                self.best_s = min(self.best_s, plan.step_time_s)

    def _limit(self) -> float:
        """Only plans faster than this are of interest."""
        return self.best_s - max(self.budget.relative_gap, ROUNDING) * self.best_s if self.plans else math.inf

    def _result(self, keep: int, bound_s: float) -> StageResult:
        plans = sorted(self.plans.values(), key=lambda plan: (plan.step_time_s, len(plan.stages), plan.spans))
        closed = bool(plans) and bound_s >= self._limit()
        if closed:
            status = SearchStatus.optimal
        elif plans:
            status = SearchStatus.feasible_limit
        else:
            status = SearchStatus.unknown_limit if self.limit_fired else SearchStatus.infeasible_memory
        return StageResult(
            plans=tuple(plans[:keep]),
            bound_s=min(bound_s, self.best_s) if plans else bound_s,
            status=status,
            limit_fired=self.limit_fired,
            effort=self.effort,
        )

    # Ranges

    def _by_end(self, high: int) -> Floats:
        """[L + 1, O, L + 1] stage seconds by (end, option, first) under the cap of candidate `high`."""
        return np.ascontiguousarray(np.where(self.time_s <= self.times[high], self.time_s, np.inf).transpose(2, 0, 1))

    def _scout(self) -> _Range | None:
        """A first plan from quick searches under growing caps, and the range that can hold better ones."""
        single = np.diagonal(self.time_s, offset=1, axis1=1, axis2=2).min(axis=0)
        if not np.isfinite(single).all():
            return None
        low = int(np.searchsorted(self.times, single.max()))
        high = len(self.times) - 1
        free_s = 0.0
        prices = None
        for cap_s in np.geomspace(self.times[low], self.times[high], 12):
            cap = max(min(int(np.searchsorted(self.times, cap_s, side="right")) - 1, high), low)
            bounds = best_prices(self.tables, self._by_end(cap), prices, rounds=2)
            best = int(bounds.whole_s.argmax())
            self.effort["ranges_bounded"] += 1
            if not math.isfinite(bounds.whole_s[best]):
                if cap == high:
                    return None
                low = max(low, cap + 1)
                continue
            prices = bounds.prices[best]
            if free_s + self.later * float(self.times[cap]) >= self.best_s:
                break
            self._grow(_Range(low=low, high=cap, bound_s=0.0), bounds.keep(PRICES_IN_DP), SCOUT_LABELS)
        if self.plans and self.later:
            high = min(high, int(np.searchsorted(self.times, self.best_s / self.later)))
        return _Range(low=low, high=max(low, high), bound_s=0.0)

    def _split(self, part: _Range) -> tuple[_Range, ...]:
        low_s, high_s = float(self.times[part.low]), float(self.times[part.high])
        middle_s = math.sqrt(low_s * high_s) if high_s > 4 * low_s > 0 else (low_s + high_s) / 2
        middle = min(max(int(np.searchsorted(self.times, middle_s)), part.low + 1), part.high)
        return (
            _Range(low=part.low, high=middle - 1, bound_s=part.bound_s),
            _Range(low=middle, high=part.high, bound_s=part.bound_s),
        )

    def _bounded(self, part: _Range, prices: Floats | None) -> tuple[_Range, Floats | None]:
        """The range with the bound B2 under its cap, and the prices that gave it."""
        self.effort["ranges_bounded"] += 1
        bounds = best_prices(self.tables, self._by_end(part.high), prices)
        best = int(bounds.whole_s.argmax())
        bound_s = float(bounds.whole_s[best]) + self.later * float(self.times[part.low]) + self.once_floor_s
        return (
            _Range(low=part.low, high=part.high, bound_s=max(bound_s, part.bound_s)),
            bounds.prices[best] if math.isfinite(bound_s) else prices,
        )

    def _search(self, part: _Range, prices: Floats | None) -> tuple[_Range, ...] | None:
        """Search a range exactly. Returns what of it may still hold better plans, or None where a limit fired."""
        self.effort["ranges_searched"] += 1
        bounds = best_prices(self.tables, self._by_end(part.high), prices).keep(PRICES_IN_DP)
        least_s, complete = self._grow(part, bounds, self.budget.labels)
        if not complete:
            self.limit_fired = True
            return None
        if not self.later or not math.isfinite(least_s):
            return ()
        high = int(np.searchsorted(self.times, (self._limit() - least_s) / self.later)) - 1
        high = min(high, part.high - 1)
        if high < part.low:
            return ()
        bound_s = least_s + self.later * float(self.times[part.low])
        return (_Range(low=part.low, high=high, bound_s=max(bound_s, part.bound_s)),)

    # Partial plans

    def _grow(self, part: _Range, bounds: PrefixBounds, width: int) -> tuple[float, bool]:
        """D1 to D3 under the cap of a range.

        Returns:
            The least Σ t + Σ send + max once of a whole plan (inf where every plan was dropped), and whether all partial
            plans were kept that D2 and D3 allow.
        """
        tables, count = self.tables, len(self.problem.blocks)
        nothing = np.zeros(1, dtype=np.int64)
        layer = _Layer(
            first=nothing + count,
            option=nothing,
            parent=nothing - 1,
            used=np.zeros((1, len(tables.devices)), dtype=np.int64),
            total_s=np.zeros(1),
            once_s=np.zeros(1),
        )
        layers = [layer]
        seen = _Seen(tables, count)
        least_s, complete = math.inf, True
        for stages in range(1, self.problem.max_stages + 1):
            grown, bound_s = self._extend(layer, stages, part, bounds)
            whole = np.flatnonzero(grown.first == 0)
            values = grown.total_s[whole] + np.maximum(grown.once_s[whole], self.once_floor_s)
            if len(whole):
                least_s = min(least_s, float(values.min()))
                for row in whole[np.argsort(values, kind="stable")[:3]]:
                    self.offer(_trace(layers, grown, int(row)))
            partial = np.flatnonzero((grown.first > 0) & (bound_s < self._limit()))
            grown, bound_s = grown.pick(partial), bound_s[partial]
            kept = seen.undominated(grown, self.once_floor_s)
            if len(kept) > width:
                complete = False
                kept = np.sort(kept[np.argsort(bound_s[kept], kind="stable")[:width]])
            layer = grown.pick(kept)
            self.effort["labels"] += len(kept)
            layers.append(layer)
            if not len(kept):
                break
        return least_s, complete

    def _extend(self, layer: _Layer, stages: int, part: _Range, bounds: PrefixBounds) -> tuple[_Layer, Floats]:
        """Every way to put one more stage before each partial plan, less those that D3 drops, with their bounds."""
        tables = self.tables
        left = tables.devices - layer.used[None] - tables.used[:, None]  # [O, n, P]
        counts = np.where((left >= 0).all(axis=2), self._window(part.high, stages)[:, layer.first], 0).ravel()
        rows = len(layer.first)
        place = np.repeat(np.arange(len(counts)), counts)
        offset = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
        option, row = place // rows, place % rows
        end = layer.first[row]
        first = end - 1 - offset
        link = tables.link[option]
        total_s = layer.total_s[row] + self.time_s[option, first, end]
        total_s += tables.send_s[link, tables.link[layer.option[row]], end]
        once_s = np.maximum(layer.once_s[row], tables.once_s[option, first, end])
        fixed_s = total_s + np.maximum(once_s, self.once_floor_s) + self.later * self.times[part.low]
        limit = self._limit()
        alive = np.flatnonzero(fixed_s < limit)
        rest_s = np.zeros(len(alive))
        priced = left.reshape(-1, left.shape[2]) @ bounds.prices.T  # [O n, M]
        for vector in range(len(bounds.prices)):
            bound = bounds.prefix_s[vector][link[alive], first[alive]] - priced[place[alive], vector]
            rest_s = np.where(first[alive] == 0, 0.0, np.maximum(rest_s, bound))
            better = fixed_s[alive] + rest_s < limit
            alive, rest_s = alive[better], rest_s[better]
        grown = _Layer(
            first=first[alive],
            option=option[alive],
            parent=row[alive],
            used=layer.used[row[alive]] + tables.used[option[alive]],
            total_s=total_s[alive],
            once_s=once_s[alive],
        )
        return grown, fixed_s[alive] + rest_s

    def _window(self, high: int, stages: int) -> Ints:
        """[O, L + 1] how many firsts each end allows, under the cap and with the memory of stage `stages` from the end."""
        need = self.problem.in_flight(stages)
        key = (high, need)
        if key not in self._windows:
            if any(cap != high for cap, _ in self._windows):
                self._windows.clear()
            self._windows[key] = ((self.time_s <= self.times[high]) & (self.tables.room >= need)).sum(axis=1)
        return self._windows[key]


class _Seen:
    """D2: what partial plans with fewer or as many stages have reached."""

    LARGEST = 8_000_000

    def __init__(self, tables: StageTables, blocks: int):
        self.tables = tables
        self.radix = np.cumprod(np.concatenate([[1], tables.devices[::-1] + 1]))[::-1]
        self.links = tables.send_s.shape[0]
        size = (blocks + 1) * self.links * int(self.radix[0])
        self.best_s = np.full(size, np.inf) if size <= self.LARGEST else None

    def undominated(self, layer: _Layer, once_floor_s: float) -> Ints:
        """Rows that stay."""
        place = (layer.first * self.links + self.tables.link[layer.option]) * self.radix[0]
        key = place + layer.used @ self.radix[1:]
        once_s = np.maximum(layer.once_s, once_floor_s)
        rows = np.arange(len(key))
        if self.best_s is not None:
            rows = np.flatnonzero(layer.total_s < self.best_s[key])
        if not len(rows):
            return rows
        rows = rows[np.lexsort((once_s[rows], layer.total_s[rows], key[rows]))]
        new_key = np.concatenate([[0], np.cumsum(np.diff(key[rows]) != 0)])
        _, rank = np.unique(once_s[rows], return_inverse=True)
        value = rank - new_key * (len(rows) + 1)  # falls from state to state, so that one running minimum serves all
        smallest = np.minimum.accumulate(value)
        stays = np.concatenate([[True], value[1:] < smallest[:-1]])
        rows = rows[stays]
        if self.best_s is not None:
            clean = rows[once_s[rows] <= once_floor_s]
            np.minimum.at(self.best_s, key[clean], layer.total_s[clean])
        return np.sort(rows)


def _trace(layers: list[_Layer], last: _Layer, row: int) -> tuple[Span, ...]:
    """The stages of a whole plan, in pipeline order."""
    spans = []
    layer = last
    for before in reversed(layers):
        parent = int(layer.parent[row])
        spans.append((int(layer.first[row]), int(before.first[parent]), int(layer.option[row])))
        layer, row = before, parent
    return tuple(spans)


def _once_floor_s(tables: StageTables, time_s: Floats) -> float:
    """Every plan has a stage with at least this once-a-step time."""
    once_s = np.where(np.isfinite(time_s), tables.once_s, np.inf)
    least = np.diagonal(once_s, offset=1, axis1=1, axis2=2).min(axis=0)
    return float(least[np.isfinite(least)].max(initial=0.0))

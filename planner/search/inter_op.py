"""Blocks to stages on pools of devices: exact for the closed form S1 of `stages`, or as near to it as limits allow.

S1 has two maxima, the largest stage time and the largest once-a-step time. A **box** holds all plans whose two maxima
lie in two ranges; under the ranges' upper ends as caps, the stage DP gives the least Σ t + Σ send, so that

* I1  step ≥ Σ t + Σ send + (m − 1)·(least bottleneck of the box) + (least once of the box)

for every plan of the box. Boxes are taken best bound first: a wide one is halved, with the bound B2 of `stage_bounds`
(devices priced, not counted) for each half; a narrow one goes through the DP, without the stages that B4 rules out.
What of it can still beat the best plan, by I1, is a smaller box.

Where the device counts of the pools span too many combinations for dense arrays, the DP counts devices in larger units
to find good plans, and partial plans on single devices (`stage_labels`) then settle the box; where these grow too many,
the box stays open with the bound B2, and the status says that a limit fired.
"""

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np

from planner.search.problem import Floats, Ints, SearchBudget, SearchStatus
from planner.search.stage_bounds import PricedStages
from planner.search.stage_dp import ExcessDP, StageDP
from planner.search.stage_labels import StageLabels
from planner.search.stage_tables import (
    StageTables,
    coarse_unit,
    coarsened,
    sparse_boundaries,
    stage_excess,
    stage_tables,
)
from planner.search.stages import Span, StagePlan, StageProblem, StageResult, score_stages

ROUNDING = 1e-9
"""Relative difference that sums of floats in another order can make."""

PRICES_IN_DP = 4
"""Price vectors whose bounds prune the DP."""

WIDE = 0.03
"""A box is halved rather than searched where its width makes I1 loose by more than this share of the step time."""

NARROW = 0.01
"""The same where the DP counts devices in larger units, so that B2 alone bounds the box."""

SCOUT_GROWTH, COARSE_BOUNDARIES = 1.25, 44
"""The quick searches for a first plan: growth of the cap from one to the next, and boundaries at which they cut."""

RETRY = 1e-3
"""Improvement of the best plan, as a share of it, after which a box that a work limit left open is tried again."""

BOXES_LEFT = 5
"""Boxes that a work limit left open, after which the search ends unless a better plan makes another try worthwhile."""


def plan_stages(problem: StageProblem, *, keep: int = 1, budget: SearchBudget | None = None) -> StageResult:
    """The best plan by S1 (within `budget.relative_gap`), up to `keep` − 1 further good plans, and a lower bound.

    Only the first plan is proven; the others are the best that the search met with other stages or options, for a
    simulator to choose from.
    """
    return _StageSearch(problem, budget or SearchBudget()).run(keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """Plans with their largest stage time in [low_s, cap_s] and largest once-a-step time in [once_low_s, once_cap_s].

    Attributes:
        bound_s: lower bound on their step time.
        prices: seconds a device in each pool that gave a good bound, a start for the next search.
    """

    low_s: float
    cap_s: float
    once_low_s: float
    once_cap_s: float
    bound_s: float
    prices: tuple[float, ...] | None


class _StageSearch:
    """Best plans and bounds of one call."""

    def __init__(self, problem: StageProblem, budget: SearchBudget):
        self.problem, self.budget = problem, budget
        self.tables = stage_tables(problem)
        self.later = problem.microbatches - 1
        self.in_flight = [problem.in_flight(place) for place in range(1, problem.max_stages + 1)]
        self.in_flight = self.in_flight[: min(problem.max_stages, len(problem.blocks))]
        unit = coarse_unit(self.tables, budget.stage_cells)
        self.exact = bool((unit == 1).all())
        everywhere = np.arange(len(problem.blocks) + 1)
        self.dp_tables = self.tables if self.exact else coarsened(self.tables, everywhere, unit)
        self.plans: dict[tuple[Span, ...], StagePlan] = {}
        self.best_s = math.inf
        self.effort = {"boxes_bounded": 0, "boxes_searched": 0}

    def run(self, keep: int) -> StageResult:
        """Search all boxes."""
        left_s = self.find()
        if not self.plans:
            nearest = self._nearest()
            if nearest is None or not nearest.fits:
                return self._without_plan(nearest, left_s)
            self.offer(nearest.spans)
        plans = sorted(self.plans.values(), key=lambda plan: (plan.step_time_s, len(plan.stages), plan.spans))
        closed = left_s >= self._limit()
        return StageResult(
            plans=tuple(plans[:keep]),
            bound_s=min(left_s, self._limit()),
            status=SearchStatus.optimal if closed else SearchStatus.feasible_limit,
            limit_fired=not closed,
            effort=self.effort,
        )

    def find(self) -> float:
        """Fill `plans`. Returns the least bound of what no search could settle."""
        first = self._first_box()
        if first is None:
            return math.inf
        self._scout(first)
        return self._settle(first)

    def _settle(self, first: _Box) -> float:
        """Take boxes best bound first. Returns the least bound of those that stay open."""
        heap = [(first.bound_s, 0, first)]
        left: list[tuple[_Box, float]] = []  # boxes that a work limit left open, with the best time then
        order = 0
        while self.effort["boxes_searched"] < self.budget.stage_runs:
            if not heap or heap[0][0] >= self._limit() or len(left) >= BOXES_LEFT:
                again = [box for box, best_s in left if self.best_s < best_s * (1 - RETRY)]
                if not again:
                    break
                left = [(box, best_s) for box, best_s in left if self.best_s >= best_s * (1 - RETRY)]
                for box in again:
                    order += 1
                    heapq.heappush(heap, (box.bound_s, order, box))
                continue
            box = heapq.heappop(heap)[2]
            axis = self._wide(box)
            if axis is None or not self.plans:  # without any plan, a narrow box is no more likely to hold one
                parts = self._search(box)
                if parts is None and axis is not None:
                    parts = _halves(box, axis)
            else:
                parts = _halves(box, axis)
            if parts is None:
                left.append((box, self.best_s))
                continue
            for part in parts:
                bounded = self._bounded(part)
                if bounded is not None and bounded.bound_s < self._limit():
                    order += 1
                    heapq.heappush(heap, (bounded.bound_s, order, bounded))
        return min((box.bound_s for box in [*(box for _, _, box in heap), *(box for box, _ in left)]), default=math.inf)

    def _without_plan(self, nearest: StagePlan | None, left_s: float) -> StageResult:
        if math.isfinite(left_s):
            status = SearchStatus.unknown_limit
        else:
            status = SearchStatus.infeasible_devices if nearest is None else SearchStatus.infeasible_memory
        return StageResult(
            plans=(),
            bound_s=left_s,
            status=status,
            nearest=nearest,
            limit_fired=status is SearchStatus.unknown_limit,
            effort=self.effort,
        )

    def _nearest(self) -> StagePlan | None:
        """A plan whose worst stage misses its memory by least (among coarse plans where blocks or devices are many)."""
        boundaries = sparse_boundaries(self.problem, COARSE_BOUNDARIES)
        everything = stage_tables(self.problem, with_memory=False)
        tables = coarsened(everything, boundaries, coarse_unit(everything, self.budget.stage_cells))
        pick = np.ix_(np.arange(len(self.problem.options)), boundaries, boundaries)
        dp = ExcessDP(
            tables,
            tables.time_s,
            self.in_flight,
            lambda in_flight: stage_excess(self.problem, in_flight)[pick],
            self.problem.min_stages,
        )
        reached = min(dp.run(), default=None)
        found = score_stages(self.problem, _at(boundaries, reached[1])) if reached else None
        if found is None and (len(boundaries) <= len(self.problem.blocks) or not self.exact):
            roomy = _StageSearch(_without_limits(self.problem), self.budget)
            roomy.find()
            found = score_stages(self.problem, min(roomy.plans)) if roomy.plans else None
        return found

    def offer(self, spans: tuple[Span, ...]) -> None:
        """Score a plan and remember it."""
        if spans not in self.plans:
            plan = score_stages(self.problem, spans)
            if plan.fits and len(spans) >= self.problem.min_stages:
                self.plans[spans] = plan
                self.best_s = min(self.best_s, plan.step_time_s)

    def _limit(self) -> float:
        """Only plans faster than this are of interest."""
        return self.best_s - max(self.budget.relative_gap, ROUNDING) * self.best_s if self.plans else math.inf

    # Boxes

    def _first_box(self) -> _Box | None:
        """All plans; None where some block fits under no option."""
        time_s = np.where(self.tables.room >= self.in_flight[0], self.tables.time_s, np.inf)
        single_s = np.diagonal(time_s, offset=1, axis1=1, axis2=2).min(axis=0)
        if not np.isfinite(single_s).all():
            return None
        once_s = np.where(np.isfinite(time_s), self.tables.once_s, np.inf)
        single_once_s = np.diagonal(once_s, offset=1, axis1=1, axis2=2).min(axis=0)
        box = _Box(
            low_s=float(single_s.max()),
            cap_s=float(time_s[np.isfinite(time_s)].max()),
            once_low_s=float(single_once_s.max()),
            once_cap_s=float(once_s[np.isfinite(once_s)].max()),
            bound_s=0.0,
            prices=None,
        )
        return self._bounded(box)

    def _allowed(self, tables: StageTables, box: _Box) -> Floats:
        """[O, L + 1, L + 1] seconds of the stages that a plan of the box may have; inf for the others."""
        allowed = (tables.time_s <= box.cap_s) & (tables.once_s <= box.once_cap_s) & (tables.room >= self.in_flight[0])
        return np.where(allowed, tables.time_s, np.inf)

    def _floor_s(self, box: _Box) -> float:
        """The part of I1 that is the box's own."""
        return self.later * box.low_s + box.once_low_s

    def _bounded(self, box: _Box) -> _Box | None:
        """The box shrunk to values that occur, with the bound B2 in I1; None where no plan is left in it."""
        self.effort["boxes_bounded"] += 1
        tables = self.tables
        time_s = self._allowed(tables, box)
        start = None if box.prices is None else np.array(box.prices)
        found = PricedStages(tables, time_s, len(self.in_flight)).bound(start, self._limit() - self._floor_s(box))
        if not math.isfinite(found.bound_s):
            return None
        low_s = float(time_s[time_s >= box.low_s].min(initial=np.inf))
        once_s = tables.once_s[np.isfinite(time_s)]
        once_low_s = float(once_s[once_s >= box.once_low_s].min(initial=np.inf))
        if not (math.isfinite(low_s) and math.isfinite(once_low_s)):
            return None
        return _Box(
            low_s=low_s,
            cap_s=float(time_s[np.isfinite(time_s)].max()),
            once_low_s=once_low_s,
            once_cap_s=float(once_s.max()),
            bound_s=max(box.bound_s, found.bound_s + self.later * low_s + once_low_s),
            prices=tuple(float(x) for x in found.prices[0]),
        )

    def _wide(self, box: _Box) -> str | None:
        """The axis along which the box is too wide to be searched, if any."""
        allowed_s = (WIDE if self.exact else NARROW) * max(min(self.best_s, 2 * box.bound_s), 1e-12)
        spread_s, once_spread_s = self.later * (box.cap_s - box.low_s), box.once_cap_s - box.once_low_s
        if max(spread_s, once_spread_s) <= allowed_s:
            return None
        return "time" if spread_s >= once_spread_s else "once"

    def _search(self, box: _Box) -> tuple[_Box, ...] | None:
        """Run the DP on a box. Returns what may still hold better plans, or None where that cannot be said."""
        self.effort["boxes_searched"] += 1
        time_s = self._allowed(self.tables, box)
        limit_s = self._limit() - self._floor_s(box)
        if box.prices is not None:
            through_s = PricedStages(self.tables, time_s, len(self.in_flight)).through(time_s, np.array(box.prices))
            time_s = np.where(through_s < limit_s, time_s, np.inf)
        least_s = self._run_dp(self.dp_tables, time_s, limit_s, None)
        if not self.exact:
            labelled_s = self._run_labels(time_s, self._limit() - self._floor_s(box))
            if labelled_s is None:
                return None
            least_s = labelled_s
        if not math.isfinite(least_s):
            return ()
        limit_s = self._limit() - least_s  # I1: what is left for the two maxima
        times = self.tables.time_s[self.tables.time_s <= box.cap_s]
        onces = self.tables.once_s[self.tables.once_s <= box.once_cap_s]
        times = times[(times >= box.low_s) & (self.later * times + box.once_low_s < limit_s)]
        onces = onces[(onces >= box.once_low_s) & (self.later * box.low_s + onces < limit_s)]
        if not len(times) or not len(onces):
            return ()
        rest = replace(
            box,
            cap_s=float(times.max()),
            once_cap_s=float(onces.max()),
            bound_s=max(box.bound_s, least_s + self._floor_s(box)),
        )
        if (rest.cap_s, rest.once_cap_s) != (box.cap_s, box.once_cap_s):
            return (rest,)
        once_is_wider = rest.once_cap_s - rest.once_low_s > self.later * (rest.cap_s - rest.low_s)
        return _halves(rest, "once" if once_is_wider else "time")

    # The DP

    def _run_dp(self, tables: StageTables, time_s: Floats, limit_s: float, boundaries: Ints | None) -> float:
        """Offer what the DP finds. Returns the least Σ t + Σ send below the limit, or inf."""
        priced = PricedStages(tables, time_s, len(self.in_flight))
        found = priced.bound(None, limit_s)
        if found.bound_s >= limit_s:
            return math.inf
        prices = found.prices[:PRICES_IN_DP]
        prefix_s = priced.prefix(prices)
        dp = StageDP(tables, time_s, self.in_flight, prices, prefix_s, limit_s, self.problem.min_stages)
        for _, spans in dp.run():
            self.offer(spans if boundaries is None else _at(boundaries, spans))
        return dp.least_s

    def _run_labels(self, time_s: Floats, limit_s: float) -> float | None:
        """As `_run_dp`, on single devices; None where a work limit fired."""
        priced = PricedStages(self.tables, time_s, len(self.in_flight))
        found = priced.bound(None, limit_s)
        if found.bound_s >= limit_s:
            return math.inf
        prices = found.prices[:PRICES_IN_DP]
        prefix_s = priced.prefix(prices)
        labels = StageLabels(
            self.tables,
            time_s,
            self.in_flight,
            prices,
            prefix_s,
            limit_s,
            self.budget.stage_labels,
            self.problem.min_stages,
        )
        for _, spans in labels.run():
            self.offer(spans)
        self.effort["labels"] = self.effort.get("labels", 0) + len(labels.reached[0])
        return labels.least_s if labels.complete else None

    def _scout(self, box: _Box) -> None:
        """First plans, from coarse DPs under growing caps."""
        boundaries = sparse_boundaries(self.problem, COARSE_BOUNDARIES)
        unit = coarse_unit(self.tables, self.budget.stage_cells)
        tables = coarsened(self.tables, boundaries, unit)
        cap_s = box.low_s
        while self.later * cap_s < self._limit():
            time_s = self._allowed(tables, replace(box, cap_s=cap_s))
            self._run_dp(tables, time_s, self._limit() - box.once_low_s, boundaries)
            if cap_s >= box.cap_s:
                break
            cap_s = min(max(cap_s * SCOUT_GROWTH, 1e-12), box.cap_s)


def _at(boundaries: Ints, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Stages over all blocks from stages over some boundaries."""
    return tuple((int(boundaries[first]), int(boundaries[end]), option) for first, end, option in spans)


def _without_limits(problem: StageProblem) -> StageProblem:
    """The problem with memory without limit."""
    return replace(
        problem,
        options=tuple(
            replace(option, groups=tuple(replace(group, memory_limit_bytes=math.inf) for group in option.groups))
            for option in problem.options
        ),
    )


def _halves(box: _Box, axis: str) -> tuple[_Box, _Box]:
    """The box cut in two; both ends that meet may lie between values that occur."""
    low_s, cap_s = (box.low_s, box.cap_s) if axis == "time" else (box.once_low_s, box.once_cap_s)
    middle_s = math.sqrt(low_s * cap_s) if cap_s > 4 * low_s > 0 else (low_s + cap_s) / 2
    above_s = math.nextafter(middle_s, math.inf)
    if axis == "time":
        return replace(box, cap_s=middle_s), replace(box, low_s=above_s)
    return replace(box, once_cap_s=middle_s), replace(box, once_low_s=above_s)

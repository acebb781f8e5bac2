"""Lower bounds of the stage DP: devices are priced, not counted, so that the DP over blocks needs no device state.

With a price μ_p ≥ 0 in seconds for each device of pool p, and only the stages (first, end, option) that a mask allows
(the number of stages is one more pool: every stage takes one of `max_stages`, at a price of its own),

* B1  h_μ(j, e) = min over ways to cut blocks 0 … j − 1 into stages of Σ (t_s + μ·devices_s) + Σ send, the send into a
  following stage of link class e counted; h_μ(0, e) = 0. And g_μ(j, e) = the same for blocks j … L − 1 after a stage of
  link class e, the send from it counted; g_μ(L, e) = 0
* B2  Σ t + Σ send ≥ h_μ(L) − μ·devices for every plan
* B3  and of a plan whose last stages hold blocks j … and leave `left` devices, the first part costs at least
  h_μ(j, e) − μ·left
* B4  and a plan that has the stage (i, j, o) costs at least h_μ(i, e_o) + t + μ·devices_o + g_μ(j, e_o) − μ·devices.

Prices follow Kelley's cutting planes: the next μ maximises θ subject to θ ≤ cost_k + μ·(devices_k − devices) over the
plans found so far. Memory counts as in the last stage, which holds the fewest microbatches.
"""

import math
from dataclasses import dataclass

import numpy as np

from planner.search.problem import Floats, Ints
from planner.search.solver import LinearProgram, ProgramStatus, minimise
from planner.search.stage_tables import StageTables

STEPS = 14
"""Most price updates for one bound."""

PRICE_LIMIT = 1e4
"""Largest price of all devices of a pool, as a multiple of the cost of the first plan."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kind:
    """Options that take the same devices over the same links."""

    link: int
    devices: tuple[int, ...]
    options: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PriceBound:
    """What a search for prices proves.

    Attributes:
        bound_s: B2 at the best prices; inf where no plan exists.
        prices: [M, P + 1] the prices tried, the best first; the last of each is the price of a stage.
    """

    bound_s: float
    prices: Floats


class PricedStages:
    """The stages that a mask allows, with devices priced.

    Args:
        time_s: [O, L + 1, L + 1] seconds of a stage by (option, first, end); inf where it may not be.
    """

    def __init__(self, tables: StageTables, time_s: Floats, max_stages: int):
        self.tables = tables
        self.have = np.append(tables.devices, max_stages).astype(np.float64)
        self.kinds = stage_kinds(tables)
        self.link = np.array([kind.link for kind in self.kinds])
        self.used = np.array([(*kind.devices, 1) for kind in self.kinds], dtype=np.float64)
        self.size = time_s.shape[1]
        merged = np.stack([time_s[kind.options].min(axis=0) for kind in self.kinds])
        self.by_end_s: Floats = merged.transpose(2, 0, 1).copy()  # [end, kind, first]
        allowed = np.any(np.isfinite(self.by_end_s), axis=1)
        self.lowest = np.where(allowed.any(axis=1), allowed.argmax(axis=1), self.size).tolist()
        single = np.diagonal(tables.time_s, offset=1, axis1=1, axis2=2)
        self.most_s = float(
            np.where(np.isfinite(single), single, 0.0).max(axis=0).sum() + tables.send_s.max(axis=(0, 1)).sum()
        )
        self.into_s = tables.send_s[self.link]  # [kind, E, L + 1]: from a kind into a link class

    def bound(self, start: Floats | None, enough_s: float = math.inf) -> PriceBound:
        """B2 with good prices.

        Args:
            start: [P + 1] prices to begin with.
            enough_s: stop once the bound reaches this.
        """
        pools = len(self.have)
        enough_s = min(enough_s, self.most_s * 1.001)
        tried: list[tuple[float, Floats]] = []
        cuts: list[tuple[float, Floats]] = []
        queue = [np.zeros(pools)] if start is None or not start.any() else [np.zeros(pools), start]
        scale_s = 1.0
        while len(tried) < STEPS:
            if queue:
                prices, model_s = queue.pop(0), math.inf
            else:
                prices, model_s = self._next_prices(cuts, scale_s, enough_s)
            value_s, cost_s, used = self._cheapest(prices)
            if not math.isfinite(value_s):
                return PriceBound(bound_s=math.inf, prices=prices[None])
            scale_s = scale_s if tried else max(cost_s, 1e-12)
            tried.append((value_s, prices))
            cuts.append((cost_s, used - self.have))
            best_s = max(value for value, _ in tried)
            if best_s > self.most_s * (1 + 1e-9):  # no plan costs that much: the devices do not suffice
                return PriceBound(bound_s=math.inf, prices=prices[None])
            if best_s >= enough_s or model_s - best_s <= 1e-4 * abs(best_s):
                break
            if len(tried) == 1 and (used <= self.have).all():
                break
        tried.sort(key=lambda item: -item[0])
        return PriceBound(bound_s=tried[0][0], prices=np.array([prices for _, prices in tried]))

    def prefix(self, prices: Floats) -> Floats:
        """[M, E, L + 1] h_μ(j, e) of B1 for M price vectors [M, P + 1]."""
        prefix = np.full((len(prices), self.tables.send_s.shape[0], self.size), np.inf)
        prefix[:, :, 0] = 0.0
        paid = prices @ self.used.T
        for end in range(1, self.size - 1):
            low = self.lowest[end]
            if low < end:
                best = (prefix[:, self.link, low:end] + self.by_end_s[end, :, low:end]).min(axis=2) + paid
                prefix[:, :, end] = (best[:, :, None] + self.into_s[:, :, end]).min(axis=1)
        return prefix

    def through(self, time_s: Floats, prices: Floats) -> Floats:
        """[O, L + 1, L + 1] B4 for one price vector [P + 1]."""
        tables, size = self.tables, self.size
        paid = self.used @ prices
        suffix = np.full((tables.send_s.shape[0], size), np.inf)
        suffix[:, size - 1] = 0.0
        by_first_s = np.ascontiguousarray(self.by_end_s.transpose(2, 1, 0))
        for first in range(size - 2, 0, -1):
            best = (by_first_s[first, :, first + 1 :] + suffix[self.link, first + 1 :]).min(axis=1) + paid
            suffix[:, first] = (best + tables.send_s[:, self.link, first]).min(axis=1)
        prefix = self.prefix(prices[None])[0]
        own_s = time_s + (tables.used @ prices[:-1] + prices[-1] - float(prices @ self.have))[:, None, None]
        return prefix[tables.link][:, :, None] + own_s + suffix[tables.link][:, None, :]

    def _cheapest(self, prices: Floats) -> tuple[float, float, Floats]:
        """B2 at some prices, and the cost and devices of the plan that attains it."""
        links = self.tables.send_s.shape[0]
        prefix = np.full((links, self.size), np.inf)
        prefix[:, 0] = 0.0
        paid = self.used @ prices
        kind_of = np.zeros((links, self.size), dtype=np.int64)
        every = np.arange(links)
        for end in range(1, self.size - 1):
            low = self.lowest[end]
            if low < end:
                best = (prefix[self.link, low:end] + self.by_end_s[end, :, low:end]).min(axis=1) + paid
                into = best[:, None] + self.into_s[:, :, end]
                kind_of[:, end] = chosen = into.argmin(axis=0)
                prefix[:, end] = into[chosen, every]
        end, low = self.size - 1, self.lowest[self.size - 1]
        if low >= end:
            return math.inf, math.inf, prices
        last = (prefix[self.link, low:end] + self.by_end_s[end, :, low:end]).min(axis=1) + paid
        kind = int(last.argmin())
        value_s = float(last[kind])
        if not math.isfinite(value_s):
            return math.inf, math.inf, prices
        used = np.zeros(len(prices))
        while True:
            used += self.used[kind]
            low = self.lowest[end]
            end = low + int((prefix[self.link[kind], low:end] + self.by_end_s[end, kind, low:end]).argmin())
            if end == 0:
                break
            kind = int(kind_of[self.link[kind], end])
        return value_s - float(prices @ self.have), value_s - float(prices @ used), used

    def _next_prices(self, cuts: list[tuple[float, Floats]], scale_s: float, enough_s: float) -> tuple[Floats, float]:
        """The prices at which the cuts' lower envelope is highest, and its height."""
        pools, count = len(self.have), len(cuts)
        share = np.maximum(self.have, 1)
        excess = np.array([over for _, over in cuts]) / share
        rows, columns = np.indices((count, pools + 1))
        result = minimise(
            LinearProgram(
                objective=np.concatenate([[-1.0], np.zeros(pools)]),
                lower=np.concatenate([[-np.inf], np.zeros(pools)]),
                upper=np.concatenate([[max(enough_s / scale_s, 1.0) * 1.01], np.full(pools, PRICE_LIMIT)]),
                integer=np.zeros(pools + 1, dtype=bool),
                rows=rows.ravel(),
                columns=columns.ravel(),
                values=np.concatenate([np.ones((count, 1)), -excess], axis=1).ravel(),
                row_lower=np.full(count, -np.inf),
                row_upper=np.array([cost for cost, _ in cuts]) / scale_s,
            )
        )
        if result.status is not ProgramStatus.optimal:
            raise RuntimeError(f"the price program ended as {result.status.name}")
        return np.maximum(result.values[1:], 0.0) * scale_s / share, -result.objective * scale_s


def stage_kinds(tables: StageTables) -> list[Kind]:
    """The options of a problem by devices and link class."""
    keys: dict[tuple[int, ...], list[int]] = {}
    for option, devices in enumerate(tables.used):
        keys.setdefault((int(tables.link[option]), *(int(x) for x in devices)), []).append(option)
    return [Kind(link=key[0], devices=key[1:], options=np.array(found)) for key, found in keys.items()]

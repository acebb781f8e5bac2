"""Lower bounds of the stage DP: devices are priced instead of counted, so that the DP over blocks needs no device state.

With a price μ_p ≥ 0 in seconds for each device of pool p, under a cap on the time of a stage,

* B1  h_μ(j, e) = min over ways to cut blocks 0 … j − 1 into stages of Σ (t_s + μ·devices_s) + Σ send, the send into a
  following stage of link class e counted;  h_μ(0, e) = 0
* B2  Σ t + Σ send ≥ max_μ h_μ(L) − μ·devices  for every plan under the cap,
* B3  and of a plan whose last stages hold blocks j … with `left` devices to spare, the first part costs at least
  max_μ h_μ(j, e) − μ·left.

Memory counts as in a stage that holds the fewest microbatches that any stage holds.
"""

from dataclasses import dataclass

import numpy as np

from planner.search.problem import Floats
from planner.search.stage_tables import StageTables


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixBounds:
    """Bounds for a set of M price vectors under one cap.

    Attributes:
        prices: [M, P] seconds a device.
        prefix_s: [M, E, L + 1] h_μ(j, e).
        whole_s: [M] the bound of B2.
    """

    prices: Floats
    prefix_s: Floats
    whole_s: Floats

    def keep(self, count: int) -> "PrefixBounds":
        """The price vectors with the highest bounds."""
        best = np.argsort(-self.whole_s, kind="stable")[:count]
        return PrefixBounds(prices=self.prices[best], prefix_s=self.prefix_s[best], whole_s=self.whole_s[best])


def prefix_bounds(tables: StageTables, by_end_s: Floats, prices: Floats) -> PrefixBounds:
    """B1 and B2 for some prices.

    Args:
        by_end_s: [L + 1, O, L + 1] seconds by (end, option, first), inf where a stage may not be.
        prices: [M, P].
    """
    size = by_end_s.shape[0]
    classes = tables.send_s.shape[0]
    prefix = np.full((len(prices), classes, size), np.inf)
    prefix[:, :, 0] = 0.0
    paid = prices @ tables.used.T  # [M, O]
    allowed = np.isfinite(by_end_s).any(axis=1)
    first_allowed = np.where(allowed.any(axis=1), allowed.argmax(axis=1), size)
    last = np.full(len(prices), np.inf)
    for end in range(1, size):
        low = first_allowed[end]
        if low >= end:
            continue
        best = (prefix[:, tables.link, low:end] + by_end_s[end, :, low:end]).min(axis=2) + paid  # [M, O]
        if end == size - 1:
            last = best.min(axis=1)
        else:
            prefix[:, :, end] = (best[:, :, None] + tables.send_s[tables.link, :, end]).min(axis=1)
    return PrefixBounds(prices=prices, prefix_s=prefix, whole_s=last - prices @ tables.devices)


def best_prices(tables: StageTables, by_end_s: Floats, start: Floats | None, rounds: int = 4) -> PrefixBounds:
    """Prices that make B2 high, and their bounds: a compass search with ever finer steps.

    Args:
        start: [P] prices to start from, or None for a wide scan first.
    """
    pools = len(tables.devices)
    found: list[PrefixBounds] = []
    factor = 2.0
    if start is None:
        unit = _typical_price(tables, by_end_s)
        found.append(prefix_bounds(tables, by_end_s, np.outer([0.0, *4.0 ** np.arange(-4, 3)], unit)))
        start = found[0].prices[found[0].whole_s.argmax()]
        if not start.any():
            start = unit * 4.0**-5
    steps = np.stack(np.meshgrid(*[[-1.0, 0.0, 1.0]] * pools, indexing="ij"), axis=-1).reshape(-1, pools)
    for _ in range(rounds):
        tried = prefix_bounds(tables, by_end_s, start * factor**steps)
        found.append(tried)
        start = tried.prices[tried.whole_s.argmax()]
        factor = factor**0.6
    return PrefixBounds(
        prices=np.concatenate([bounds.prices for bounds in found]),
        prefix_s=np.concatenate([bounds.prefix_s for bounds in found]),
        whole_s=np.concatenate([bounds.whole_s for bounds in found]),
    )


def _typical_price(tables: StageTables, by_end_s: Floats) -> Floats:
    """[P] seconds: about the whole work on the fastest option of each pool, over the square of all devices."""
    finite = by_end_s[np.isfinite(by_end_s)]
    whole = float(finite.min(initial=np.inf)) * (by_end_s.shape[0] - 1) if len(finite) else 1.0
    return np.maximum(whole / np.maximum(tables.devices, 1), 1e-12)

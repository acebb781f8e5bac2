"""A quick way to near-optimal assignments under one tight memory row: price its bytes, and solve without the row.

* P1  L(λ) = min over assignments of time + λ·(memory − budget): every L(λ), λ >= 0, is a lower bound
* P2  memory falls as λ grows, so bisection finds the least λ whose assignment fits

Each priced problem has no row, so that reductions and exact elimination apply to it fully (`intra_op`, road 1). What is
lost against the ILP is the duality gap, which is reported with the bound.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from planner.search.problem import IntraOpProblem, evaluate

STEPS = 5
CLOSE = 0.06  # stops when the best that fits is within this of the bound


@dataclass(frozen=True)
class Priced:
    """The fastest assignment met that fits (empty if none), the best bound of P1, and the last relative price."""

    choice: tuple[int, ...]
    bound_s: float
    price: float


def price_memory(
    problem: IntraOpProblem,
    solve_free: Callable[[IntraOpProblem], tuple[tuple[int, ...], float]],
    start: float | None = None,
) -> Priced:
    """Bisects the price of the worst row's bytes.

    Args:
        solve_free: solves a problem without rows; returns its choice and proven bound.
        start: relative price to begin with, such as that of a like problem (`Priced.price`).
    """
    best: tuple[float, tuple[int, ...]] | None = None
    bound = -np.inf
    low, high = 0.0, None
    row = int(np.argmin(problem.budget_bytes))
    budget = float(problem.budget_bytes[row])
    # In units of (least time of all nodes) a (budget), so that a price carries over to problems of another size.
    unit = sum(float(n.time_s[np.isfinite(n.time_s)].min()) for n in problem.nodes) / max(budget, 1.0)
    price = unit * (1.0 if start is None else start)
    for _ in range(STEPS):
        choice, value = solve_free(_with_price(problem, row, price))
        bound = max(bound, value - price * budget)
        found = evaluate(problem, choice)
        if found.feasible:
            if best is None or found.time_s < best[0]:
                best = (found.time_s, choice)
            high = price
        else:
            low = price
        if best is not None and best[0] - bound <= CLOSE * best[0]:
            break
        price = np.sqrt(low * high) if high is not None and low > 0 else high / 8 if high is not None else price * 8
    if best is not None and bound < 0.5 * best[0]:  # prices far above what the row is worth prove little
        bound = max(bound, solve_free(_with_price(problem, row, 0.0))[1])
    return Priced(best[1] if best else (), bound, (high or price) / unit if unit else 1.0)


def _with_price(problem: IntraOpProblem, row: int, price: float) -> IntraOpProblem:
    """The problem without rows, with `price` seconds for each byte of one row."""
    nodes = tuple(
        replace(
            n,
            time_s=n.time_s + price * n.memory_bytes[row],
            memory_bytes=n.memory_bytes[:0],
            transient_bytes=np.zeros_like(n.transient_bytes),
        )
        for n in problem.nodes
    )
    tensors = tuple(
        replace(
            t, cast_time_s=t.cast_time_s + price * t.cast_memory_bytes[row], cast_memory_bytes=t.cast_memory_bytes[:0]
        )
        for t in problem.tensors
    )
    return IntraOpProblem(nodes=nodes, tensors=tensors, budget_bytes=np.zeros(0))

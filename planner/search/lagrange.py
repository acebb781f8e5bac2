"""Lagrangian relaxation of the memory rows, with exact elimination as its oracle.

* L1  L(λ) = min_x time(x) + Σ_r λ_r (memory_r(x) + T₀ − budget_r)  for prices λ ≥ 0 in seconds a byte is a lower bound on
  the time of every assignment that fits; T₀ is the smallest transient that any assignment can have.
* L2  Prices follow Kelley's cutting planes: the next λ maximises θ subject to θ ≤ time_k + λ·excess_k over the
  assignments found so far. Each of these that fits is an incumbent.
* L3  The min-marginal of a strategy under L, plus Σ_r λ_r (transient − T₀) where its transient exceeds T₀, bounds every
  assignment that uses it; where that exceeds the incumbent the strategy is ruled out for good.
"""

import math
from dataclasses import dataclass

import numpy as np

from planner.search.elimination import Elimination
from planner.search.problem import Floats, IntraOpProblem, SearchBudget, evaluate
from planner.search.reduce import Mask
from planner.search.solver import LinearProgram, ProgramStatus, minimise

PRICE_LIMIT = 1e5
"""Largest price, as a multiple of (fastest time / budget): far above any that a problem that fits can need."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relaxation:
    """What the relaxation proves.

    Attributes:
        bound_s: lower bound on the time of every assignment that fits; inf proves that none does.
        choice: the fastest assignment found that fits, or empty.
        time_s: its time, inf where there is none.
        allowed: masks of the strategies that an assignment faster than `cutoff_s` can use.
        cutoff_s: assignments that use a ruled-out strategy are proven to take at least this long.
        steps: price updates made.
    """

    bound_s: float
    choice: tuple[int, ...]
    time_s: float
    allowed: tuple[Mask, ...]
    cutoff_s: float
    steps: int


def relax(problem: IntraOpProblem, elimination: Elimination, budget: SearchBudget) -> Relaxation:
    """Bound a problem with memory rows, look for good assignments, and rule strategies out."""
    return _Dual(problem, elimination, budget).run()


class _Dual:
    """Prices, cuts and the incumbent of one relaxation."""

    def __init__(self, problem: IntraOpProblem, elimination: Elimination, budget: SearchBudget):
        self.problem, self.elimination, self.budget = problem, elimination, budget
        self.rows = len(problem.budget_bytes)
        self.floor = max(0.0, max(float(node.transient_bytes.min()) for node in problem.nodes))
        self.cuts: list[tuple[float, Floats]] = []
        self.choice: tuple[int, ...] = ()
        self.time_s = math.inf

    def run(self) -> Relaxation:
        everything = tuple(np.ones(size, dtype=bool) for size in self.problem.sizes)
        infeasible = Relaxation(
            bound_s=math.inf, choice=(), time_s=math.inf, allowed=everything, cutoff_s=math.inf, steps=0
        )
        best, best_prices = self._oracle(np.zeros(self.rows), 1.0), np.zeros(self.rows)
        if not math.isfinite(best):
            return infeasible
        for row in range(self.rows):
            unit = np.zeros(self.rows)
            unit[row] = 1.0
            if self._oracle(unit, 0.0) > 1e-9 * abs(self.problem.budget_bytes[row]):
                return infeasible
        scale_s = max(abs(self.cuts[0][0]), 1e-12)
        scale_bytes = np.maximum(np.abs(self.problem.budget_bytes), 1.0)
        worst_s = _largest_time_s(self.problem)
        steps = 0
        while steps < self.budget.dual_steps and self._gap(best) > self.budget.relative_gap:
            steps += 1
            prices, model = self._next_prices(scale_s, scale_bytes)
            value = self._oracle(prices, 1.0)
            if value > best:
                best, best_prices = value, prices
            if best > worst_s * (1 + 1e-9):
                return infeasible
            if model - best <= 1e-9 * scale_s:
                break
        allowed, cutoff_s = everything, math.inf
        if self.choice and self._gap(best) > self.budget.relative_gap:
            cutoff_s = self.time_s * (1 - self.budget.relative_gap)
            allowed = self._rule_out(best_prices, cutoff_s)
        return Relaxation(
            bound_s=min(best, self.time_s),
            choice=self.choice,
            time_s=self.time_s,
            allowed=allowed,
            cutoff_s=cutoff_s,
            steps=steps,
        )

    def _gap(self, bound_s: float) -> float:
        if not self.choice:
            return math.inf
        return (self.time_s - bound_s) / max(abs(self.time_s), 1e-300)

    def _costs(self, prices: Floats, time_weight: float) -> tuple[list[Floats], list[Floats]]:
        nodes = [time_weight * node.time_s + prices @ node.memory_bytes for node in self.problem.nodes]
        casts = [
            np.where(
                np.isfinite(tensor.cast_time_s),
                time_weight * np.where(np.isfinite(tensor.cast_time_s), tensor.cast_time_s, 0.0)
                + np.tensordot(prices, tensor.cast_memory_bytes, axes=1),
                np.inf,
            )
            for tensor in self.problem.tensors
        ]
        return nodes, casts

    def _oracle(self, prices: Floats, time_weight: float) -> float:
        """L1 (with the time weighted), recording the assignment as a cut and, where it fits, as incumbent."""
        value, choice = self.elimination.minimise(*self._costs(prices, time_weight))
        if not choice:
            return math.inf
        cost = evaluate(self.problem, choice)
        self.cuts.append((cost.time_s, cost.memory_bytes + self.floor - self.problem.budget_bytes))
        if cost.feasible and cost.time_s < self.time_s:
            self.time_s, self.choice = cost.time_s, choice
        return value + float(prices @ (self.floor - self.problem.budget_bytes))

    def _next_prices(self, scale_s: float, scale_bytes: Floats) -> tuple[Floats, float]:
        """L2: the prices at which the cuts' lower envelope is highest, and its height."""
        count = len(self.cuts)
        times = np.array([time for time, _ in self.cuts]) / scale_s
        excess = np.array([excess for _, excess in self.cuts]) / scale_bytes
        rows, columns = np.indices((count, self.rows + 1))
        matrix = np.concatenate([np.ones((count, 1)), -excess], axis=1)
        program = LinearProgram(
            objective=np.concatenate([[-1.0], np.zeros(self.rows)]),
            lower=np.concatenate([[-np.inf], np.zeros(self.rows)]),
            upper=np.concatenate([[np.inf], np.full(self.rows, PRICE_LIMIT)]),
            integer=np.zeros(self.rows + 1, dtype=bool),
            rows=rows.ravel(),
            columns=columns.ravel(),
            values=matrix.ravel(),
            row_lower=np.full(count, -np.inf),
            row_upper=times,
        )
        result = minimise(program)
        if result.status is not ProgramStatus.optimal:
            raise RuntimeError(f"the price program ended as {result.status.name}")
        return np.maximum(result.values[1:], 0.0) * scale_s / scale_bytes, -result.objective * scale_s

    def _rule_out(self, prices: Floats, cutoff_s: float) -> tuple[Mask, ...]:
        """L3."""
        constant = float(prices @ (self.floor - self.problem.budget_bytes))
        allowed = []
        for node, marginal in zip(
            self.problem.nodes, self.elimination.min_marginals(*self._costs(prices, 1.0)), strict=True
        ):
            extra = float(prices.sum()) * np.maximum(node.transient_bytes - self.floor, 0.0)
            allowed.append(marginal + constant + extra <= cutoff_s + 1e-12 * abs(cutoff_s))
        return tuple(allowed)


def _largest_time_s(problem: IntraOpProblem) -> float:
    """More than any assignment without an impossible cast can take."""
    total = sum(float(node.time_s[np.isfinite(node.time_s)].max()) for node in problem.nodes)
    for tensor in problem.tensors:
        finite = tensor.cast_time_s[np.isfinite(tensor.cast_time_s)]
        if len(finite):
            total += len(tensor.consumers) * float(finite.max())
    return total

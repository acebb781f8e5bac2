"""Lagrangian relaxation of the memory rows, with exact elimination as its oracle.

* L1  L(λ) = min_x time(x) + Σ_r λ_r (memory_r(x) + T₀ − budget_r)  for prices λ ≥ 0 in seconds a byte is a lower bound
  on the time of every assignment that fits; T₀ is the smallest transient that any assignment can have. For the goal
  *excess*, time is left out and Σ_r λ_r = 1: a lower bound on the excess of the worst row.
* L2  Prices follow Kelley's cutting planes: the next λ maximises θ subject to θ ≤ time_k + λ·excess_k over the
  assignments found so far. Each of these that fits is an incumbent; prices a little above the last ones give more.
* L3  The min-marginal of a strategy under L, plus Σ_r λ_r (transient − T₀) where its transient exceeds T₀, bounds every
  assignment that uses the strategy: above a cutoff it is of no interest.
"""

import math
from dataclasses import dataclass

import numpy as np

from planner.search.elimination import Elimination
from planner.search.problem import Floats, Goal, IntraOpProblem, SearchBudget, evaluate, gap_unit, score
from planner.search.solver import LinearProgram, ProgramStatus, minimise

PRICE_LIMIT = 1e5
"""Largest price, as a multiple of (fastest time / budget): far above any that a problem that fits can need."""

RAISED = (1.003, 1.01, 1.03, 1.1, 1.3, 2.0, 4.0)
"""Multiples of the best prices that are tried, in this order, until an assignment fits."""

HALVINGS = 3
"""Further multiples tried between the first that fits and the one before it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relaxation:
    """What the relaxation proves, in the goal's unit.

    Attributes:
        bound: lower bound on the goal; inf proves that no assignment counts.
        choice: the best assignment found that counts, or empty.
        value: its goal, inf where there is none.
        through: [S] a node, lower bound on the goal of every assignment that uses the strategy; empty where the gap is
            closed or no proof is wanted.
        steps: calls of the oracle.
    """

    bound: float
    choice: tuple[int, ...]
    value: float
    through: tuple[Floats, ...]
    steps: int


def relax(
    problem: IntraOpProblem, elimination: Elimination, goal: Goal, budget: SearchBudget, of_interest: float = math.inf
) -> Relaxation:
    """Bound a problem with memory rows, look for good assignments, and bound every strategy.

    Args:
        of_interest: ends as soon as the bound exceeds this.
    """
    return _Dual(problem, elimination, goal, budget, of_interest).run()


class _Dual:
    """Prices, cuts and the incumbent of one relaxation."""

    def __init__(
        self,
        problem: IntraOpProblem,
        elimination: Elimination,
        goal: Goal,
        budget: SearchBudget,
        of_interest: float = math.inf,
    ):
        self.problem, self.elimination, self.goal, self.budget = problem, elimination, goal, budget
        self.of_interest = of_interest
        self.rows = len(problem.budget_bytes)
        self.time_weight = 1.0 if goal is Goal.time else 0.0
        self.floor = max(0.0, max(float(node.transient_bytes.min()) for node in problem.nodes))
        self.possible = [np.isfinite(tensor.cast_time_s) for tensor in problem.tensors]
        self.cast_s = [np.where(p, t.cast_time_s, 0.0) for p, t in zip(self.possible, problem.tensors, strict=True)]
        self.cuts: list[tuple[float, Floats]] = []
        self.choice: tuple[int, ...] = ()
        self.value = math.inf
        self.fits = False  # the oracle's last assignment
        self.steps = 0
        self.best, self.best_prices = -math.inf, np.zeros(self.rows)

    def run(self) -> Relaxation:
        if not self._start():
            return Relaxation(bound=math.inf, choice=(), value=math.inf, through=(), steps=self.steps)
        scale_bytes = np.maximum(np.abs(self.problem.budget_bytes), 1.0)
        scale = max(gap_unit(self.problem, self.goal, self.cuts[0][0]), 1e-12)
        worst_s = _largest_time_s(self.problem)
        while self.steps < self.budget.dual_steps and not self._closed() and self.best <= self.of_interest:
            prices, model = self._next_prices(scale, scale_bytes)
            self._try(prices)
            if self.goal is Goal.time and self.best > worst_s * (1 + 1e-9):
                return Relaxation(bound=math.inf, choice=(), value=math.inf, through=(), steps=self.steps)
            if model - self.best <= 1e-7 * scale:
                break
        through: tuple[Floats, ...] = ()
        if self.best <= self.of_interest:
            if self.goal is Goal.time:
                self._raise_prices()
            if self.budget.prove and not self._closed():
                through = self._through()
        return Relaxation(
            bound=min(self.best, self.value), choice=self.choice, value=self.value, through=through, steps=self.steps
        )

    def _raise_prices(self) -> None:
        """Looks for the least multiple of the best prices whose assignment fits: the faster, the lower the prices."""
        low, high = 1.0, math.inf
        for factor in RAISED:
            if self._closed():
                return
            self._oracle(self.best_prices * factor, 1.0)
            if self.fits:
                high = factor
                break
            low = factor
        for _ in range(HALVINGS if math.isfinite(high) else 0):
            if self._closed() or high / low < RAISED[0]:
                return
            middle = math.sqrt(low * high)
            self._oracle(self.best_prices * middle, 1.0)
            low, high = (low, middle) if self.fits else (middle, high)

    def _start(self) -> bool:
        """First cuts: the fastest assignment and the smallest of each row. False where a row cannot fit at all."""
        if self.goal is Goal.time and not math.isfinite(self._try(np.zeros(self.rows))):
            return False
        for row in range(self.rows):
            unit = np.zeros(self.rows)
            unit[row] = 1.0
            if self.goal is Goal.excess:
                if not math.isfinite(self._try(unit)):
                    return False
            elif self._oracle(unit, 0.0) > 1e-9 * abs(self.problem.budget_bytes[row]):
                return False
        return True

    def _closed(self) -> bool:
        if not self.choice:
            return False
        unit = gap_unit(self.problem, self.goal, self.value)
        return self.value - self.best <= self.budget.relative_gap * unit

    def _try(self, prices: Floats) -> float:
        value = self._oracle(prices, self.time_weight)
        if value > self.best:
            self.best, self.best_prices = value, prices
        return value

    def _costs(self, prices: Floats, time_weight: float) -> tuple[list[Floats], list[Floats]]:
        nodes = [
            np.where(np.isfinite(node.time_s), time_weight * node.time_s, np.inf) + prices @ node.memory_bytes
            if time_weight
            else np.where(np.isfinite(node.time_s), prices @ node.memory_bytes, np.inf)
            for node in self.problem.nodes
        ]
        casts = [
            np.where(possible, time_weight * cast_s + np.tensordot(prices, tensor.cast_memory_bytes, axes=1), np.inf)
            for possible, cast_s, tensor in zip(self.possible, self.cast_s, self.problem.tensors, strict=True)
        ]
        return nodes, casts

    def _oracle(self, prices: Floats, time_weight: float) -> float:
        """L1 (with the time weighted), recording the assignment as a cut and, where it counts, as incumbent."""
        self.steps += 1
        value, choice = self.elimination.minimise(*self._costs(prices, time_weight))
        if not choice:
            return math.inf
        cost = evaluate(self.problem, choice)
        self.cuts.append((self.time_weight * cost.time_s, cost.memory_bytes + self.floor - self.problem.budget_bytes))
        reached = score(self.problem, choice, self.goal)
        self.fits = math.isfinite(reached)
        if reached < self.value:
            self.value, self.choice = reached, choice
        return value + float(prices @ (self.floor - self.problem.budget_bytes))

    def _next_prices(self, scale: float, scale_bytes: Floats) -> tuple[Floats, float]:
        """L2: the prices at which the cuts' lower envelope is highest, and its height."""
        if self.goal is Goal.excess:
            scale_bytes = np.full(self.rows, scale)
        count = len(self.cuts)
        times = np.array([time for time, _ in self.cuts]) / scale
        excess = np.array([excess for _, excess in self.cuts]) / scale_bytes
        matrix = np.concatenate([np.ones((count, 1)), -excess], axis=1)
        row_lower, row_upper = np.full(count, -np.inf), times
        if self.goal is Goal.excess:
            matrix = np.concatenate([matrix, [[0.0] + [1.0] * self.rows]])
            row_lower, row_upper = np.append(row_lower, 1.0), np.append(row_upper, 1.0)
        rows, columns = np.indices(matrix.shape)
        program = LinearProgram(
            objective=np.concatenate([[-1.0], np.zeros(self.rows)]),
            lower=np.concatenate([[-np.inf], np.zeros(self.rows)]),
            upper=np.concatenate([[np.inf], np.full(self.rows, PRICE_LIMIT)]),
            integer=np.zeros(self.rows + 1, dtype=bool),
            rows=rows.ravel(),
            columns=columns.ravel(),
            values=matrix.ravel(),
            row_lower=row_lower,
            row_upper=row_upper,
        )
        result = minimise(program)
        if result.status is not ProgramStatus.optimal:
            raise RuntimeError(f"the price program ended as {result.status.name}")
        return np.maximum(result.values[1:], 0.0) * scale / scale_bytes, -result.objective * scale

    def _through(self) -> tuple[Floats, ...]:
        """L3."""
        prices = self.best_prices
        constant = float(prices @ (self.floor - self.problem.budget_bytes))
        marginals = self.elimination.min_marginals(*self._costs(prices, self.time_weight))
        return tuple(
            marginal + constant + float(prices.sum()) * np.maximum(node.transient_bytes - self.floor, 0.0)
            for node, marginal in zip(self.problem.nodes, marginals, strict=True)
        )


def _largest_time_s(problem: IntraOpProblem) -> float:
    """No assignment without an impossible cast takes longer than this."""
    total = sum(float(node.time_s[np.isfinite(node.time_s)].max()) for node in problem.nodes)
    for tensor in problem.tensors:
        finite = tensor.cast_time_s[np.isfinite(tensor.cast_time_s)]
        if len(finite):
            total += len(tensor.consumers) * float(finite.max())
    return total

"""The sharding choice inside a stage, solved exactly. The ILP, with x binary and all other variables continuous:

* E0  min Σ_n Σ_s time[n,s]·x[n,s] + Σ_t Σ_ab cast_time[t,a,b]·y[t,a,b]
* E1  Σ_s x[n,s] = 1                                        one strategy a node
* E2  Σ_b w[t,c,a,b] = u[t,a] = Σ_{s: source(s)=a} x[p,s]   (≤ where consumer c has strategies that do not read t)
* E3  Σ_a w[t,c,a,b] = d[t,c,b] = Σ_{s: target(s)=b} x[c,s] E2 and E3: one transport polytope per tensor and consumer
* E4  y[t,a,b] ≥ w[t,c,a,b]                                 paid once, whoever needs it (y = w for one consumer)
* E5  Σ memory[r,n,s]·x[n,s] + Σ cast_memory[r,t,a,b]·y[t,a,b] + T ≤ budget[r]   (+ E for `least_memory`, which min E)
* E6  T ≥ Σ_s transient[n,s]·x[n,s]
* E7  variables of impossible casts do not exist

`solve` takes the cheapest road that proves its answer: (1) reduce without rows and eliminate exactly; where that
optimum fits, it is the answer. (2) Reduce with rows. (3) Lagrangian relaxation over the same elimination: a bound, an
incumbent, and a bound for every strategy. (4) The ILP over the strategies whose bound is below a cutoff: what it finds
below the cutoff is the optimum, and finding nothing raises the bound to the cutoff; the cutoff grows until one happens.
Where no proof is wanted, roads 2 and 3 alone are taken.
"""

import math
from dataclasses import replace

import numpy as np

from planner.search import reduce
from planner.search.elimination import Elimination
from planner.search.ilp import OBJECTIVE_SCALE, build_ilp, without
from planner.search.lagrange import relax
from planner.search.problem import (
    Floats,
    Goal,
    IntraOpProblem,
    Node,
    SearchBudget,
    SearchStatus,
    Solution,
    evaluate,
    gap_unit,
    score,
)
from planner.search.solver import minimise

ROUNDING = 1e-9
"""Relative difference between a bound and a value that sums of floats can make."""

FIRST_CUTOFF, CUTOFF_GROWTH = 0.005, 2.0
"""The first cutoff lies this share above the bound; each further one adds this many times the distance."""

SHRINKS = 0.8
"""The relaxation is repeated on the strategies below a cutoff while each time at most this share of them is left."""

NEAR_MISSES = 50
"""Assignments that fit only within HiGHS's tolerance and are ruled out one by one, before the search gives up."""


def solve(problem: IntraOpProblem, *, budget: SearchBudget | None = None, of_interest_s: float = math.inf) -> Solution:
    """The fastest assignment that fits, with a bound; the same input gives the same output.

    An infeasible problem comes back with the status and, if `budget.prove`, with the assignment that misses the memory
    budget by least.

    Args:
        of_interest_s: the search ends as soon as its bound exceeds this, with what it has.
    """
    return _Search(problem, Goal.time, budget or SearchBudget(), of_interest_s).run()


def solve_by_ilp(problem: IntraOpProblem, *, budget: SearchBudget | None = None) -> Solution:
    """`solve` by the ILP alone, without reductions, elimination or relaxation: the reference for the other roads."""
    search = _Search(problem, Goal.time, budget or SearchBudget())
    search.ilp(problem, None, math.inf)
    return search.finish()


def least_memory(problem: IntraOpProblem, *, budget: SearchBudget | None = None) -> Solution:
    """The assignment whose worst row exceeds its budget by least, time aside; `missing_bytes` is that excess or 0.

    Rows without a budget do not count; where no row has one, the largest row is minimised. `bound_s` stays 0: nothing
    is proven about time. The excess is within `relative_gap` × budget of the least.
    """
    return _least_memory(problem, budget or SearchBudget())


def _least_memory(problem: IntraOpProblem, budget: SearchBudget) -> Solution:
    finite = np.isfinite(problem.budget_bytes)
    rows = np.flatnonzero(finite) if finite.any() else np.arange(len(finite))
    timeless = _timeless(problem, rows, problem.budget_bytes[rows] if finite.any() else np.zeros(len(rows)))
    search = _Search(timeless, Goal.excess, budget)
    status = search.run_excess()
    if not search.choice:
        return _nothing(status, search)
    cost = evaluate(problem, search.choice)
    return Solution(
        choice=search.choice,
        time_s=cost.time_s,
        bound_s=0.0,
        status=status,
        memory_bytes=tuple(float(x) for x in cost.memory_bytes + cost.transient_bytes),
        missing_bytes=cost.missing_bytes,
        limit_fired=search.limit_fired,
        wall_limit_fired=search.wall_limit_fired,
        effort=search.effort,
    )


def _timeless(problem: IntraOpProblem, rows: np.ndarray, limits: Floats) -> IntraOpProblem:
    """The problem with all times zero (impossible stays impossible) and only some of its rows."""
    return IntraOpProblem(
        nodes=tuple(
            Node(
                name=node.name,
                time_s=np.where(np.isfinite(node.time_s), 0.0, np.inf),
                memory_bytes=node.memory_bytes[rows],
                transient_bytes=node.transient_bytes,
            )
            for node in problem.nodes
        ),
        tensors=tuple(
            replace(
                tensor,
                cast_time_s=np.where(np.isfinite(tensor.cast_time_s), 0.0, np.inf),
                cast_memory_bytes=tensor.cast_memory_bytes[rows],
            )
            for tensor in problem.tensors
        ),
        budget_bytes=limits,
    )


class _Search:
    """Incumbent and bound of one search in the goal's unit, in terms of the problem that it was given."""

    def __init__(self, problem: IntraOpProblem, goal: Goal, budget: SearchBudget, of_interest: float = math.inf):
        self.problem, self.goal, self.budget, self.of_interest = problem, goal, budget, of_interest
        self.choice: tuple[int, ...] = ()
        self.value = math.inf
        self.bound = -math.inf
        self.limit_fired = self.wall_limit_fired = False
        self.effort: dict[str, int] = {}

    def run(self) -> Solution:
        """All roads towards the least time."""
        if not self.budget.prove and np.isfinite(self.problem.budget_bytes).any():
            self._with_rows()  # whose relaxation begins with the optimum without rows
            return self.finish()
        free = reduce.apply(self.problem, with_memory=False)
        if isinstance(free, SearchStatus):
            return _nothing(free, self)
        self.effort["strategies_without_rows"] = sum(free.problem.sizes)
        elimination = Elimination.build(free.problem, self.budget.table_entries)
        if elimination is not None:
            self.bound, choice = elimination.minimise(*_costs(free.problem))
            if not choice:
                return _nothing(SearchStatus.infeasible_casts, self)
            self.offer(free.invert(choice))
        if not self.closed() and not self._too_slow():
            self._with_rows()
        return self.finish()

    def run_excess(self) -> SearchStatus:
        """All roads towards the least excess."""
        reduced = reduce.apply(self.problem, keep_rows=True)
        if isinstance(reduced, SearchStatus):
            return reduced
        self._close(reduced)
        if self.choice:
            return SearchStatus.optimal if self.closed() else SearchStatus.feasible_limit
        return SearchStatus.unknown_limit if self.limit_fired else SearchStatus.infeasible_casts

    def offer(self, choice: tuple[int, ...]) -> bool:
        """Take an assignment as incumbent if it counts and is better. Returns whether it counts."""
        value = score(self.problem, choice, self.goal)
        if value < self.value:
            self.choice, self.value = choice, value
        return value < math.inf

    def unit(self) -> float:
        """What the relative gap is relative to."""
        return gap_unit(self.problem, self.goal, self.value if self.choice else self.bound)

    def closed(self) -> bool:
        """Whether the gap is within the request (or within rounding)."""
        return bool(self.choice) and self.value - self.bound <= (self.budget.relative_gap + ROUNDING) * self.unit()

    def _too_slow(self) -> bool:
        """Whether nothing of interest is left to find, which counts as a limit."""
        too_slow = self.of_interest < self.bound < math.inf
        self.limit_fired |= too_slow
        return too_slow

    def finish(self) -> Solution:
        """The result as it stands, for the goal of least time."""
        if not self.choice and self.limit_fired and self.bound < math.inf:
            return _nothing(SearchStatus.unknown_limit, self)
        if not self.choice and not self.budget.prove:
            return _nothing(SearchStatus.infeasible_memory, self)
        if not self.choice:
            closest = _least_memory(self.problem, self.budget)
            status = SearchStatus.infeasible_memory if closest.choice else closest.status
            return replace(closest, time_s=math.inf, bound_s=math.inf, status=status, effort=self.effort)
        cost = evaluate(self.problem, self.choice)
        return Solution(
            choice=self.choice,
            time_s=cost.time_s,
            bound_s=min(self.bound, cost.time_s),
            status=SearchStatus.optimal if self.closed() else SearchStatus.feasible_limit,
            memory_bytes=tuple(float(x) for x in cost.memory_bytes + cost.transient_bytes),
            limit_fired=self.limit_fired,
            wall_limit_fired=self.wall_limit_fired,
            effort=self.effort,
        )

    def _with_rows(self) -> None:
        fitted = reduce.apply(self.problem)
        if isinstance(fitted, SearchStatus):
            self.bound = math.inf
            return
        self.effort["strategies_with_rows"] = sum(fitted.problem.sizes)
        self._close(fitted)

    def _close(self, reduced: reduce.Reduced) -> None:
        """Roads 3 and 4."""
        problem = reduced.problem
        elimination = Elimination.build(problem, self.budget.table_entries) if len(problem.budget_bytes) else None
        if elimination is None:
            if self.budget.prove:
                self.ilp(problem, reduced, math.inf)
            else:
                self.limit_fired = True
            return
        relaxed = relax(problem, elimination, self.goal, self.budget, self.of_interest)
        self.effort["dual_steps"] = relaxed.steps
        self.bound = max(self.bound, relaxed.bound)
        if relaxed.choice:
            self.offer(reduced.invert(relaxed.choice))
        if self._too_slow() or self.closed() or self.bound == math.inf:
            return
        if not self.budget.prove:
            self.limit_fired = True
            return
        if not relaxed.through:
            return
        distance = FIRST_CUTOFF * self.unit()
        while not (self.closed() or self.limit_fired or self.bound == math.inf):
            cutoff, last = self.bound + distance, self._improves()
            if cutoff >= last or _count(relaxed.through, last) <= 1.2 * _count(relaxed.through, cutoff):
                cutoff = last
            self._below(reduced, relaxed.through, cutoff)
            if cutoff == last:
                break
            distance *= CUTOFF_GROWTH

    def _improves(self) -> float:
        """Only values at or below this are of interest: better than the incumbent by more than the requested gap."""
        return self.value - self.budget.relative_gap * self.unit() if self.choice else math.inf

    def _below(self, reduced: reduce.Reduced, through: tuple[Floats, ...], cutoff: float) -> None:
        """Look only for assignments at or below the cutoff: improves the incumbent or lifts the bound."""
        left = sum(self.problem.sizes)
        while True:
            masks = [np.ones(size, dtype=bool) for size in self.problem.sizes]
            for node, kept, bound in zip(reduced.nodes, reduced.kept, through, strict=True):
                masks[node] = np.zeros(self.problem.sizes[node], dtype=bool)
                masks[node][kept[bound <= cutoff + ROUNDING * self.unit()]] = True
            rest = reduce.apply(self.problem, keep_rows=self.goal is Goal.excess, allowed=tuple(masks))
            if isinstance(rest, SearchStatus):
                self.bound = max(self.bound, cutoff)
                return
            before, left = left, sum(rest.problem.sizes)
            elimination = Elimination.build(rest.problem, self.budget.table_entries)
            if elimination is None or left > SHRINKS * before or not len(rest.problem.budget_bytes):
                break
            relaxed = relax(rest.problem, elimination, self.goal, self.budget)
            self.effort["dual_steps"] = self.effort.get("dual_steps", 0) + relaxed.steps
            if relaxed.choice:
                self.offer(rest.invert(relaxed.choice))
                cutoff = min(cutoff, self._improves())
            if relaxed.bound >= cutoff or not relaxed.through:
                self.bound = max(self.bound, min(relaxed.bound, cutoff))
                return
            reduced, through = rest, relaxed.through
        self.effort["strategies_after_relaxation"] = left
        self.ilp(rest.problem, rest, cutoff)

    def ilp(self, problem: IntraOpProblem, reduced: reduce.Reduced | None, cutoff: float) -> None:
        """Solve the ILP of `problem`, whose assignments `reduced` maps back, for values at or below the cutoff."""
        size = self._typical(problem)
        scale = size / OBJECTIVE_SCALE
        slack = ROUNDING * self.unit() if self.choice or math.isfinite(self.bound) else 0.0
        program, layout = build_ilp(problem, goal=self.goal, size=size, cutoff=cutoff + slack)
        self.effort["ilp_variables"] = len(program.objective)
        bound = -math.inf
        for _ in range(NEAR_MISSES):
            result = minimise(
                program,
                relative_gap=self.budget.relative_gap / 2 if self.goal is Goal.time else 0.0,
                absolute_gap=self.budget.relative_gap / 2 * self.unit() / scale if self.goal is Goal.excess else 1e-9,
                node_limit=self.budget.mip_nodes,
                wall_s=self.budget.wall_s,
            )
            self.effort["ilp_nodes"] = self.effort.get("ilp_nodes", 0) + result.nodes
            self.limit_fired |= result.limit_fired
            self.wall_limit_fired |= result.wall_limit_fired
            bound = max(bound, result.bound * scale)
            if not len(result.values):
                break
            choice = layout.read(result.values)
            if self.offer(reduced.invert(choice) if reduced is not None else choice) or result.limit_fired:
                break
            program = without(program, layout, choice)  # fits only within HiGHS's tolerance: rule it out, go on
        else:
            self.limit_fired = True
        self.bound = max(self.bound, min(bound, cutoff))

    def _typical(self, problem: IntraOpProblem) -> float:
        """About how large the goal is."""
        if self.choice or self.goal is Goal.excess:
            return self.unit()
        total = sum(float(np.abs(node.time_s[np.isfinite(node.time_s)]).max(initial=0.0)) for node in problem.nodes)
        return total if total > 0 else 1.0


def _costs(problem: IntraOpProblem) -> tuple[list[Floats], list[Floats]]:
    return [node.time_s for node in problem.nodes], [tensor.cast_time_s for tensor in problem.tensors]


def _count(through: tuple[Floats, ...], cutoff: float) -> int:
    return sum(int((bound <= cutoff).sum()) for bound in through)


def _nothing(status: SearchStatus, search: _Search) -> Solution:
    unknown = status is SearchStatus.unknown_limit
    return Solution(
        choice=(),
        time_s=math.inf,
        bound_s=search.bound if unknown and search.goal is Goal.time else (0.0 if unknown else math.inf),
        status=status,
        limit_fired=search.limit_fired,
        wall_limit_fired=search.wall_limit_fired,
        effort=search.effort,
    )

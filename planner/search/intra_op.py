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
incumbent, and strategies ruled out. (4) The ILP above on what is left.
"""

import math
from dataclasses import replace

import numpy as np

from planner.search import reduce
from planner.search.elimination import Elimination
from planner.search.ilp import build_ilp, without
from planner.search.lagrange import relax
from planner.search.problem import (
    Floats,
    IntraOpProblem,
    Node,
    SearchBudget,
    SearchStatus,
    Solution,
    evaluate,
)
from planner.search.solver import ProgramStatus, minimise

OBJECTIVE_SCALE = 1e3
"""Objectives are scaled to about this size, because HiGHS's tolerances are absolute."""

ROUNDING = 1e-9
"""Relative difference between a bound and a time that sums of floats can make."""


def solve(problem: IntraOpProblem, *, budget: SearchBudget | None = None) -> Solution:
    """The fastest assignment that fits, with a bound; the same input gives the same output.

    An infeasible problem comes back with the status, and with the assignment that misses the memory budget by least.
    """
    return _Search(problem, budget or SearchBudget()).run()


def solve_by_ilp(problem: IntraOpProblem, *, budget: SearchBudget | None = None) -> Solution:
    """`solve` by the ILP alone, without reductions, elimination or relaxation: the reference for the other roads."""
    search = _Search(problem, budget or SearchBudget())
    search.ilp(problem, None)
    return search.finish()


def least_memory(problem: IntraOpProblem, *, budget: SearchBudget | None = None) -> Solution:
    """The assignment whose worst row misses its budget by least, time aside; `missing_bytes` is that miss or 0.

    Rows without a budget do not count; where no row has one, the largest row is minimised. `bound_s` is no bound on
    time here and stays 0.
    """
    budget = budget or SearchBudget()
    finite = np.isfinite(problem.budget_bytes)
    rows = np.flatnonzero(finite) if finite.any() else np.arange(len(finite))
    limits = problem.budget_bytes[rows] if finite.any() else np.zeros(len(rows))
    timeless = IntraOpProblem(
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
    reduced = reduce.apply(timeless, keep_rows=True)
    if isinstance(reduced, SearchStatus):
        return _nothing(SearchStatus.infeasible_casts)
    scale = max(float(np.abs(limits).max(initial=0.0)), _largest_memory(timeless), 1.0)
    program, layout = build_ilp(reduced.problem, time_scale=1.0, memory_scale=scale, minimise_excess=True)
    result = minimise(program, relative_gap=1e-9, node_limit=budget.mip_nodes, wall_s=budget.wall_s)
    if result.status is ProgramStatus.infeasible:
        return _nothing(SearchStatus.infeasible_casts)
    if not len(result.values):
        return replace(_nothing(SearchStatus.unknown_limit), limit_fired=True, bound_s=0.0)
    choice = reduced.invert(layout.read(result.values))
    cost = evaluate(problem, choice)
    return Solution(
        choice=choice,
        time_s=cost.time_s,
        bound_s=0.0,
        status=SearchStatus.feasible_limit if result.limit_fired else SearchStatus.optimal,
        memory_bytes=tuple(float(x) for x in cost.memory_bytes + cost.transient_bytes),
        missing_bytes=cost.missing_bytes,
        limit_fired=result.limit_fired,
        wall_limit_fired=result.wall_limit_fired,
    )


def _nothing(status: SearchStatus) -> Solution:
    return Solution(choice=(), time_s=math.inf, bound_s=math.inf, status=status)


def _largest_memory(problem: IntraOpProblem) -> float:
    return max((float(node.memory_bytes.max(initial=0.0)) for node in problem.nodes), default=0.0)


class _Search:
    """Incumbent and bound of one `solve`, in terms of the original problem."""

    def __init__(self, problem: IntraOpProblem, budget: SearchBudget):
        self.problem, self.budget = problem, budget
        self.choice: tuple[int, ...] = ()
        self.time_s = math.inf
        self.bound_s = -math.inf
        self.limit_fired = self.wall_limit_fired = False
        self.effort: dict[str, int] = {}

    def run(self) -> Solution:
        free = reduce.apply(self.problem, with_memory=False)
        if isinstance(free, SearchStatus):
            return _nothing(SearchStatus.infeasible_casts)
        elimination = self._eliminate(free.problem)
        self.effort["strategies_without_rows"] = sum(free.problem.sizes)
        if elimination is not None:
            bound_s, choice = elimination.minimise(*_costs(free.problem))
            if not choice:
                return _nothing(SearchStatus.infeasible_casts)
            self.bound_s = bound_s
            if self.offer(free.invert(choice)):
                return self.finish()
        fitted = reduce.apply(self.problem)
        if isinstance(fitted, SearchStatus):
            return self._infeasible(fitted)
        self.effort["strategies_with_rows"] = sum(fitted.problem.sizes)
        if len(fitted.problem.budget_bytes):
            fitted = self._relax(fitted)
            if fitted is None:
                return self.finish()
        self.ilp(fitted.problem, fitted)
        return self.finish()

    def offer(self, choice: tuple[int, ...]) -> bool:
        """Take an assignment as incumbent if it fits and is faster. Returns whether it fits."""
        cost = evaluate(self.problem, choice)
        if cost.feasible and cost.time_s < self.time_s:
            self.choice, self.time_s = choice, cost.time_s
        return cost.feasible

    def closed(self) -> bool:
        """Whether the gap is within the request (or within rounding)."""
        gap = max(self.budget.relative_gap, ROUNDING)
        return bool(self.choice) and self.time_s - self.bound_s <= gap * abs(self.time_s)

    def finish(self) -> Solution:
        """The result as it stands."""
        if not self.choice:
            if self.bound_s == math.inf or not self.limit_fired:
                return self._infeasible(SearchStatus.infeasible_memory)
            return replace(
                _nothing(SearchStatus.unknown_limit),
                bound_s=self.bound_s,
                limit_fired=True,
                wall_limit_fired=self.wall_limit_fired,
                effort=self.effort,
            )
        cost = evaluate(self.problem, self.choice)
        return Solution(
            choice=self.choice,
            time_s=cost.time_s,
            bound_s=min(self.bound_s, cost.time_s),
            status=SearchStatus.optimal if self.closed() else SearchStatus.feasible_limit,
            memory_bytes=tuple(float(x) for x in cost.memory_bytes + cost.transient_bytes),
            limit_fired=self.limit_fired,
            wall_limit_fired=self.wall_limit_fired,
            effort=self.effort,
        )

    def _infeasible(self, status: SearchStatus) -> Solution:
        closest = least_memory(self.problem, budget=self.budget)
        if closest.status is SearchStatus.infeasible_casts:
            return closest
        return replace(closest, time_s=math.inf, bound_s=math.inf, status=status, effort=self.effort)

    def _eliminate(self, problem: IntraOpProblem) -> Elimination | None:
        return Elimination.build(problem, self.budget.table_entries)

    def _relax(self, fitted: reduce.Reduced) -> reduce.Reduced | None:
        """Road 3. Returns what the ILP still has to look at, or None where the question is settled."""
        elimination = self._eliminate(fitted.problem)
        if elimination is None:
            return fitted
        relaxed = relax(fitted.problem, elimination, self.budget)
        self.effort["dual_steps"] = self.effort.get("dual_steps", 0) + relaxed.steps
        self.bound_s = max(self.bound_s, relaxed.bound_s)
        if relaxed.choice:
            self.offer(fitted.invert(relaxed.choice))
        if self.closed() or self.bound_s == math.inf:
            return None
        rest = reduce.apply(self.problem, allowed=_masks(self.problem, fitted, relaxed.allowed))
        if isinstance(rest, SearchStatus):
            self.bound_s = self.time_s * (1 - self.budget.relative_gap)
            return None
        self.effort["strategies_after_relaxation"] = sum(rest.problem.sizes)
        return rest

    def ilp(self, problem: IntraOpProblem, reduced: reduce.Reduced | None) -> None:
        """Road 4: solve the ILP of `problem`, whose assignments `reduced` maps back, and update bound and incumbent."""
        rest_bound_s = self.time_s * (1 - self.budget.relative_gap) if self.choice else math.inf
        time_scale = self.time_s if self.choice else _typical_time(problem)
        program, layout = build_ilp(problem, time_scale=time_scale / OBJECTIVE_SCALE)
        self.effort["ilp_variables"] = len(program.objective)
        bound_s = -math.inf
        while True:
            result = minimise(
                program,
                relative_gap=self.budget.relative_gap / 2,
                node_limit=self.budget.mip_nodes,
                wall_s=self.budget.wall_s,
            )
            self.effort["ilp_nodes"] = self.effort.get("ilp_nodes", 0) + result.nodes
            self.limit_fired |= result.limit_fired
            self.wall_limit_fired |= result.wall_limit_fired
            bound_s = max(bound_s, result.bound * time_scale / OBJECTIVE_SCALE)
            if not len(result.values):
                break
            choice = layout.read(result.values)
            if self.offer(reduced.invert(choice) if reduced is not None else choice) or result.limit_fired:
                break
            program = without(program, layout, choice)  # fits only within HiGHS's tolerance: rule it out, go on
        self.bound_s = max(self.bound_s, min(bound_s, rest_bound_s))
        self.limit_fired |= bool(self.choice) and not self.closed()


def _costs(problem: IntraOpProblem) -> tuple[list[Floats], list[Floats]]:
    return [node.time_s for node in problem.nodes], [tensor.cast_time_s for tensor in problem.tensors]


def _typical_time(problem: IntraOpProblem) -> float:
    total = sum(float(node.time_s[np.isfinite(node.time_s)].min()) for node in problem.nodes)
    return total if total > 0 else 1.0


def _masks(problem: IntraOpProblem, fitted: reduce.Reduced, allowed: tuple[reduce.Mask, ...]) -> tuple[reduce.Mask, ...]:
    """Masks over the original strategies from masks over reduced ones; folded nodes stay as they are."""
    masks = [np.ones(size, dtype=bool) for size in problem.sizes]
    for node, kept, mask in zip(fitted.nodes, fitted.kept, allowed, strict=True):
        masks[node] = np.zeros(problem.sizes[node], dtype=bool)
        masks[node][kept[mask]] = True
    return tuple(masks)

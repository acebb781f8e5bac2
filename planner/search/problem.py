"""The sharding choice inside a stage as numbers: what the ILP reads, what it returns, and the one scoring function.

Nothing here knows ops, meshes or specs: a node has S strategies with costs, a tensor has a matrix of casts between the
spec that its producer leaves (row) and the spec that a consumer needs (column). A cast (a, b) of a tensor is paid once
when at least one consumer needs b while the producer leaves a, however many consumers need it.
"""

import math
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NOT_NEEDED = -1
"""Target spec index of a consumer strategy that does not read the tensor."""

LIMIT_HINT = "Raise the limits of SearchBudget to close the gap."


class SearchStatus(Enum):
    """How a search ended; the value is a sentence for people, with the next step where there is one."""

    optimal = "The result is proven best in the declared search space, within the requested relative gap."
    feasible_limit = f"A search limit fired: the best result found and a proven lower bound are given. {LIMIT_HINT}"
    unknown_limit = f"A search limit fired before any result was found; a proven lower bound is given. {LIMIT_HINT}"
    infeasible_memory = (
        "Nothing in the search space fits into memory. `missing_bytes` says by how much the closest candidate misses; "
        "allow more devices, rematerialisation, a smaller microbatch, or a larger budget."
    )
    infeasible_casts = (
        "Every assignment needs a resharding that no collective performs (or a strategy that was ruled out). "
        "Loosen the pinned shardings."
    )
    infeasible_devices = (
        "No split of the blocks into stages can be served by the devices and stage options given, memory aside. "
        "Allow more stages, other mesh shapes, or more devices."
    )

    @property
    def found(self) -> bool:
        """Whether a usable result comes with this status."""
        return self in (SearchStatus.optimal, SearchStatus.feasible_limit)


class Goal(Enum):
    """What a search over an intra-op problem minimises."""

    time = "seconds, with every memory row within its budget"
    excess = "bytes by which the worst memory row exceeds its budget, time aside"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchBudget:
    """Work limits, counted so that the same input gives the same output; only `wall_s` looks at a clock.

    Attributes:
        relative_gap: stop when (best − bound) ≤ relative_gap × best.
        prove: False stops after the Lagrangian relaxation, with what it found (perhaps nothing) and its bound.
        mip_nodes: branch-and-bound nodes of one HiGHS solve.
        table_entries: largest table of one step of exact elimination; larger structures go to HiGHS.
        dual_steps: price updates of the Lagrangian relaxation.
        stage_cells: combinations of device counts up to which the stage DP works on dense arrays.
        stage_runs: runs of the stage DP in one search.
        stage_labels: partial plans of one number of stages that the stage DP may hold at once beyond dense arrays.
        wall_s: limit in seconds of one HiGHS solve, or None; where it fires results may differ between runs, and
            `limit_fired` says so.
    """

    relative_gap: float = 1e-6
    prove: bool = True
    mip_nodes: int = 20_000
    table_entries: int = 16_000_000
    dual_steps: int = 40
    stage_cells: int = 200
    stage_runs: int = 60
    stage_labels: int = 20_000
    wall_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """One decision: an op group that takes exactly one of S strategies.

    Attributes:
        time_s: [S] seconds, all equal blocks that share the decision together; inf rules a strategy out.
        memory_bytes: [R, S] bytes added to each memory row, equal blocks together.
        transient_bytes: [S] bytes that are live only while the op runs; rows pay the largest chosen one.
    """

    name: str
    time_s: Floats
    memory_bytes: Floats
    transient_bytes: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorEdge:
    """A tensor between its producer and its consumers.

    Attributes:
        producer: node index.
        source: [S_producer] row of the cast matrix that each producer strategy leaves.
        consumers: (node index, [S_consumer] column that each strategy needs, or NOT_NEEDED). A node may occur twice.
        cast_time_s: [A, B] seconds of each cast, equal blocks together; inf where no collective does it.
        cast_memory_bytes: [R, A, B] bytes that a paid cast adds to each memory row.
    """

    name: str
    producer: int
    source: Ints
    consumers: tuple[tuple[int, Ints], ...]
    cast_time_s: Floats
    cast_memory_bytes: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntraOpProblem:
    """min Σ node time + Σ paid casts, with Σ node memory + Σ paid cast memory + T ≤ budget in every row.

    T is the largest transient of the chosen strategies.

    Attributes:
        budget_bytes: [R] bytes; inf where a row does not bind.

    Raises:
        ValueError: shapes or indices do not fit together, or a cast has a negative or undefined cost.
    """

    nodes: tuple[Node, ...]
    tensors: tuple[TensorEdge, ...]
    budget_bytes: Floats

    def __post_init__(self):
        rows = len(self.budget_bytes)
        for node in self.nodes:
            count = len(node.time_s)
            _require(count > 0, f"node {node.name!r} has no strategy")
            _require(
                node.memory_bytes.shape == (rows, count) and node.transient_bytes.shape == (count,),
                f"node {node.name!r} with {count} strategies and {rows} memory rows has memory of shape "
                f"{node.memory_bytes.shape} and transients of shape {node.transient_bytes.shape}",
            )
            _require(
                bool((node.time_s > -np.inf).all())
                and bool(np.isfinite(node.memory_bytes).all())
                and bool(np.isfinite(node.transient_bytes).all()),
                f"node {node.name!r} has a cost that is not a number",
            )
        for tensor in self.tensors:
            sources, targets = tensor.cast_time_s.shape
            _require(
                tensor.cast_memory_bytes.shape == (rows, sources, targets),
                f"tensor {tensor.name!r} has casts of shape {tensor.cast_time_s.shape} and cast memory of shape "
                f"{tensor.cast_memory_bytes.shape}, expected {(rows, sources, targets)}",
            )
            _require(
                bool((tensor.cast_time_s >= 0).all()) and bool((tensor.cast_memory_bytes >= 0).all()),
                f"tensor {tensor.name!r} has a cast with a cost below zero or undefined",
            )
            for what, node, specs, lowest, count in (
                ("producer", tensor.producer, tensor.source, 0, sources),
                *(("consumer", node, target, NOT_NEEDED, targets) for node, target in tensor.consumers),
            ):
                _require(
                    0 <= node < len(self.nodes) and len(specs) == len(self.nodes[node].time_s),
                    f"tensor {tensor.name!r}: {what} {node} does not exist or has another number of strategies",
                )
                _require(
                    bool(((specs >= lowest) & (specs < count)).all()),
                    f"tensor {tensor.name!r}: {what} {node} names a spec outside {lowest}..{count - 1}",
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of strategies of each node."""
        return tuple(len(node.time_s) for node in self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """What one assignment costs.

    Attributes:
        time_s: seconds, inf where an impossible cast is needed.
        memory_bytes: [R] bytes without the transient.
        transient_bytes: the largest transient of the chosen strategies.
        excess_bytes: the most by which a row with its transient exceeds its budget; negative where all fit.
    """

    time_s: float
    memory_bytes: Floats
    transient_bytes: float
    excess_bytes: float

    @property
    def possible(self) -> bool:
        """Every cast that the assignment needs exists."""
        return math.isfinite(self.time_s)

    @property
    def feasible(self) -> bool:
        """Possible, and every row fits its budget."""
        return self.possible and self.excess_bytes <= 0

    @property
    def missing_bytes(self) -> float:
        """By how much the worst row misses its budget, 0 where all fit."""
        return max(self.excess_bytes, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Result of a search over one problem.

    Attributes:
        choice: strategy of each node; of the closest assignment where memory is infeasible, empty where none exists.
        time_s: seconds of `choice`, inf where the status holds no usable result.
        bound_s: proven lower bound on the seconds of any feasible assignment.
        memory_bytes: of `choice`, a row each, with its transient.
        missing_bytes: by how much `choice` misses the budget (0 unless memory is infeasible).
        limit_fired: a work or wall-clock limit stopped the search early.
        wall_limit_fired: the limit that fired was the clock, so that another run may differ.
        effort: counts of work, for reports: strategies left, branch-and-bound nodes, and the like.
    """

    choice: tuple[int, ...]
    time_s: float
    bound_s: float
    status: SearchStatus
    memory_bytes: tuple[float, ...] = ()
    missing_bytes: float = 0.0
    limit_fired: bool = False
    wall_limit_fired: bool = False
    effort: dict[str, int] = field(default_factory=dict)


def evaluate(problem: IntraOpProblem, choice: tuple[int, ...]) -> Evaluation:
    """Score one assignment: the only place where costs are added up for a result that leaves this package."""
    time_s = 0.0
    memory = np.zeros(len(problem.budget_bytes))
    transient = 0.0
    for node, strategy in zip(problem.nodes, choice, strict=True):
        time_s += float(node.time_s[strategy])
        memory += node.memory_bytes[:, strategy]
        transient = max(transient, float(node.transient_bytes[strategy]))
    for tensor in problem.tensors:
        source = int(tensor.source[choice[tensor.producer]])
        for target in sorted({int(specs[choice[node]]) for node, specs in tensor.consumers} - {NOT_NEEDED}):
            cast_s = float(tensor.cast_time_s[source, target])
            time_s += cast_s
            if math.isfinite(cast_s):
                memory += tensor.cast_memory_bytes[:, source, target]
    excess = max((float(x) for x in memory + transient - problem.budget_bytes), default=-math.inf)
    return Evaluation(time_s=time_s, memory_bytes=memory, transient_bytes=transient, excess_bytes=excess)


def score(problem: IntraOpProblem, choice: tuple[int, ...], goal: Goal) -> float:
    """The goal's value of one assignment, inf where it does not count."""
    cost = evaluate(problem, choice)
    if goal is Goal.excess:
        return cost.excess_bytes if cost.possible else math.inf
    return cost.time_s if cost.feasible else math.inf


def gap_unit(problem: IntraOpProblem, goal: Goal, value: float) -> float:
    """What a relative gap is relative to: the time itself, or the memory at stake."""
    if goal is Goal.time:
        return abs(value)
    finite = problem.budget_bytes[np.isfinite(problem.budget_bytes)]
    stake = sum(float(np.abs(node.memory_bytes).max(initial=0.0)) for node in problem.nodes)
    return max(1.0, float(np.abs(finite).max(initial=0.0)), stake)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)

"""Sparse arrays of the intra-op ILP (formulas E0 to E7 of `planner.search.intra_op`)."""

import math
from dataclasses import dataclass, replace

import numpy as np

from planner.search.problem import NOT_NEEDED, Floats, Goal, IntraOpProblem, Ints, TensorEdge
from planner.search.solver import LinearProgram

OBJECTIVE_SCALE = 1e3
"""Objectives are scaled to about this size, because HiGHS's tolerances are absolute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the nodes' variables stand: strategy s of node n is variable ``first[n] + s``."""

    first: tuple[int, ...]
    sizes: tuple[int, ...]

    def read(self, values: Floats) -> tuple[int, ...]:
        """The assignment in a solution vector."""
        return tuple(
            int(values[first : first + size].argmax()) for first, size in zip(self.first, self.sizes, strict=True)
        )


def build_ilp(
    problem: IntraOpProblem, *, goal: Goal, size: float, cutoff: float = math.inf
) -> tuple[LinearProgram, Layout]:
    """The ILP of a problem.

    Args:
        size: about how many seconds (goal time) or bytes (goal excess) the optimum has, for scaling.
        cutoff: largest objective of interest, in seconds or bytes.
    """
    minimise_excess = goal is Goal.excess
    time_scale = 1.0 if minimise_excess else size / OBJECTIVE_SCALE
    build = _Builder()
    first = tuple(
        int(build.variables(node.time_s / time_scale, integer=True, fixed=~np.isfinite(node.time_s))[0])
        for node in problem.nodes
    )
    for start, count in zip(first, problem.sizes, strict=True):  # E1
        build.row(np.arange(start, start + count), np.ones(count), 1.0, 1.0)
    rows = np.flatnonzero(np.isfinite(problem.budget_bytes)).tolist()
    unit = np.full(len(problem.budget_bytes), size / OBJECTIVE_SCALE if minimise_excess else 1.0)
    if not minimise_excess:
        unit = np.maximum(np.abs(problem.budget_bytes), 1.0)
    in_row: dict[int, list[tuple[Ints, Floats]]] = {row: [] for row in rows}
    for node, start in zip(problem.nodes, first, strict=True):
        for row in rows:
            in_row[row].append((start + np.arange(len(node.time_s)), node.memory_bytes[row] / unit[row]))
    for tensor in problem.tensors:
        paid, source, target = _tensor(build, problem, tensor, first, time_scale)
        for row in rows:
            in_row[row].append((paid, tensor.cast_memory_bytes[row, source, target] / unit[row]))
    if rows:
        _memory_rows(build, problem, first, unit, in_row, minimise_excess)
    program = build.program()
    if minimise_excess:
        objective = np.zeros(len(program.objective))
        objective[-1] = 1.0
        program = replace(program, objective=objective)
    if math.isfinite(cutoff):
        program = _below(program, cutoff / size * OBJECTIVE_SCALE)
    return program, Layout(first=first, sizes=problem.sizes)


def without(program: LinearProgram, layout: Layout, choice: tuple[int, ...]) -> LinearProgram:
    """The program with one assignment ruled out."""
    chosen = np.array([first + strategy for first, strategy in zip(layout.first, choice, strict=True)])
    return replace(
        program,
        rows=np.concatenate([program.rows, np.full(len(chosen), len(program.row_lower))]),
        columns=np.concatenate([program.columns, chosen]),
        values=np.concatenate([program.values, np.ones(len(chosen))]),
        row_lower=np.append(program.row_lower, -np.inf),
        row_upper=np.append(program.row_upper, len(chosen) - 1.0),
    )


def _below(program: LinearProgram, cutoff: float) -> LinearProgram:
    """The program with its objective held at or below `cutoff`, in a row whose numbers are near one."""
    costly = np.flatnonzero(program.objective)
    unit = max(abs(cutoff), 1.0)
    return replace(
        program,
        rows=np.concatenate([program.rows, np.full(len(costly), len(program.row_lower))]),
        columns=np.concatenate([program.columns, costly]),
        values=np.concatenate([program.values, program.objective[costly] / unit]),
        row_lower=np.append(program.row_lower, -np.inf),
        row_upper=np.append(program.row_upper, cutoff / unit),
    )


def _tensor(
    build: "_Builder", problem: IntraOpProblem, tensor: TensorEdge, first: tuple[int, ...], time_scale: float
) -> tuple[Ints, Ints, Ints]:
    """E2 to E4 of one tensor. Returns the variables of its paid casts with their sources and targets."""
    source, target = np.nonzero(np.isfinite(tensor.cast_time_s))  # E7
    cost = tensor.cast_time_s[source, target] / time_scale
    alone = len(tensor.consumers) == 1
    paid = build.variables(cost)
    for node, specs in tensor.consumers:
        flow = paid if alone else build.variables(np.zeros(len(cost)))
        optional = bool((specs == NOT_NEEDED).any())
        for spec in range(tensor.cast_time_s.shape[0]):  # E2
            leaves = first[tensor.producer] + np.flatnonzero(tensor.source == spec)
            _transport(build, flow[source == spec], leaves, -np.inf if optional else 0.0)
        for spec in range(tensor.cast_time_s.shape[1]):  # E3
            _transport(build, flow[target == spec], first[node] + np.flatnonzero(specs == spec), 0.0)
        if not alone:  # E4
            costly = np.flatnonzero(cost + tensor.cast_memory_bytes[:, source, target].sum(axis=0))
            build.pair_rows(paid[costly], flow[costly])
    return paid, source, target


def _transport(build: "_Builder", flow: Ints, chosen: Ints, lower: float) -> None:
    """Flow through one spec equals (or, with `lower` = −inf, is at most) the strategies that have it."""
    if len(flow) + len(chosen):
        columns = np.concatenate([flow, chosen])
        build.row(columns, np.concatenate([np.ones(len(flow)), -np.ones(len(chosen))]), lower, 0.0)


def _memory_rows(
    build: "_Builder",
    problem: IntraOpProblem,
    first: tuple[int, ...],
    units: Floats,
    in_row: dict[int, list[tuple[Ints, Floats]]],
    minimise_excess: bool,
) -> None:
    """E5 and E6; the excess E, where asked for, is the last variable."""
    unit = float(max(units[row] for row in in_row))
    floor = max(0.0, max(float(node.transient_bytes.min()) for node in problem.nodes))
    transient = build.variables(np.zeros(1), lower=floor / unit)
    for node, start in zip(problem.nodes, first, strict=True):
        above = np.flatnonzero(node.transient_bytes > floor)
        if len(above):
            values = np.concatenate([node.transient_bytes[above] / unit, -np.ones(1)])
            below = floor / unit
            values[:-1] -= below  # T − floor ≥ Σ (transient − floor)·x is the tighter form of E6
            build.row(np.concatenate([start + above, transient]), values, -np.inf, -below)
    excess = build.variables(np.zeros(1), lower=-np.inf) if minimise_excess else np.zeros(0, dtype=np.int64)
    for row, parts in in_row.items():
        columns = np.concatenate([*(column for column, _ in parts), transient, excess])
        values = np.concatenate([*(value for _, value in parts), [unit / units[row]], -np.ones(len(excess))])
        build.row(columns, values, -np.inf, float(problem.budget_bytes[row] / units[row]))


class _Builder:
    """Collects variables and rows."""

    def __init__(self):
        self._objective: list[Floats] = []
        self._lower: list[Floats] = []
        self._upper: list[Floats] = []
        self._integer: list[np.ndarray] = []
        self._count = 0
        self._columns: list[Ints] = []
        self._values: list[Floats] = []
        self._lengths: list[Ints] = []
        self._row_lower: list[Floats] = []
        self._row_upper: list[Floats] = []

    def variables(
        self, cost: Floats, *, integer: bool = False, lower: float = 0.0, fixed: np.ndarray | None = None
    ) -> Ints:
        """New variables, one a cost; `fixed` ones stay at zero."""
        count = len(cost)
        upper = np.full(count, 1.0 if integer else np.inf)
        if fixed is not None:
            upper[fixed] = 0.0
            cost = np.where(fixed, 0.0, cost)
        self._objective.append(cost)
        self._lower.append(np.full(count, lower))
        self._upper.append(upper)
        self._integer.append(np.full(count, integer))
        self._count += count
        return np.arange(self._count - count, self._count)

    def row(self, columns: Ints, values: Floats, lower: float, upper: float) -> None:
        """lower ≤ values·x[columns] ≤ upper."""
        used = np.flatnonzero(values)
        self._columns.append(columns[used])
        self._values.append(values[used])
        self._lengths.append(np.array([len(used)]))
        self._row_lower.append(np.array([lower]))
        self._row_upper.append(np.array([upper]))

    def pair_rows(self, larger: Ints, smaller: Ints) -> None:
        """x[larger] ≥ x[smaller], a row each."""
        count = len(larger)
        self._columns.append(np.stack([larger, smaller], axis=1).ravel())
        self._values.append(np.tile([1.0, -1.0], count))
        self._lengths.append(np.full(count, 2))
        self._row_lower.append(np.zeros(count))
        self._row_upper.append(np.full(count, np.inf))

    def program(self) -> LinearProgram:
        """Everything collected."""
        lengths = np.concatenate(self._lengths)
        return LinearProgram(
            objective=np.concatenate(self._objective),
            lower=np.concatenate(self._lower),
            upper=np.concatenate(self._upper),
            integer=np.concatenate(self._integer),
            rows=np.repeat(np.arange(len(lengths)), lengths),
            columns=np.concatenate(self._columns),
            values=np.concatenate(self._values),
            row_lower=np.concatenate(self._row_lower),
            row_upper=np.concatenate(self._row_upper),
        )

"""The OR-Tools adapter."""

import math

import numpy as np
import pytest

from planner.search.solver import LinearProgram, ProgramStatus, minimise


def program(objective, rows, lower=0.0, upper=math.inf, integer=False):
    """min objective·x with rows of (coefficients, least, most)."""
    count = len(objective)
    matrix = np.array([coefficients for coefficients, _, _ in rows], dtype=float).reshape(len(rows), count)
    at_rows, at_columns = np.nonzero(matrix)
    return LinearProgram(
        objective=np.array(objective, dtype=float),
        lower=np.full(count, lower),
        upper=np.full(count, upper),
        integer=np.full(count, integer),
        rows=at_rows,
        columns=at_columns,
        values=matrix[at_rows, at_columns],
        row_lower=np.array([least for _, least, _ in rows], dtype=float),
        row_upper=np.array([most for _, _, most in rows], dtype=float),
    )


def test_linear_and_integer_optimum():
    rows = [([2.0, 3.0], -math.inf, 7.0)]
    relaxed = minimise(program([-3.0, -4.0], rows))
    assert relaxed.status is ProgramStatus.optimal and relaxed.objective == pytest.approx(-10.5)
    whole = minimise(program([-3.0, -4.0], rows, integer=True))
    assert whole.objective == pytest.approx(-10.0) and whole.bound == pytest.approx(-10.0)
    assert whole.values == pytest.approx([2.0, 1.0])


def test_infeasible_and_unbounded():
    assert minimise(program([1.0], [([1.0], 2.0, 1e9)], upper=1.0, integer=True)).status is ProgramStatus.infeasible
    assert minimise(program([-1.0], [])).status is ProgramStatus.unbounded


def test_node_limit_fires_without_the_clock():
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 60, (5, 60)).astype(float)
    case = program(-rng.integers(5, 60, 60), [(row, -math.inf, 500.0) for row in weights], upper=1.0, integer=True)
    stopped, full = minimise(case, node_limit=1), minimise(case)
    assert stopped.limit_fired and not stopped.wall_limit_fired
    assert stopped.bound <= full.objective + 1e-6 <= stopped.objective + 1e-5
    again = minimise(case)
    assert (again.values == full.values).all() and again.nodes == full.nodes

"""The one OR-Tools adapter: linear and mixed-integer programs from sparse arrays through HiGHS.

MathOpt's protocol buffer is filled straight from arrays (building 10⁵ coefficients takes a few milliseconds; a solve of
a tiny program 0.4 ms). HiGHS runs without parallelism and with a fixed seed, and its work limit is the number of
branch-and-bound nodes, so the same program gives the same answer unless the optional wall-clock limit fires.
"""

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from ortools.math_opt import callback_pb2, model_parameters_pb2, model_pb2, parameters_pb2, result_pb2
from ortools.math_opt.core.python import solver as mathopt
from ortools.math_opt.python import init_arguments

from planner.search.problem import Floats, Ints


class ProgramStatus(Enum):
    """How HiGHS ended."""

    optimal = "optimal within the requested gap"
    feasible = "a limit fired with a feasible point at hand"
    infeasible = "proven infeasible"
    unbounded = "the objective falls without limit"
    unknown = "a limit fired without a feasible point"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearProgram:
    """min objective·x  s.t.  row_lower ≤ A x ≤ row_upper,  lower ≤ x ≤ upper,  x integer where `integer`.

    Attributes:
        rows, columns, values: the nonzeros of A, in any order, none twice.
    """

    objective: Floats
    lower: Floats
    upper: Floats
    integer: np.ndarray
    rows: Ints
    columns: Ints
    values: Floats
    row_lower: Floats
    row_upper: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProgramResult:
    """What HiGHS found.

    Attributes:
        values: the best point, empty where there is none.
        bound: proven lower bound on the objective.
        nodes: branch-and-bound nodes.
    """

    status: ProgramStatus
    values: Floats
    objective: float
    bound: float
    nodes: int
    limit_fired: bool
    wall_limit_fired: bool


def minimise(
    program: LinearProgram,
    *,
    relative_gap: float = 0.0,
    absolute_gap: float = 1e-9,
    node_limit: int | None = None,
    wall_s: float | None = None,
) -> ProgramResult:
    """Solve one program. Scale it first: HiGHS's tolerances are absolute (1e-6 on rows and integrality).

    Args:
        relative_gap, absolute_gap: (objective − bound), over |objective| or as it is, at which to stop.
        node_limit: branch-and-bound nodes, None for no limit.
        wall_s: seconds, None for no limit.
    """
    settings = parameters_pb2.SolveParametersProto(random_seed=0, relative_gap_tolerance=relative_gap)
    settings.absolute_gap_tolerance = absolute_gap
    if node_limit is not None:
        settings.node_limit = node_limit
    if wall_s is not None:
        settings.time_limit.FromNanoseconds(int(wall_s * 1e9))
    settings.highs.string_options["parallel"] = "off"
    settings.highs.string_options["presolve"] = "off"  # 2 to 5 times slower on these already reduced programs
    answer = mathopt.solve(
        _model(program),
        parameters_pb2.SOLVER_TYPE_HIGHS,
        init_arguments.StreamableSolverInitArguments().to_proto(),
        settings,
        model_parameters_pb2.ModelSolveParametersProto(),
        None,
        callback_pb2.CallbackRegistrationProto(),
        None,
        None,
    )
    return _read(answer, len(program.objective))


def _model(program: LinearProgram) -> model_pb2.ModelProto:
    model = model_pb2.ModelProto()
    count, rows = len(program.objective), len(program.row_lower)
    model.variables.ids.extend(range(count))
    model.variables.lower_bounds.extend(program.lower.tolist())
    model.variables.upper_bounds.extend(program.upper.tolist())
    model.variables.integers.extend(np.asarray(program.integer, dtype=bool).tolist())
    costly = np.flatnonzero(program.objective)
    model.objective.linear_coefficients.ids.extend(costly.tolist())
    model.objective.linear_coefficients.values.extend(program.objective[costly].tolist())
    model.linear_constraints.ids.extend(range(rows))
    model.linear_constraints.lower_bounds.extend(program.row_lower.tolist())
    model.linear_constraints.upper_bounds.extend(program.row_upper.tolist())
    order = np.lexsort((program.columns, program.rows))
    model.linear_constraint_matrix.row_ids.extend(program.rows[order].tolist())
    model.linear_constraint_matrix.column_ids.extend(program.columns[order].tolist())
    model.linear_constraint_matrix.coefficients.extend(program.values[order].tolist())
    return model


def _read(answer: result_pb2.SolveResultProto, count: int) -> ProgramResult:
    values = np.zeros(0)
    objective = math.inf
    if answer.solutions and answer.solutions[0].HasField("primal_solution"):
        primal = answer.solutions[0].primal_solution
        if primal.feasibility_status == 2:  # SOLUTION_STATUS_FEASIBLE
            values = np.zeros(count)
            values[np.array(primal.variable_values.ids, dtype=np.int64)] = primal.variable_values.values
            objective = primal.objective_value
    reason, limit = answer.termination.reason, answer.termination.limit
    fired = limit != result_pb2.LIMIT_UNSPECIFIED
    bound = answer.termination.objective_bounds.dual_bound
    if reason == result_pb2.TERMINATION_REASON_OPTIMAL:
        status = ProgramStatus.optimal
    elif reason in (
        result_pb2.TERMINATION_REASON_INFEASIBLE,
        result_pb2.TERMINATION_REASON_INFEASIBLE_OR_UNBOUNDED,
    ):
        status, bound = ProgramStatus.infeasible, math.inf
    elif reason == result_pb2.TERMINATION_REASON_UNBOUNDED:
        status = ProgramStatus.unbounded
    elif reason in (result_pb2.TERMINATION_REASON_FEASIBLE, result_pb2.TERMINATION_REASON_NO_SOLUTION_FOUND):
        status = ProgramStatus.feasible if len(values) else ProgramStatus.unknown
    else:
        raise RuntimeError(f"HiGHS failed: {answer.termination.detail}")
    return ProgramResult(
        status=status,
        values=values,
        objective=objective,
        bound=bound,
        nodes=answer.solve_stats.node_count,
        limit_fired=fired,
        wall_limit_fired=limit == result_pb2.LIMIT_TIME,
    )

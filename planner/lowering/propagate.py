"""Strategies for a program that the search did not see (the optimizer update): follow the operands' splits.

Each op splits as its largest split operand does; sums over a split dim leave pending sums, which pass through linear
ops
and are reduced where anything else reads them. Nothing is differentiated, so REPLICATED and VARYING cost the same.
"""

import math
from collections.abc import Mapping, Sequence

from costmodel.graph import Op
from costmodel.sharding import (
    PARTIAL,
    PASS,
    REPLICATED,
    VARYING,
    Spec,
    Strategy,
    axis_choices,
    major_factor,
    result_spec,
)
from planner.frontend.flat import Program, Value


def propagate(
    program: Program, ops: Mapping[str, Op], inputs: Mapping[str, Spec], mesh: Sequence[int]
) -> tuple[dict[str, Strategy], dict[str, Spec]]:
    """Strategies of all ops, and the spec of every value."""
    specs = dict(inputs)
    whole: Spec = (REPLICATED,) * len(mesh)
    strategies: dict[str, Strategy] = {}
    for equation in program.equations:
        op = ops[equation.name]
        have = [specs.get(o.name, whole) if isinstance(o, Value) else whole for o in equation.inputs]
        sizes = [math.prod(o.shape) for o in equation.inputs]
        codes: list[int] = []
        for axis, size in enumerate(mesh):
            codes.append(choose(op, [s[axis] for s in have], sizes, size, mesh, codes))
        strategies[op.name] = tuple(codes)
        for i, value in enumerate(equation.outputs):
            specs[value.name] = result_spec(op, i, strategies[op.name])
    return strategies, specs


def choose(
    op: Op, have: Sequence[int], sizes: Sequence[int], size: int, mesh: Sequence[int], earlier: Sequence[int]
) -> int:
    """The strategy of an op on one mesh axis, that of its largest split operand.

    Args:
        have: code of each operand on the axis. sizes: elements of each. size: of the axis. earlier: codes on the axes
            before it.
    """
    choices = axis_choices(op, size)
    pending = {i for i, code in enumerate(have) if code == PARTIAL}
    split = [i for i, code in enumerate(have) if code >= 0]
    if pending and not split:
        for i, linear in enumerate(op.linear):
            if set(linear) == pending:
                return PASS - i
    for i in sorted(split, key=lambda i: -sizes[i]):
        factor = major_factor(op, op.in_dims[i], have[i])
        parts = size
        for axis, code in enumerate(earlier):
            parts *= mesh[axis] if code == factor else 1
        if factor in choices and op.factors[factor].size % parts == 0:
            return factor
    return VARYING if VARYING in have else REPLICATED

"""Pieces of small constants worked out at capture: ``ones((layers, heads))[i]`` is a constant of its own.

Libraries make tables for all layers and take one row in each; folded, equal layers look equal.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from planner.frontend import jax_compat as jc
from planner.frontend.flat import REGIONS, Equation, Operand, Program, Value, prune

PICKS = frozenset({"slice", "dynamic_slice", "gather"})
AFTER = frozenset({"squeeze", "reshape", "broadcast_in_dim", "convert_element_type", "transpose"})
LARGEST = 1 << 12  # elements of a constant that is worked out


def fold_picks(program: Program) -> Program:
    """The program without the equations that take pieces of small constants; their results are captured arrays."""
    makers: dict[Value, Equation] = {}  # small values made of constants alone
    arrays: dict[Value, Any] = dict(program.constants)
    picked: set[Value] = set()
    for e in program.equations:
        if not _foldable(e) or not all(not isinstance(o, Value) or o in makers or o in arrays for o in e.inputs):
            continue
        makers.update(dict.fromkeys(e.outputs, e))
        if e.primitive.name in PICKS or (e.primitive.name in AFTER and e.inputs[0] in picked):
            picked.update(e.outputs)
    if not picked:
        return program

    def value(operand: Operand) -> Any:
        if not isinstance(operand, Value):
            return operand.value
        if operand not in arrays:
            e = makers[operand]
            results = jc.bind(e.primitive, [jc.array(value(o), o.aval) for o in e.inputs], e.params)
            arrays.update(zip(e.outputs, results, strict=True))
        return arrays[operand]

    constants = {**program.constants, **{v: np.asarray(value(v)) for v in picked}}
    kept = tuple(e for e in program.equations if not any(v in picked for v in e.outputs))
    return prune(replace(program, equations=kept, constants=constants))


def _foldable(equation: Equation) -> bool:
    small = all(math.prod(v.shape) <= LARGEST and not jc.is_key(v.aval.dtype) for v in equation.outputs)
    plain = equation.primitive.name not in REGIONS and not equation.primitive.name.startswith("random")
    return small and plain and not equation.params.get("effects") and not equation.scopes

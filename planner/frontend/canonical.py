"""Stable text of equation parameters and programs: equal text means equal computation, in every process."""

import hashlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from planner.frontend import jax_compat as jc
from planner.frontend.flat import Equation, Operand, Program, Value

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def describe_param(value: Any) -> str:
    """Text of an equation parameter: no object identities, no generated names."""
    if value is None or isinstance(value, (bool, int, float)):
        return str(value)
    if isinstance(value, str):
        return _ADDRESS.sub("", value)
    if isinstance(value, jc.ClosedJaxpr):
        return f"{describe_param(value.jaxpr)}{describe_param(list(value.consts))}"
    if isinstance(value, jc.Jaxpr):
        return _ADDRESS.sub("", str(value))
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(describe_param(v) for v in value) + ")"
    if isinstance(value, dict):
        pairs = sorted(value.items(), key=lambda kv: str(kv[0]))
        return "{" + ",".join(f"{k}:{describe_param(v)}" for k, v in pairs) + "}"
    if jc.wrapped_fun(value) or callable(value):
        return getattr(value, "__name__", type(value).__name__)
    if isinstance(value, np.ndarray) or hasattr(value, "__array__"):
        return describe_array(value)
    return _ADDRESS.sub("", str(value))


def describe_array(value: Any) -> str:
    """A captured array by its contents. Typed keys count as their words."""
    if jc.is_key(getattr(value, "dtype", np.dtype(bool))):
        value = jc.key_words(value)
    array = np.asarray(value)
    return f"{array.dtype}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


def describe_operand(operand: Operand, names: dict[Value, str]) -> str:
    """An operand by its name in `names`, a literal by its number."""
    if isinstance(operand, Value):
        return names[operand]
    return f"{describe_param(operand.value)}:{operand.aval.str_short()}"


def program_text(program: Program, describe: Callable[[Equation], str]) -> str:
    """Text of a program up to the names of its values.

    Args:
        describe: text of an equation's parameters (a rule's `describe`).
    """
    names: dict[Value, str] = {v: f"i{n}:{v.aval.str_short()}" for n, v in enumerate(program.inputs)}
    lines = []
    for n, (value, array) in enumerate(program.constants.items()):
        names[value] = f"c{n}"
        lines.append(f"c{n}={describe_array(array)}")
    scopes: dict[int, int] = {}
    for equation in program.equations:
        args = [describe_operand(o, names) for o in equation.inputs]
        for v in equation.outputs:
            names[v] = f"v{len(names)}"
        around = [scopes.setdefault(s.index, len(scopes)) for s in equation.scopes]
        results = [v.aval.str_short() for v in equation.outputs]
        lines.append(f"{equation.primitive.name}{args}{describe(equation)}->{results}{around}")
    lines.append(str([describe_operand(o, names) for o in program.outputs]))
    return ";".join(lines)

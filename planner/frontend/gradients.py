"""Which values of a program a cotangent reaches: those on a path from a trained parameter to the loss."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from planner.frontend.flat import REGIONS, Equation, Operand, Program, Value

BLOCKS_GRADIENT = frozenset({"stop_gradient", "floor", "ceil", "round", "sign", "is_finite", "nextafter"})


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _passes(equation: Equation) -> bool:
    return equation.primitive.name not in BLOCKS_GRADIENT


def depends(program: Program, seeds: Iterable[str]) -> set[str]:
    """Names of float values that depend differentiably on the seeds."""
    moved = set(seeds)
    for equation in program.equations:
        if _passes(equation) and any(isinstance(o, Value) and o.name in moved for o in equation.inputs):
            moved.update(v.name for v in equation.outputs if _is_float(v.aval))
    return moved


def depends_in_loop(body: Program, carry: int, consts: int, seeds: Iterable[str]) -> set[str]:
    """The same for one iteration of a loop, whose carry feeds itself."""
    seeds = set(seeds)
    while True:
        moved = depends(body, seeds)
        outputs = body.outputs[:carry]
        fed = {v.name for v, o in zip(body.inputs[consts:], outputs) if isinstance(o, Value) and o.name in moved}
        if fed <= seeds:
            return moved
        seeds |= fed


def annotated(program: Program, moved: set[str], *, transposed: bool = False) -> Program:
    """The program with `Equation.moving` and `Equation.transposed` stated.

    Args:
        moved: names of the values that depend on the seeds.
        transposed: whether the program is a derivative.
    """

    def one(e: Equation) -> Equation:
        if e.primitive.name not in REGIONS:
            return e
        moving = tuple(isinstance(o, Value) and o.name in moved and _is_float(o.aval) for o in e.inputs)
        return replace(e, moving=moving, transposed=transposed, memo={})

    return replace(program, equations=tuple(one(e) for e in program.equations))


def reaches(program: Program, wanted: Iterable[str]) -> set[str]:
    """Names of float values that the wanted ones depend on differentiably."""
    found = set(wanted)
    for equation in reversed(program.equations):
        if _passes(equation) and any(v.name in found for v in equation.outputs):
            found.update(o.name for o in equation.inputs if isinstance(o, Value) and _is_float(o.aval))
    return found


def needing_gradient(program: Program, trained: Iterable[str], loss: Iterable[Operand]) -> set[str]:
    """Names of the values that a cotangent reaches in a straight program (loops count as one equation)."""
    wanted = {o.name for o in loss if isinstance(o, Value)}
    return depends(program, trained) & reaches(program, wanted)


def needing_gradient_in_loop(body: Program, carry: int, consts: int, moved: set[str], wanted: set[int]) -> set[str]:
    """The same for one iteration of a loop, whose carry feeds itself.

    Args:
        moved: names of body inputs that depend on a trained parameter from outside.
        wanted: positions of body outputs that the loss reads after the loop.
    """
    seeds, targets = set(moved), set(wanted)
    inputs, outputs = body.inputs, body.outputs
    while True:
        forward = depends(body, seeds)
        back = reaches(body, [o.name for i in targets if isinstance(o := outputs[i], Value)])
        grown = {
            inputs[consts + i].name for i in range(carry) if isinstance(o := outputs[i], Value) and o.name in forward
        }
        again = {i for i in range(carry) if inputs[consts + i].name in back}
        if grown <= seeds and again <= targets:
            return forward & back
        seeds |= grown
        targets |= again

"""What JAX keeps of each op for the backward pass, found by tracing the op's own derivative.

Rules state which operands and results a cotangent reads, but not what JAX keeps: it keeps the square of a divisor, the
mask of a ReLU, three tensors of a product of powers. Only bytes that are really kept make a memory prediction right.
Where JAX cannot differentiate an op that stands alone, the op says why (`Op.guessed_saves`), and its rule counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from costmodel.graph import Op
from planner.frontend import jax_compat as jc
from planner.frontend.canonical import describe_param
from planner.frontend.flat import COMPOSITES, CUSTOM, Constant, Equation, Value

Own = tuple[tuple[int, ...], int, bool]  # shape, bytes, whether it is the same whatever the operands
Kept = tuple[tuple[int, ...], tuple[Own, ...]]  # positions (~j: result j), own
Cache = dict[tuple[Any, ...], Kept | str]
"""By content of the equation: what JAX keeps, or why it cannot say. One for each capture, as shapes differ."""

_OWN_DERIVATIVES = CUSTOM | COMPOSITES
"""Primitives whose derivative is the user's or a package's code, which may raise anything."""

_NO_DERIVATIVE = (NotImplementedError, TypeError, ValueError)
"""What JAX raises where a primitive has no derivative, or none that stands alone."""


def with_residuals(equation: Equation, op: Op, needs_grad: Callable[[Value], bool], cache: Cache) -> Op:
    """The op with what JAX keeps of it. An op that JAX cannot differentiate alone keeps what its rule says."""
    moving = [i for i, o in enumerate(equation.inputs) if isinstance(o, Value) and needs_grad(o)]
    if not moving or not any(needs_grad(v) for v in equation.outputs):
        return replace(op, saves=(), backward_flops=0.0, inside_backward=None)
    found = kept_of(equation, tuple(moving), cache)
    stored = _stored(equation)
    if isinstance(found, str):
        return replace(op, stored=stored, guessed_saves=found)
    positions, own = found
    names = [equation.inputs[p] if p >= 0 else equation.outputs[~p] for p in positions]
    tensors = [o for o in (*equation.outputs, *equation.inputs) if isinstance(o, Value)]
    keeps = tuple((next((t.name for t in tensors if t.shape == shape), ""), size, fixed) for shape, size, fixed in own)
    return replace(
        op, saves=tuple(dict.fromkeys(n.name for n in names if isinstance(n, Value))), keeps=keeps, stored=stored
    )


def _stored(equation: Equation) -> bool:
    """Whether the policy of a user's ``jax.checkpoint`` (the outermost, if nested) keeps the results."""
    policy = equation.scopes[0].policy if equation.scopes else None
    if policy is None:
        return False
    return bool(policy(equation.primitive, *[o.aval for o in equation.inputs], **equation.params) is True)


def kept_of(equation: Equation, moving: Sequence[int], cache: Cache) -> Kept | str:
    """Residuals of one equation when the operands at `moving` need a cotangent; why not, where JAX cannot say."""
    shapes = [o.aval.str_short() for o in (*equation.inputs, *equation.outputs)]
    constants = [describe_param(o.value) for o in equation.inputs if isinstance(o, Constant)]
    key = (equation.primitive.name, *shapes, *constants, tuple(moving), describe_param(equation.params))
    if key not in cache:
        expected = (Exception,) if equation.primitive.name in _OWN_DERIVATIVES else _NO_DERIVATIVE
        try:
            cache[key] = _trace(equation, moving)
        except expected as error:
            first = next(iter(str(error).splitlines()), "")
            cache[key] = f"{type(error).__name__}: {first}"
    return cache[key]


def _trace(equation: Equation, moving: Sequence[int]) -> Kept:
    places = [i for i, o in enumerate(equation.inputs) if isinstance(o, Value)]
    positions: list[int] = []
    sizes: list[tuple[tuple[int, ...], int]] = []

    def run(*given: Any) -> list[Any]:
        operands: list[Any] = [_constant(o) if isinstance(o, Constant) else None for o in equation.inputs]
        for i, x in zip(places, given, strict=True):
            operands[i] = x

        def moved(*some: Any) -> tuple[list[Any], list[Any]]:
            every = list(operands)
            for i, x in zip(moving, some, strict=True):
                every[i] = x
            results = jc.bind(equation.primitive, every, equation.params)
            return [r for r in results if jnp.issubdtype(r.dtype, jnp.inexact)], results

        inexact, back, results = jax.vjp(moved, *[operands[i] for i in moving], has_aux=True)
        known = {id(x): ~j for j, x in enumerate(results)}
        outs = iter(inexact)
        known |= {id(next(outs)): ~j for j, r in enumerate(results) if jnp.issubdtype(r.dtype, jnp.inexact)}
        known |= {id(x): i for i, x in zip(places, given, strict=True)}
        own = []
        for leaf in jax.tree.leaves(back):
            if id(leaf) in known:
                positions.append(known[id(leaf)])
            elif leaf.size > 1:
                own.append(leaf)
                sizes.append((tuple(leaf.shape), leaf.size * jc.itemsize(leaf.dtype)))
        return own

    avals = [jax.ShapeDtypeStruct(equation.inputs[i].shape, equation.inputs[i].aval.dtype) for i in places]
    fixed = jc.constant_outputs(jax.make_jaxpr(run)(*avals))
    own = tuple((shape, size, still) for (shape, size), still in zip(sizes, fixed, strict=True))
    return tuple(dict.fromkeys(positions)), own


def _constant(operand: Constant) -> Any:
    return operand.value if jc.is_key(operand.aval.dtype) else jnp.asarray(operand.value, operand.aval.dtype)

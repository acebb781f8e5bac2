"""Bounds of a region of a value, found in the program that makes it: what a mask does to tokens that come later.

Masks depend on no data: they are comparisons of counts, or captured arrays. So the elements of a region have bounds
that interval arithmetic finds, and where the region lies behind the diagonal these say what is left of it:

    counts > counts        true
    select(true, ..)       the number that hides
    scores + that number   at least `HIDES` below zero
    exp(.. - maximum)      zero

Numbers of which nothing is known are taken as finite; beside an addend of at least `HIDES` below zero they are taken as
less than a quarter of its size (a score beyond that would show through such a mask in any program).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from costmodel.graph import Op
from planner.frontend import jax_compat as jc
from planner.frontend.flat import Constant, Equation, Operand, Program, Value

Interval = tuple[float, float]
Box = tuple[tuple[int, int], ...]  # start and stop along each dim
Region = Callable[[Box], Interval]

ANY: Interval = (-math.inf, math.inf)
BOOL: Interval = (0.0, 1.0)
HIDES = -1e9  # an addend from here down is a mask
UNDERFLOW = -800.0  # the exponential of less is zero in every float type
_DEEPEST = 200  # equations that are followed back; nothing is known of what lies behind


def anything(operand: Operand) -> Interval:
    """What is known of a value of which nothing is known."""
    return BOOL if operand.aval.dtype == np.bool_ else ANY


def whole_box(shape: tuple[int, ...]) -> Box:
    return tuple((0, n) for n in shape)


class Bounds:
    """Bounds of the values of one program.

    Args:
        inputs: bounds of inputs, where they are known.
        floors: value -> a number that its elements are not below.
    """

    def __init__(self, program: Program, ops: Mapping[str, Op], inputs: Mapping[str, Region]):
        self.ops, self.inputs = ops, inputs
        self.floors: dict[str, float] = {}
        self.makers = {v.name: (e, i) for e in program.equations for i, v in enumerate(e.outputs)}
        self.constants = {v.name: array for v, array in program.constants.items()}
        self._known: dict[tuple[str, Box], Interval] = {}

    def of(self, operand: Operand, box: Box, depth: int = 0) -> Interval:
        """The least and the largest element of a region."""
        if isinstance(operand, Constant):
            return of_array(operand.value, ()) if not jc.is_key(operand.aval.dtype) else ANY
        key = (operand.name, box)
        if key not in self._known:
            low, high = self._find(operand, box, depth)
            floor = self.floors.get(operand.name, -math.inf)
            self._known[key] = (max(low, floor), max(high, floor))
        return self._known[key]

    def forget(self) -> None:
        """Drops what was found before a floor was set."""
        self._known.clear()

    def _find(self, value: Value, box: Box, depth: int) -> Interval:
        if jc.is_key(value.aval.dtype):
            return ANY
        if value.name in self.inputs:
            return self.inputs[value.name](box)
        if value.name in self.constants:
            return of_array(self.constants[value.name], box)
        made = self.makers.get(value.name)
        if made is None or depth > _DEEPEST:
            return anything(value)
        equation, position = made
        found = _TRANSFER.get(equation.primitive.name)
        if found is None or len(equation.outputs) > 1:
            return anything(value)
        low, high = found(self, equation, self._operand_boxes(equation, position, box), box, depth + 1)
        return anything(value) if math.isnan(low) or math.isnan(high) else _as_stored((low, high), value.aval.dtype)

    def _operand_boxes(self, equation: Equation, position: int, box: Box) -> list[Box]:
        """The region of each operand that a region of a result is made of, as far as dims are shared."""
        op = self.ops[equation.name]
        ranges = {parts: r for parts, r in zip(op.out_dims[position], box, strict=True) if parts}
        return [
            tuple(ranges.get(parts, (0, n)) for parts, n in zip(dims, o.shape, strict=True))
            for dims, o in zip(op.in_dims, equation.inputs, strict=True)
        ]


def of_array(value: Any, box: Box) -> Interval:
    array = np.asarray(value)
    if array.dtype == np.bool_:
        array = array.astype(np.int8)
    if not np.issubdtype(array.dtype, np.number) and array.dtype.kind not in "fV":
        return ANY
    part = array[tuple(slice(a, b) for a, b in box)].astype(np.float64) if array.ndim else array.astype(np.float64)
    return (float(part.min()), float(part.max())) if part.size else ANY


def _as_stored(found: Interval, dtype: Any) -> Interval:
    """Bounds as a type holds them: floats are rounded (in order, so that bounds stay bounds), integers that do not fit
    may be anything."""
    if dtype == np.bool_:
        return found
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return found if limits.min <= found[0] and found[1] <= limits.max else ANY
    with np.errstate(over="ignore"):
        low, high = (float(np.asarray(x).astype(dtype)) for x in found)
    return (low, high)


def _product(x: float, y: float) -> float:
    return 0.0 if x == 0.0 or y == 0.0 else x * y


def _sum(a: Interval, b: Interval) -> Interval:
    for mask, other in ((a, b), (b, a)):
        if mask[1] <= HIDES and other[1] == math.inf:
            return (-math.inf, mask[1] * 0.75)
    return (a[0] + b[0], a[1] + b[1])


def _exp(x: float) -> float:
    return 0.0 if x < UNDERFLOW else math.exp(x) if x < 700.0 else math.inf


Transfer = Callable[[Bounds, Equation, list[Box], Box, int], Interval]


def _each(function: Callable[..., Interval]) -> Transfer:
    """Of the bounds of the operands."""

    def transfer(bounds: Bounds, e: Equation, boxes: list[Box], box: Box, depth: int) -> Interval:
        return function(*(bounds.of(o, b, depth) for o, b in zip(e.inputs, boxes, strict=True)))

    return transfer


def _hull(*several: Interval) -> Interval:
    return (min(i[0] for i in several), max(i[1] for i in several))


def _multiply(a: Interval, b: Interval) -> Interval:
    corners = [_product(x, y) for x in a for y in b]
    return (min(corners), max(corners))


def _divide(a: Interval, b: Interval) -> Interval:
    if a == (0.0, 0.0):
        return a
    return _multiply(a, (1.0 / b[1], 1.0 / b[0])) if b[0] > 0 or b[1] < 0 else ANY


def _select(bounds: Bounds, e: Equation, boxes: list[Box], box: Box, depth: int) -> Interval:
    low, high = bounds.of(e.inputs[0], boxes[0], depth)
    cases = range(1, len(e.inputs))
    if low == high and int(low) + 1 in cases:
        cases = range(int(low) + 1, int(low) + 2)
    return _hull(*(bounds.of(e.inputs[i], boxes[i], depth) for i in cases))


def _iota(bounds: Bounds, e: Equation, boxes: list[Box], box: Box, depth: int) -> Interval:
    start, stop = box[e.params["dimension"]]
    return (float(start), float(stop - 1))


def _slice(bounds: Bounds, e: Equation, boxes: list[Box], box: Box, depth: int) -> Interval:
    strides = e.params["strides"] or (1,) * len(box)
    window = zip(box, e.params["start_indices"], strides, strict=True)
    return bounds.of(e.inputs[0], tuple((at + a * s, at + (b - 1) * s + 1) for (a, b), at, s in window), depth)


def _compare(known: Callable[[Interval, Interval], bool | None]) -> Transfer:
    def function(a: Interval, b: Interval) -> Interval:
        answer = known(a, b)
        return BOOL if answer is None else (float(answer), float(answer))

    return _each(function)


def _less(a: Interval, b: Interval) -> bool | None:
    return True if a[1] < b[0] else False if a[0] >= b[1] else None


def _at_most(a: Interval, b: Interval) -> bool | None:
    return True if a[1] <= b[0] else False if a[0] > b[1] else None


def _equal(a: Interval, b: Interval) -> bool | None:
    return False if a[1] < b[0] or b[1] < a[0] else True if a == b and a[0] == a[1] else None


def _not(answer: bool | None) -> bool | None:
    return None if answer is None else not answer


def _logic(function: Callable[[Interval, Interval], Interval]) -> Transfer:
    """Of booleans; nothing is said of the bits of integers."""

    def transfer(bounds: Bounds, e: Equation, boxes: list[Box], box: Box, depth: int) -> Interval:
        if e.outputs[0].aval.dtype != np.bool_:
            return ANY
        return function(*(bounds.of(o, b, depth) for o, b in zip(e.inputs, boxes, strict=True)))

    return transfer


_same = _each(lambda a: a)


def _convert(bounds: Bounds, e: Equation, boxes: list[Box], box: Box, depth: int) -> Interval:
    low, high = bounds.of(e.inputs[0], boxes[0], depth)
    if e.outputs[0].aval.dtype == np.bool_:
        return (0.0, 0.0) if low == high == 0.0 else (1.0, 1.0) if low > 0 or high < 0 else BOOL
    if jnp.issubdtype(e.outputs[0].aval.dtype, jnp.integer) and jnp.issubdtype(e.inputs[0].aval.dtype, jnp.inexact):
        return (low - 1.0, high + 1.0)
    return (low, high)


_TRANSFER: dict[str, Transfer] = {
    **dict.fromkeys(
        ("broadcast_in_dim", "reshape", "transpose", "squeeze", "copy", "copy_p", "stop_gradient", "name",
         "reduce_max", "reduce_min", "reduce_precision", "expand_dims"),
        _same,
    ),
    "convert_element_type": _convert,
    "iota": _iota,
    "slice": _slice,
    "select_n": _select,
    "concatenate": _each(_hull),
    "add": _each(_sum),
    "add_any": _each(_sum),
    "sub": _each(lambda a, b: _sum(a, (-b[1], -b[0]))),
    "neg": _each(lambda a: (-a[1], -a[0])),
    "mul": _each(_multiply),
    "div": _each(_divide),
    "max": _each(lambda a, b: (max(a[0], b[0]), max(a[1], b[1]))),
    "min": _each(lambda a, b: (min(a[0], b[0]), min(a[1], b[1]))),
    "abs": _each(lambda a: (0.0 if a[0] <= 0 <= a[1] else min(abs(a[0]), abs(a[1])), max(abs(a[0]), abs(a[1])))),
    "exp": _each(lambda a: (_exp(a[0]), _exp(a[1]))),
    "exp2": _each(lambda a: (0.0, _exp(a[1] * (0.7 if a[1] > 0 else 0.69)))),
    "lt": _compare(_less),
    "gt": _compare(lambda a, b: _less(b, a)),
    "le": _compare(_at_most),
    "ge": _compare(lambda a, b: _at_most(b, a)),
    "eq": _compare(_equal),
    "ne": _compare(lambda a, b: _not(_equal(a, b))),
    "and": _logic(lambda a, b: (min(a[0], b[0]), min(a[1], b[1]))),
    "or": _logic(lambda a, b: (max(a[0], b[0]), max(a[1], b[1]))),
    "not": _logic(lambda a: (1.0 - a[1], 1.0 - a[0])),
}  # fmt: skip

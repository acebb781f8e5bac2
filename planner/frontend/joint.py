"""Which dims of a whole program split together.

Factors of neighbouring ops are the same loop where a tensor joins them. Joining all of them gives **classes**: a class
splits when every op that it touches can split its factor, and the state of every value follows: split at some dim,
equal everywhere, or a pending sum. Loops, branches and functions with custom derivatives get their factors from here
(`rules/region.py`), and so does the check of what a microbatch means (`microbatch.py`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from costmodel.graph import Op
from costmodel.sharding import PARTIAL, PASS, VARYING, major_factor
from planner.frontend.flat import Equation, Operand, Program, Value

Place = tuple[str, int]  # (value name, dim)
SUMS = ("add", "add_any", "sub")


class Classes:
    """Union-find over value dims and op factors."""

    def __init__(self) -> None:
        self._parent: dict[object, object] = {}

    def find(self, item: object) -> object:
        root = item
        while (up := self._parent.setdefault(root, root)) is not root:
            root = up
        while self._parent[item] is not root:
            self._parent[item], item = root, self._parent[item]
        return root

    def join(self, a: object, b: object) -> None:
        self._parent[self.find(a)] = self.find(b)


@dataclass(frozen=True, eq=False)
class Joined:
    """A program with its ops and the classes of its dims. All joins are made before the first look-up.

    Attributes:
        moved: names of the values that depend on what the loss is differentiated by, where that was asked.
    """

    program: Program
    ops: Mapping[str, Op]
    classes: Classes
    moved: frozenset[str] = frozenset()

    @cached_property
    def _by_root(self) -> dict[object, dict[str, list[int]]]:
        found: dict[object, dict[str, list[int]]] = {}
        for name, op in self.ops.items():
            for f, factor in enumerate(op.factors):
                if factor.size > 1:
                    found.setdefault(self.classes.find((name, "factor", f)), {}).setdefault(name, []).append(f)
        return found

    def members(self, root: object) -> dict[str, list[int]]:
        """Op name -> factors of this class."""
        return self._by_root.get(self.classes.find(root), {})


def join_ops(program: Program, ops: Mapping[str, Op], classes: Classes | None = None) -> Joined:
    """Joins each tensor dim with the major factor of every op dim that it stands for."""
    classes = classes or Classes()
    for equation in program.equations:
        op = ops[equation.name]
        tensors: list[tuple[Operand, tuple[tuple[int, ...], ...]]] = [
            *zip(equation.inputs, op.in_dims, strict=True),
            *zip(equation.outputs, op.out_dims, strict=True),
        ]
        for operand, dims in tensors:
            if isinstance(operand, Value):
                for dim in range(len(dims)):
                    if (factor := major_factor(op, dims, dim)) >= 0:
                        classes.join((operand.name, dim), (op.name, "factor", factor))
    return Joined(program, ops, classes)


@dataclass(frozen=True, slots=True)
class Spread:
    """What splitting one class does to a program.

    Attributes:
        codes: op name -> strategy code on the split axis (a factor, VARYING or a PASS).
        states: value name -> dim that is split, VARYING or PARTIAL.
        outputs: state that each output is brought to, where it is not left as it comes.
    """

    codes: dict[str, int]
    states: dict[str, int]
    outputs: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a class cannot split: the equation that forbids it."""

    equation: Equation
    reason: str


def spread(
    joined: Joined,
    root: object,
    inputs: Mapping[str, int],
    *,
    allow_max: int = 0,
    allow_reductions: bool = True,
    affine: bool = False,
    redrawn: bool = False,
) -> Spread | Obstacle:
    """Follows a split of class `root` through the program, or says which equation forbids it.

    Args:
        inputs: state of each program input (a dim, VARYING or PARTIAL); absent means VARYING.
        allow_max: elements of the largest result that an op may all-reduce as a maximum.
        allow_reductions: whether an op may sum over the class.
        affine: whether a pending sum may meet a value that is equal everywhere in an addition (not so on shards, where
            the value would be added once each; but so for a mean of means).
        redrawn: whether a dim that a random op creates splits in any case (not so on shards, which must hold parts of
            what is drawn whole; but so for a smaller batch, which draws its own).
    """
    members = joined.members(root)
    states: dict[str, int] = dict(inputs)
    codes: dict[str, int] = {}
    for equation in joined.program.equations:
        op = joined.ops[equation.name]
        have = [states.get(o.name, VARYING) if isinstance(o, Value) else VARYING for o in equation.inputs]
        factors = members.get(op.name, [])
        if PARTIAL in have:
            pending = {p for p, h in enumerate(have) if h == PARTIAL}
            linear = next((i for i, s in enumerate(op.linear) if set(s) == pending), None)
            if linear is None and affine and op.primitive in SUMS:
                linear = 0
            if linear is None or any(h >= 0 for h in have):
                return Obstacle(equation, "a pending sum meets an operation that is not linear in it")
            codes[op.name] = PASS - linear
            states.update((value.name, PARTIAL) for value in equation.outputs)
            continue
        split = [h for h in have if h >= 0]
        if not factors:
            if split:
                return Obstacle(equation, "the op has no loop for the split dim")
            codes[op.name] = VARYING
            states.update((value.name, VARYING) for value in equation.outputs)
            continue
        outcome = _one(op, equation, factors, have, allow_max, allow_reductions, redrawn)
        if isinstance(outcome, Obstacle):
            return outcome
        code, results = outcome
        codes[op.name] = code
        states.update(zip((value.name for value in equation.outputs), results, strict=True))
    return Spread(codes, states)


def _one(
    op: Op,
    equation: Equation,
    factors: list[int],
    have: Sequence[int],
    allow_max: int,
    allow_reductions: bool,
    redrawn: bool,
) -> tuple[int, list[int]] | Obstacle:
    """Strategy code and result states of one op whose loop belongs to the class."""
    touched = [
        f for f in factors if any(_dim(op, dims, f) == h for dims, h in zip(op.in_dims, have, strict=True) if h >= 0)
    ]
    if not touched:
        if op.inputs and not any(f in parts for f in factors for dims in op.in_dims for parts in dims):
            touched = factors[:1]  # a dim that the op creates (broadcast, iota)
        elif not op.inputs:
            touched = factors[:1]
        else:
            return Obstacle(equation, "an operand that should be split is not")
    if len(factors) > 1:
        return Obstacle(equation, "two loops of one op would be split together")
    factor = touched[0]
    info = op.factors[factor]
    drawn = redrawn and op.work == "random" and not any(factor in parts for dims in op.in_dims for parts in dims)
    if not info.splits and not drawn:
        return Obstacle(equation, info.reason or f"{op.primitive} does not split {info.name}")
    for dims, h in zip(op.in_dims, have, strict=True):
        place = _dim(op, dims, factor)
        if place is None:
            return Obstacle(equation, "the split dim is the minor part of a merged dim")
        if (place if place >= 0 else VARYING) != h:
            return Obstacle(equation, "operands are split differently")
    results = []
    for dims, shape in zip(op.out_dims, equation.out_shapes, strict=True):
        place = _dim(op, dims, factor)
        if place is None:
            return Obstacle(equation, "the split dim is the minor part of a merged dim")
        if place >= 0:
            results.append(place)
        elif info.combine == "sum" and allow_reductions:
            results.append(PARTIAL)
        elif info.combine == "same" or (info.combine == "max" and math.prod(shape) <= allow_max):
            results.append(VARYING)
        else:
            return Obstacle(equation, f"{op.primitive} joins all of {info.name}")
    return factor, results


def _dim(op: Op, dims: tuple[tuple[int, ...], ...], factor: int) -> int | None:
    for dim, parts in enumerate(dims):
        if factor in parts:
            return dim if major_factor(op, dims, dim) == factor else None
    return -1


def class_size(joined: Joined, root: object) -> int:
    """Largest number that every loop of the class divides by."""
    sizes = [joined.ops[name].factors[f].size for name, factors in joined.members(root).items() for f in factors]
    return math.gcd(*sizes) if sizes else 1


def make_ops(program: Program, make: Callable[[Equation], Op]) -> dict[str, Op]:
    return {equation.name: make(equation) for equation in program.equations}

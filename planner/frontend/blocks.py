"""Cutting a program into blocks, and finding equal ones.

A **block class** is a program under names of its own, with its ops; equal blocks share one by canonical hash. A scan
over stacked layers is a run of one class. In a straight program cuts go where the live set is narrow; repeats of the
pieces between cuts become runs, what stands before and after stays apart (embedding, head, loss).
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from costmodel.graph import Op, Role, Tensor
from planner.frontend import jax_compat as jc
from planner.frontend.canonical import describe_array, describe_param
from planner.frontend.flat import Constant, Equation, Operand, Program, Value
from planner.frontend.ops import op_from_equation, rule_for
from planner.frontend.residuals import Cache as ResidualCache
from planner.frontend.residuals import with_residuals
from planner.frontend.rules.region import join_program


@dataclass(frozen=True, eq=False)
class BlockClass:
    """Equal blocks share this.

    Attributes:
        program: the equations, inputs ``in.0``, ``in.1``, ... and values named after their equation.
        tensors: every value by name. Roles of inputs as in the blocks.
    """

    key: str
    program: Program
    ops: dict[str, Op]
    tensors: dict[str, Tensor]

    @property
    def flops(self) -> float:
        return sum(op.flops for op in self.ops.values())


def make_class(
    equations: Sequence[Equation],
    inputs: Sequence[Value],
    outputs: Sequence[Operand],
    roles: Sequence[Role],
    needs_grad: Callable[[Value], bool],
    cache: dict[str, BlockClass],
    residuals: ResidualCache,
    constants: dict[Value, Any] | None = None,
) -> BlockClass:
    """The class of a block, from `cache` where an equal one exists.

    Args:
        residuals: what JAX keeps of ops, as far as it is known; filled here.
    """
    renamed: dict[Value, Value] = {v: Value(f"in.{i}", v.aval) for i, v in enumerate(inputs)}
    counts: dict[str, int] = {}
    scopes: dict[int, int] = {}
    digest = hashlib.sha256()
    body: list[Equation] = []
    held: dict[Value, Any] = {}
    for i, (value, array) in enumerate((constants or {}).items()):
        renamed[value] = Value(f"const.{i}", value.aval)
        held[renamed[value]] = array
        digest.update(f"const {describe_array(array)};".encode())
    for v, role in zip(inputs, roles, strict=True):
        digest.update(f"in {v.aval.str_short()} {role} {needs_grad(v)};".encode())

    def operand(o: Operand) -> Operand:
        return renamed[o] if isinstance(o, Value) else o

    def text(o: Operand) -> str:
        return renamed[o].name if isinstance(o, Value) else f"{describe_param(o.value)}:{o.aval.str_short()}"

    for equation in equations:
        kind = equation.primitive.name
        name = f"{kind}.{counts.get(kind, 0)}"
        counts[kind] = counts.get(kind, 0) + 1
        for i, v in enumerate(equation.outputs):
            renamed[v] = Value(name if i == 0 else f"{name}:{i}", v.aval)
        for scope in equation.scopes:
            scopes.setdefault(scope.index, len(scopes))
        args = tuple(operand(o) for o in equation.inputs)
        digest.update(
            f"{name} {[text(o) for o in equation.inputs]} {rule_for(kind).describe(equation)} "
            f"{[v.aval.str_short() + str(needs_grad(v)) for v in equation.outputs]} "
            f"{[(scopes[s.index], describe_param(s.policy)) for s in equation.scopes]};".encode()
        )
        body.append(replace(equation, name=name, inputs=args, outputs=tuple(renamed[v] for v in equation.outputs)))
    digest.update(f"out {[text(o) for o in outputs]}".encode())
    key = digest.hexdigest()[:16]
    if key in cache:
        return cache[key]
    grads = {new.name for old, new in renamed.items() if needs_grad(old)}
    role_of = {f"in.{i}": role for i, role in enumerate(roles)}
    tensors = {
        v.name: Tensor(
            v.name,
            v.shape,
            str(v.aval.dtype),
            jc.itemsize(v.aval.dtype),
            role_of.get(v.name, "const" if v in held else "activation"),
            v.name in grads,
        )
        for v in renamed.values()
    }
    program = Program(tuple(renamed[v] for v in inputs), tuple(body), tuple(operand(o) for o in outputs), held)
    joined = join_program(program, lambda e: op_from_equation(e, rule_for(e.primitive.name), lambda v: v.name in grads))
    program = joined.program
    ops = {
        e.name: with_residuals(e, joined.ops[e.name], lambda v: v.name in grads, residuals) for e in program.equations
    }
    cache[key] = BlockClass(key, program, ops, tensors)
    return cache[key]


def interface(
    equations: Sequence[Equation], later: set[Value], constants: dict[Value, Any]
) -> tuple[list[Value], list[Value], dict[Value, Any]]:
    """Inputs (in order of first use), outputs (in order of definition) and captured arrays of a piece of a program."""
    made: dict[Value, None] = {}
    inputs: dict[Value, None] = {}
    held: dict[Value, Any] = {}
    for equation in equations:
        for o in equation.inputs:
            if isinstance(o, Value) and o not in made:
                if o in constants:
                    held[o] = constants[o]
                else:
                    inputs[o] = None
        made.update(dict.fromkeys(equation.outputs))
    return list(inputs), [v for v in made if v in later], held


def piece_hash(equations: Sequence[Equation], roles: Callable[[Value], str]) -> str:
    """Hash of a piece of a program up to names: equal pieces may be blocks of one run. What is read of the batch is no
    different from what other pieces make."""
    digest = hashlib.sha256()
    local: dict[Value, str] = {}
    for equation in equations:
        args = []
        for o in equation.inputs:
            if isinstance(o, Constant):
                args.append(describe_param(o.value))
            else:
                role = "activation" if roles(o) == "batch" else roles(o)
                args.append(local.setdefault(o, f"{role}{len(local)}{o.aval.str_short()}"))
        for v in equation.outputs:
            local[v] = f"v{len(local)}"
        digest.update(
            f"{equation.primitive.name}{args}{rule_for(equation.primitive.name).describe(equation)};".encode()
        )
    return digest.hexdigest()


def narrow_cuts(
    equations: Sequence[Equation],
    outside: set[Value],
    needs_grad: Callable[[Value], bool],
    entering: Iterable[Value] = (),
) -> list[int]:
    """Positions between equations where one differentiable activation is live (the fewest, if never one).

    Args:
        outside: values that are read behind the equations; entering: those from before them that count.
    """
    last: dict[Value, int] = {}
    for i, equation in enumerate(equations):
        for o in equation.inputs:
            if isinstance(o, Value):
                last[o] = i
    change = np.zeros(len(equations) + 1, dtype=np.int64)
    made = [(i + 1, v) for i, equation in enumerate(equations) for v in equation.outputs]
    for begin, v in [*((0, v) for v in entering), *made]:
        if needs_grad(v):
            end = len(equations) if v in outside else last.get(v, begin - 1)
            change[begin] += 1
            if end + 1 <= len(equations):
                change[end + 1] -= 1
    live = np.cumsum(change)[1:-1] if len(equations) > 1 else np.zeros(0, dtype=np.int64)
    positive = live[live > 0]
    if not len(positive):
        return []
    return [int(p) + 1 for p in np.flatnonzero(live == positive.min())]


LONGEST_PERIOD = 4096  # pieces between narrow places that one layer may have


def repeats(ids: np.ndarray, weight: np.ndarray) -> tuple[int, int, int] | None:
    """The repetition that covers most weight: (start, period, count), or None where nothing repeats."""
    best: tuple[float, int, tuple[int, int, int]] | None = None
    total = np.concatenate([[0.0], np.cumsum(weight)])
    for period in range(1, min(len(ids) // 2, LONGEST_PERIOD) + 1):
        same = np.concatenate([[False], ids[:-period] == ids[period:], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            count = (int(end - start) + period) // period
            if count >= 2:
                covered = float(total[start + period * count] - total[start])
                if best is None or covered > best[0] * 1.001:
                    best = (covered, period, (int(start), period, count))
    return best[2] if best else None


SMALLEST_RUN, HEAVY_ATOM, GAIN = 0.02, 0.125, 0.1
"""Shares of a program's work: the least that a run of blocks has, the least of a piece that is looked into, and what
runs must gain by that."""

Piece = tuple[int, int]  # start and end among the equations


def segment(
    equations: Sequence[Equation],
    flops: Sequence[float],
    outside: set[Value],
    roles: Callable[[Value], str],
    needs_grad: Callable[[Value], bool],
    pieces: int = 16,
) -> list[tuple[int, int, int]]:
    """Blocks of a straight program as (start, end, run number); run -1 for blocks that do not repeat.

    Cuts are narrow places; runs of equal pieces come first, the rest is cut into at most about `pieces` parts of like
    work. Heavy pieces that do not repeat are looked into: beside a value that lives all through one it may have narrow
    places of its own, and repeat between them. Such a value was made before the piece (an encoder's output, read all
    through the decoder) or in it (a learned bias, the first input, read by every layer). It is an input of each block
    that reads it, like a constant of a scan, and crosses every border in between.
    """
    work = _Segments(equations, flops, outside, roles, needs_grad, pieces)
    atoms = work.atoms(0, len(equations))
    found = work.blocks(atoms)
    kept: set[Piece] = set()
    while True:
        heavy = [(a, b) for a, b in atoms if (a, b) not in kept and work.is_heavy_rest(a, b, found)]
        if not heavy:
            return found
        kept.update(heavy)
        ways = []
        for beside in (False, True):
            inside = {piece: work.atoms(*piece, beside=beside) for piece in heavy}
            finer = [new for piece in atoms for new in inside.get(piece, [piece])]
            ways.append((finer, work.blocks(finer)))
        finer, better = max(ways, key=lambda way: work.in_runs(way[1]))
        if work.in_runs(better) >= work.in_runs(found) + GAIN * work.total:
            atoms, found = finer, better


@dataclass
class _Segments:
    equations: Sequence[Equation]
    flops: Sequence[float]
    outside: set[Value]
    roles: Callable[[Value], str]
    needs_grad: Callable[[Value], bool]
    pieces: int

    def __post_init__(self) -> None:
        self.before = np.concatenate([[0.0], np.cumsum(self.flops)])
        self.total = float(self.before[-1]) or 1.0
        self.hashes: dict[Piece, str] = {}
        self.last: dict[Value, int] = {}
        for i, equation in enumerate(self.equations):
            self.last.update((o, i) for o in equation.inputs if isinstance(o, Value))
        self.last.update(dict.fromkeys(self.outside, len(self.equations)))

    def weight(self, start: int, end: int) -> float:
        return float(self.before[end] - self.before[start])

    def atoms(self, start: int, end: int, *, beside: bool = False) -> list[Piece]:
        """Pieces between the narrow places of equations start..end, by the values made among them.

        Args:
            beside: by all values that live there, but for those that live through most of the work.
        """
        equations = self.equations[start:end]
        later = {v for e in equations for v in e.outputs if self.last.get(v, -1) >= end}
        entering: list[Value] = []
        through = frozenset[Value]()
        if beside:
            before = [v for e in self.equations[:start] for v in e.outputs if self.last.get(v, -1) >= start]
            through, half = self.living_through(start, end), self.weight(start, end) / 2.0
            entering = [v for v in before if self.weight(start, min(self.last[v], end)) <= half]
            later.update(v for v in entering if self.last[v] >= end)
        cuts = narrow_cuts(equations, later, lambda v: v not in through and self.needs_grad(v), entering)
        return [(a, b) for a, b in pairwise([start, *(start + c for c in cuts), end]) if b > a]

    def living_through(self, start: int, end: int) -> frozenset[Value]:
        """Values made by equations start..end that live through more than half of the work done there."""
        half = self.weight(start, end) / 2.0
        ends = {v: min(self.last.get(v, i), end) for i in range(start, end) for v in self.equations[i].outputs}
        made = ((i, v) for i in range(start, end) for v in self.equations[i].outputs)
        return frozenset(v for i, v in made if ends[v] > i and self.weight(i + 1, ends[v]) > half)

    def in_runs(self, blocks: Sequence[tuple[int, int, int]]) -> float:
        return sum(self.weight(a, b) for a, b, run in blocks if run >= 0)

    def is_heavy_rest(self, start: int, end: int, blocks: Sequence[tuple[int, int, int]]) -> bool:
        """Whether a piece is heavy and in no run."""
        if self.weight(start, end) < HEAVY_ATOM * self.total:
            return False
        return any(run < 0 and a <= start and end <= b for a, b, run in blocks)

    def hash_of(self, piece: Piece) -> str:
        if piece not in self.hashes:
            self.hashes[piece] = piece_hash(self.equations[piece[0] : piece[1]], self.roles)
        return self.hashes[piece]

    def equal_before(self, atoms: Sequence[Piece], lo: int, start: int, period: int) -> int | None:
        """Where a piece equal to the first of a run begins right before it, as an atom from `lo` on. Where no gradient
        crosses its input it has narrow places that the others lack, so that its atoms are not theirs."""
        begin, end = atoms[start][0], atoms[start + period - 1][1]
        wanted = 2 * begin - end
        ahead = bisect_left(atoms, wanted, lo, start, key=lambda piece: piece[0])
        if ahead == start or atoms[ahead][0] != wanted:
            return None
        return ahead if self.hash_of((wanted, begin)) == self.hash_of((begin, end)) else None

    def blocks(self, atoms: Sequence[Piece]) -> list[tuple[int, int, int]]:
        """Runs of equal pieces, and parts of what is between them."""
        names: dict[str, int] = {}
        ids = np.array([names.setdefault(self.hash_of(piece), len(names)) for piece in atoms])
        weight = np.array([self.weight(a, b) for a, b in atoms])
        found: list[tuple[int, int, int]] = []
        runs = 0

        def split(lo: int, hi: int) -> None:
            nonlocal runs
            best = repeats(ids[lo:hi], weight[lo:hi]) if hi - lo >= 2 else None
            if (
                best is None
                or weight[lo + best[0] : lo + best[0] + best[1] * best[2]].sum() < SMALLEST_RUN * self.total
            ):
                return rest(lo, hi)
            start, period, count = lo + best[0], best[1], best[2]
            ahead = self.equal_before(atoms, lo, start, period)
            split(lo, start if ahead is None else ahead)
            run, runs = runs, runs + 1
            if ahead is not None:
                found.append((atoms[ahead][0], atoms[start][0], run))
            for first in range(start, start + period * count, period):
                found.append((atoms[first][0], atoms[first + period - 1][1], run))
            return split(start + period * count, hi)

        def rest(lo: int, hi: int) -> None:
            start, held = lo, 0.0
            for i in range(lo, hi):
                held += weight[i]
                if held >= self.total / self.pieces or i == hi - 1:
                    found.append((atoms[start][0], atoms[i][1], -1))
                    start, held = i + 1, 0.0

        if atoms:
            split(0, len(atoms))
        return found

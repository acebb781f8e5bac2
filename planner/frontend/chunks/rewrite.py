"""The program of one chunk: a block's program with the shapes that chunk j of c has, as a block class of its own.

An equation keeps its name, and its rule says how it runs on a part of each factor, as it does for the shards of a mesh:
a chunk is part j of c, a prefix part 0 of c/(j + 1). Beside the equations of the block stand

    name.chunk, name.prefix    slices of a whole value
    name.prefix (gathered)     the slices that earlier chunks had, which are inputs ``name@0``, ``name@1``, ..., and
                               the chunk's own, joined
    name~.., name.guard~..     what a rule adds to its primitive, and the guard of a maximum
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from costmodel.errors import LoweringError
from costmodel.graph import Op, Tensor
from costmodel.sharding import REPLICATED
from planner.frontend import jax_compat as jc
from planner.frontend.blocks import BlockClass
from planner.frontend.chunks.causal import REDUCING, Blocked, ClassCuts, Step
from planner.frontend.chunks.cut import WHOLE, Cut, cut_shape
from planner.frontend.flat import Constant, Equation, Operand, Program, Value, flatten
from planner.frontend.ops import op_from_equation, rule_for
from planner.frontend.residuals import Cache as ResidualCache
from planner.frontend.residuals import with_residuals
from planner.frontend.rules.base import Placement
from planner.frontend.rules.factors import is_inexact

CHUNK, PREFIX = "chunk", "prefix"  # names of the axes along which chunks are parts


@dataclass(frozen=True, eq=False)
class ChunkClass:
    """A block on one chunk.

    Attributes:
        cls: its program. Inputs are those of the block, then of each gathered value the earlier chunks' slices;
            outputs are those of the block, then its own slice of each gathered value, unless it is the last chunk.
        original: name of an equation -> the equation of the block that it stands for.
        helpers: name of a slice or join -> the equation and operand that it was made for.
        joins: names of the equations that join slices of chunks.
        earlier: inputs that earlier chunks made, by (gathered value, chunk); own: gathered values that are handed on.
    """

    cls: BlockClass
    original: Mapping[str, str]
    helpers: Mapping[str, tuple[str, int]]
    joins: frozenset[str]
    earlier: Mapping[str, tuple[str, int]]
    own: tuple[str, ...]


def slice_name(value: str, chunk: int) -> str:
    """Name of the slice that a chunk had of a gathered value."""
    return f"{value}@{chunk}"


def chunk_class(found: ClassCuts, at: int, key: str, residuals: ResidualCache) -> ChunkClass:
    """The class of a block on chunk `at`.

    Args:
        key: of the class.
        residuals: what JAX keeps of ops, as far as it is known; filled here.
    """
    return _Rewriter(found, at, key, residuals).run()


@dataclass
class _Rewriter:
    found: ClassCuts
    at: int
    key: str
    residuals: ResidualCache
    equations: list[Equation] = field(default_factory=list)
    main: dict[str, Value] = field(default_factory=dict)  # the values of the block, as the chunk has them
    others: dict[tuple[str, Cut, tuple[int, ...]], Value] = field(default_factory=dict)
    constants: dict[Value, Any] = field(default_factory=dict)
    grads: set[str] = field(default_factory=set)
    original: dict[str, str] = field(default_factory=dict)
    helpers: dict[str, tuple[str, int]] = field(default_factory=dict)
    joins: set[str] = field(default_factory=set)

    @cached_property
    def _block(self) -> Program:
        return self.found.cls.program

    def _cut(self, operand: Operand) -> Cut:
        return self.found.cuts.get(operand.name, WHOLE) if isinstance(operand, Value) else WHOLE

    def _needs_grad(self, name: str) -> bool:
        return self.found.cls.tensors[name].needs_grad

    def _own(self, value: Value) -> Value:
        """A value of the block with the chunk's shape."""
        return self._value(value.name, value, cut_shape(value.shape, self._cut(value), self.found.chunks, self.at))

    def _value(self, name: str, like: Value, shape: tuple[int, ...]) -> Value:
        if self._needs_grad(like.name):
            self.grads.add(name)
        return Value(name, like.aval.update(shape=shape))

    def run(self) -> ChunkClass:
        found, block = self.found, self._block
        last = self.at == found.chunks - 1
        inputs = [self._own(v) for v in block.inputs]
        self.main.update((v.name, v) for v in inputs)
        for value, array in block.constants.items():
            self.main[value.name] = value
            self.constants[value] = array
        shapes = {v.name: v for v in (*block.inputs, *(v for e in block.equations for v in e.outputs))}
        earlier: dict[str, tuple[str, int]] = {}
        for name, _ in found.gathers:
            for chunk in range(self.at):
                value = self._value(slice_name(name, chunk), shapes[name], self._own(shapes[name]).shape)
                earlier[value.name] = (name, chunk)
                self.main[value.name] = value
                inputs.append(value)
        for equation in block.equations:
            step = found.steps.get(equation.name)
            if step is None:
                self._as_it_is(equation)
            else:
                self._on_chunk(equation, step)
        own = () if last else tuple(name for name, _ in found.gathers)
        outputs: list[Operand] = [self._output(i, o) for i, o in enumerate(block.outputs)]
        outputs += [self.main[name] for name in own]
        program = Program(tuple(inputs), tuple(self.equations), tuple(outputs), self.constants)
        return ChunkClass(
            self._class(program), self.original, self.helpers, frozenset(self.joins), earlier, own,
        )  # fmt: skip

    def _output(self, position: int, operand: Operand) -> Operand:
        if not isinstance(operand, Value):
            return operand
        if position in self.found.once:
            maker = next(e for e in self._block.equations if operand in e.outputs)
            return self._operand(maker, 0, operand, Cut(partial=True))
        return self.main[operand.name]

    def _class(self, program: Program) -> BlockClass:
        block = self.found.cls.tensors
        tensors = {}
        for v in (*program.inputs, *self.constants, *(v for e in program.equations for v in e.outputs)):
            known = block.get(v.name)
            tensors[v.name] = Tensor(
                v.name, v.shape, str(v.aval.dtype), jc.itemsize(v.aval.dtype),
                known.role if known is not None else "const" if v in self.constants else "activation",
                v.name in self.grads if known is None else known.needs_grad,
            )  # fmt: skip

        def needs_grad(value: Value) -> bool:
            return tensors[value.name].needs_grad

        ops: dict[str, Op] = {}
        for e in program.equations:
            op = op_from_equation(e, rule_for(e.primitive.name), needs_grad)
            ops[e.name] = with_residuals(e, op, needs_grad, self.residuals)
        return BlockClass(self.key, program, ops, tensors)

    def _as_it_is(self, equation: Equation) -> None:
        """An equation of which every chunk needs the whole."""
        given = tuple(self.main[o.name] if isinstance(o, Value) else o for o in equation.inputs)
        self.original[equation.name] = equation.name
        self._add(replace(equation, inputs=given))
        self.main.update((v.name, v) for v in equation.outputs)

    def _add(self, equation: Equation) -> None:
        self.equations.append(equation)

    def _on_chunk(self, equation: Equation, step: Step) -> None:
        pairs = enumerate(zip(equation.inputs, step.operands, strict=True))
        given = [self._operand(equation, i, o, want) for i, (o, want) in pairs]
        results = [self._own(v) for v in equation.outputs]
        raw = results
        guard = step.guard if self.at < self.found.chunks - 1 else None  # the last chunk leaves nothing out
        if guard is not None:
            (value,) = equation.outputs
            raw = [self._value(f"{value.name}.unguarded", value, results[0].shape)]
        rule, op = rule_for(equation.primitive.name), self.found.cls.ops[equation.name]
        # Up to its own a chunk has at + 1 of the sequence's parts: rules, which divide sizes by an axis', find what it
        # has where the axis is that fraction.
        place = Placement(
            op=op,
            strategy=tuple(f if f >= 0 else REPLICATED for f in (step.chunk, step.prefix)),
            mesh=(self.found.chunks, Fraction(self.found.chunks, self.at + 1)),  # type: ignore[arg-type]
            axis_names=(CHUNK, PREFIX),
            fixed={CHUNK: self.at, PREFIX: 0},
        )

        def local(*args: Any) -> list[Any]:
            at = iter(args)
            typed = [
                next(at) if isinstance(o, Value)
                else o.value if jc.is_key(o.aval.dtype) else jnp.asarray(o.value, o.aval.dtype)
                for o in equation.inputs
            ]  # fmt: skip
            if equation.primitive.name in REDUCING:  # over what it has; a rule would join it with other parts
                return jc.bind(equation.primitive, typed, equation.params)
            return rule.local(equation, place, typed)

        self._traced(equation, local, given, raw, "", main=equation.primitive.name)
        if guard is not None:

            def guarded(x: Any) -> list[Any]:
                return [jnp.where(x >= jnp.asarray(guard, x.dtype), x, jnp.asarray(jnp.nan, x.dtype))]

            self._traced(equation, guarded, [self.main.get(raw[0].name, raw[0])], results, ".guard")

    def _operand(self, equation: Equation, position: int, operand: Operand, want: Cut) -> Operand:
        """An operand as the equation needs it; slices and joins are made where it stands, once in each remat region."""
        if isinstance(operand, Constant):
            return operand
        have = self._cut(operand)
        if have == want:
            return self.main[operand.name]
        key = (operand.name, want, tuple(s.index for s in equation.scopes))
        if key not in self.others:
            made = self._partial if want.partial else self._joined if self._gathers(have, want) else self._sliced
            number = sum(1 for name, _, _ in self.others if name == operand.name)
            kind = PREFIX if want.prefix >= 0 else CHUNK if want.chunk >= 0 else "zero"
            name = f"{operand.name}.{kind}{number or ''}"
            value = self._value(name, operand, cut_shape(operand.shape, want, self.found.chunks, self.at))
            self.helpers[name] = (equation.name, position)
            made(equation, operand, have, want, value)
            self.others[key] = self.main.pop(name, value)
        return self.others[key]

    def _gathers(self, have: Cut, want: Cut) -> bool:
        return have.chunk >= 0 and want == Cut(prefix=have.chunk)

    def _sliced(self, equation: Equation, operand: Value, have: Cut, want: Cut, value: Value) -> None:
        own = self.main[operand.name]
        start, stop = [0] * len(own.shape), list(own.shape)
        for dim, (mine, wanted) in {want.chunk: (have.chunk, CHUNK), want.prefix: (have.prefix, PREFIX)}.items():
            if dim >= 0 and mine != dim:
                part = operand.shape[dim] // self.found.chunks
                start[dim] = part * self.at if wanted == CHUNK else 0
                stop[dim] = part * (self.at + 1)
        self._traced(equation, lambda x: [lax.slice(x, start, stop)], [own], [value], "", name=value.name)

    def _joined(self, equation: Equation, operand: Value, have: Cut, want: Cut, value: Value) -> None:
        parts: list[Operand] = [self.main[slice_name(operand.name, i)] for i in range(self.at)]
        parts.append(self.main[operand.name])
        if len(parts) == 1:
            self.main[value.name] = self.main[operand.name]
            del self.helpers[value.name]
            return
        self.joins.add(value.name)
        self._traced(
            equation, lambda *xs: [lax.concatenate(xs, want.prefix)], parts, [value], "", name=value.name
        )  # fmt: skip

    def _partial(self, equation: Equation, operand: Value, have: Cut, want: Cut, value: Value) -> None:
        """A whole value as a summand: the first chunk's is all of it."""
        if self.at == 0:
            self.main[value.name] = self.main[operand.name]
            del self.helpers[value.name]
            return
        own = self.main[operand.name]
        self._traced(
            equation, lambda x: [lax.mul(x, np.zeros((), x.dtype))], [own], [value], "", name=value.name
        )  # fmt: skip

    def _traced(
        self,
        equation: Equation,
        function: Callable[..., list[Any]],
        given: Sequence[Operand],
        results: Sequence[Value],
        suffix: str,
        *,
        main: str = "",
        name: str = "",
    ) -> None:
        """Adds the equations that a function of the operands traces to.

        Args:
            main: primitive of the equation that stands for `equation` and keeps its name.
            name: of the only equation; else they are numbered.
        """
        values = [o for o in given if isinstance(o, Value)]
        avals = [jax.ShapeDtypeStruct(v.shape, v.aval.dtype) for v in values]
        try:
            closed = jax.make_jaxpr(function)(*avals)
        except (NameError, LoweringError) as error:  # an op inside a loop that would need what other chunks have
            raise Blocked(equation, f"what is inside it needs other chunks ({error})") from error
        prefix = f"{equation.name}{suffix}~"
        inner = flatten(closed, [f"{prefix}in.{i}" for i in range(len(values))], prefix)
        new: dict[Value, Value] = dict(zip(inner.inputs, values, strict=True))
        for value, array in inner.constants.items():
            new[value] = value
            self.constants[value] = array
        kept = next((e.name for e in inner.equations if e.primitive.name == main), None)
        moves = any(self._needs_grad(v.name) for v in equation.outputs)
        ends = {o: r for o, r in zip(inner.outputs, results, strict=True) if isinstance(o, Value) and o not in new}
        for e in inner.equations:
            label = equation.name if e.name == kept else name if name and len(inner.equations) == 1 else e.name
            outputs = []
            for i, v in enumerate(e.outputs):
                own = ends.get(v, Value(v.name if e.name != kept else f"{prefix}out.{i}", v.aval))
                if v not in ends and moves and is_inexact(v):
                    self.grads.add(own.name)
                new[v] = own
                outputs.append(own)
            same = e.name == kept
            if same:
                self.original[label] = equation.name
            operands = tuple(new[o] if isinstance(o, Value) else o for o in e.inputs)
            moving = equation.moving if same and len(operands) == len(equation.inputs) else None
            self._add(
                replace(
                    e,
                    name=label,
                    inputs=operands,
                    outputs=tuple(outputs),
                    source=equation.source,
                    scopes=equation.scopes,
                    moving=moving,
                    transposed=equation.transposed,
                    together=equation.together if same else (),
                )
            )
        for o, r in zip(inner.outputs, results, strict=True):
            assert isinstance(o, Value), f"{equation.name} ({equation.source}) makes a constant of a chunk"
            self.main[r.name] = new[o]


__all__ = ["CHUNK", "PREFIX", "ChunkClass", "chunk_class", "slice_name"]

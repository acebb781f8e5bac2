"""A program over whole parameter leaves as one over their parts, where pipeline stages cut leaves along a dim.

The optimizer is the user's, traced on whole leaves. An equation on a cut value runs once for each stage, on that
stage's part, as its factors allow: a dim that is carried to the result stays cut; a sum or a maximum over it leaves one
summand a stage, and equations of its own join them (`staged.py` makes these cross stages). What no factor lets through
(a sort over the layers, a loop) is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import jax
from jax.extend.core import primitives

from costmodel.errors import InputError
from costmodel.graph import Op
from costmodel.sharding import major_factor
from planner.frontend import jax_compat as jc
from planner.frontend.flat import Constant, Equation, Operand, Program, Value
from planner.frontend.ops import op_from_equation, rule_for
from planner.frontend.rules.base import Placement, Rule
from planner.frontend.rules.elementwise import Elementwise
from planner.frontend.rules.reduction import Reduction

JOINS = {
    "reduce_max": primitives.max_p,
    "reduce_min": primitives.min_p,
    "reduce_or": primitives.or_p,
    "reduce_and": primitives.and_p,
}
Bounds = dict[int, tuple[int, int]]  # stage -> first index and end along the cut dim


@dataclass(frozen=True)
class Cut:
    """Where a value is cut: along which dim, and which slice each stage has. Stages are in order and miss nothing."""

    dim: int
    bounds: Bounds


@dataclass(frozen=True)
class _CutValue:
    cut: Cut
    parts: dict[int, Value]


def part_name(name: str, stage: int) -> str:
    """Name of a stage's part of a cut value."""
    return f"{name}@{stage}"


def cut_program(
    program: Program, cuts: Mapping[str, Cut], outputs: Mapping[int, Cut]
) -> tuple[Program, dict[int, Cut]]:
    """The program over parts.

    Args:
        cuts: how inputs are cut, by name; the part of stage s is an input `part_name(name, s)`.
        outputs: how outputs are to be cut, by position. Others are handed out as they come.

    Returns:
        the program, in which each cut input and output stands as its parts, in order of stages; and how outputs are
        cut, by position, those that came cut included.

    Raises:
        InputError: MP116, an equation joins the parts in a way that cannot be done on them.
    """
    work = _Cutter(program)
    inputs: list[Value] = []
    for v in program.inputs:
        if v.name in cuts:
            inputs += work.enter(v, cuts[v.name])
        else:
            inputs.append(v)
    for e in program.equations:
        work.run(e)
    found: list[Operand] = []
    came: dict[int, Cut] = {}
    for i, o in enumerate(program.outputs):
        cut = work.cut_of(o)
        wanted = outputs.get(i, cut)
        if wanted is None:
            found.append(o)
            continue
        if cut is not None and cut != wanted:
            _refuse(program.equations[-1], f"its result lies as {cut}, and should as {wanted}")
        came[i] = wanted
        found += [work.part(o, s, wanted) for s in wanted.bounds]
    return Program(tuple(inputs), tuple(work.equations), tuple(found), program.constants), came


@dataclass
class _Cutter:
    program: Program
    equations: list[Equation] = field(default_factory=list)
    cut_values: dict[str, _CutValue] = field(default_factory=dict)
    slices: dict[tuple[str, int, int, int], Value] = field(default_factory=dict)

    def enter(self, v: Value, cut: Cut) -> list[Value]:
        return self._record(v, cut)

    def cut_of(self, o: Operand) -> Cut | None:
        found = self.cut_values.get(o.name) if isinstance(o, Value) else None
        return found.cut if found is not None else None

    def part(self, o: Operand, stage: int, cut: Cut) -> Operand:
        """A stage's part of an operand; of one that is whole, a slice."""
        if isinstance(o, Value) and o.name in self.cut_values:
            return self.cut_values[o.name].parts[stage]
        if isinstance(o, Constant):
            return o
        first, end = cut.bounds[stage]
        key = (o.name, cut.dim, first, end)
        if key not in self.slices:
            starts, ends = [0] * len(o.shape), list(o.shape)
            starts[cut.dim], ends[cut.dim] = first, end
            params = {"start_indices": tuple(starts), "limit_indices": tuple(ends), "strides": None}
            name = f"{o.name}[{first}:{end}].{cut.dim}"
            new = Value(name, o.aval.update(shape=tuple(b - a for a, b in zip(starts, ends, strict=True))))
            self.equations.append(Equation(name, primitives.slice_p, (o,), (new,), params, ""))
            self.slices[key] = new
        return self.slices[key]

    def _record(self, v: Value, cut: Cut) -> list[Value]:
        """Values for the parts of a cut value."""
        parts = {s: _resized(v, part_name(v.name, s), _part_shape(v.shape, cut, s)) for s in cut.bounds}
        self.cut_values[v.name] = _CutValue(cut, parts)
        return list(parts.values())

    def run(self, e: Equation) -> None:
        if all(self.cut_of(o) is None for o in e.inputs):
            self.equations.append(e)
            return
        rule = rule_for(e.primitive.name)
        op = op_from_equation(e, rule, lambda v: False)
        if not op.known or (type(rule).local is not Rule.local and not isinstance(rule, Reduction)):
            _refuse(e, f"{e.primitive.name} runs on whole values only")
        factor, bounds = self._factor(e, op)
        if not op.factors[factor].splits:
            _refuse(e, op.factors[factor].reason or f"{e.primitive.name} needs the whole dim")
        wanted = [_place(e, op, dims, shape, factor, bounds) for dims, shape in zip(op.in_dims, e.in_shapes)]
        leaves = [_place(e, op, dims, shape, factor, bounds) for dims, shape in zip(op.out_dims, e.out_shapes)]
        made: dict[int, tuple[Value, ...]] = {}
        for stage in bounds:
            args = tuple(o if cut is None else self.part(o, stage, cut) for o, cut in zip(e.inputs, wanted))
            outs = tuple(
                _resized(v, part_name(v.name, stage), v.shape if cut is None else _part_shape(v.shape, cut, stage))
                for v, cut in zip(e.outputs, leaves)
            )
            made[stage] = outs
            place = _StagePart(
                op=op, strategy=(factor,), mesh=(len(bounds),), axis_names=("stage",),
                ins=tuple(o.shape for o in args), outs=tuple(v.shape for v in outs),
            )  # fmt: skip
            params = rule.local_params(e, place)
            new = replace(e, name=part_name(e.name, stage), inputs=args, outputs=outs, params=params, memo={})
            if not isinstance(rule, Elementwise):
                _check(new)
            self.equations.append(new)
        for j, (v, cut) in enumerate(zip(e.outputs, leaves)):
            parts = {s: outs[j] for s, outs in made.items()}
            if cut is not None:
                self.cut_values[v.name] = _CutValue(cut, parts)
            else:
                self._join(e, op.factors[factor].combine, v, list(parts.values()))

    def _factor(self, e: Equation, op: Op) -> tuple[int, Bounds]:
        """The loop that the operands' cuts cut, and where it is cut."""
        found: list[tuple[int, Bounds]] = []
        for o, dims in zip(e.inputs, op.in_dims):
            cut = self.cut_of(o)
            if cut is None:
                continue
            factor = major_factor(op, dims, cut.dim)
            if factor < 0:
                _refuse(e, "the cut dim has no loop of its own")
            found.append((factor, _scaled(e, cut.bounds, op.factors[factor].size, o.shape[cut.dim])))
        if any(one != found[0] for one in found):
            _refuse(e, "its operands are cut in different ways")
        return found[0]

    def _join(self, e: Equation, combine: str, v: Value, parts: list[Value]) -> None:
        """Equations that make a value of one summand (or maximum) a stage."""
        primitive = primitives.add_p if combine == "sum" else JOINS.get(e.primitive.name)
        if primitive is None:
            _refuse(e, "what stages make of their parts cannot be joined")
        total = parts[0]
        for k, part in enumerate(parts[1:], start=1):
            name = v.name if k == len(parts) - 1 else f"{v.name}.join{k}"
            out = v if k == len(parts) - 1 else Value(name, v.aval)
            self.equations.append(Equation(f"{e.name}.join{k}", primitive, (total, part), (out,), {}, e.source))
            total = out


@dataclass(frozen=True)
class _StagePart(Placement):
    """Stands for a mesh in a rule's `local_params`, where parts need not be equal."""

    ins: tuple[tuple[int, ...], ...] = ()
    outs: tuple[tuple[int, ...], ...] = ()

    def local_in(self, position: int, shape: Any) -> tuple[int, ...]:
        return self.ins[position]

    def local_out(self, position: int, shape: Any) -> tuple[int, ...]:
        return self.outs[position]


def _place(
    e: Equation, op: Op, dims: tuple[tuple[int, ...], ...], shape: tuple[int, ...], factor: int, bounds: Bounds
) -> Cut | None:
    """How a tensor of the op is cut where the loop `factor` is; None where it lacks that loop."""
    for dim, parts in enumerate(dims):
        if factor in parts:
            if major_factor(op, dims, dim) != factor:
                _refuse(e, "the cut dim is the minor part of a merged dim")
            return Cut(dim, _scaled(e, bounds, shape[dim], op.factors[factor].size))
    return None


def _scaled(e: Equation, bounds: Bounds, size: int, of: int) -> Bounds:
    """Bounds along a dim of `of` elements as bounds along one of `size`, both walked in the same order."""
    if any(end * size % of for _, end in bounds.values()):
        _refuse(e, f"the stages' borders do not fall between its {size} parts")
    return {s: (first * size // of, end * size // of) for s, (first, end) in bounds.items()}


def _part_shape(shape: tuple[int, ...], cut: Cut, stage: int) -> tuple[int, ...]:
    first, end = cut.bounds[stage]
    return (*shape[: cut.dim], end - first, *shape[cut.dim + 1 :])


def _resized(v: Value, name: str, shape: tuple[int, ...]) -> Value:
    return Value(name, v.aval.update(shape=shape))


def _check(e: Equation) -> None:
    """Refuses an equation that does not make a part of its result from parts of its operands."""
    avals = [jax.ShapeDtypeStruct(o.shape, o.aval.dtype) for o in e.inputs]
    try:
        made = jax.eval_shape(lambda *args: jc.bind(e.primitive, args, e.params), *avals)
    except Exception as error:  # whatever a primitive raises on operands that its params do not fit
        lines = str(error).strip().splitlines()
        _refuse(e, f"it does not run on a part ({type(error).__name__}: {lines[0] if lines else ''})")
    if [tuple(x.shape) for x in made] != [v.shape for v in e.outputs]:
        _refuse(e, f"of parts it makes {[tuple(x.shape) for x in made]} for {[v.shape for v in e.outputs]}")


def _refuse(e: Equation, reason: str) -> NoReturn:
    raise InputError(
        "MP116",
        f"the optimizer works on all layers of a stacked parameter at once, and stages cut them: "
        f"{e.name.partition('@')[0]}{f' ({e.source})' if e.source else ''}: {reason}",
        "plan with stages=1, or give the layers as separate parameters instead of a stack",
    )


__all__ = ["Cut", "cut_program", "part_name"]

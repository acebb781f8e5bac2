"""Loops, branches and functions with custom derivatives: one op each, whose factors come from the programs inside.

A dim of an operand splits when the same split can be followed through every program inside (`joint.spread`) without a
collective, and comes out consistently: a loop's carry as it went in, all branches alike. Only single numbers may be
all-reduced inside (whether any example of a batch still runs). The local programs run the inner equations on shards.

A value that is equal everywhere becomes a summand for free: the first device keeps it, the others put zeros. So a loop
may gather a sum over the split examples in a carry that starts whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from costmodel.graph import Factor, Op
from costmodel.sharding import PARTIAL, VARYING, Spec
from planner.frontend import jax_compat as jc
from planner.frontend.canonical import describe_param, program_text
from planner.frontend.flat import REGIONS, Equation, Operand, Program
from planner.frontend.joint import Classes, Joined, Obstacle, Spread, class_size, join_ops, make_ops
from planner.frontend.rules.amount import guessed_trips
from planner.frontend.rules.base import Factorisation, Placement, Rule, rule_for
from planner.frontend.rules.factors import adds_up, is_inexact
from planner.frontend.rules.inner import Inner, Place, Solution, once, state_of
from planner.lowering.spmd import LocalProgram


def _item(inner: Inner, place: Place) -> object:
    side, position, dim = place
    return (inner.operand_dims if side == "in" else inner.result_dims)[position][dim]


def merge_regions(joined: Joined) -> Program:
    """The program with factors of its loops, branches and functions joined that always split together around them.

    Values that never meet inside (the leaves of a pytree that is handed through) have factors of their own, but an op
    splits one factor at a time. The same program where nothing changes.
    """
    replaced: dict[str, Equation] = {}
    for e in joined.program.equations:
        rule = rule_for(e.primitive.name)
        if not isinstance(rule, Region):
            continue
        groups: dict[object, list[int]] = {}
        for f, factor in enumerate(joined.ops[e.name].factors):
            if factor.size > 1:
                groups.setdefault(joined.classes.find((e.name, "factor", f)), []).append(f)
        places = rule.places(e)
        for group in groups.values():
            at = tuple(places[f] for f in group if f in places)
            found = rule.splitting_together(replaced.get(e.name, e), at) if len(at) > 1 else None
            if found is not None:
                replaced[e.name] = found
    if not replaced:
        return joined.program
    return replace(joined.program, equations=tuple(replaced.get(e.name, e) for e in joined.program.equations))


def join_program(
    program: Program, make: Callable[[Equation], Op], join: Callable[[Classes], None] = lambda classes: None
) -> Joined:
    """A program with joined dims, its regions merged (`merge_regions`).

    Args:
        make: the op of an equation.
        join: makes the joins that come from outside.
    """
    while True:
        classes = Classes()
        join(classes)
        joined = join_ops(program, make_ops(program, make), classes)
        merged = merge_regions(joined)
        if merged is program:
            return joined
        program = merged


class Region(Rule):
    """Base of the equations that hold programs."""

    def build(self, eqn: Equation) -> Inner:
        """Loads and joins the programs; sets operand_dims and result_dims."""
        raise NotImplementedError

    def solve(self, eqn: Equation, inner: Inner, root: object) -> Solution | Obstacle:
        """What splitting the class `root` does."""
        raise NotImplementedError

    def run(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        """The local program, where the equation is not run as it is."""
        raise NotImplementedError

    def static(self, eqn: Equation) -> dict[str, Any]:
        """The parameters that say how the programs inside are used."""
        return {}

    def moving(self, eqn: Equation) -> tuple[bool, ...]:
        """For each operand, whether a cotangent may reach it."""
        return tuple(map(is_inexact, eqn.inputs)) if eqn.moving is None else eqn.moving

    def inner(self, eqn: Equation) -> Inner:
        return once(eqn, "inner", lambda: self._inner(eqn))

    def _inner(self, eqn: Equation) -> Inner:
        while True:
            inner = self.build(eqn)
            for places in eqn.together:
                first, *rest = (_item(inner, place) for place in places)
                for item in rest:
                    inner.classes.join(first, item)
            flat: dict[str, Program] = eqn.memo.get("programs", {})
            merged = {id(j.program): merge_regions(j) for j in inner.programs.values()}
            flat.update({prefix: merged.get(id(program), program) for prefix, program in flat.items()})
            if all(merged[id(j.program)] is j.program for j in inner.programs.values()):
                break
        for items in (*inner.operand_dims, *inner.result_dims):
            for item in items:
                root = None if item is None else inner.classes.find(item)
                if root is not None and root not in inner.solutions:
                    inner.solutions[root] = _summed(eqn, self.solve(eqn, inner, root))
                    inner.roots.append(root)
        return inner

    def places(self, eqn: Equation) -> dict[int, Place]:
        """A dim of an operand or result that each factor splits (but for the dims that a loop walks along)."""
        facts, inner = self.factorise(eqn), self.inner(eqn)
        found: dict[int, Place] = {}
        for side, tensors, items in (
            ("in", facts.in_dims, inner.operand_dims),
            ("out", facts.out_dims, inner.result_dims),
        ):
            for position, dims in enumerate(tensors):
                for dim, parts in enumerate(dims):
                    if items[position][dim] is not None:
                        found.update(dict.fromkeys(parts, (side, position, dim)))
        return found

    def splitting_together(self, eqn: Equation, places: tuple[Place, ...]) -> Equation | None:
        """The equation with the factors of some places as one factor; None where that could not split."""
        if places in once(eqn, "apart", set):
            return None
        kept = {key: value for key, value in eqn.memo.items() if key not in ("inner", "text", "programs")}
        memo = {**kept, "programs": dict(eqn.memo.get("programs", {})), "apart": set()}
        new = replace(eqn, together=(*eqn.together, places), memo=memo)
        inner = self.inner(new)
        if isinstance(inner.solutions[inner.classes.find(_item(inner, places[0]))], Obstacle):
            eqn.memo["apart"].add(places)
            return None
        return new

    def describe(self, eqn: Equation) -> str:
        return once(eqn, "text", lambda: self._text(eqn))

    def _text(self, eqn: Equation) -> str:
        inner = self.inner(eqn)
        texts = {
            name: program_text(j.program, lambda e: rule_for(e.primitive.name).describe(e))
            for name, j in inner.programs.items()
        }
        # What could not be traced is told apart by the names of its functions.
        whole = f"{inner.whole} {describe_param({k: str(v) for k, v in eqn.params.items()})}" if inner.whole else ""
        return f"{self.static(eqn)}{eqn.together}{texts}{whole}"

    def factorise(self, eqn: Equation) -> Factorisation:
        inner = self.inner(eqn)
        factors: list[Factor] = []
        index: dict[object, int] = {}
        for root in inner.roots:
            solution = inner.solutions[root]
            index[root] = len(factors)
            sizes = [class_size(j, root) for j in inner.programs.values() if j.members(root)]
            reason, combine = "", "none"
            if isinstance(solution, Obstacle):
                reason, at = solution.reason, solution.equation
                if at.primitive.name not in REGIONS:
                    reason += f" ({' '.join(filter(None, (at.name, at.source)))})"
            else:
                missing = {s for s in solution.results if s < 0}
                combine = "sum" if PARTIAL in missing else "same" if missing else "none"
            factors.append(Factor(f"c{len(factors)}", max(1, min(sizes)) if sizes else 0, combine, not reason, reason))  # type: ignore[arg-type]
        sizes_of: dict[int, int] = {}

        def dims(shapes: Sequence[tuple[int, ...]], items: list[list[object]]) -> tuple[Any, ...]:
            out = []
            for shape, tensor in zip(shapes, items, strict=True):
                parts: list[tuple[int, ...]] = []
                for n, item in zip(shape, tensor, strict=True):
                    if n == 1:
                        parts.append(())
                    elif item is None:
                        reason = inner.whole or "the dim that the loop walks along"
                        factors.append(Factor(f"whole{len(factors)}", n, "none", False, reason))
                        parts.append((len(factors) - 1,))
                    else:
                        at = index[inner.classes.find(item)]
                        sizes_of.setdefault(at, n)
                        parts.append((at,))
                out.append(tuple(parts))
            return tuple(out)

        in_dims, out_dims = dims(eqn.in_shapes, inner.operand_dims), dims(eqn.out_shapes, inner.result_dims)
        # A class that no inner op touches (a value passed through) splits as its dim does.
        factors = [
            Factor(f.name, f.size or sizes_of.get(i, 1), f.combine, f.splits, f.reason) for i, f in enumerate(factors)
        ]
        everything = tuple(range(len(eqn.inputs)))
        return Factorisation(
            factors=tuple(factors),
            in_dims=in_dims,
            out_dims=out_dims,
            residuals=(everything,) * len(eqn.inputs),
            flops=inner.ahead.flops,
            backward_flops=inner.back.flops,
            work="opaque",
            fuses=False,
            inside=inner.ahead.inside,
            inside_backward=inner.back.inside,
            guessed_trips=tuple(dict.fromkeys(guessed_trips(eqn, inner.programs))),
        )

    def local(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        if self.inner(eqn).whole:
            return super().local(eqn, place, args)
        results = self.run(eqn, place, args)
        return [on_first(x, self._zeroed(eqn, place, i)) for i, x in enumerate(results)]

    def _zeroed(self, eqn: Equation, place: Placement, position: int) -> list[str]:
        """Axes on which a result, equal everywhere as its program leaves it, becomes a summand."""
        return [
            axis
            for axis, code in zip(place.axis_names, place.strategy, strict=True)
            if code >= 0 and position in self.solution(eqn, code).zeroed
        ]

    def solution(self, eqn: Equation, root: int) -> Solution:
        """What splitting factor `root` does."""
        inner = self.inner(eqn)
        found = inner.solutions[inner.roots[root]]
        assert not isinstance(found, Obstacle)
        return found

    def runner(self, eqn: Equation, place: Placement, name: str) -> Callable[..., list[Any]]:
        """Local program `name` as a function of one device's inputs; results in the states that were solved."""
        inner = self.inner(eqn)
        joined = inner.programs[name]
        per_axis: list[Spread | int] = []
        for code in place.strategy:
            per_axis.append(self.solution(eqn, code).programs[name] if code >= 0 else code)
        strategies = {op: tuple(s.codes[op] if isinstance(s, Spread) else s for s in per_axis) for op in joined.ops}

        def spec_of(value: Operand) -> Spec:
            return tuple(state_of(s, value) if isinstance(s, Spread) else s for s in per_axis)

        local = LocalProgram(
            program=joined.program, ops=joined.ops, strategies=strategies, mesh=place.mesh, axis_names=place.axis_names,
            fixed=place.fixed,
        )  # fmt: skip
        specs = [spec_of(v) for v in joined.program.inputs]
        targets: list[Spec] = []
        zeroed: list[list[str]] = []  # axes on which all devices but the first put zeros, for each output
        for i, o in enumerate(joined.program.outputs):
            have = spec_of(o)
            want = tuple(
                s.outputs[i] if isinstance(s, Spread) and s.outputs is not None else h
                for s, h in zip(per_axis, have, strict=True)
            )
            first = [h != w and w == PARTIAL for h, w in zip(have, want, strict=True)]
            targets.append(tuple(h if f else w for h, w, f in zip(have, want, first, strict=True)))
            zeroed.append([a for a, f in zip(place.axis_names, first, strict=True) if f])

        def run(*args: Any) -> list[Any]:
            args_ = [jc.to_varying(a, place.split_axes()) for a in args]
            outs, _ = local(args_, specs, targets)
            outs = [on_first(x, axes) for x, axes in zip(outs, zeroed, strict=True)]
            return [jc.to_varying(x, place.split_axes()) for x in outs]

        return run


def on_first(x: Any, axes: Sequence[str]) -> Any:
    """A value that is equal everywhere as a summand: zeros on all devices but the first."""
    for axis in axes:
        x = jnp.where(lax.axis_index(axis) == 0, x, jnp.zeros_like(x))
    return x


def _summed(eqn: Equation, solution: Solution | Obstacle) -> Solution | Obstacle:
    """A solution in which results that are pending sums and results that are equal everywhere do not come together."""
    if isinstance(solution, Obstacle) or not {PARTIAL, VARYING} <= set(solution.results):
        return solution
    zeroed = frozenset(i for i, state in enumerate(solution.results) if state == VARYING)
    if not all(adds_up(eqn.outputs[i]) for i in zeroed):
        return Obstacle(eqn, "some results are pending sums and others cannot be")
    return replace(
        solution, results=[PARTIAL if i in zeroed else s for i, s in enumerate(solution.results)], zeroed=zeroed
    )

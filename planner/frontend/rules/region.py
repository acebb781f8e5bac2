"""Loops, branches and functions with custom derivatives: one op each, whose factors come from the programs inside.

A dim of an operand splits when the same split can be followed through every program inside (`joint.spread`) without a
collective, and comes out consistently: a loop's carry as it went in, all branches alike, a custom backward rule such
that the cotangent of every operand is what the operand's spec demands. The local programs run the inner equations on
shards; ``custom_vjp`` keeps the user's backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jax import lax

from costmodel.graph import Factor
from costmodel.sharding import PARTIAL, REPLICATED, VARYING, Spec
from planner.frontend import jax_compat as jc
from planner.frontend.flat import Equation, Operand, Program, Value, flatten
from planner.frontend.joint import Classes, Joined, Obstacle, Spread, class_size, join_ops, make_ops, spread
from planner.frontend.ops import op_from_equation, rule_for
from planner.frontend.rules.base import Factorisation, Placement, Rule, register
from planner.lowering.spmd import LocalProgram

State = int  # a dim, VARYING or PARTIAL


@dataclass(eq=False)
class Inner:
    """The programs inside one equation, with joined dims, and what splitting each class does.

    Attributes:
        programs: by name.
        solutions: class root -> (operand states, result states, spread of each program), or why not.
    """

    programs: dict[str, Joined]
    classes: Classes
    operand_dims: list[list[object]] = field(default_factory=list)
    result_dims: list[list[object]] = field(default_factory=list)
    solutions: dict[object, tuple[list[State], list[State], dict[str, Spread]] | Obstacle] = field(default_factory=dict)
    roots: list[object] = field(default_factory=list)
    flops: float = 0.0


def _load(closed: Any, prefix: str, classes: Classes, *, differentiated: bool = True) -> Joined:
    names = [f"{prefix}in.{i}" for i in range(len(closed.jaxpr.invars))]
    program = flatten(jc.as_closed(closed), names, prefix, differentiated=differentiated)
    ops = make_ops(program, lambda e: op_from_equation(e, rule_for(e.primitive.name), lambda v: True))
    return join_ops(program, ops, classes)


def _flops(joined: Joined) -> float:
    return sum(op.flops for op in joined.ops.values())


def _join_dims(classes: Classes, a: Operand, b: Operand, shift_a: int = 0, shift_b: int = 0) -> None:
    """Joins the dims of two values that are one; shifts skip leading dims."""
    if isinstance(a, Value) and isinstance(b, Value):
        for d, size in enumerate(a.shape[shift_a:]):
            if size > 1:
                classes.join((a.name, d + shift_a), (b.name, d + shift_b))


def _input_states(joined: Joined, root: object, values: Sequence[Operand]) -> dict[str, State] | None:
    """State of each input under a split of `root`; None where one value would be split twice."""
    states: dict[str, State] = {}
    for value in values:
        if isinstance(value, Value):
            dims = [d for d, n in enumerate(value.shape) if n > 1 and joined.classes.find((value.name, d)) is root]
            if len(dims) > 1:
                return None
            states[value.name] = dims[0] if dims else VARYING
    return states


def _state(spread_: Spread, operand: Operand) -> State:
    return spread_.states.get(operand.name, VARYING) if isinstance(operand, Value) else VARYING


class Region(Rule):
    """Base of the equations that hold programs."""

    def __init__(self) -> None:
        self._inner: WeakKeyDictionary[Equation, Inner] = WeakKeyDictionary()

    def build(self, eqn: Equation) -> Inner:
        """Loads and joins the programs; sets operand_dims and result_dims to the class item of every dim (or None)."""
        raise NotImplementedError

    def solve(self, eqn: Equation, inner: Inner, root: object) -> tuple[list[State], list[State], dict[str, Spread]] | Obstacle:
        raise NotImplementedError

    def inner(self, eqn: Equation) -> Inner:
        if eqn not in self._inner:
            inner = self.build(eqn)
            for items in (*inner.operand_dims, *inner.result_dims):
                for item in items:
                    root = None if item is None else inner.classes.find(item)
                    if root is not None and root not in inner.solutions:
                        inner.solutions[root] = self.solve(eqn, inner, root)
                        inner.roots.append(root)
            self._inner[eqn] = inner
        return self._inner[eqn]

    def factorise(self, eqn: Equation) -> Factorisation:
        inner = self.inner(eqn)
        factors: list[Factor] = []
        index: dict[object, int] = {}
        for root in inner.roots:
            solution = inner.solutions[root]
            index[root] = len(factors)
            size = max(1, min(class_size(j, root) for j in inner.programs.values() if j.members(root))) if any(
                j.members(root) for j in inner.programs.values()) else 0
            reason, combine = "", "none"
            if isinstance(solution, Obstacle):
                reason = f"{solution.reason} ({solution.equation.name} {solution.equation.source})"
            else:
                missing = {s for s in solution[1] if s < 0}
                if missing == {PARTIAL}:
                    combine = "sum"
                elif missing == {VARYING}:
                    combine = "same"
                elif missing:
                    reason = "some results are pending sums and others are not"
            factors.append(Factor(f"c{len(factors)}", size, combine, not reason, reason))  # type: ignore[arg-type]
        sizes: dict[int, int] = {}

        def dims(shapes: Sequence[tuple[int, ...]], items: list[list[object]]) -> tuple[Any, ...]:
            out = []
            for shape, tensor in zip(shapes, items, strict=True):
                parts: list[tuple[int, ...]] = []
                for n, item in zip(shape, tensor, strict=True):
                    if n == 1:
                        parts.append(())
                    elif item is None:
                        factors.append(Factor(f"whole{len(factors)}", n, "none", False, "the dim that the loop walks along"))
                        parts.append((len(factors) - 1,))
                    else:
                        at = index[inner.classes.find(item)]
                        sizes[at] = n if at not in sizes else sizes[at]
                        parts.append((at,))
                out.append(tuple(parts))
            return tuple(out)

        in_dims, out_dims = dims(eqn.in_shapes, inner.operand_dims), dims(eqn.out_shapes, inner.result_dims)
        # A class that no inner op touches (a value passed through) splits as its dim does.
        factors = [Factor(f.name, f.size or sizes.get(i, 1), f.combine, f.splits, f.reason) for i, f in enumerate(factors)]
        everything = tuple(range(len(eqn.inputs)))
        return Factorisation(
            factors=tuple(factors),
            in_dims=in_dims,
            out_dims=out_dims,
            residuals=(everything,) * len(eqn.inputs),
            flops=inner.flops,
            work="opaque",
            fuses=False,
        )

    def runner(self, eqn: Equation, place: Placement, name: str) -> Callable[..., list[Any]]:
        """Local program `name` as a function of one device's inputs; results in the states that were solved."""
        inner = self.inner(eqn)
        joined = inner.programs[name]
        per_axis: list[Spread | int] = []
        for code in place.strategy:
            if code >= 0:
                solution = inner.solutions[inner.roots[code]]
                assert not isinstance(solution, Obstacle)
                per_axis.append(solution[2][name])
            else:
                per_axis.append(code)
        strategies = {
            op: tuple(s.codes[op] if isinstance(s, Spread) else s for s in per_axis) for op in joined.ops
        }

        def spec_of(value: Operand) -> Spec:
            return tuple(_state(s, value) if isinstance(s, Spread) else s for s in per_axis)

        local = LocalProgram(
            program=joined.program, ops=joined.ops, strategies=strategies, mesh=place.mesh, axis_names=place.axis_names
        )
        specs = [spec_of(v) for v in joined.program.inputs]
        targets = [spec_of(o) for o in joined.program.outputs]

        def run(*args: Any) -> list[Any]:
            args_ = [jc.to_varying(a, place.split_axes()) for a in args]
            outs, _ = local(args_, specs, targets)
            return [jc.to_varying(x, place.split_axes()) for x in outs]

        return run




@register("scan")
class Scan(Region):
    """A loop over a leading dim that is not a run of layers (those are blocks): recurrences, chunked losses."""

    def build(self, eqn: Equation) -> Inner:
        classes = Classes()
        body = _load(eqn.params["jaxpr"], "b:", classes)
        consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]
        inputs, outputs = body.program.inputs, body.program.outputs
        for i in range(carry):
            _join_dims(classes, inputs[consts + i], outputs[i])
        inner = Inner({"body": body}, classes, flops=_flops(body) * eqn.params["length"])
        for i, value in enumerate(inputs):
            dims: list[object] = [(value.name, d) for d in range(len(value.shape))]
            inner.operand_dims.append([None, *dims] if i >= consts + carry else dims)
        for i, (operand, shape) in enumerate(zip(outputs, eqn.out_shapes, strict=True)):
            if i < carry:
                name: object = inputs[consts + i].name
                inner.result_dims.append([(name, d) for d in range(len(shape))])
            else:
                known = isinstance(operand, Value)
                inner.result_dims.append([None, *[(operand.name, d) if known else None for d in range(len(shape) - 1)]])
        return inner

    def solve(self, eqn: Equation, inner: Inner, root: object) -> Any:
        body = inner.programs["body"]
        consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]
        inputs, outputs = body.program.inputs, body.program.outputs
        states = _input_states(body, root, inputs)
        if states is None:
            return Obstacle(eqn, "two dims of one value would be split together")
        got = spread(body, root, states)
        if isinstance(got, Obstacle):
            return got
        results = [_state(got, o) for o in outputs]
        for i in range(carry):
            if results[i] != states[inputs[consts + i].name]:
                return Obstacle(eqn, "the loop's carry comes out split differently than it went in")
        first_x = consts + carry
        operands = [states[v.name] + (i >= first_x and states[v.name] >= 0) for i, v in enumerate(inputs)]
        results = [r + (i >= carry and r >= 0) for i, r in enumerate(results)]
        return operands, results, {"body": got}

    def local(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]
        run = self.runner(eqn, place, "body")

        def step(state: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = run(*args[:consts], *state, *xs)
            return outs[:carry], outs[carry:]

        final, stacked = lax.scan(
            step, list(args[consts : consts + carry]), list(args[consts + carry :]),
            length=eqn.params["length"], reverse=eqn.params["reverse"], unroll=eqn.params["unroll"],
        )
        return [*final, *stacked]


@register("while")
class While(Region):
    """A loop whose trip count is data: costed as one trip (and reported so), since nothing states the count."""

    def build(self, eqn: Equation) -> Inner:
        classes = Classes()
        condition = _load(eqn.params["cond_jaxpr"], "c:", classes)
        body = _load(eqn.params["body_jaxpr"], "b:", classes)
        nc, nb = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        for i, output in enumerate(body.program.outputs):
            _join_dims(classes, body.program.inputs[nb + i], output)
            _join_dims(classes, body.program.inputs[nb + i], condition.program.inputs[nc + i])
        inner = Inner({"cond": condition, "body": body}, classes, flops=_flops(condition) + _flops(body))
        values = [*condition.program.inputs[:nc], *body.program.inputs]
        inner.operand_dims = [[(v.name, d) for d in range(len(v.shape))] for v in values]
        inner.result_dims = inner.operand_dims[nc + nb :]
        return inner

    def solve(self, eqn: Equation, inner: Inner, root: object) -> Any:
        condition, body = inner.programs["cond"], inner.programs["body"]
        nc, nb = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        states = _input_states(body, root, [*condition.program.inputs, *body.program.inputs])
        if states is None:
            return Obstacle(eqn, "two dims of one value would be split together")
        test, got = spread(condition, root, states), spread(body, root, states)
        for outcome in (test, got):
            if isinstance(outcome, Obstacle):
                return outcome
        if _state(test, condition.program.outputs[0]) != VARYING:
            return Obstacle(eqn, "the loop's condition depends on values that would be split")
        results = [_state(got, o) for o in body.program.outputs]
        if results != [states[v.name] for v in body.program.inputs[nb:]]:
            return Obstacle(eqn, "the loop's carry comes out split differently than it went in")
        operands = [states[v.name] for v in (*condition.program.inputs[:nc], *body.program.inputs)]
        return operands, results, {"cond": test, "body": got}

    def local(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        nc, nb = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test, body = self.runner(eqn, place, "cond"), self.runner(eqn, place, "body")

        def condition(state: list[Any]) -> Any:
            return test(*args[:nc], *state)[0]

        return lax.while_loop(condition, lambda s: body(*args[nc : nc + nb], *s), list(args[nc + nb :]))


@register("cond")
class Branches(Region):
    def build(self, eqn: Equation) -> Inner:
        classes = Classes()
        programs = {f"branch{i}": _load(b, f"b{i}:", classes) for i, b in enumerate(eqn.params["branches"])}
        first, *rest = programs.values()
        for other in rest:
            for a, b in zip(first.program.inputs, other.program.inputs, strict=True):
                _join_dims(classes, a, b)
        for i, shape in enumerate(eqn.out_shapes):
            for j in programs.values():
                out = j.program.outputs[i]
                if isinstance(out, Value):
                    for d, n in enumerate(shape):
                        if n > 1:
                            classes.join((out.name, d), (f"result.{i}", d))
        inner = Inner(programs, classes, flops=max(_flops(j) for j in programs.values()))
        inner.operand_dims = [[], *[[(v.name, d) for d in range(len(v.shape))] for v in first.program.inputs]]
        inner.result_dims = [[(f"result.{i}", d) for d in range(len(s))] for i, s in enumerate(eqn.out_shapes)]
        return inner

    def solve(self, eqn: Equation, inner: Inner, root: object) -> Any:
        spreads: dict[str, Spread] = {}
        shared: tuple[list[State], list[State]] | None = None
        for name, j in inner.programs.items():
            states = _input_states(j, root, j.program.inputs)
            if states is None:
                return Obstacle(eqn, "two dims of one value would be split together")
            got = spread(j, root, states)
            if isinstance(got, Obstacle):
                return got
            mine = ([VARYING, *[states[v.name] for v in j.program.inputs]], [_state(got, o) for o in j.program.outputs])
            if shared is not None and mine != shared:
                return Obstacle(eqn, "the branches leave their results split differently")
            shared, spreads[name] = mine, got
        assert shared is not None
        return *shared, spreads

    def local(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        branches = [self.runner(eqn, place, name) for name in self.inner(eqn).programs]
        return lax.switch(args[0].astype(jnp.int32), branches, *args[1:])


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(value.aval.dtype, jnp.inexact)


@register("custom_jvp_call")
class CustomJvp(Region):
    """Keeps the user's jvp rule: primal and tangent programs must split alike."""

    def build(self, eqn: Equation) -> Inner:
        classes = Classes()
        call = _load(eqn.params["call_jaxpr"], "p:", classes, differentiated=False)
        consts = eqn.params["num_consts"]
        primals = call.program.inputs[consts:]
        zeros = tuple(not _is_float(v) for v in primals)
        rule, out_zeros = jc.custom_jvp_jaxpr(eqn.params, zeros)
        tangent = _load(rule, "t:", classes, differentiated=False)
        moving = [v for v, z in zip(primals, zeros, strict=True) if not z]
        for a, b in zip((*primals, *moving), tangent.program.inputs, strict=True):
            _join_dims(classes, a, b)
        outs = call.program.outputs
        moved = [o for o, z in zip(outs, out_zeros, strict=True) if not z]
        for i, shape in enumerate(eqn.out_shapes):
            for d, n in enumerate(shape):
                for o in (outs[i], tangent.program.outputs[i]):
                    if n > 1 and isinstance(o, Value):
                        classes.join((o.name, d), (f"result.{i}", d))
        for a, b in zip(moved, tangent.program.outputs[len(outs) :], strict=True):
            _join_dims(classes, a, b)
        inner = Inner({"primal": call, "tangent": tangent}, classes, flops=_flops(call))
        inner.operand_dims = [[(v.name, d) for d in range(len(v.shape))] for v in call.program.inputs]
        inner.result_dims = [[(f"result.{i}", d) for d in range(len(s))] for i, s in enumerate(eqn.out_shapes)]
        return inner

    def solve(self, eqn: Equation, inner: Inner, root: object) -> Any:
        call, tangent = inner.programs["primal"], inner.programs["tangent"]
        a = _input_states(call, root, call.program.inputs)
        b = _input_states(tangent, root, tangent.program.inputs)
        if a is None or b is None:
            return Obstacle(eqn, "two dims of one value would be split together")
        got, rate = spread(call, root, a), spread(tangent, root, b)
        for outcome in (got, rate):
            if isinstance(outcome, Obstacle):
                return outcome
        results = [_state(got, o) for o in call.program.outputs]
        zeros = self._zeros(eqn)[1]
        expected = [*results, *[r for r, z in zip(results, zeros, strict=True) if not z]]
        if [_state(rate, o) for o in tangent.program.outputs] != expected:
            return Obstacle(eqn, "the custom derivative splits differently than the function")
        return [a[v.name] for v in call.program.inputs], results, {"primal": got, "tangent": rate}

    def _zeros(self, eqn: Equation) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        primals = eqn.inputs[eqn.params["num_consts"] :]
        zeros = tuple(not _is_float(v) for v in primals)
        return zeros, jc.custom_jvp_jaxpr(eqn.params, zeros)[1]

    def local(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        consts = eqn.params["num_consts"]
        primal, tangent = self.runner(eqn, place, "primal"), self.runner(eqn, place, "tangent")
        zeros, out_zeros = self._zeros(eqn)

        @jax.custom_jvp
        def call(*moving: Any) -> list[Any]:
            return primal(*args[:consts], *moving)

        @call.defjvp
        def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
            rates = [jc.to_varying(t, place.split_axes()) for t, z in zip(tangents, zeros, strict=True) if not z]
            outs = tangent(*primals, *rates)
            results, moved = outs[: len(out_zeros)], iter(outs[len(out_zeros) :])
            full = [jc.zero_tangent(r) if z else next(moved) for r, z in zip(results, out_zeros, strict=True)]
            return results, full

        return call(*args[consts:])


@register("custom_vjp_call")
class CustomVjp(Region):
    """Keeps the user's backward: its cotangents must come out as the operands' specs demand."""

    def build(self, eqn: Equation) -> Inner:
        classes = Classes()
        call = _load(eqn.params["call_jaxpr"], "p:", classes, differentiated=False)
        forward_jaxpr, residuals = jc.custom_vjp_forward(
            eqn.params, tuple(_is_float(v) for v in eqn.inputs[eqn.params["num_consts"] :])
        )
        forward = _load(forward_jaxpr, "f:", classes, differentiated=False)
        consts = eqn.params["num_consts"]
        moving = [(o.shape, o.aval) for o in forward.program.outputs]
        avals = [jax.ShapeDtypeStruct(shape, aval.dtype) for shape, aval in moving]
        backward_jaxpr = jax.make_jaxpr(lambda *a: self._dense(eqn, jc.custom_vjp_backward(eqn.params)(*a)))(*avals)
        backward = _load(backward_jaxpr, "r:", classes, differentiated=False)
        inputs = call.program.inputs
        for a, b in zip(inputs[consts:], forward.program.inputs, strict=True):
            _join_dims(classes, a, b)
        for i, shape in enumerate(eqn.out_shapes):
            for o in (call.program.outputs[i], forward.program.outputs[residuals + i], backward.program.inputs[residuals + i]):
                for d, n in enumerate(shape):
                    if n > 1 and isinstance(o, Value):
                        classes.join((o.name, d), (f"result.{i}", d))
        for a, b in zip(forward.program.outputs[:residuals], backward.program.inputs[:residuals], strict=True):
            _join_dims(classes, a, b)
        floats = [v for v in inputs[consts:] if _is_float(v)]
        for a, b in zip(floats, backward.program.outputs, strict=True):
            _join_dims(classes, a, b)
        inner = Inner({"call": call, "forward": forward, "backward": backward}, classes, flops=_flops(call))
        inner.operand_dims = [[(v.name, d) for d in range(len(v.shape))] for v in inputs]
        inner.result_dims = [[(f"result.{i}", d) for d in range(len(s))] for i, s in enumerate(eqn.out_shapes)]
        return inner

    @staticmethod
    def _dense(eqn: Equation, cotangents: Sequence[Any]) -> list[Any]:
        """Cotangents of the float operands as arrays, symbolic zeros made whole."""
        operands = eqn.inputs[eqn.params["num_consts"] :]
        return [
            jc.instantiate_zero(ct) for v, ct in zip(operands, cotangents, strict=True) if _is_float(v)
        ]

    def solve(self, eqn: Equation, inner: Inner, root: object) -> Any:
        call, forward, backward = (inner.programs[n] for n in ("call", "forward", "backward"))
        consts = eqn.params["num_consts"]
        a = _input_states(call, root, call.program.inputs)
        b = _input_states(forward, root, forward.program.inputs)
        if a is None or b is None:
            return Obstacle(eqn, "two dims of one value would be split together")
        got, ahead = spread(call, root, a), spread(forward, root, b)
        for outcome in (got, ahead):
            if isinstance(outcome, Obstacle):
                return outcome
        results = [_state(got, o) for o in call.program.outputs]
        outs = [_state(ahead, o) for o in forward.program.outputs]
        residuals = len(outs) - len(results)
        if outs[residuals:] != results:
            return Obstacle(eqn, "the custom forward splits differently than the function")
        if any(outs[i] == PARTIAL for i in range(residuals)):
            return Obstacle(eqn, "the custom forward keeps a pending sum for its backward")
        # The cotangent of a split result is split, of a pending sum it is whole, of an equal result it is a summand.
        flip = {PARTIAL: VARYING, VARYING: PARTIAL}
        into = {
            v.name: s for v, s in zip(backward.program.inputs, [*outs[:residuals], *[flip.get(r, r) for r in results]], strict=True)
        }
        back = spread(backward, root, into)
        if isinstance(back, Obstacle):
            return back
        floats = [v for v in call.program.inputs[consts:] if _is_float(v)]
        for v, o in zip(floats, backward.program.outputs, strict=True):
            if _state(back, o) != flip.get(a[v.name], a[v.name]):
                return Obstacle(eqn, "the custom backward leaves a cotangent split differently than its operand")
        return [a[v.name] for v in call.program.inputs], results, {"call": got, "forward": ahead, "backward": back}

    def local(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        consts = eqn.params["num_consts"]
        call, forward, backward = (self.runner(eqn, place, n) for n in ("call", "forward", "backward"))
        results = len(eqn.outputs)
        operands = eqn.inputs[consts:]

        @jax.custom_vjp
        def function(*moving: Any) -> list[Any]:
            return call(*args[:consts], *moving)

        def ahead(*moving: Any) -> tuple[list[Any], list[Any]]:
            outs = forward(*moving)
            return outs[len(outs) - results :], outs[: len(outs) - results]

        def back(kept: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
            grads = iter(backward(*kept, *cotangents))
            return tuple(next(grads) if _is_float(v) else None for v in operands)

        function.defvjp(ahead, back)
        return function(*args[consts:])

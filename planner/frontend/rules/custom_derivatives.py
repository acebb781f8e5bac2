"""Functions with custom derivatives: what the user wrote is kept, and runs on shards.

The function and its derivative are captured, and a split must go through both alike: the cotangent of every operand
comes out as the operand's spec demands. Where the user's derivative cannot be traced the equation runs as it is, whole.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import linear_call

from costmodel.sharding import PARTIAL, VARYING
from planner.frontend import jax_compat as jc
from planner.frontend.flat import COMPOSITES, Equation, Operand, Value
from planner.frontend.joint import Classes, Joined, Obstacle, spread
from planner.frontend.rules.amount import Amount, backward_amount, forward_amount
from planner.frontend.rules.base import Placement, register
from planner.frontend.rules.factors import is_inexact
from planner.frontend.rules.inner import (
    NUMBER,
    TWICE,
    Inner,
    Solution,
    State,
    dims_of_results,
    dims_of_values,
    input_states,
    join_dims,
    join_results,
    load,
    once,
    output_states,
    state_of,
)
from planner.frontend.rules.region import Region, on_first

# The cotangent of a pending sum is equal everywhere, that of a value that is equal everywhere is a pending sum.
COTANGENT = {PARTIAL: VARYING, VARYING: PARTIAL}


def cotangent(state: State) -> State:
    return COTANGENT.get(state, state)


class Custom(Region):
    """Base: the function itself, and what its derivative adds."""

    def call(self, eqn: Equation, classes: Classes) -> Joined:
        """The function itself, which runs where nothing is differentiated."""
        return load(eqn, eqn.params["call_jaxpr"], "p:", classes, (False,) * len(eqn.inputs))

    def static(self, eqn: Equation) -> dict[str, Any]:
        return {"consts": self.consts(eqn), "moving": self.moving(eqn)}

    def consts(self, eqn: Equation) -> int:
        """Leading operands that the user's derivative knows nothing of."""
        return eqn.params["num_consts"]

    def derivative(self, eqn: Equation, classes: Classes, call: Joined) -> dict[str, Joined]:
        """The programs of the derivative, their dims joined with those of the function."""
        raise NotImplementedError

    def derivative_amount(self, programs: Mapping[str, Joined]) -> Amount:
        """What the backward pass takes."""
        raise NotImplementedError

    def build(self, eqn: Equation) -> Inner:
        classes = Classes()
        call = self.call(eqn, classes)
        for i, o in enumerate(call.program.outputs):
            join_results(classes, eqn, i, o)
        inner = Inner({"call": call}, classes, ahead=forward_amount(call))
        inner.operand_dims, inner.result_dims = dims_of_values(call.program.inputs), dims_of_results(eqn)
        if not any(self.moving(eqn)):
            return inner
        try:
            inner.programs |= self.derivative(eqn, classes, call)
        except Exception as error:  # the user's code runs here
            first = next(iter(str(error).splitlines()), "")
            inner.whole = f"tracing the custom derivative failed: {type(error).__name__}: {first}"
            whole: list[list[object]] = [[None] * len(shape) for shape in eqn.in_shapes]
            inner.operand_dims, inner.result_dims = whole, [[None] * len(shape) for shape in eqn.out_shapes]
            inner.back = inner.ahead.times(2.0)
            return inner
        if "forward" in inner.programs:  # what runs instead where something is differentiated
            inner.ahead = forward_amount(inner.programs["forward"])
        inner.back = self.derivative_amount(inner.programs)
        return inner

    def _follow(self, eqn: Equation, joined: Joined, root: object) -> tuple[dict[str, State], Any] | Obstacle:
        states = input_states(joined, root, joined.program.inputs)
        if states is None:
            return Obstacle(eqn, TWICE)
        got = spread(joined, root, states, allow_max=NUMBER)
        return got if isinstance(got, Obstacle) else (states, got)


@register("custom_jvp_call")
class CustomJvp(Custom):
    """Keeps the user's jvp rule: function and tangent program must split alike."""

    def _zeros(self, eqn: Equation) -> tuple[bool, ...]:
        """For each primal whether the rule is told that its tangent is zero; most rules want zeros as arrays."""
        consts = self.consts(eqn)
        if eqn.params["symbolic_zeros"]:
            return tuple(not m for m in self.moving(eqn)[consts:])
        return tuple(not is_inexact(o) for o in eqn.inputs[consts:])

    def derivative(self, eqn: Equation, classes: Classes, call: Joined) -> dict[str, Joined]:
        zeros = self._zeros(eqn)
        rule, out_zeros = once(eqn, "derivative", lambda: jc.custom_jvp_jaxpr(eqn.params, zeros))
        primals = call.program.inputs[self.consts(eqn) :]
        moves = [m for m, z in zip(self.moving(eqn)[self.consts(eqn) :], zeros, strict=True) if not z]
        tangent = load(eqn, rule, "t:", classes, (*(False,) * len(zeros), *moves), derivative=True)
        moving = [v for v, z in zip(primals, zeros, strict=True) if not z]
        for a, b in zip((*primals, *moving), tangent.program.inputs, strict=True):
            join_dims(classes, a, b)
        outs = tangent.program.outputs
        for i in range(len(eqn.outputs)):
            join_results(classes, eqn, i, outs[i])
        moved = [i for i, z in enumerate(out_zeros) if not z]
        for i, o in zip(moved, outs[len(eqn.outputs) :], strict=True):
            join_results(classes, eqn, i, o)
        return {"tangent": tangent}

    def derivative_amount(self, programs: Mapping[str, Joined]) -> Amount:
        """JAX transposes what the tangent program does with tangents."""
        return backward_amount(programs["tangent"])

    def solve(self, eqn: Equation, inner: Inner, root: object) -> Solution | Obstacle:
        found = self._follow(eqn, inner.programs["call"], root)
        if isinstance(found, Obstacle):
            return found
        states, got = found
        operands = [states[v.name] for v in inner.programs["call"].program.inputs]
        results = output_states(inner.programs["call"], got)
        if "tangent" not in inner.programs:
            return Solution(operands, results, {"call": got})
        rate = self._follow(eqn, inner.programs["tangent"], root)
        if isinstance(rate, Obstacle):
            return rate
        expected = [*results, *[r for r, z in zip(results, eqn.memo["derivative"][1], strict=True) if not z]]
        if output_states(inner.programs["tangent"], rate[1]) != expected:
            return Obstacle(eqn, "the custom derivative splits differently than the function")
        return Solution(operands, results, {"call": got, "tangent": rate[1]})

    def run(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        call = self.runner(eqn, place, "call")
        if "tangent" not in self.inner(eqn).programs:
            return call(*args)
        tangent, consts = self.runner(eqn, place, "tangent"), self.consts(eqn)
        zeros, out_zeros = self._zeros(eqn), eqn.memo["derivative"][1]
        function = jax.custom_jvp(lambda *args: call(*args))

        @function.defjvp
        def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
            rates = [
                jc.to_varying(t, place.split_axes()) for t, z in zip(tangents[consts:], zeros, strict=True) if not z
            ]
            outs = tangent(*primals[consts:], *rates)
            results, moved = outs[: len(out_zeros)], iter(outs[len(out_zeros) :])
            return results, [jc.zero_tangent(r) if z else next(moved) for r, z in zip(results, out_zeros, strict=True)]

        return function(*args)


@register("custom_vjp_call")
class CustomVjp(Custom):
    """Keeps the user's backward function."""

    def derivative(self, eqn: Equation, classes: Classes, call: Joined) -> dict[str, Joined]:
        consts, results = self.consts(eqn), len(eqn.outputs)
        moving = self.moving(eqn)[consts:]
        closed, residuals = once(eqn, "forward", lambda: self.ahead(eqn, moving))
        forward = load(eqn, closed, "f:", classes, (False,) * len(moving))
        floats = [is_inexact(v) for v in eqn.outputs]
        outs = forward.program.outputs
        if [o.shape for o in outs[residuals:]] != list(eqn.out_shapes):
            raise ValueError("the forward function's results have other shapes than the function's")
        residual = outs[:residuals]
        traced, kept = once(eqn, "backward", lambda: self._backward(eqn, moving, residual))
        backward = load(eqn, traced, "r:", classes, (False,) * len(traced.in_avals))
        for a, b in zip(call.program.inputs[consts:], forward.program.inputs, strict=True):
            join_dims(classes, a, b)
        arriving = iter(backward.program.inputs)
        for a in _traced(residual):
            join_dims(classes, a, next(arriving))
        for i in range(results):
            join_results(classes, eqn, i, outs[residuals + i], *([next(arriving)] if floats[i] else []))
        for i, b in zip(kept, backward.program.outputs, strict=True):
            join_dims(classes, call.program.inputs[consts + i], b)
        return {"forward": forward, "backward": backward}

    def derivative_amount(self, programs: Mapping[str, Joined]) -> Amount:
        return forward_amount(programs["backward"])

    def ahead(self, eqn: Equation, moving: Sequence[bool]) -> tuple[Any, int]:
        """The forward function as a closed jaxpr of arguments -> (residuals, results), and the number of residuals."""
        return jc.custom_vjp_forward(eqn.params, tuple(moving))

    def back(self, eqn: Equation, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
        """What the backward function gives each argument: a cotangent or a symbolic zero."""
        return jc.custom_vjp_backward(eqn.params)(*residuals, *cotangents)

    def _backward(
        self, eqn: Equation, moving: Sequence[bool], residual: Sequence[Operand]
    ) -> tuple[Any, tuple[int, ...]]:
        """The user's backward as a jaxpr of residuals and cotangents, and the operands that it gives a cotangent."""
        floats = [is_inexact(v) for v in eqn.outputs]
        kept: list[int] = []

        def back(*given: Any) -> list[Any]:
            at = iter(given)
            passed = [next(at) if isinstance(o, Value) else o.value for o in residual]  # flags stay what they are
            full = [next(at) if f else _no_cotangent(v.shape) for f, v in zip(floats, eqn.outputs, strict=True)]
            found = self.back(eqn, passed, full)
            kept[:] = [i for i, ct in enumerate(found) if moving[i] and not jc.is_zero(ct)]
            return [found[i] for i in kept]

        sources = [*_traced(residual), *(v for v, f in zip(eqn.outputs, floats, strict=True) if f)]
        traced = jax.make_jaxpr(back)(*(jax.ShapeDtypeStruct(o.shape, o.aval.dtype) for o in sources))
        return traced, tuple(kept)

    def solve(self, eqn: Equation, inner: Inner, root: object) -> Solution | Obstacle:
        call = inner.programs["call"]
        found = self._follow(eqn, call, root)
        if isinstance(found, Obstacle):
            return found
        states, got = found
        operands = [states[v.name] for v in call.program.inputs]
        results = output_states(call, got)
        if "forward" not in inner.programs:
            return Solution(operands, results, {"call": got})
        forward, backward = inner.programs["forward"], inner.programs["backward"]
        ahead = self._follow(eqn, forward, root)
        if isinstance(ahead, Obstacle):
            return ahead
        residual = _traced(forward.program.outputs[: len(forward.program.outputs) - len(results)])
        kept = [state_of(ahead[1], o) for o in residual]
        if output_states(forward, ahead[1])[len(forward.program.outputs) - len(results) :] != results:
            return Obstacle(eqn, "the custom forward splits differently than the function")
        if PARTIAL in kept:
            return Obstacle(eqn, "the custom forward keeps a pending sum for its backward")
        arriving = [cotangent(r) for r, v in zip(results, eqn.outputs, strict=True) if is_inexact(v)]
        into = {v.name: s for v, s in zip(backward.program.inputs, [*kept, *arriving], strict=True)}
        back = spread(backward, root, into, allow_max=NUMBER)
        if isinstance(back, Obstacle):
            return back
        consts = self.consts(eqn)
        expected = [cotangent(operands[consts + i]) for i in eqn.memo["backward"][1]]
        if output_states(backward, back) != expected:
            return Obstacle(eqn, "the custom backward leaves a cotangent split differently than its operand")
        return Solution(operands, results, {"call": got, "forward": ahead[1], "backward": back})

    def _linear(self, eqn: Equation) -> bool:
        """Whether the user's backward is linear in the cotangents, so that it may be given summands of them."""
        backward = self.inner(eqn).programs["backward"]
        count = sum(map(is_inexact, eqn.outputs))
        arriving = backward.program.inputs[len(backward.program.inputs) - count :]
        found = spread(backward, object(), {v.name: PARTIAL for v in arriving})
        return not isinstance(found, Obstacle) and all(s == PARTIAL for s in output_states(backward, found))

    def run(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        call = self.runner(eqn, place, "call")
        if "forward" not in self.inner(eqn).programs:
            return call(*args)
        forward, backward = self.runner(eqn, place, "forward"), self.runner(eqn, place, "backward")
        consts, results, kept = self.consts(eqn), len(eqn.outputs), eqn.memo["backward"][1]
        floats = [is_inexact(v) for v in eqn.outputs]
        outputs = self.inner(eqn).programs["forward"].program.outputs
        equal = [a for a, code in zip(place.axis_names, place.strategy, strict=True) if code == VARYING]
        settled = equal if equal and not self._linear(eqn) else []
        function = jax.custom_vjp(lambda *args: call(*args))

        def ahead(*args: Any) -> tuple[list[Any], list[Any]]:
            outs = forward(*args[consts:])
            kept = zip(outs[: len(outs) - results], outputs, strict=False)
            return outs[len(outs) - results :], [x for x, o in kept if isinstance(o, Value)]

        def back(residuals: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
            arriving = [ct for ct, f in zip(cotangents, floats, strict=True) if f]
            if settled:  # a backward that is not linear needs the whole cotangent, and gives its result once
                arriving = [lax.psum(ct, tuple(settled)) for ct in arriving]
            found = backward(*residuals, *arriving)
            grads = dict(zip(kept, (on_first(g, settled) for g in found), strict=True))
            return (*(None,) * consts, *(grads.get(i) for i in range(len(args) - consts)))

        function.defvjp(ahead, back)
        return function(*args)


def _traced(operands: Sequence[Operand]) -> list[Value]:
    return [o for o in operands if isinstance(o, Value)]


def _no_cotangent(shape: tuple[int, ...]) -> Any:
    """What JAX passes for a result that has no cotangent."""
    return np.zeros(shape, jax.dtypes.float0)


@register(*COMPOSITES)
class Composite(CustomVjp):
    """A primitive that a package defines as a function of others, with a derivative that JAX finds by its rules.

    The primitive's implementation is its program, its vjp the derivative. In a derivative it stays one linear function
    with its own transpose.
    """

    def consts(self, eqn: Equation) -> int:
        return 0

    def call(self, eqn: Equation, classes: Classes) -> Joined:
        closed = once(eqn, "call", lambda: jc.implementation(eqn.primitive, eqn.params, [o.aval for o in eqn.inputs]))
        return load(eqn, closed, "p:", classes, (False,) * len(eqn.inputs))

    def describe(self, eqn: Equation) -> str:
        return f"{super().describe(eqn)}{eqn.transposed}"

    def _along(self, eqn: Equation, moving: Sequence[bool], args: Sequence[Any]) -> Any:
        """The primitive as a function of the arguments that move."""

        def function(*given: Any) -> list[Any]:
            some = iter(given)
            return jc.bind(
                eqn.primitive, [next(some) if m else a for a, m in zip(args, moving, strict=True)], eqn.params
            )

        return function

    def ahead(self, eqn: Equation, moving: Sequence[bool]) -> tuple[Any, int]:
        def whole(*args: Any) -> list[Any]:
            if eqn.transposed:
                kept = [a for a, m in zip(args, moving, strict=True) if not m]
                return [*kept, *jc.bind(eqn.primitive, args, eqn.params)]
            own = [a for a, m in zip(args, moving, strict=True) if m]
            results, pull = jax.vjp(self._along(eqn, moving, args), *own)
            kept, eqn.memo["pull"] = jax.tree.flatten(pull)
            return [*kept, *results]

        closed = jax.make_jaxpr(whole)(*(jax.ShapeDtypeStruct(o.shape, o.aval.dtype) for o in eqn.inputs))
        return closed, len(closed.out_avals) - len(eqn.outputs)

    def back(self, eqn: Equation, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
        moving = self.moving(eqn)
        if eqn.transposed:
            fixed = iter(residuals)
            args = [None if m else next(fixed) for m in moving]
            own = [jax.ShapeDtypeStruct(o.shape, o.aval.dtype) for o, m in zip(eqn.inputs, moving, strict=True) if m]
            floats = [i for i, v in enumerate(eqn.outputs) if is_inexact(v)]
            along = self._along(eqn, moving, args)
            pull = jax.linear_transpose(lambda *given: [along(*given)[i] for i in floats], *own)
            found = iter(pull([cotangents[i] for i in floats]))
        else:
            found = iter(jax.tree.unflatten(eqn.memo["pull"], residuals)(list(cotangents)))
        return [next(found) if m else None for m in moving]

    def run(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        if not eqn.transposed or not any(self.moving(eqn)):
            return super().run(eqn, place, args)
        call, backward = self.runner(eqn, place, "call"), self.runner(eqn, place, "backward")
        moving, kept = self.moving(eqn), eqn.memo["backward"][1]
        at = [i for i, m in enumerate(moving) if m]

        def forward(fixed: list[Any], own: list[Any]) -> list[Any]:
            some, others = iter(own), iter(fixed)
            return call(*(next(some) if m else next(others) for m in moving))

        def transpose(fixed: list[Any], cotangents: list[Any]) -> list[Any]:
            arriving = [ct for ct, v in zip(cotangents, eqn.outputs, strict=True) if is_inexact(v)]
            found = dict(zip(kept, backward(*fixed, *arriving), strict=True))
            return [found[i] if i in found else jnp.zeros_like(args[i]) for i in at]

        fixed = [a for a, m in zip(args, moving, strict=True) if not m]
        return linear_call(forward, transpose, fixed, [args[i] for i in at])

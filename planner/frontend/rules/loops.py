"""Loops and branches as ops: scan, while, cond."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from costmodel.sharding import PARTIAL, VARYING
from planner.frontend.flat import Equation, Program, Value
from planner.frontend.joint import Classes, Obstacle, Spread, spread
from planner.frontend.rules.amount import Amount, backward_amount, forward_amount
from planner.frontend.rules.base import Placement, register
from planner.frontend.rules.factors import adds_up
from planner.frontend.rules.inner import (
    NUMBER,
    TWICE,
    Inner,
    Loop,
    Solution,
    State,
    dims_of_results,
    dims_of_values,
    input_states,
    join_dims,
    join_results,
    load,
    output_states,
    shared_states,
)
from planner.frontend.rules.region import Region, on_first


def needed_inputs(program: Program, equation: Equation) -> set[str]:
    """Names of the program inputs that an equation depends on."""
    needed = {o for o in equation.inputs if isinstance(o, Value)}
    for e in reversed(program.equations):
        if any(v in needed for v in e.outputs):
            needed.update(o for o in e.inputs if isinstance(o, Value))
    return {v.name for v in program.inputs if v in needed}


@register("scan")
class Scan(Region):
    """A loop over a leading dim that is not a run of layers (those are blocks): recurrences, chunked losses."""

    def static(self, eqn: Equation) -> dict[str, Any]:
        return {name: eqn.params[name] for name in ("num_consts", "num_carry", "length", "reverse", "unroll")}

    def build(self, eqn: Equation) -> Inner:
        classes = Classes()
        consts, carry, length = (eqn.params[name] for name in ("num_consts", "num_carry", "length"))
        body = load(eqn, eqn.params["jaxpr"], "b:", classes, self.moving(eqn), Loop(consts, carry))
        inputs, outputs = body.program.inputs, body.program.outputs
        for i in range(carry):
            join_dims(classes, inputs[consts + i], outputs[i])
        inner = Inner(
            {"body": body},
            classes,
            ahead=forward_amount(body).times(length),
            back=backward_amount(body).times(length),
        )
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

    def solve(self, eqn: Equation, inner: Inner, root: object) -> Solution | Obstacle:
        body = inner.programs["body"]
        consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]
        inputs = body.program.inputs
        states = input_states(body, root, inputs)
        if states is None:
            return Obstacle(eqn, TWICE)
        first, fed = dict(states), inputs[consts : consts + carry]
        while True:  # until no more carries turn out to gather a sum over the split dim
            got = spread(body, root, states, allow_max=NUMBER)
            if isinstance(got, Obstacle):
                sources = needed_inputs(body.program, got.equation)
                summed = [v for v in fed if v.name in sources]
            else:
                results = output_states(body, got)
                summed = [v for v, s in zip(fed, results) if s == PARTIAL]
            summed = [v for v in summed if states[v.name] == VARYING and adds_up(v)]
            if not summed:
                break
            states |= {v.name: PARTIAL for v in summed}
        if isinstance(got, Obstacle):
            return got
        going_in = [states[v.name] for v in fed]
        if shared_states([going_in, results[:carry]], fed) != going_in:
            return Obstacle(eqn, "the loop's carry comes out split differently than it went in")
        operands = [s + (i >= consts + carry and s >= 0) for i, s in enumerate(first[v.name] for v in inputs)]
        stacked = [r + 1 if r >= 0 else r for r in results[carry:]]
        inside = replace(got, outputs=(*going_in, *results[carry:]))
        return Solution(operands, [*going_in, *stacked], {"body": inside})

    def run(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]
        run = self.runner(eqn, place, "body")
        fed = self.inner(eqn).programs["body"].program.inputs[consts : consts + carry]
        start = [on_first(x, self._gathering(eqn, place, v)) for x, v in zip(args[consts:], fed)]

        def step(state: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = run(*args[:consts], *state, *xs)
            return outs[:carry], outs[carry:]

        final, stacked = lax.scan(
            step,
            start,
            list(args[consts + carry :]),
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [*final, *stacked]

    def _gathering(self, eqn: Equation, place: Placement, value: Value) -> list[str]:
        """Axes on which a carry gathers a pending sum."""
        return [
            axis
            for axis, code in zip(place.axis_names, place.strategy, strict=True)
            if code >= 0 and self.solution(eqn, code).programs["body"].states[value.name] == PARTIAL
        ]


@register("while")
class While(Region):
    """A loop whose trip count is data: costed as one trip, and reported so (MP174), since nothing states the count.

    All devices run it equally often: a condition on split values is all-reduced, or the values do not split. Under vmap
    JAX leaves a condition for each example: the loop runs while one holds, and an example that is done stays as it is.
    """

    def static(self, eqn: Equation) -> dict[str, Any]:
        return {name: eqn.params[name] for name in ("cond_nconsts", "body_nconsts")}

    def build(self, eqn: Equation) -> Inner:
        classes = Classes()
        nc, nb = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        moving = self.moving(eqn)
        condition = load(eqn, eqn.params["cond_jaxpr"], "c:", classes, (False,) * (len(moving) - nb))
        body = load(eqn, eqn.params["body_jaxpr"], "b:", classes, moving[nc:], Loop(nb, len(moving) - nc - nb))
        for i, output in enumerate(body.program.outputs):
            join_dims(classes, body.program.inputs[nb + i], output)
            join_dims(classes, body.program.inputs[nb + i], condition.program.inputs[nc + i])
            join_dims(classes, condition.program.outputs[0], body.program.inputs[nb + i])
        inner = Inner(
            {"cond": condition, "body": body},
            classes,
            ahead=forward_amount(condition) + forward_amount(body),
            back=backward_amount(body),
        )
        inner.operand_dims = dims_of_values([*condition.program.inputs[:nc], *body.program.inputs])
        inner.result_dims = inner.operand_dims[nc + nb :]
        return inner

    def solve(self, eqn: Equation, inner: Inner, root: object) -> Solution | Obstacle:
        condition, body = inner.programs["cond"], inner.programs["body"]
        nc, nb = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        states = input_states(body, root, [*condition.program.inputs, *body.program.inputs])
        if states is None:
            return Obstacle(eqn, TWICE)
        test, got = (spread(j, root, states, allow_max=NUMBER) for j in (condition, body))
        if isinstance(test, Obstacle):
            return test
        if isinstance(got, Obstacle):
            return got
        if output_states(condition, test) == [PARTIAL]:
            return Obstacle(eqn, "the loop's condition depends on values that would be split")
        fed = body.program.inputs[nb:]
        going_in, results = [states[v.name] for v in fed], output_states(body, got)
        if shared_states([going_in, results], fed) != going_in:
            return Obstacle(eqn, "the loop's carry comes out split differently than it went in")
        operands = [states[v.name] for v in (*condition.program.inputs[:nc], *body.program.inputs)]
        return Solution(operands, going_in, {"cond": test, "body": replace(got, outputs=tuple(going_in))})

    def run(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        nc, nb = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test, body = self.runner(eqn, place, "cond"), self.runner(eqn, place, "body")
        axes = self._asked(eqn, place)

        def holds(state: list[Any]) -> Any:
            return test(*args[:nc], *state)[0]

        def condition(state: list[Any]) -> Any:
            held = jnp.any(holds(state))
            return lax.pmax(held.astype(jnp.uint8), axes).astype(bool) if axes else held

        def step(state: list[Any]) -> list[Any]:
            new, held = body(*args[nc : nc + nb], *state), holds(state)
            if held.ndim == 0:
                return new
            keep = [jnp.expand_dims(held, tuple(range(held.ndim, x.ndim))) for x in new]
            return [jnp.where(k, x, old) for k, x, old in zip(keep, new, state, strict=True)]

        return lax.while_loop(condition, step, list(args[nc + nb :]))

    def _asked(self, eqn: Equation, place: Placement) -> tuple[str, ...]:
        """Axes over which the examples of the condition are split."""
        condition = self.inner(eqn).programs["cond"]
        return tuple(
            axis
            for axis, code in zip(place.axis_names, place.strategy, strict=True)
            if code >= 0 and output_states(condition, self.solution(eqn, code).programs["cond"])[0] >= 0
        )


def _weight(amount: Amount) -> tuple[float, float]:
    return amount.flops, amount.inside.memory_bytes


@register("cond")
class Branches(Region):
    """One of several programs, chosen by a number; costed as the most expensive one."""

    def build(self, eqn: Equation) -> Inner:
        classes = Classes()
        moving = self.moving(eqn)[1:]
        programs = {f"branch{i}": load(eqn, b, f"b{i}:", classes, moving) for i, b in enumerate(eqn.params["branches"])}
        first, *rest = programs.values()
        for other in rest:
            for a, b in zip(first.program.inputs, other.program.inputs, strict=True):
                join_dims(classes, a, b)
        for i in range(len(eqn.outputs)):
            join_results(classes, eqn, i, *(j.program.outputs[i] for j in programs.values()))
        inner = Inner(
            programs,
            classes,
            ahead=max(map(forward_amount, programs.values()), key=_weight),
            back=max(map(backward_amount, programs.values()), key=_weight),
        )
        inner.operand_dims = [[], *dims_of_values(first.program.inputs)]
        inner.result_dims = dims_of_results(eqn)
        return inner

    def solve(self, eqn: Equation, inner: Inner, root: object) -> Solution | Obstacle:
        spreads: dict[str, Spread] = {}
        operands: list[list[State]] = []
        for name, j in inner.programs.items():
            states = input_states(j, root, j.program.inputs)
            if states is None:
                return Obstacle(eqn, TWICE)
            got = spread(j, root, states, allow_max=NUMBER)
            if isinstance(got, Obstacle):
                return got
            operands.append([states[v.name] for v in j.program.inputs])
            spreads[name] = got
        results = shared_states([output_states(inner.programs[n], s) for n, s in spreads.items()], eqn.outputs)
        if results is None or any(o != operands[0] for o in operands):
            return Obstacle(eqn, "the branches leave their results split differently")
        inside = {name: replace(s, outputs=tuple(results)) for name, s in spreads.items()}
        return Solution([VARYING, *operands[0]], results, inside)

    def run(self, eqn: Equation, place: Placement, args: list[Any]) -> list[Any]:
        branches: Sequence[Any] = [self.runner(eqn, place, name) for name in self.inner(eqn).programs]
        return lax.switch(args[0].astype(jnp.int32), branches, *args[1:])

"""Dtype casts of whole stacked parameters, moved into the layers that read them: a layer is cast when it runs."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from planner.frontend.flat import Equation, Operand, Program, Value


def sink_casts(program: Program, params: set[Value]) -> tuple[list[Equation], Callable[[int], set[Value]]]:
    """Moves a dtype cast of a whole stacked parameter into the layers that read it; a function of what is used from
    a position on comes along."""
    uses = Counter(o for e in program.equations for o in e.inputs if isinstance(o, Value))
    uses.update(o for o in program.outputs if isinstance(o, Value))
    casts = {
        e.outputs[0]: e
        for e in program.equations
        if e.primitive.name == "convert_element_type"
        and e.inputs[0] in params
        and uses[e.outputs[0]] == 1
        and not e.scopes
    }
    sunk: dict[Value, Equation] = {}
    equations: list[Equation] = []
    for e in program.equations:
        if e.primitive.name == "scan" and not e.scopes and any(o in casts for o in e.inputs):
            first = e.params["num_consts"] + e.params["num_carry"]
            taken = {i: casts[o] for i, o in enumerate(e.inputs) if i >= first and o in casts}
            if taken:
                sunk.update({c.outputs[0]: c for c in taken.values()})
                inputs = tuple(taken[i].inputs[0] if i in taken else o for i, o in enumerate(e.inputs))
                e = replace(e, inputs=inputs, params={**e.params, "sunk": taken})
        equations.append(e)
    equations = [e for e in equations if e.outputs[0] not in sunk] if sunk else equations
    positions: dict[Value, int] = {o: len(equations) for o in program.outputs if isinstance(o, Value)}
    for i, e in enumerate(equations):
        for o in e.inputs:
            if isinstance(o, Value):
                positions[o] = max(i, positions.get(o, -1))
    return equations, lambda at: {v for v, last in positions.items() if last >= at}


def with_casts(body: Program, sunk: dict[int, Equation]) -> Program:
    """A loop body whose inputs `sunk` come uncast: the cast runs first, on the slice."""
    if not sunk:
        return body
    inputs, first = list(body.inputs), []
    for i, cast in sunk.items():
        whole = cast.inputs[0]
        raw = Value(inputs[i].name, whole.aval.update(shape=whole.shape[1:]))
        cooked = inputs[i]
        label = f"convert_element_type.sunk{i}"
        inner = Value(label, cooked.aval)
        first.append((raw, inner, Equation(label, cast.primitive, (raw,), (inner,), dict(cast.params), cast.source)))
        inputs[i] = raw
    swap = {old.name: inner for (raw, inner, _), i in zip(first, sunk, strict=True) for old in [body.inputs[i]]}

    def new(o: Operand) -> Operand:
        return swap[o.name] if isinstance(o, Value) and o.name in swap else o

    equations = [replace(e, inputs=tuple(new(o) for o in e.inputs)) for e in body.equations]
    return Program(
        tuple(inputs), (*(e for _, _, e in first), *equations), tuple(new(o) for o in body.outputs), body.constants
    )

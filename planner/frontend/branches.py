"""A program without branches: what ``lax.cond`` would run is run in every case, and the results are selected.

For optimizers, whose branches are cheap and never differentiated: a selection is elementwise, so leaves split and are
cut through it, each in its own way.
"""

from dataclasses import replace

from jax.extend.core import primitives

from planner.frontend.flat import Equation, Operand, Program, Value, flatten


def without_branches(program: Program) -> Program:
    """The same results; branches with effects (a callback) stay as they are."""
    equations: list[Equation] = []
    constants = dict(program.constants)
    for e in program.equations:
        branches = e.params.get("branches", ())
        if e.primitive.name != "cond" or any(branch.effects for branch in branches):
            equations.append(e)
            continue
        which, *operands = e.inputs
        cases: list[list[Operand]] = []
        for b, branch in enumerate(branches):
            names = [f"{e.name}/{b}/in.{i}" for i in range(len(operands))]
            inner = without_branches(flatten(branch, names, f"{e.name}/{b}/", use="run"))
            given: dict[Operand, Operand] = dict(zip(inner.inputs, operands, strict=True))
            constants |= inner.constants
            equations += [replace(i, inputs=tuple(given.get(o, o) for o in i.inputs)) for i in inner.equations]
            cases.append([given.get(o, o) for o in inner.outputs])
        for v, *results in zip(e.outputs, *cases, strict=True):
            assert isinstance(v, Value)
            inputs = (which, *results)
            equations.append(Equation(f"{v.name}/select", primitives.select_n_p, inputs, (v,), {}, e.source))
    return Program(program.inputs, tuple(equations), program.outputs, constants)

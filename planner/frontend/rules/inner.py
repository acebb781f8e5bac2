"""The programs inside a loop, a branch or a function with derivatives of its own, with their dims joined."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from costmodel.sharding import PARTIAL, VARYING
from planner.frontend import jax_compat as jc
from planner.frontend import ops as op_facts
from planner.frontend.flat import Equation, Operand, Program, Use, Value, flatten
from planner.frontend.gradients import annotated, depends, depends_in_loop
from planner.frontend.joint import Classes, Joined, Obstacle, Spread, join_ops, make_ops
from planner.frontend.rules.amount import Amount
from planner.frontend.rules.base import rule_for
from planner.frontend.rules.factors import adds_up

State = int  # a dim, VARYING or PARTIAL
Place = tuple[str, int, int]  # "in" or "out", position, dim
NUMBER = 1  # elements of a result that may be all-reduced as a maximum inside
TWICE = "two dims of one value would be split together"


@dataclass(frozen=True)
class Solution:
    """What splitting one class does.

    Attributes:
        operands, results: state of each. programs: what happens inside each program.
        zeroed: positions of results that the programs leave equal everywhere, and that become summands.
    """

    operands: list[State]
    results: list[State]
    programs: dict[str, Spread]
    zeroed: frozenset[int] = frozenset()


@dataclass(eq=False)
class Inner:
    """The programs inside one equation, with joined dims, and what splitting each class does.

    Attributes:
        programs: by name.
        operand_dims, result_dims: class item of every dim, or None for a dim that the equation walks along.
        solutions: class root -> what a split of it does, or why there is none.
        ahead, back: what running the equation takes, forward and in the backward pass.
        whole: why nothing splits and the equation runs as it is; empty where it does not.
    """

    programs: dict[str, Joined]
    classes: Classes
    operand_dims: list[list[object]] = field(default_factory=list)
    result_dims: list[list[object]] = field(default_factory=list)
    solutions: dict[object, Solution | Obstacle] = field(default_factory=dict)
    roots: list[object] = field(default_factory=list)
    ahead: Amount = field(default_factory=Amount)
    back: Amount = field(default_factory=Amount)
    whole: str = ""


@dataclass(frozen=True)
class Loop:
    """Where a loop's carry stands among its body's inputs."""

    consts: int
    carry: int


def once(eqn: Equation, key: str, make: Callable[[], Any]) -> Any:
    """What `make` found out about an equation, the first time it was asked."""
    if key not in eqn.memo:
        eqn.memo[key] = make()
    return eqn.memo[key]


def load(
    eqn: Equation,
    closed: Any,
    prefix: str,
    classes: Classes,
    moving: Sequence[bool],
    loop: Loop | None = None,
    derivative: bool = False,
) -> Joined:
    """A program inside an equation, flat, with its ops, its dims joined in `classes`.

    Args:
        moving: for each input whether a cotangent may reach it.
        derivative: the program is linear in the inputs that move, and JAX will transpose it. Custom derivatives inside
            have had their effect, and such a function may call itself.
    """
    names = [f"{prefix}in.{i}" for i in range(len(closed.jaxpr.invars))]
    seeds = [n for n, m in zip(names, moving, strict=True) if m]

    def moved_in(program: Program) -> set[str]:
        return depends_in_loop(program, loop.carry, loop.consts, seeds) if loop else depends(program, seeds)

    derivative = derivative or eqn.transposed
    flat: dict[str, Program] = once(eqn, "programs", dict)
    if prefix not in flat:
        use: Use = "transposed" if derivative else "differentiated" if any(moving) else "run"
        program = flatten(jc.as_closed(closed), names, prefix, use=use)
        flat[prefix] = annotated(program, moved_in(program), transposed=derivative)
    program = flat[prefix]
    moved = moved_in(program)
    ops = make_ops(
        program, lambda e: op_facts.op_from_equation(e, rule_for(e.primitive.name), lambda v: v.name in moved)
    )
    return replace(join_ops(program, ops, classes), moved=frozenset(moved))


def join_dims(classes: Classes, a: Operand, b: Operand) -> None:
    """Joins the dims of two values that are one; `b` may have more of them behind."""
    if isinstance(a, Value) and isinstance(b, Value):
        for d, size in enumerate(a.shape):
            if size > 1:
                classes.join((a.name, d), (b.name, d))


def dims_of_values(values: Sequence[Value]) -> list[list[object]]:
    return [[(v.name, d) for d in range(len(v.shape))] for v in values]


def join_results(classes: Classes, eqn: Equation, i: int, *same: Operand) -> None:
    """Joins the dims of inner values that are result `i` of the equation, under the name of the result."""
    for d, n in enumerate(eqn.out_shapes[i]):
        for o in same:
            if n > 1 and isinstance(o, Value):
                classes.join((o.name, d), (f"result.{i}", d))


def dims_of_results(eqn: Equation) -> list[list[object]]:
    return [[(f"result.{i}", d) for d in range(len(shape))] for i, shape in enumerate(eqn.out_shapes)]


def input_states(joined: Joined, root: object, values: Sequence[Operand]) -> dict[str, State] | None:
    """State of each input under a split of `root`; None where one value would be split twice."""
    states: dict[str, State] = {}
    for value in values:
        if isinstance(value, Value):
            dims = [d for d, n in enumerate(value.shape) if n > 1 and joined.classes.find((value.name, d)) is root]
            if len(dims) > 1:
                return None
            states[value.name] = dims[0] if dims else VARYING
    return states


def state_of(spread_: Spread, operand: Operand) -> State:
    return spread_.states.get(operand.name, VARYING) if isinstance(operand, Value) else VARYING


def output_states(joined: Joined, spread_: Spread) -> list[State]:
    """States in which a program's outputs come."""
    return [state_of(spread_, o) for o in joined.program.outputs]


def shared_states(several: Sequence[Sequence[State]], operands: Sequence[Operand]) -> list[State] | None:
    """States that values which come in several ways can all be brought to for free; None where there are none."""
    shared = []
    for states, operand in zip(zip(*several, strict=True), operands, strict=True):
        found = set(states) - {VARYING}
        if len(found) > 1 or (PARTIAL in found and VARYING in states and not adds_up(operand)):
            return None
        shared.append(found.pop() if found else VARYING)
    return shared

"""A backward pass in two parts: B, what the cotangents of a stage's inputs need, and W, the weight gradients.

The backward pass is traced to a jaxpr and its equations are divided: those that the wanted outputs need are B, the rest
is W. What W reads of B's results is *handed* over, so W does nothing that B did. Calls and remats are inlined. A loop
(`scan`) is divided inside: B's loop carries the chain of cotangents and stacks what W's loop reads of it; W's loop
carries only what it sums up. What cannot be divided so (``while``, ``cond``) runs whole in B if B needs any result of
it. Each equation, so each collective, is in exactly one part; only changes of view (a transpose, a broadcast) run again
in W where that hands over no more bytes.

The first stage of a pipeline receives nothing that has a cotangent, so by this rule it would have no B. There `border`
marks the values between blocks, and B makes their cotangents: it is the chain of cotangents there too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from planner.frontend import jax_compat as jc
from planner.frontend.flat import CUSTOM, INLINED

BORDER = "cotangent between blocks"
# Primitives without arithmetic: running one again costs less than keeping its result.
VIEWS = {"broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "convert_element_type", "pvary", "name"}


@jax.custom_vjp
def border(x: Any) -> Any:
    """The identity; its cotangent belongs to B."""
    return x


border.defvjp(lambda x: (x, None), lambda _, g: (checkpoint_name(g, BORDER),))


class Wire:
    """A value of the backward pass, by identity."""

    def __init__(self, aval: Any):
        self.aval = aval

    @property
    def bytes(self) -> int:
        return int(np.prod(self.aval.shape, dtype=np.int64)) * jc.itemsize(self.aval.dtype)


@dataclass(frozen=True, eq=False)
class Fixed:
    """A literal or a captured array."""

    value: Any


Atom = Wire | Fixed


@dataclass(frozen=True, eq=False)
class Step:
    """An equation: `run` takes the values of `inputs` and gives those of `outputs`."""

    inputs: tuple[Atom, ...]
    outputs: tuple[Wire, ...]
    run: Callable[[Sequence[Any]], list[Any]]
    name: str = ""
    marked: bool = False
    loop: "Loop | None" = None


@dataclass(frozen=True, eq=False)
class Block:
    """Steps in order, with what they take and leave."""

    inputs: tuple[Wire, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Atom, ...]


@dataclass(frozen=True, eq=False)
class Loop:
    """A scan. The body takes constants, carries and items, and leaves carries and results."""

    body: Block
    constants: int
    carries: int
    length: int
    reverse: bool
    unroll: Any

    @property
    def marked(self) -> bool:
        return any(step.marked for step in self.body.steps)


def block_of(closed: Any) -> Block:
    """A closed jaxpr with its calls inlined."""
    inputs = tuple(Wire(var.aval) for var in closed.jaxpr.invars)
    steps: list[Step] = []
    outputs = _inline(closed, inputs, steps)
    return Block(inputs, tuple(steps), tuple(outputs))


def _inline(closed: Any, given: Sequence[Atom], steps: list[Step]) -> list[Atom]:
    env: dict[Any, Atom] = dict(zip(closed.jaxpr.invars, given, strict=True))
    env.update((var, Fixed(x)) for var, x in zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def read(atom: Any) -> Atom:
        return Fixed(jc.literal(atom)) if isinstance(atom, jc.Literal) else env[atom]

    for eqn in closed.jaxpr.eqns:
        args = tuple(read(a) for a in eqn.invars)
        if eqn.primitive.name in INLINED | CUSTOM:
            outs: Sequence[Atom] = _inline(jc.inner_jaxpr(eqn), args, steps)
        else:
            outs = tuple(Wire(var.aval) for var in eqn.outvars)
            steps.append(_step(eqn, args, outs))
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(a) for a in closed.jaxpr.outvars]


def _step(eqn: Any, args: tuple[Atom, ...], outs: tuple[Wire, ...]) -> Step:
    name, params = eqn.primitive.name, eqn.params
    loop = None
    if name == "scan":
        body = block_of(jc.as_closed(params["jaxpr"]))
        loop = Loop(
            body, params["num_consts"], params["num_carry"], params["length"], params["reverse"], params["unroll"]
        )
    marked = loop.marked if loop is not None else name == "name" and params["name"] == BORDER
    return Step(args, outs, lambda given: jc.replay(eqn, given), name, marked, loop)


def _wires(atoms: Iterable[Atom]) -> list[Wire]:
    return [a for a in atoms if isinstance(a, Wire)]


def _divide(steps: Sequence[Step], live: set[Wire]) -> tuple[list[Step], list[Step]]:
    """Steps that `live` or a mark needs, and the rest. `live` gets all that the first part reads and makes."""
    first: list[Step] = []
    rest: list[Step] = []
    for step in reversed(steps):
        wanted = [o in live for o in step.outputs]
        if not any(wanted) and not step.marked:
            rest.append(step)
            continue
        if step.loop is not None and not all(wanted):
            step, other = _divide_loop(step, step.loop, wanted)
            rest.extend([other] if other is not None else [])
        first.append(step)
        live.update(_wires(step.inputs))
    return first[::-1], rest[::-1]


def _divide_loop(step: Step, loop: Loop, wanted: Sequence[bool]) -> tuple[Step, Step | None]:
    """A scan as two: the second reads what the first stacked."""
    body, nc, nk = loop.body, loop.constants, loop.carries
    starts, carried, results = body.inputs[nc : nc + nk], body.outputs[:nk], body.outputs[nk:]
    mine = {j for j in range(nk) if wanted[j]}
    while True:  # a carry that B reads is B's, and so is what makes it
        live = {
            *_wires(carried[j] for j in mine),
            *_wires(r for r, w in zip(results, wanted[nk:], strict=True) if w),
        }
        first, rest = _divide(body.steps, live)
        more = {j for j, w in enumerate(starts) if w in live} - mine
        if not more:
            break
        mine |= more
    others = [j for j in range(nk) if j not in mine]
    made = {o for s in first for o in s.outputs} | {starts[j] for j in mine}
    ready = [j for j, r in enumerate(results) if wanted[nk + j] or r in made]
    late = [j for j in range(len(results)) if j not in ready]
    rest_outputs = (*(carried[j] for j in others), *(results[j] for j in late))
    rest, handed = _handed(first, rest, rest_outputs, made)
    stacks = tuple(Wire(jc.stacked_aval(w.aval, loop.length)) for w in handed)
    whole = _Scan(step, loop)
    one = whole.part(
        sorted(mine), first, [*(carried[j] for j in sorted(mine)), *(results[j] for j in ready), *handed],
        [*(step.outputs[j] for j in sorted(mine)), *(step.outputs[nk + j] for j in ready), *stacks],
    )  # fmt: skip
    if not rest_outputs:
        return one, None
    outs = [*(step.outputs[j] for j in others), *(step.outputs[nk + j] for j in late)]
    return one, whole.part(others, rest, rest_outputs, outs, handed, stacks)


@dataclass(frozen=True)
class _Scan:
    """Makes scans of parts of a scan's body."""

    step: Step
    loop: Loop

    def part(
        self,
        carries: Sequence[int],
        steps: Sequence[Step],
        outputs: Sequence[Atom],
        made: Sequence[Wire],
        more: Sequence[Wire] = (),
        more_items: Sequence[Wire] = (),
    ) -> Step:
        """A scan over `steps` that carries the given carries.

        Args:
            outputs: of the body: the carries, then what is stacked; made: what the scan leaves of them.
            more: values of the body that come stacked, as `more_items`.
        """
        loop, nc, nk = self.loop, self.loop.constants, self.loop.carries
        read = {w for s in steps for w in _wires(s.inputs)} | set(_wires(outputs))
        inner = loop.body.inputs
        constants = [i for i in range(nc) if inner[i] in read]
        items = [i for i in range(nc + nk, len(inner)) if inner[i] in read]
        starts = [nc + j for j in carries]
        order = [inner[i] for i in (*constants, *starts, *items)] + list(more)
        body = Block(tuple(order), tuple(steps), tuple(outputs))
        inputs = tuple(self.step.inputs[i] for i in (*constants, *starts, *items)) + tuple(more_items)
        new = Loop(body, len(constants), len(carries), loop.length, loop.reverse, loop.unroll)
        return Step(inputs, tuple(made), lambda given: _scan(new, given), "scan", new.marked, new)


def _scan(loop: Loop, given: Sequence[Any]) -> list[Any]:
    nc, nk = loop.constants, loop.carries

    def body(carry: list[Any], items: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = run_block(loop.body, [*given[:nc], *carry, *items])
        return outs[:nk], outs[nk:]

    last, stacked = lax.scan(
        body, list(given[nc : nc + nk]), list(given[nc + nk :]), loop.length, loop.reverse, loop.unroll
    )
    return [*last, *stacked]


def _handed(
    first: Sequence[Step], rest: Sequence[Step], outputs: Sequence[Atom], made: set[Wire]
) -> tuple[list[Step], list[Wire]]:
    """The rest, with views of B's values made again, and the values of B that it reads."""
    maker = {o: s for s in first for o in s.outputs}
    again: set[Step] = set()
    handed: dict[Wire, None] = {}
    open_wires = _wires((*(a for s in rest for a in s.inputs), *outputs))
    seen: set[Wire] = set()
    while open_wires:
        wire = open_wires.pop(0)
        if wire in seen or wire not in made:
            continue
        seen.add(wire)
        step = maker.get(wire)
        if step is not None and step.name in VIEWS and sum(w.bytes for w in _wires(step.inputs)) <= wire.bytes:
            again.add(step)
            open_wires.extend(_wires(step.inputs))
        else:
            handed[wire] = None
    return [*(s for s in first if s in again), *rest], list(handed)


def run_block(block: Block, given: Sequence[Any]) -> list[Any]:
    """Evaluates a block. Inputs that nothing reads may be None."""
    env: dict[Wire, Any] = dict(zip(block.inputs, given, strict=True))

    def read(atom: Atom) -> Any:
        return env[atom] if isinstance(atom, Wire) else atom.value

    for step in block.steps:
        env.update(zip(step.outputs, step.run([read(a) for a in step.inputs]), strict=True))
    return [read(a) for a in block.outputs]


@dataclass(frozen=True)
class SplitBackward:
    """The two parts of a backward pass.

    Attributes:
        activations: B: the inputs of the whole -> wanted outputs, then what is handed to W.
        weights: W: the inputs of the whole, then what B handed over -> the other outputs.
        handed: number of values that B hands to W.
    """

    activations: Block
    weights: Block
    handed: int

    @cached_property
    def read_by_activations(self) -> tuple[int, ...]:
        """Positions of the inputs that B reads."""
        return _reads(self.activations)

    @cached_property
    def read_by_weights(self) -> tuple[int, ...]:
        """Positions of the inputs of the whole that W reads; what B handed over is not among them."""
        return tuple(i for i in _reads(self.weights) if i < len(self.activations.inputs))


def _reads(block: Block) -> tuple[int, ...]:
    read = {w for s in block.steps for w in _wires(s.inputs)} | set(_wires(block.outputs))
    return tuple(i for i, w in enumerate(block.inputs) if w in read)


def split(closed: Any, wanted: Sequence[bool]) -> SplitBackward:
    """Divides a backward pass.

    Args:
        closed: its closed jaxpr.
        wanted: for each output whether it is B's.
    """
    block = block_of(jc.without_dead_code(closed))
    mine = [o for o, w in zip(block.outputs, wanted, strict=True) if w]
    others = [o for o, w in zip(block.outputs, wanted, strict=True) if not w]
    first, rest = _divide(block.steps, set(_wires(mine)))
    made = {o for s in first for o in s.outputs}
    rest, handed = _handed(first, rest, others, made)
    return SplitBackward(
        Block(block.inputs, tuple(first), (*mine, *handed)),
        Block((*block.inputs, *handed), tuple(rest), tuple(others)),
        len(handed),
    )


__all__ = ["Block", "SplitBackward", "border", "run_block", "split"]

"""A program over parameters, partitioned over pipeline stages: the optimizer's init and update.

Leaves live on stages. An equation whose inputs are all of one stage (or of none) runs there; one that joins several
stages (the sum of a global norm) is **crossing**: its inputs, small by nature, go to the driver, its result to every
stage that reads it. Equations run in phases: stage programs and crossing programs take turns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from costmodel.errors import InputError
from planner.frontend.flat import Equation, Program, Value, flatten, prune

CROSSING = -1
ANYWHERE = -2
SMALL = 1 << 16  # elements that may cross stages in an update


@dataclass(frozen=True)
class Piece:
    """Equations of one phase on one stage (or the driver), as a program of their own."""

    stage: int
    program: Program


@dataclass(frozen=True)
class StagedProgram:
    """Pieces in the order of running.

    Attributes:
        owners: stage of each input by name; ANYWHERE for leaves that every stage has a copy of.
        output_owners: stage that an output made of nothing (zeros) belongs to; those left out are everywhere.
    """

    program: Program
    owners: Mapping[str, int]
    output_names: tuple[str, ...]
    output_owners: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        place: dict[str, tuple[int, int]] = {n: (s, 0) for n, s in self.owners.items()}  # value -> stage, phase
        rows: list[tuple[Equation, int, int]] = []
        for e in self.program.equations:
            inputs = [place.get(o.name, (ANYWHERE, 0)) for o in e.inputs if isinstance(o, Value)]
            stages = {s for s, _ in inputs if s >= 0}
            crossing = any(s == CROSSING for s, _ in inputs)
            if len(stages) > 1:
                large = [o for o in e.inputs if isinstance(o, Value) and _size(o) > SMALL]
                if large:
                    raise InputError("MP116", f"the optimizer joins {large[0]!r} with parameters of other stages in {e.name} ({e.source})",
                                     "only sums and other small values may cross stages; plan with stages=1 for this optimizer")
                stage = CROSSING
            elif stages:
                stage = stages.pop()
            else:
                stage = CROSSING if crossing else ANYWHERE
            phase = max((p + (s == CROSSING and stage >= 0) for s, p in inputs), default=0)
            rows.append((e, stage, phase))
            place.update((v.name, (stage, phase)) for v in e.outputs)
        found: list[Piece] = []
        last = max((p for _, _, p in rows), default=0)
        every = sorted({s for s in self.owners.values() if s >= 0} | {s for _, s, _ in rows if s >= 0}) or [0]
        for phase in range(last + 1):
            for stage in every:
                mine = [e for e, s, p in rows if (s == stage and p == phase) or s == ANYWHERE]
                found.append(self._piece(stage, mine, [e for e, s, p in rows if s == stage and p == phase], rows, phase == 0))
            joint = [e for e, s, p in rows if s in (CROSSING, ANYWHERE) and (s == ANYWHERE or p == phase)]
            if any(s == CROSSING and p == phase for _, s, p in rows):
                found.append(self._piece(CROSSING, joint, [e for e, s, p in rows if s == CROSSING and p == phase], rows, False))
        return tuple(p for p in found if p.program.outputs)

    def _piece(self, stage: int, equations: Sequence[Equation], own: Sequence[Equation], rows: Sequence[Any], shared: bool) -> Piece:
        """`shared`: results that every stage computes alike (step counts) are handed out by this piece."""
        made = {v for e in equations for v in e.outputs}
        mine = {v for e in own for v in e.outputs}
        elsewhere = {o for e, _, _ in rows if e not in own for o in e.inputs if isinstance(o, Value)}
        wanted = {o for o in self.program.outputs if isinstance(o, Value)}
        anywhere_outputs = [
            v for v in made - mine if v in wanted and self.output_owners.get(v.name, stage) == stage
        ] if shared else []
        outputs = [v for v in mine if v in elsewhere or v in wanted] + anywhere_outputs
        outputs.sort(key=lambda v: v.name)
        inputs = list(dict.fromkeys(o for e in equations for o in e.inputs if isinstance(o, Value) and o not in made and o not in self.program.constants))
        constants = {v: a for v, a in self.program.constants.items()}
        slim = prune(Program(tuple(inputs), tuple(equations), tuple(outputs), constants))
        used = {o for e in slim.equations for o in e.inputs if isinstance(o, Value)} | set(outputs)
        return Piece(stage, Program(tuple(v for v in inputs if v in used), slim.equations, slim.outputs, slim.constants))


def _size(value: Value) -> int:
    count = 1
    for n in value.shape:
        count *= n
    return count


def staged(
    function: Callable[..., Any], inputs: Mapping[str, Any], owners: Mapping[str, int], output_stages: Sequence[int] = ()
) -> StagedProgram:
    """Traces ``function(dict of abstract inputs) -> pytree`` and partitions it.

    Args:
        output_stages: stage of each output leaf, where known (ANYWHERE or nothing otherwise).
    """
    names = list(inputs)
    closed = jax.make_jaxpr(lambda *xs: jax.tree.leaves(function(dict(zip(names, xs, strict=True)))))(*inputs.values())
    program = flatten(closed, names)
    outs = tuple(o.name if isinstance(o, Value) else "" for o in program.outputs)
    placed = {n: s for n, s in zip(outs, output_stages) if n and s >= 0}
    return StagedProgram(program, owners, outs, placed)


__all__ = ["ANYWHERE", "CROSSING", "Piece", "StagedProgram", "staged"]

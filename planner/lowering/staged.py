"""A program over parameters, partitioned over pipeline stages: the optimizer's init and update.

Leaves live on stages. An equation whose arrays are all of one stage (or of none) runs there; one that joins several
stages (the sum of a global norm) is **crossing**: its inputs, small by nature, go to the driver, its result to every
stage that reads it. Equations run in phases: stage programs and crossing programs take turns.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from costmodel.errors import InputError
from planner.frontend.flat import Equation, Operand, Program, Value, prune

CROSSING = -1
ANYWHERE = -2
SMALL = 1 << 16  # elements that may cross stages in an update
Row = tuple[Equation, int, int]  # an equation with its stage and phase


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
        rows = self._placed()
        found: list[Piece] = []
        last = max((p for _, _, p in rows), default=0)
        every = sorted({s for s in self.owners.values() if s >= 0} | {s for _, s, _ in rows if s >= 0}) or [0]
        for phase in range(last + 1):
            for stage in every:
                mine = [e for e, s, p in rows if (s == stage and p == phase) or s == ANYWHERE]
                found.append(
                    self._piece(stage, mine, [e for e, s, p in rows if s == stage and p == phase], rows, phase == 0)
                )
            joint = [e for e, s, p in rows if s in (CROSSING, ANYWHERE) and (s == ANYWHERE or p == phase)]
            if any(s == CROSSING and p == phase for _, s, p in rows):
                found.append(
                    self._piece(CROSSING, joint, [e for e, s, p in rows if s == CROSSING and p == phase], rows, False)
                )
        return tuple(p for p in found if p.program.outputs)

    def _placed(self) -> list[Row]:
        """Every equation with its stage and phase. A sum that joins stages is regrouped: each stage sums its own
        first."""
        place: dict[str, tuple[int, int]] = {n: (s, 0) for n, s in self.owners.items()}  # value -> stage, phase
        sums = _scalar_sums(self.program)
        inner = {e.name for leaves in sums.values() for e in leaves.inner}
        rows: list[Row] = []

        def add(e: Equation) -> None:
            inputs = [place.get(o.name, (ANYWHERE, 0)) for o in e.inputs if isinstance(o, Value)]
            stage = self._stage(e, place)
            # Stages of one phase run one after the other, then what joins them: other stages' values come a phase
            # later.
            phase = max((p + (stage >= 0 and s not in (stage, ANYWHERE)) for s, p in inputs), default=0)
            rows.append((e, stage, phase))
            place.update((v.name, (stage, phase)) for v in e.outputs)

        for e in self.program.equations:
            if e.name in sums:
                for regrouped in sums[e.name].by_stage(e, place):
                    add(regrouped)
            elif e.name not in inner:
                add(e)
        return _late(rows, place)

    def _stage(self, e: Equation, place: Mapping[str, tuple[int, int]]) -> int:
        """Where an equation runs: with its only array, single numbers come along; CROSSING where it joins arrays."""
        values = [(o, place.get(o.name, (ANYWHERE, 0))[0]) for o in e.inputs if isinstance(o, Value)]
        stages = {s for _, s in values if s >= 0}
        arrays = {s for o, s in values if s >= 0 and _size(o) > 1}
        if len(stages) == 1:
            return stages.pop()
        if len(arrays) == 1:
            return arrays.pop()
        if any(_size(o) > SMALL for o, s in values if s >= 0):
            large = max((o for o, s in values if s >= 0), key=_size)
            raise InputError(
                "MP116",
                f"the optimizer joins {large!r} with parameters of other stages in {e.name} ({e.source})",
                "only sums and other small values may cross stages; plan with stages=1 for this optimizer",
            )
        return CROSSING if stages or any(s == CROSSING for _, s in values) else ANYWHERE

    def _piece(
        self, stage: int, equations: Sequence[Equation], own: Sequence[Equation], rows: Sequence[Any], shared: bool
    ) -> Piece:
        """`shared`: results that every stage computes alike (step counts) are handed out by this piece."""
        made = {v for e in equations for v in e.outputs}
        mine = {v for e in own for v in e.outputs}
        elsewhere = {o for e, _, _ in rows if e not in own for o in e.inputs if isinstance(o, Value)}
        wanted = {o for o in self.program.outputs if isinstance(o, Value)}
        anywhere_outputs = (
            [v for v in made - mine if v in wanted and self.output_owners.get(v.name, stage) == stage] if shared else []
        )
        outputs = [v for v in mine if v in elsewhere or v in wanted] + anywhere_outputs
        outputs.sort(key=lambda v: v.name)
        inputs = list(
            dict.fromkeys(
                o
                for e in equations
                for o in e.inputs
                if isinstance(o, Value) and o not in made and o not in self.program.constants
            )
        )
        constants = dict(self.program.constants)
        slim = prune(Program(tuple(inputs), tuple(equations), tuple(outputs), constants))
        used = {o for e in slim.equations for o in e.inputs if isinstance(o, Value)} | set(outputs)
        return Piece(
            stage, Program(tuple(v for v in inputs if v in used), slim.equations, slim.outputs, slim.constants)
        )


def _late(rows: list[Row], place: Mapping[str, tuple[int, int]]) -> list[Row]:
    """Every equation in the last phase that its readers allow, so that no large value waits for a later phase."""
    last = max((phase for _, _, phase in rows), default=0)
    limit: dict[str, int] = {}  # value -> the last phase that may make it
    out: list[Row] = []
    for e, stage, phase in reversed(rows):
        if stage >= 0:
            phase = max(phase, min((limit.get(v.name, last) for v in e.outputs), default=last))
        out.append((e, stage, phase))
        for o in e.inputs:
            if isinstance(o, Value):
                other = place.get(o.name, (ANYWHERE, 0))[0]
                allowed = phase - (stage >= 0 and other != stage)
                limit[o.name] = min(limit.get(o.name, last), allowed)
    return out[::-1]


@dataclass(frozen=True)
class ScalarSum:
    """A tree of additions of single numbers: the equations below its root, and its leaves in order."""

    inner: tuple[Equation, ...]
    leaves: tuple[Operand, ...]

    def by_stage(self, root: Equation, place: Mapping[str, tuple[int, int]]) -> list[Equation]:
        """The same sum as equations that first add up what each stage has; the last makes the root's value.

        Leaves come in the order of the user's pytree, in which stages may alternate; added in that order, each
        alternation would be a transfer.
        """
        groups: dict[int, list[Operand]] = {}
        for leaf in self.leaves:
            stage = place.get(leaf.name, (ANYWHERE, 0))[0] if isinstance(leaf, Value) else ANYWHERE
            groups.setdefault(stage, []).append(leaf)
        made: list[Equation] = []

        def chain(operands: list[Operand], last: Value | None) -> Operand:
            total = operands[0]
            for i, operand in enumerate(operands[1:], start=2):
                name = f"{root.name}.sum{len(made)}"
                out = last if last is not None and i == len(operands) else Value(name, root.outputs[0].aval)
                made.append(replace(root, name=name, inputs=(total, operand), outputs=(out,)))
                total = out
            return total

        if len(groups) == 1:
            chain(list(self.leaves), root.outputs[0])
        else:
            chain([chain(own, None) for _, own in sorted(groups.items())], root.outputs[0])
        return made


def _scalar_sums(program: Program) -> dict[str, ScalarSum]:
    """Trees of additions of single numbers by the name of their root; intermediate sums have no other reader."""
    uses = Counter(o for e in program.equations for o in e.inputs if isinstance(o, Value))
    uses.update(o for o in program.outputs if isinstance(o, Value))
    trees: dict[Value, tuple[tuple[Equation, ...], tuple[Operand, ...]]] = {}
    makers = {
        e.outputs[0]: e for e in program.equations if e.primitive.name in ("add", "add_any") and not e.outputs[0].shape
    }
    for value, e in makers.items():
        inner: tuple[Equation, ...] = ()
        leaves: tuple[Operand, ...] = ()
        for o in e.inputs:
            below = trees.pop(o) if isinstance(o, Value) and o in trees and uses[o] == 1 else None
            inner += (*below[0], makers[o]) if below is not None else ()  # type: ignore[index]
            leaves += below[1] if below is not None else (o,)
        trees[value] = (inner, leaves)
    return {makers[v].name: ScalarSum(*t) for v, t in trees.items() if len(t[1]) > 2}


def _size(value: Value) -> int:
    count = 1
    for n in value.shape:
        count *= n
    return count


def stage_program(program: Program, owners: Mapping[str, int], output_stages: Sequence[int]) -> StagedProgram:
    """Partitions a program.

    Args:
        output_stages: stage of each output (ANYWHERE where not known).
    """
    outs = tuple(o.name if isinstance(o, Value) else "" for o in program.outputs)
    placed = {n: s for n, s in zip(outs, output_stages, strict=True) if n and s >= 0}
    return StagedProgram(program, owners, outs, placed)


__all__ = ["ANYWHERE", "CROSSING", "Piece", "StagedProgram", "stage_program"]

"""The optimizer on sharded, staged parameters: the user's own init and update, captured and run where the leaves live.

Leaves that stages cut are cut in its programs too (`optimizer_programs.py`); here each stage's pieces of them run on
its mesh, in the specs that the plan stores parameters and optimizer state in.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from costmodel.graph import Op
from costmodel.sharding import REPLICATED, Spec, Strategy
from planner.frontend import jax_compat as jc
from planner.frontend.flat import Value
from planner.frontend.joint import make_ops
from planner.frontend.ops import op_from_equation, rule_for
from planner.frontend.task import TrainingTask
from planner.lowering.optimizer_programs import OptimizerPrograms, Part, optimizer_programs, parts_of
from planner.lowering.placement import GroupPlacement, partition
from planner.lowering.propagate import propagate
from planner.lowering.spmd import LocalProgram
from planner.lowering.stage import cast_on
from planner.lowering.staged import ANYWHERE, CROSSING, Piece, StagedProgram
from planner.lowering.written import GATHER, UPDATE


@dataclass(frozen=True)
class PieceSpecs:
    """How a piece runs on its stage's mesh: strategies of its ops, specs of what it takes and leaves."""

    ops: dict[str, Op]
    strategies: dict[str, Strategy]
    inputs: dict[str, Spec]
    outputs: dict[str, Spec]


@dataclass(frozen=True)
class Updater:
    """Init and update of the optimizer over all stages.

    Attributes:
        placements: of each stage's first group.
    """

    task: TrainingTask
    parts: dict[str, Part]
    placements: tuple[GroupPlacement, ...]

    def __post_init__(self) -> None:
        _ = self.programs  # refuses an optimizer that cannot run on these parts

    @cached_property
    def programs(self) -> OptimizerPrograms:
        return optimizer_programs(self.task, self.parts)

    @property
    def init_program(self) -> StagedProgram:
        return self.programs.init

    @property
    def update_program(self) -> StagedProgram:
        return self.programs.update

    @property
    def state_owner(self) -> dict[str, str | None]:
        """State leaf name -> key of the part that it belongs to (None for step counts and the like)."""
        return self.programs.owner

    @cached_property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(leaf.shape) for name, leaf in self.programs.state.items()}

    @cached_property
    def state_dtypes(self) -> dict[str, Any]:
        return {name: leaf.dtype for name, leaf in self.programs.state.items()}

    def collect_state(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """State leaves out of the values of the init program (constants are made here)."""
        return dict(zip(self.programs.made, self._outputs(self.init_program, values), strict=True))

    def collect_update(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """New parameters and state leaves out of the values of the update program, by the names of what they
        replace."""
        return dict(zip(self.programs.replaced, self._outputs(self.update_program, values), strict=True))

    def _outputs(self, program: StagedProgram, values: Mapping[str, Any]) -> list[Any]:
        return [
            values[o.name] if isinstance(o, Value) else jnp.asarray(o.value, o.aval.dtype)
            for o in program.program.outputs
        ]

    @cached_property
    def new_names(self) -> dict[str, str]:
        """Output value of the update program -> the input that it replaces."""
        names = zip(self.update_program.output_names, self.programs.replaced, strict=True)
        return {out: target for out, target in names if out}

    def spec_of(self, name: str, shape: tuple[int, ...], stage: int) -> Spec:
        """Spec of an input or output of the update: parameters as stored, gradients and state as the plan splits
        them."""
        whole = self.placements[max(stage, 0)].whole
        kind, _, key = name.partition("/")
        if kind == "param" and key in self.parts:
            return self.parts[key].held.value
        if kind == "grad":
            return self.parts[key].held.optimizer
        owner = self.state_owner.get(name)
        if owner is not None and tuple(shape) == self.parts[owner].held.shape:
            return self.parts[owner].held.optimizer
        return whole

    @cached_property
    def _piece_specs(self) -> dict[int, "PieceSpecs"]:
        """By identity of the piece."""
        found: dict[int, PieceSpecs] = {}
        for program, rename, prefix in (
            (self.init_program, self.init_names, "param/"),
            (self.update_program, self.new_names, ""),
        ):
            between: dict[str, tuple[int, Spec]] = {}  # value that a later piece reads -> stage and spec
            for piece in program.pieces:
                if piece.stage != CROSSING:
                    found[id(piece)] = self._specs_of(piece, rename, prefix, between)
        return found

    def _specs_of(
        self, piece: Piece, rename: Mapping[str, str], prefix: str, between: dict[str, tuple[int, Spec]]
    ) -> "PieceSpecs":
        placement = self.placements[piece.stage]
        ops = make_ops(piece.program, lambda e: op_from_equation(e, rule_for(e.primitive.name), lambda v: False))

        def known(v: Value) -> Spec | None:
            name = rename.get(v.name, f"{prefix}{v.name}")
            kind, _, key = name.partition("/")
            if name in self.state_owner or (kind in ("param", "grad") and key in self.parts):
                return self.spec_of(name, v.shape, piece.stage)
            return None

        inputs = {}
        for v in piece.program.inputs:
            stage, spec = between.get(v.name, (ANYWHERE, placement.whole))
            inputs[v.name] = known(v) or (spec if stage == piece.stage else placement.whole)
        strategies, specs = propagate(piece.program, ops, inputs, placement.sizes)
        outputs = {}
        for v in piece.program.outputs:
            if isinstance(v, Value):
                # What only a later piece of the stage reads stays split as it comes.
                split = tuple(c if c >= 0 else REPLICATED for c in specs.get(v.name, placement.whole))
                outputs[v.name] = known(v) or split
                between[v.name] = (piece.stage, outputs[v.name])
        return PieceSpecs(ops, strategies, inputs, outputs)

    def local_piece(self, piece: Piece, values: Mapping[str, Any]) -> dict[str, Any]:
        """Runs a piece on one device's parts; results by value name."""
        program, placement, specs = piece.program, self.placements[piece.stage], self._piece_specs[id(piece)]
        local = LocalProgram(
            program=program,
            ops=specs.ops,
            strategies=specs.strategies,
            mesh=placement.sizes,
            axis_names=placement.axis_names,
        )
        with jax.named_scope(UPDATE):
            given = [values[v.name] for v in program.inputs]
            outs, have = local(given, [specs.inputs[v.name] for v in program.inputs])
        found = {}
        for v, x, spec in zip(program.outputs, outs, have, strict=True):
            if isinstance(v, Value):
                new = self.new_names.get(v.name, "").startswith("param/")
                with jax.named_scope(GATHER if new else UPDATE):
                    itemsize = jc.itemsize(v.aval.dtype)
                    found[v.name] = cast_on(x, v.shape, itemsize, spec, specs.outputs[v.name], placement)
        return found

    def partitions(self, piece: Piece) -> tuple[dict[str, PartitionSpec], dict[str, PartitionSpec]]:
        """PartitionSpecs of a piece's inputs and outputs."""
        specs, names = self._piece_specs[id(piece)], self.placements[piece.stage].axis_names
        dims = {v.name: len(v.shape) for v in (*piece.program.inputs, *piece.program.outputs) if isinstance(v, Value)}
        inputs, outputs = (
            {n: partition(spec, dims[n], names) for n, spec in some.items()} for some in (specs.inputs, specs.outputs)
        )
        return inputs, outputs

    def last_reads(self, piece: Piece) -> tuple[str, ...]:
        """Values that no piece of the update after this one reads, and that are none of its results."""
        return tuple(v.name for v in piece.program.inputs if self._last_reader.get(v.name) is piece)

    @cached_property
    def _last_reader(self) -> dict[str, Piece]:
        found = {v.name: piece for piece in self.update_program.pieces for v in piece.program.inputs}
        return {name: piece for name, piece in found.items() if name not in self.update_program.output_names}

    def written_over(self, piece: Piece) -> frozenset[str]:
        """What a piece reads last and its results can take the place of, one for each: parameters and state leaves
        first, as the gradient of a parameter is gone afterwards anyway."""
        in_specs, out_specs = self.partitions(piece)
        room = Counter(
            (v.shape, v.aval.dtype, out_specs[v.name]) for v in piece.program.outputs if isinstance(v, Value)
        )
        found = set()
        avals = {v.name: v for v in piece.program.inputs}
        for name in sorted(self.last_reads(piece), key=lambda n: n.startswith("grad/")):
            place = (avals[name].shape, avals[name].aval.dtype, in_specs[name])
            if room[place]:
                room[place] -= 1
                found.add(name)
        return frozenset(found)

    @cached_property
    def init_names(self) -> dict[str, str]:
        """Output value of the init program -> state leaf name. An output may be a bare input or constant."""
        return {out: name for out, name in zip(self.init_program.output_names, self.programs.made, strict=True) if out}


__all__ = ["OptimizerPrograms", "Part", "Updater", "parts_of"]

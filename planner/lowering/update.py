"""The optimizer on sharded, staged parameters: the user's own init and update, captured and run where the leaves live.

Every trained leaf, or the part of it that a stage holds, is a leaf of its own to the optimizer. Elementwise updates and
sums over leaves (a global norm) do not see the difference; an update that works leaf by leaf (lamb, adafactor) would,
and is refused where a stacked leaf is cut between stages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from costmodel.errors import InputError
from costmodel.graph import Op
from costmodel.sharding import REPLICATED, Spec, Strategy
from planner.frontend import jax_compat as jc
from planner.frontend.flat import Value
from planner.frontend.joint import make_ops
from planner.frontend.ops import op_from_equation, rule_for
from planner.frontend.task import TrainingTask
from planner.lowering.placement import GroupPlacement, partition
from planner.lowering.propagate import propagate
from planner.lowering.spmd import LocalProgram
from planner.lowering.stage import HeldParameter, cast_on
from planner.lowering.staged import ANYWHERE, CROSSING, Piece, StagedProgram, staged
from planner.lowering.written import GATHER, UPDATE


@dataclass(frozen=True)
class Part:
    """A trained leaf, or the part of it that one stage holds.

    Attributes:
        key: its name to the optimizer; name: of the parameter's value.
    """

    key: str
    name: str
    stage: int
    held: HeldParameter


def parts_of(stages: list[dict[str, HeldParameter]]) -> dict[str, Part]:
    """Parts by key. A leaf that several stages hold whole (tied) belongs to the first."""
    found: dict[str, Part] = {}
    for stage, held in enumerate(stages):
        for name, p in held.items():
            if not p.trained:
                continue
            if p.items is None:
                found.setdefault(name, Part(name, name, stage, p))
            else:
                split = any(name in other and other is not held for other in stages)
                key = f"{name}@{stage}" if split else name
                found[key] = Part(key, name, stage, p)
    return found


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
        if any("@" in key for key in self.parts):
            check_separable(self.task)

    @cached_property
    def _abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {k: jax.ShapeDtypeStruct(p.held.shape, p.held.dtype) for k, p in self.parts.items()}

    @cached_property
    def init_program(self) -> StagedProgram:
        owners = {k: p.stage for k, p in self.parts.items()}
        stages = [self.parts[k].stage if k is not None else ANYWHERE for k in self.state_owner.values()]
        return staged(self.task.optimizer.init, self._abstract, owners, stages)

    @cached_property
    def _state(self) -> tuple[list[tuple[Any, Any]], Any]:
        abstract = jax.eval_shape(self.task.optimizer.init, self._abstract)
        return jax.tree_util.tree_leaves_with_path(abstract), jax.tree.structure(abstract)

    @cached_property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {f"state/{i}": tuple(leaf.shape) for i, (_, leaf) in enumerate(self._state[0])}

    @cached_property
    def state_dtypes(self) -> dict[str, Any]:
        return {f"state/{i}": leaf.dtype for i, (_, leaf) in enumerate(self._state[0])}

    def collect_state(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """State leaves out of the values of the init program (constants are made here)."""
        return dict(zip(self.state_owner, self._outputs(self.init_program, values), strict=True))

    def collect_update(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """New parameters and state leaves out of the values of the update program, by the names of what they
        replace."""
        names = [*(f"param/{k}" for k in self.parts), *self.state_owner]
        return dict(zip(names, self._outputs(self.update_program, values), strict=True))

    def _outputs(self, program: StagedProgram, values: Mapping[str, Any]) -> list[Any]:
        return [
            values[o.name] if isinstance(o, Value) else jnp.asarray(o.value, o.aval.dtype)
            for o in program.program.outputs
        ]

    @cached_property
    def state_owner(self) -> dict[str, str | None]:
        """State leaf name -> key of the part that it belongs to (None for step counts and the like)."""
        found: dict[str, str | None] = {}
        for i, (path, _) in enumerate(self._state[0]):
            found[f"state/{i}"] = next(
                (k.key for k in reversed(path) if isinstance(k, jax.tree_util.DictKey) and k.key in self.parts), None
            )
        return found

    @cached_property
    def update_program(self) -> StagedProgram:
        leaves, tree = self._state
        inputs: dict[str, Any] = {f"param/{k}": a for k, a in self._abstract.items()}
        inputs |= {f"grad/{k}": a for k, a in self._abstract.items()}
        inputs |= {f"state/{i}": leaf for i, (_, leaf) in enumerate(leaves)}
        owners = {f"{kind}/{k}": p.stage for k, p in self.parts.items() for kind in ("param", "grad")}
        owners |= {n: self.parts[k].stage if k is not None else ANYWHERE for n, k in self.state_owner.items()}

        def step(given: Mapping[str, Any]) -> Any:
            params = {k: given[f"param/{k}"] for k in self.parts}
            grads = {k: given[f"grad/{k}"] for k in self.parts}
            state = jax.tree.unflatten(tree, [given[f"state/{i}"] for i in range(len(leaves))])
            updates, state = self.task.optimizer.update(grads, state, params)
            return [optax.apply_updates(params, updates)[k] for k in self.parts], jax.tree.leaves(state)

        stages = [self.parts[k].stage for k in self.parts]
        stages += [self.parts[k].stage if k is not None else ANYWHERE for k in self.state_owner.values()]
        return staged(step, inputs, owners, stages)

    @cached_property
    def new_names(self) -> dict[str, str]:
        """Output value of the update program -> the input that it replaces."""
        targets = [*(f"param/{k}" for k in self.parts), *self.state_owner]
        return {out: target for out, target in zip(self.update_program.output_names, targets, strict=True) if out}

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

    @cached_property
    def init_names(self) -> dict[str, str]:
        """Output value of the init program -> state leaf name. An output may be a bare input or constant."""
        return {out: f"state/{i}" for i, out in enumerate(self.init_program.output_names) if out}


def check_separable(task: TrainingTask) -> None:
    """Refuses an optimizer whose update of a leaf is not the updates of its slices.

    Tried on a small leaf of random numbers, whole and cut along its leading dim, for two steps.

    Raises:
        InputError: the results differ.
    """
    rng = np.random.default_rng(0)
    whole, grads = (jnp.asarray(rng.normal(size=(4, 3, 8)), jnp.float32) for _ in range(2))

    def run(cut: bool) -> Any:
        def split(x: Any) -> dict[str, Any]:
            return {"a": x[:1], "b": x[1:]} if cut else {"a": x}

        def steps(start: Any, gradient: Any) -> Any:
            params, state = split(start), task.optimizer.init(split(start))
            for scale in (1.0, 0.5):
                updates, state = task.optimizer.update(
                    jax.tree.map(lambda g, scale=scale: g * scale, split(gradient)), state, params
                )
                params = optax.apply_updates(params, updates)
            return jnp.concatenate([params["a"], params["b"]]) if cut else params["a"]

        return jax.jit(steps)(whole, grads)  # one compile; op by op an optimizer is dozens

    if not np.allclose(run(True), run(False), rtol=1e-5, atol=1e-7):
        raise InputError(
            "MP116",
            "the optimizer updates a stacked parameter differently when its layers are split over stages "
            "(it works on whole leaves, as lamb and adafactor do)",
            "plan with stages=1, or give the layers as separate parameters instead of a stack",
        )


__all__ = ["Part", "Updater", "check_separable", "parts_of"]

"""Runs a plan of several stages or groups: executables per stage group, driven by the plan's action lists.

Everything is dispatched ahead; arrays stay on their devices and cross stages by ``device_put``. Gradients of the groups
of a stage, and of a parameter that several stages read, meet by transfer and add; the owner updates and sends the new
value. The arrays of a state are given away to the step that it is passed to.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from costmodel.schedule.actions import Action, Schedule
from costmodel.schedule.validate import dependency_order
from costmodel.units import format_count
from planner.frontend import jax_compat as jc
from planner.frontend.flat import Value
from planner.lowering.feed import Feed
from planner.lowering.group_programs import GroupPrograms
from planner.lowering.pipeline_step import PipelineStep
from planner.lowering.staged import CROSSING, Piece
from planner.lowering.state import TrainState, apart, require_alive
from planner.lowering.update import Updater
from planner.lowering.verify import Verification, check_shardings, verify_pipeline

Actor = tuple[int, int]  # (virtual) stage, group


@dataclass(frozen=True)
class PipelineTrainer:
    """`init`, `step` and `params` of a plan of several stage groups.

    Attributes:
        programs: by (stage, group).
        shares: microbatches that each group runs.
        check: whether the first step compares where its results lie with the plan.
    """

    programs: dict[Actor, GroupPrograms]
    shares: dict[Actor, tuple[int, ...]]
    schedule: Schedule
    updater: Updater
    feed: Feed
    check: bool = True
    _jitted: dict[int, Any] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)

    def __repr__(self) -> str:
        task, devices = self.feed.capture.task.name, sum(len(p.placement.plan.devices) for p in self.programs.values())
        stages, runs = (
            format_count(self.stages, "stage"),
            format_count(self.feed.microbatches, "microbatch", "microbatches"),
        )
        return f"Trainer of {task}: {stages} on {devices} devices, {runs} a step"

    @cached_property
    def stages(self) -> int:
        return 1 + max(stage for stage, _ in self.programs)

    @cached_property
    def runner(self) -> dict[tuple[int, int], Actor]:
        """(stage, microbatch) -> the group that runs it."""
        return {(actor[0], i): actor for actor, share in self.shares.items() for i in share}

    @cached_property
    def maker(self) -> dict[str, int]:
        """Value -> stage that makes it."""
        return {
            s.value: stage
            for (stage, g), p in self.programs.items()
            if g == 0
            for b in p.micro.stage.blocks
            for s in b.outputs
        }

    @cached_property
    def readers(self) -> Counter[str]:
        """Value that crosses stages -> number of stages that read it."""
        return Counter(
            name for (_, g), p in self.programs.items() if g == 0 for name in p.micro.receives if name in self.maker
        )

    @cached_property
    def _state_home(self) -> dict[str, Actor]:
        """Carried state leaf -> the first actor that reads it."""
        found: dict[str, Actor] = {}
        for actor, p in sorted(self.programs.items()):
            for name in p.micro.receives:
                found.setdefault(name, actor)
        return found

    # init and results

    def init(self, params: Any, state: Any = None) -> TrainState:
        """Puts each stage's part of the parameters on its devices and makes the optimizer state there."""
        named = self.feed.named_params(params)
        placed, used = [], set()
        for _, p in sorted(self.programs.items()):
            own = {}
            for name, held in p.micro.held.items():
                whole = named[name] if held.items is None else named[name][held.items[0] : held.items[1]]
                own[name] = jax.device_put(  # a copy: the step gives it away, and it may be the user's own array
                    jnp.copy(whole) if isinstance(whole, jax.Array) else whole, p.sharding(p.param_specs[name])
                )
                used.add(name)
            placed.append(own)
        carried = {}
        for name, x in self.feed.named_state(state).items():
            actor = self._state_home.get(name, (0, 0))
            carried[name] = jax.device_put(x, self.programs[actor].sharding(PartitionSpec()))
        values: dict[str, Any] = {
            k: placed[self.index[part.stage, 0]][part.name] for k, part in self.updater.parts.items()
        }
        for piece in self.updater.init_program.pieces:
            values.update(self.run_piece(piece, values))
        optimizer = apart(self.updater.collect_state(values), (x for own in placed for x in own.values()))
        return TrainState(tuple(placed), optimizer, carried, {n: x for n, x in named.items() if n not in used})

    @cached_property
    def index(self) -> dict[Actor, int]:
        return {actor: i for i, actor in enumerate(sorted(self.programs))}

    def params(self, state: TrainState) -> Any:
        """Parameters in the user's own pytree; layers of different stages are joined on the host."""
        pieces: dict[str, dict[int, Any]] = {}
        for actor, i in self.index.items():
            if actor[1] == 0:
                for name, held in self.programs[actor].micro.held.items():
                    pieces.setdefault(name, {}).setdefault(held.items[0] if held.items else 0, state.params[i][name])
        named = {
            n: parts[0]
            if len(parts) == 1 and self._whole(n)
            else jnp.asarray(np.concatenate([np.asarray(parts[k]) for k in sorted(parts)]))
            for n, parts in pieces.items()
        }
        return self.feed.params_tree({**state.unused, **named})

    def _whole(self, name: str) -> bool:
        return all(p.micro.held[name].items is None for p in self.programs.values() if name in p.micro.held)

    def state(self, state: TrainState) -> Any:
        """The carried state in the user's own pytree."""
        return self.feed.state_tree(state.carried)

    # one step

    def step(self, state: TrainState, batch: Any, rng: Any = None) -> tuple[TrainState, dict[str, Any]]:
        """One step on a global batch. Metrics hold ``loss`` and, where the task has aux outputs, ``aux`` by
        microbatch. The state is consumed."""
        require_alive(state)
        run = self.begin(state, self.feed.leaves(batch, rng))
        for actor, action in self.order:
            run.run(actor, action)
        new, metrics = run.finish()
        if self.check and "shardings" not in self._done:
            self.check_shardings(new)
        return new, metrics

    def heaviest(self, actor: Actor) -> GroupPrograms:
        """Of all programs that an actor has for a unit of work, those that do the most."""
        return self.programs[actor]

    def held_bytes(self, actor: Actor) -> int:
        """Bytes that a device holds of one unit of work from its F to its B, at most."""
        return self.programs[actor].residual_bytes

    def traces(self, actor: Actor) -> list[tuple[str, Any]]:
        """An actor's programs, traced, with the phase of each; on the first group of a stage its update too."""
        traces = self.heaviest(actor).traces()
        return traces + [("once", traced) for traced in self.update_traces(actor[0])] if actor[1] == 0 else traces

    def begin(self, state: TrainState, leaves: dict[str, Any]) -> PipelineStep:
        """A step before its first action.

        Args:
            leaves: as `Feed.leaves` gives them.
        """
        return PipelineStep(self, state, leaves)

    def check_shardings(self, state: TrainState) -> int:
        """Number of arrays compared.

        Raises:
            LoweringError: MP503, a parameter or a leaf of the optimizer's state does not lie where the plan says.
        """
        self._done.add("shardings")
        found = [
            (f"stage {actor[0]} group {actor[1]}: {name}", state.params[i][name], p.sharding(p.param_specs[name]))
            for actor, i in self.index.items()
            for p in (self.programs[actor],)
            for name in p.micro.held
        ]
        for name, key in self.updater.state_owner.items():
            if key is not None:
                placement = self.programs[self.updater.parts[key].stage, 0].placement
                shape = self.updater.state_shapes[name]
                spec = self.updater.spec_of(name, shape, self.updater.parts[key].stage)
                found.append((f"optimizer state of {key}", state.optimizer[name], placement.sharding(spec, len(shape))))
        return check_shardings(found)

    def verify(self, *, compiled: bool = True) -> Verification:
        """Compares bytes kept for the backward pass and collectives of every stage group with the plan.

        Args:
            compiled: also compile the programs (again, so that collectives stay apart) and count in the HLO.

        Raises:
            LoweringError: MP504 or MP505, they differ.
        """
        report = verify_pipeline(self, compiled=compiled)
        report.check()
        return report

    @cached_property
    def order(self) -> list[tuple[Actor, Action]]:
        """Every action, with the stage group that runs it, in an order that respects what it waits for."""
        rows = self.schedule.actions
        return [
            ((action.stage, rows[i].group), action) for i, action in dependency_order(self.schedule, self.stages).order
        ]

    @cached_property
    def actor_of(self) -> dict[Actor, Actor]:
        """(Virtual stage, group) -> (stage, group) of the action list that runs it."""
        return {(a.stage, row.group): (row.stage, row.group) for row in self.schedule.actions for a in row.actions}

    def run_piece(self, piece: Piece, values: Mapping[str, Any]) -> dict[str, Any]:
        """Runs a piece of the optimizer where it lives; results by value name. What it reads for the last time and can
        be written over is given away."""
        if piece.stage == CROSSING:
            return self._run_crossing(piece, values)
        run, given, kept = self._piece(piece)
        mesh = self.programs[piece.stage, 0].placement.mesh
        return run(
            *({n: jax.device_put(values[n], NamedSharding(mesh, s)) for n, s in some.items()} for some in (given, kept))
        )

    def _piece(self, piece: Piece) -> tuple[Any, dict[str, PartitionSpec], dict[str, PartitionSpec]]:
        """jit of a piece of one stage, and the specs of what it takes: of values that it is given for good and of
        others."""
        if id(piece) not in self._jitted:
            in_specs, out_specs = self.updater.partitions(piece)
            donated = self.updater.written_over(piece)
            given, kept = ({n: s for n, s in in_specs.items() if (n in donated) == wanted} for wanted in (True, False))
            mapped = jax.shard_map(
                lambda given, kept: self.updater.local_piece(piece, {**given, **kept}),
                mesh=self.programs[piece.stage, 0].placement.mesh,
                in_specs=(given, kept),
                out_specs=out_specs,
            )
            self._jitted[id(piece)] = jax.jit(mapped, donate_argnums=(0,)), given, kept
        return self._jitted[id(piece)]

    def update_traces(self, stage: int) -> list[Any]:
        """The optimizer's programs of a stage, traced for abstract arguments."""
        return [run.trace(*arguments) for run, arguments in self.update_calls(stage)]

    def update_calls(self, stage: int) -> list[tuple[Any, tuple[Any, ...]]]:
        """The optimizer's programs of a stage, with abstract arguments."""
        found = []
        for piece in self.updater.update_program.pieces:
            if piece.stage == stage:
                run, *specs = self._piece(piece)
                mesh = self.programs[stage, 0].placement.mesh
                avals = {v.name: v for v in piece.program.inputs}
                arguments = tuple(
                    {
                        n: jax.ShapeDtypeStruct(avals[n].shape, avals[n].aval.dtype, sharding=NamedSharding(mesh, s))
                        for n, s in some.items()
                    }
                    for some in specs
                )
                found.append((run, arguments))
        return found

    def _run_crossing(self, piece: Piece, values: Mapping[str, Any]) -> dict[str, Any]:
        """Joins small values of several stages on the first device."""
        if id(piece) not in self._jitted:
            self._jitted[id(piece)] = jax.jit(lambda given: _evaluate(piece, given))
        devices = self.programs[0, 0].placement.devices
        assert devices is not None, "a trainer without devices cannot run"
        home = devices[0]
        return self._jitted[id(piece)]({v.name: jax.device_put(values[v.name], home) for v in piece.program.inputs})


def _evaluate(piece: Piece, given: Mapping[str, Any]) -> dict[str, Any]:
    env: dict[str, Any] = dict(given)
    for e in piece.program.equations:
        args = [env[o.name] if isinstance(o, Value) else jnp.asarray(o.value, o.aval.dtype) for o in e.inputs]
        env.update(zip((v.name for v in e.outputs), jc.bind(e.primitive, args, e.params), strict=True))
    return {v.name: env[v.name] for v in piece.program.outputs if isinstance(v, Value)}

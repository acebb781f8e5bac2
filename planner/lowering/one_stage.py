"""A plan of one stage with one group: the whole step is one program under jit.

The microbatch loop is a scan. Parameters are made varying before it and gradients are summed once after it, so the loop
holds no data-parallel collective but those that the plan has per microbatch (ZeRO-3's gathers, ZeRO-2's scatters).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from costmodel.units import format_count
from planner.frontend import jax_compat as jc
from planner.lowering.feed import Feed
from planner.lowering.microbatch import MicrobatchProgram, cotangents, summand
from planner.lowering.placement import GroupPlacement, partition
from planner.lowering.stage import hoist, shifted
from planner.lowering.state import TrainState, require_alive
from planner.lowering.update import Updater
from planner.lowering.verify import Verification, check_shardings, verify_one_stage
from planner.lowering.written import ACCUMULATE, LOSS, REDUCE


@dataclass(frozen=True)
class OneStageTrainer:
    """Runs a plan of one stage: `init`, `step`, `params`, `verify`.

    Attributes:
        check: whether the first step compares where its results lie with the plan.
    """

    micro: MicrobatchProgram
    updater: Updater
    feed: Feed
    check: bool = True
    _done: set[str] = field(default_factory=set)

    def __repr__(self) -> str:
        task, devices = self.feed.capture.task.name, len(self.placement.plan.devices)
        runs = format_count(self.feed.microbatches, "microbatch", "microbatches")
        return f"Trainer of {task}: 1 stage on {format_count(devices, 'device')}, {runs} a step"

    @property
    def placement(self) -> GroupPlacement:
        return self.micro.stage.placement

    @cached_property
    def param_specs(self) -> dict[str, PartitionSpec]:
        names = self.placement.axis_names
        return {n: partition(p.value, len(p.shape), names) for n, p in self.micro.held.items()}

    @cached_property
    def state_specs(self) -> dict[str, PartitionSpec]:
        """PartitionSpecs of the optimizer state's leaves."""
        names = self.placement.axis_names
        shapes = self.updater.state_shapes
        return {n: partition(self.updater.spec_of(n, s, 0), len(s), names) for n, s in shapes.items()}

    @cached_property
    def batch_specs(self) -> dict[str, PartitionSpec]:
        """PartitionSpecs of fed leaves: split ones have a leading microbatch dim."""
        out = {}
        for name, spec in self.micro.receives.items():
            if self.micro.stage.capture.inputs[name].role in ("batch", "rng"):
                dims, stacked = len(self.micro.tensor(name).shape), self.feed.is_split(name)
                out[name] = partition(shifted(spec, 1) if stacked else spec, dims + stacked, self.placement.axis_names)
        return out

    def init(self, params: Any, state: Any = None) -> TrainState:
        """Puts parameters where the plan says and makes the optimizer state.

        Args:
            params: the user's pytree of arrays.
            state: the carried state's initial pytree, where the task has one.
        """
        placed = self.feed.named_params(params)
        arrays = {n: self._placed(placed[n], spec) for n, spec in self.param_specs.items()}
        carried = {n: self._placed(x, PartitionSpec()) for n, x in self.feed.named_state(state).items()}
        make = jax.shard_map(
            self._init_local, mesh=self.placement.mesh, in_specs=(self.param_specs,), out_specs=self.state_specs
        )
        unused = {n: x for n, x in placed.items() if n not in arrays}
        return TrainState(params=({**arrays},), optimizer=jax.jit(make)(arrays), carried=carried, unused=unused)

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.placement.mesh, spec)

    def _placed(self, x: Any, spec: PartitionSpec) -> Any:
        """An array where the plan says. The step donates it, so it must not share memory with the user's own array, as
        ``device_put`` from one of our devices would make it do."""
        return jax.device_put(jnp.copy(x) if isinstance(x, jax.Array) else x, self._sharding(spec))

    def _init_local(self, params: dict[str, Any]) -> dict[str, Any]:
        values = {k: params[p.name] for k, p in self.updater.parts.items()}
        for piece in self.updater.init_program.pieces:
            values.update(self.updater.local_piece(piece, values))
        return self.updater.collect_state(values)

    def step(self, state: TrainState, batch: Any, rng: Any = None) -> tuple[TrainState, dict[str, Any]]:
        """One step on a global batch. Metrics hold ``loss`` and, where the task has aux outputs, ``aux`` by
        microbatch. The state is consumed."""
        require_alive(state)
        leaves = self.feed.leaves(batch, rng)
        fed = {n: jax.device_put(leaves[n], self._sharding(spec)) for n, spec in self.batch_specs.items()}
        params, optimizer, carried, loss, aux = self.compiled(state.params[0], state.optimizer, state.carried, fed)
        new = TrainState(params=(params,), optimizer=optimizer, carried=carried, unused=state.unused)
        if self.check and "shardings" not in self._done:
            self.check_shardings(new)
        metrics = {"loss": loss}
        if self.feed.capture.task.has_aux:
            metrics["aux"] = self.feed.aux(aux)
        return new, metrics

    def check_shardings(self, state: TrainState) -> int:
        """Number of arrays compared.

        Raises:
            LoweringError: MP503, a parameter or a leaf of the optimizer's state does not lie where the plan says.
        """
        self._done.add("shardings")
        specs = [*self.param_specs.items(), *self.state_specs.items()]
        arrays = {**state.params[0], **state.optimizer}
        return check_shardings((n, arrays[n], self._sharding(spec)) for n, spec in specs)

    def verify(self, *, compiled: bool = True) -> Verification:
        """Compares bytes kept for the backward pass and collectives with the plan.

        Args:
            compiled: also compile the step (again, so that collectives stay apart) and count in the HLO.

        Raises:
            LoweringError: MP504 or MP505, they differ.
        """
        report = verify_one_stage(self, compiled=compiled)
        report.check()
        return report

    def params(self, state: TrainState) -> Any:
        """Parameters in the user's own pytree."""
        return self.feed.params_tree({**state.unused, **state.params[0]})

    def state(self, state: TrainState) -> Any:
        """The carried state in the user's own pytree."""
        return self.feed.state_tree(state.carried)

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        """jit of (params, optimizer state, carried state, batch) -> (params, optimizer state, carried state, loss,
        aux)."""
        whole = PartitionSpec()
        local = jax.shard_map(
            self._step_local,
            mesh=self.placement.mesh,
            in_specs=(self.param_specs, self.state_specs, whole, self.batch_specs),
            out_specs=(self.param_specs, self.state_specs, whole, whole, whole),
        )
        return jax.jit(local, donate_argnums=(0, 1, 2))

    def lower(self) -> Any:
        """The step lowered for abstract arguments, for compile checks."""
        return self.trace().lower()

    def trace(self) -> Any:
        """The step traced for abstract arguments."""
        return self.compiled.trace(*self.abstract_arguments())

    def abstract_arguments(self) -> tuple[Any, ...]:
        """What `compiled` takes: parameters, optimizer state, carried state, batch."""
        held = self.micro.held
        params = {
            n: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=self._sharding(self.param_specs[n]))
            for n, p in held.items()
        }
        dtypes = self.updater.state_dtypes
        optimizer = {
            n: jax.ShapeDtypeStruct(s, dtypes[n], sharding=self._sharding(self.state_specs[n]))
            for n, s in self.updater.state_shapes.items()
        }
        carried = self.feed.abstract_state()
        batch = {
            n: jax.ShapeDtypeStruct(*self.feed.fed_aval(n), sharding=self._sharding(s))
            for n, s in self.batch_specs.items()
        }
        return params, optimizer, carried, batch

    def _step_local(self, params: Any, optimizer: Any, carried: dict[str, Any], batch: dict[str, Any]) -> Any:
        """One device's step."""
        micro, feed, axes = self.micro, self.feed, self.placement.axis_names
        used = hoist(micro.held, params, self.placement)
        whole = {n: x for n, x in batch.items() if not feed.is_split(n)}
        split = {n: x for n, x in batch.items() if feed.is_split(n)}

        def one(carry: Any, xs: Any) -> Any:
            totals, losses, state = carry
            step = micro.vjp(used, {**whole, **xs, **state})
            grads, _ = step.back(cotangents(micro, step, feed.seeds()))
            with jax.named_scope(ACCUMULATE):
                totals = micro.add_gradients(totals, grads)
            losses = {n: losses[n] + summand(micro, step, n) for n in micro.losses}
            following = feed.next_state(state, step.outs)
            return (totals, losses, following), {n: step.outs[n] for n in feed.aux_names if n}

        nothing = {n: jc.to_varying(jnp.zeros((), jnp.float32), axes) for n in micro.losses}
        init = (micro.zero_gradients(), nothing, carried)
        if feed.microbatches == 1:  # not as a loop: there its gradient would lie beside the accumulator
            (totals, losses, carried), aux = one(init, {n: x[0] for n, x in split.items()})
            aux = {n: x[None] for n, x in aux.items()}
        else:
            (totals, losses, carried), aux = lax.scan(one, init, split, length=feed.microbatches)
        with jax.named_scope(LOSS):
            loss, scale = feed.combine(
                feed.loss_totals({n: lax.psum(x, axes) if axes else x for n, x in losses.items()})
            )
        with jax.named_scope(REDUCE):
            grads = micro.reduce(totals)
        if scale is not None:
            grads = {n: (g * scale).astype(g.dtype) for n, g in grads.items()}
        params, optimizer = self._update_local(params, grads, optimizer)
        return params, optimizer, carried, loss, aux

    def _update_local(self, params: dict[str, Any], grads: dict[str, Any], optimizer: dict[str, Any]) -> Any:
        updater = self.updater
        values = {f"param/{k}": params[p.name] for k, p in updater.parts.items()}
        values |= {f"grad/{k}": grads[p.name] for k, p in updater.parts.items()} | optimizer
        for piece in updater.update_program.pieces:
            values.update(updater.local_piece(piece, values))
        new = updater.collect_update(values)
        return {**params, **{p.name: new[f"param/{k}"] for k, p in updater.parts.items()}}, {
            n: new[n] for n in updater.state_owner
        }

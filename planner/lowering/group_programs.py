"""The executables of one stage group: forward of a microbatch, backward, the gradient reduction.

Forward hands out what backward needs. JAX's vjp function is a pytree whose leaves are the residuals; each leaf leaves
the program with one leading dim for the mesh axes over which it varies, so that it comes back with the same type. A
residual that is a parameter itself is not handed out: backward is given the parameters again.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from costmodel.sharding import PARTIAL, Spec
from planner.frontend import jax_compat as jc
from planner.lowering.microbatch import MicrobatchProgram, summand
from planner.lowering.placement import GroupPlacement, partition
from planner.lowering.stage import hoist


@dataclass
class Residuals:
    """What forward hands to backward, known once forward was traced.

    Attributes:
        tree: structure of the vjp function.
        slots: for each leaf the name of a parameter that it is, or the axes over which it varies.
        specs: specs of sent values and loss parts.
        moving: names of outputs that take a cotangent.
    """

    tree: Any = None
    slots: list[str | tuple[str, ...]] = field(default_factory=list)
    shapes: list[tuple[tuple[int, ...], Any]] = field(default_factory=list)
    specs: dict[str, Spec] = field(default_factory=dict)
    moving: tuple[str, ...] = ()


@dataclass(frozen=True)
class GroupPrograms:
    """Jitted programs of one stage on one group.

    Attributes:
        seeds: cotangents of the loss parts, where this stage makes the loss.
    """

    micro: MicrobatchProgram
    seeds: tuple[float, ...]
    kept: Residuals = field(default_factory=Residuals)

    @property
    def placement(self) -> GroupPlacement:
        return self.micro.stage.placement

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.placement.mesh, spec)

    def mapped(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(function, mesh=self.placement.mesh, in_specs=in_specs, out_specs=out_specs)

    @cached_property
    def param_specs(self) -> dict[str, PartitionSpec]:
        return {n: partition(p.value, len(p.shape), self.placement.axis_names) for n, p in self.micro.held.items()}

    def crossing_partition(self, name: str, spec: Spec) -> PartitionSpec:
        return partition(spec, len(self.micro.tensor(name).shape), self.placement.axis_names)

    @cached_property
    def value_specs(self) -> dict[str, PartitionSpec]:
        """Of the values that forward takes."""
        return {n: self.crossing_partition(n, s) for n, s in self.micro.receives.items()}

    @cached_property
    def sent_specs(self) -> dict[str, PartitionSpec]:
        self._probe()
        return {n: self.crossing_partition(n, s) for n, s in self.kept.specs.items() if n not in self.micro.losses}

    @cached_property
    def _probed(self) -> bool:
        """Traces forward once for the residuals' structure; nothing is compiled."""

        def probe(params: Any, values: Any) -> tuple[()]:
            self.linearise(params, values)
            return ()

        jax.eval_shape(self.mapped(probe, (self.param_specs, self.value_specs), ()), *self.abstract_inputs())
        return True

    def abstract_inputs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Parameters and values that forward takes, whole and abstract."""

        params = {n: self._aval(p, self.param_specs[n]) for n, p in self.micro.held.items()}
        return params, {n: self._aval(v, self.value_specs[n]) for n, v in self._received_values().items()}

    def _probe(self) -> None:
        assert self._probed

    def _received_values(self) -> dict[str, jax.ShapeDtypeStruct]:
        capture = self.micro.stage.capture
        found = {v.name: v for v in capture.program.inputs}
        found |= {v.name: v for e in capture.program.equations for v in e.outputs}
        out = {}
        for name in self.micro.receives:
            tensor = self.micro.tensor(name)
            # Some values only exist between blocks (a layer's carry), or for one chunk of a sequence.
            dtype = found[name].aval.dtype if name in found else jnp.dtype(tensor.dtype)
            out[name] = jax.ShapeDtypeStruct(tensor.shape, dtype)
        return out

    def linearise(self, params: dict[str, Any], values: dict[str, Any]) -> Any:
        used = hoist(self.micro.held, params, self.placement)
        step = self.micro.vjp(used, values)
        leaves, self.kept.tree = jax.tree.flatten(step.back)
        own = {id(x): n for n, x in self.given_again(used, values).items()}
        self.kept.slots = [own.get(id(leaf)) or tuple(sorted(jc.varying_axes(leaf))) for leaf in leaves]
        self.kept.shapes = [(tuple(leaf.shape), leaf.dtype) for leaf in leaves]
        self.kept.specs, self.kept.moving = dict(step.specs), step.moving
        return step, [leaf for leaf, slot in zip(leaves, self.kept.slots, strict=True) if not isinstance(slot, str)]

    def given_again(self, used: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """What backward is given again, so that residuals that are it are not handed out: parameters as they are
        used."""
        return used

    @cached_property
    def residual_bytes(self) -> int:
        """Bytes that one device keeps for one microbatch in flight."""
        self._probe()
        return sum(
            math.prod(shape) * jc.itemsize(dtype)
            for (shape, dtype), slot in zip(self.kept.shapes, self.kept.slots, strict=True)
            if not isinstance(slot, str)
        )

    @cached_property
    def residual_specs(self) -> list[PartitionSpec]:
        """Of the residuals that forward hands out: one leading dim for the axes over which each varies."""
        self._probe()
        return [PartitionSpec(slot or None) for slot in self.kept.slots if not isinstance(slot, str)]

    @cached_property
    def arriving(self) -> tuple[str, ...]:
        """Sent values whose cotangents arrive."""
        self._probe()
        return tuple(n for n in self.kept.moving if n not in self.micro.losses)

    @cached_property
    def cotangent_specs(self) -> dict[str, PartitionSpec]:
        """Of the cotangents that arrive."""
        return {n: self.sent_specs[n] for n in self.arriving}

    @cached_property
    def forward(self) -> Any:
        """jit of (parameters, values) -> (sent values, loss summands, residuals)."""
        every = PartitionSpec(self.placement.axis_names or None)

        def run(params: Any, values: Any) -> Any:
            step, leaves = self.linearise(params, values)
            sent = {n: step.outs[n] for n in self.sent_specs}
            losses = {n: summand(self.micro, step, n)[None] for n in self.micro.losses}
            return sent, losses, [leaf[None] for leaf in leaves]

        loss_specs = dict.fromkeys(self.micro.losses, every)
        return jax.jit(
            self.mapped(run, (self.param_specs, self.value_specs), (self.sent_specs, loss_specs, self.residual_specs))
        )

    @cached_property
    def backward(self) -> Any:
        """jit of (parameters, residuals, cotangents of sent values, accumulators) -> (cotangents of received
        activations, accumulators)."""
        out_specs = {n: self.value_specs[n] for n in self.micro.differentiable}

        def run(params: Any, residuals: list[Any], arrived: dict[str, Any], totals: dict[str, Any]) -> Any:
            used = hoist(self.micro.held, params, self.placement)
            own = iter(residuals)
            leaves = [used[slot] if isinstance(slot, str) else next(own)[0] for slot in self.kept.slots]
            back = jax.tree.unflatten(self.kept.tree, leaves)
            grads, sent_back = back({**self.loss_cotangents(), **arrived})
            return sent_back, self.accumulate(totals, grads)

        in_specs = (self.param_specs, self.residual_specs, self.cotangent_specs, self.total_specs)
        return jax.jit(self.mapped(run, in_specs, (out_specs, self.total_specs)), donate_argnums=(3,))

    def accumulate(self, totals: dict[str, Any], grads: dict[str, Any]) -> dict[str, Any]:
        """Accumulators of one device with one microbatch's gradients added."""
        return self._stack(self.micro.add_gradients(self._unstack(totals), grads))

    def loss_cotangents(self) -> dict[str, Any]:
        names = [n for n in self.kept.moving if n in self.micro.losses]
        return {n: self.micro.seed(n, self.kept.specs[n], self.seeds[self.micro.losses.index(n)]) for n in names}

    def traces(self) -> list[tuple[str, Any]]:
        """The programs traced for abstract arguments, with the phase that their collectives belong to."""
        return [(phase, run.trace(*arguments)) for phase, run, arguments in self.calls()]

    def calls(self) -> list[tuple[str, Any, tuple[Any, ...]]]:
        """The programs with abstract arguments, and the phase that their collectives belong to."""
        params, values = self.abstract_inputs()
        sent, _, residuals = self.forward.trace(params, values).out_info
        kept = [self._aval(x, spec) for x, spec in zip(residuals, self.residual_specs, strict=True)]
        arrived = {n: self._aval(sent[n], spec) for n, spec in self.cotangent_specs.items()}
        totals = {n: self._aval(x, self.total_specs[n]) for n, x in jax.eval_shape(self.zeros).items()}
        backward = self.backward_calls(params, kept, arrived, totals)
        return [
            ("forward", self.forward, (params, values)),
            *(("backward", run, arguments) for run, arguments in backward),
            ("once", self.reduce, (totals,)),
        ]

    def backward_calls(
        self, params: dict[str, Any], residuals: list[Any], arrived: dict[str, Any], totals: dict[str, Any]
    ) -> list[tuple[Any, tuple[Any, ...]]]:
        """What runs backward, with abstract arguments."""
        return [(self.backward, (params, residuals, arrived, totals))]

    def _aval(self, x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding(spec))

    # accumulators

    def _partial_axes(self, name: str) -> tuple[str, ...]:
        spec = self.micro.held[name].accumulated
        return tuple(a for a, code in zip(self.placement.axis_names, spec, strict=True) if code == PARTIAL)

    def _stack(self, totals: dict[str, Any]) -> dict[str, Any]:
        return {n: x[None] for n, x in totals.items()}

    def _unstack(self, totals: dict[str, Any]) -> dict[str, Any]:
        return {n: x[0] for n, x in totals.items()}

    @cached_property
    def total_specs(self) -> dict[str, PartitionSpec]:
        """Of the accumulators: a leading dim for the axes on which they are pending sums."""
        out = {}
        for name in self.micro.trained:
            p = self.micro.held[name]
            dims = partition(p.accumulated, len(p.shape), self.placement.axis_names)
            out[name] = PartitionSpec(self._partial_axes(name) or None, *dims)
        return out

    @cached_property
    def zeros(self) -> Any:
        """jit of () -> accumulators."""
        return jax.jit(self.mapped(lambda: self._stack(self.micro.zero_gradients()), (), self.total_specs))

    @cached_property
    def reduced_specs(self) -> dict[str, PartitionSpec]:
        names = self.placement.axis_names
        return {
            n: partition(self.micro.held[n].optimizer, len(self.micro.held[n].shape), names) for n in self.micro.trained
        }

    @cached_property
    def reduce(self) -> Any:
        """jit of accumulators -> gradients as the update takes them: the one reduction of a step."""
        run = self.mapped(
            lambda totals: self.micro.reduce(self._unstack(totals)), (self.total_specs,), self.reduced_specs
        )
        return jax.jit(run, donate_argnums=(0,))


__all__ = ["GroupPrograms", "Residuals"]

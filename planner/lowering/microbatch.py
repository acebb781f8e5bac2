"""One microbatch through one stage, inside shard_map: forward with what backward needs, and backward.

Values cross stages only as split or replicated arrays. Inside, a value that the stage takes as varying is made so by
the
differentiated function itself, so that its cotangent comes out summed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from costmodel.sharding import PARTIAL, REPLICATED, VARYING, Spec
from planner.frontend import jax_compat as jc
from planner.frontend.capture import Capture
from planner.frontend.flat import Value
from planner.lowering.stage import HeldParameter, Placed, StageProgram, cast_on
from planner.space.borders import arriving, crossing


@dataclass(frozen=True)
class MicrobatchProgram:
    """What one stage does for one microbatch.

    Attributes:
        sends: names of values that later stages read.
        losses: names of the loss parts made here (empty but on the last stage).
        results: names of carried state and aux leaves made here, which every device gets whole. No cotangent comes back
            for those that no later stage reads.
    """

    stage: StageProgram
    sends: tuple[str, ...]
    losses: tuple[str, ...]
    results: tuple[str, ...] = ()

    @cached_property
    def receives(self) -> dict[str, Spec]:
        """Incoming values (batch, keys, state, activations) with the spec in which they arrive."""
        sizes, found = self.stage.placement.sizes, {}
        for name, spec in self.stage.incoming.items():
            if not self._constant(name):
                tensor = self.tensor(name)
                found[name] = arriving(spec, tensor, tensor.shape, sizes)
        return found

    def _constant(self, name: str) -> bool:
        return any(v.name == name for v in self.stage.capture.program.constants)

    def tensor(self, name: str) -> Any:
        return self.stage.capture.values[name]

    @cached_property
    def differentiable(self) -> tuple[str, ...]:
        """Incoming activations that get a cotangent."""
        values = self.stage.capture.values
        return tuple(n for n in self.receives if values[n].needs_grad and values[n].role == "activation")

    @cached_property
    def trained(self) -> tuple[str, ...]:
        return tuple(n for n, p in self.stage.held.items() if p.trained)

    @cached_property
    def held(self) -> dict[str, HeldParameter]:
        return self.stage.held

    def forward(
        self, params: Mapping[str, Any], values: Mapping[str, Any]
    ) -> tuple[dict[str, Placed], dict[str, Placed]]:
        """Runs the stage. Returns (sent values in crossing specs, loss parts as they come), each with its spec."""
        placement = self.stage.placement
        env: dict[str, Placed] = {n: (params[n], p.hoisted) for n, p in self.held.items()}
        for name, spec in self.receives.items():
            inside = self.stage.incoming[name]
            x = values[name]
            if inside != spec:
                t = self.tensor(name)
                x = cast_on(x, t.shape, t.itemsize, spec, inside, placement)
            env[name] = (x, inside)
        self.stage.run(env)
        sent: dict[str, Placed] = {}
        for name in dict.fromkeys((*self.sends, *self.results)):
            x, spec = env[name]
            if name not in self.sends:
                x = lax.stop_gradient(x)
            t = self.tensor(name)
            target = placement.whole if name in self.results else crossing(spec, t.shape, placement.sizes)
            sent[name] = (cast_on(x, t.shape, t.itemsize, spec, target, placement), target)
        return sent, {name: self._settled(name, *env[name]) for name in self.losses}

    def _settled(self, name: str, x: Any, spec: Spec) -> Placed:
        """A loss part as a whole number or a pending sum on each axis: what its cotangent's seed can be given for."""
        target = tuple(REPLICATED if code == VARYING else code for code in spec)
        t = self.tensor(name)
        return cast_on(x, t.shape, t.itemsize, spec, target, self.stage.placement), target

    def vjp(self, params: Mapping[str, Any], values: Mapping[str, Any]) -> "Linearised":
        """Forward, keeping what backward needs."""
        fixed_params = {n: x for n, x in params.items() if n not in self.trained}
        fixed_values = {n: x for n, x in values.items() if n not in self.differentiable}
        specs: dict[str, Spec] = {}

        def run(moving: dict[str, Any], arriving: dict[str, Any]) -> tuple[Any, Any]:
            sent, losses = self.forward({**fixed_params, **moving}, {**fixed_values, **arriving})
            specs.update({n: s for n, (_, s) in (sent | losses).items()})
            every = {n: x for n, (x, _) in (sent | losses).items()}
            moved = {n: x for n, x in every.items() if self.carries_gradient(n)}
            return moved, {n: x for n, x in every.items() if n not in moved}

        moved, back, rest = jax.vjp(
            run, {n: params[n] for n in self.trained}, {n: values[n] for n in self.differentiable}, has_aux=True
        )
        return Linearised({**moved, **rest}, specs, back, tuple(moved))

    def carries_gradient(self, name: str) -> bool:
        if name not in self.sends and name not in self.losses:
            return False
        return self.tensor(name).needs_grad and jnp.issubdtype(jnp.dtype(self.tensor(name).dtype), jnp.inexact)

    def add_gradients(self, totals: Mapping[str, Any], grads: Mapping[str, Any]) -> dict[str, Any]:
        """Adds one microbatch's gradients; where the plan splits the accumulator they are scattered first (ZeRO-2)."""
        out = {}
        for name, total in totals.items():
            p = self.held[name]
            g = cast_on(grads[name], p.shape, p.dtype.itemsize, p.cotangent, p.accumulated, self.stage.placement)
            out[name] = total + g.astype(total.dtype)
        return out

    def zero_gradients(self) -> dict[str, Any]:
        """Accumulators, each with the axes over which it varies."""
        out = {}
        for name in self.trained:
            p = self.held[name]
            out[name] = jc.to_varying(
                jnp.zeros(self.local_shape(p.shape, p.accumulated), p.dtype), self.varying_axes(p.accumulated)
            )
        return out

    def reduce(self, totals: Mapping[str, Any]) -> dict[str, Any]:
        """The one gradient reduction of a step: accumulators into the spec of the update."""
        return {
            n: cast_on(
                x,
                self.held[n].shape,
                self.held[n].dtype.itemsize,
                self.held[n].accumulated,
                self.held[n].optimizer,
                self.stage.placement,
            )
            for n, x in totals.items()
        }

    def varying_axes(self, spec: Spec) -> tuple[str, ...]:
        return tuple(a for a, code in zip(self.stage.placement.axis_names, spec, strict=True) if code != REPLICATED)

    def local_shape(self, shape: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
        out = list(shape)
        for size, code in zip(self.stage.placement.sizes, spec, strict=True):
            if code >= 0:
                out[code] //= size
        return tuple(out)

    def seed(self, name: str, spec: Spec, value: float) -> Any:
        """The cotangent of a loss part: whole on each device where the loss is a pending sum."""
        assert VARYING not in spec, (name, spec)
        return jc.to_varying(jnp.asarray(value, jnp.dtype(self.tensor(name).dtype)), self.varying_axes(spec))


@dataclass(frozen=True)
class Linearised:
    """A forward pass with its backward.

    Attributes:
        outs: sent values and loss parts; specs: their specs.
        back: JAX's vjp function (a pytree whose leaves are the residuals).
        moving: names of outputs that take a cotangent.
    """

    outs: dict[str, Any]
    specs: dict[str, Spec]
    back: Any
    moving: tuple[str, ...]


def cotangents(micro: MicrobatchProgram, step: Linearised, seeds: tuple[float, ...]) -> dict[str, Any]:
    """Cotangents of a stage that makes the loss: its seeds, zeros for everything else."""
    found = {}
    for name in step.moving:
        if name in micro.losses:
            found[name] = micro.seed(name, step.specs[name], seeds[micro.losses.index(name)])
        else:
            found[name] = jnp.zeros_like(step.outs[name])
    return found


def summand(micro: MicrobatchProgram, step: Linearised, name: str) -> Any:
    """This device's share of a loss part, such that the sum over all devices is the loss."""
    x, spec = step.outs[name].astype(jnp.float32), step.specs[name]
    for axis, code in zip(micro.stage.placement.axis_names, spec, strict=True):
        if code == REPLICATED:
            x = jnp.where(lax.axis_index(axis) == 0, x, jnp.zeros_like(x))
    return jc.to_varying(x, micro.stage.placement.axis_names)


def micro_of(
    captured: Capture, stage: int, programs: Sequence[StageProgram], program: StageProgram
) -> MicrobatchProgram:
    """What a stage sends, and which results and loss parts it makes."""
    made = {s.value for b in program.blocks for s in b.outputs}
    later = {s.value for other in programs[stage + 1 :] for b in other.blocks for s in b.inputs}
    losses = tuple(o.name for o in captured.loss if isinstance(o, Value) and o.name in made)
    results = tuple(
        dict.fromkeys(o.name for o in (*captured.state, *captured.aux) if isinstance(o, Value) and o.name in made)
    )
    sends = tuple(sorted(made & later))
    return MicrobatchProgram(program, sends, losses, results)


__all__ = ["PARTIAL", "Linearised", "MicrobatchProgram", "Value", "cotangents", "micro_of", "summand"]

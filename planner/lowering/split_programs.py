"""The executables of one stage group whose schedule splits backwards: B and W instead of one backward.

F is that of `GroupPrograms`. B takes the residuals that it reads and the cotangents that arrived, and hands W what W
reads of its results. Until its W, a microbatch keeps what `Handed` holds: the residuals, arrived cotangents and results
of B that W reads. Residuals that only B reads are let go after B.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from planner.frontend import jax_compat as jc
from planner.lowering.group_programs import GroupPrograms
from planner.lowering.split_backward import SplitBackward, run_block, split
from planner.lowering.stage import hoist

Array = tuple[tuple[int, ...], Any]  # shape, dtype


class Handed(NamedTuple):
    """What one microbatch keeps between its B and its W: arrays, by position in the backward pass's inputs."""

    residuals: list[Any]
    arrived: dict[str, Any]
    made: list[Any]


@dataclass(frozen=True, kw_only=True)
class _Traced:
    """The divided backward pass. Its inputs are the residuals' leaves, then the arrived cotangents by name.

    Attributes:
        leaves: number of residual leaves, those that are parameters included.
        arrived: the arrived cotangents; handed: what B hands to W; both with shape and dtype on one device.
        axes: for each value that B hands over, the mesh axes over which it varies.
        sent_back: names of B's cotangents, in order; trained: names of W's gradients.
    """

    halves: SplitBackward
    leaves: int
    arrived: dict[str, Array]
    handed: list[Array]
    axes: list[tuple[str, ...]]
    sent_back: tuple[str, ...]
    trained: tuple[str, ...]


@dataclass(frozen=True)
class SplitPrograms(GroupPrograms):
    """Jitted F, B and W of one stage on one group."""

    @cached_property
    def _traced(self) -> _Traced:
        """Traces the backward pass once, on one device's abstract values."""
        found: list[_Traced] = []
        sent = self.arriving

        def probe(params: Any, values: Any) -> tuple[()]:
            step, _ = self.linearise(params, values)
            leaves = jax.tree.leaves(step.back)
            arriving = {n: step.outs[n] for n in sent}
            names: list[tuple[str, ...]] = []

            def back(leaves_: list[Any], arrived: list[Any]) -> Any:
                given = dict(zip(arriving, arrived, strict=True))
                grads, sent_back = jax.tree.unflatten(self.kept.tree, leaves_)({**self.loss_cotangents(), **given})
                names[:] = [tuple(sent_back), tuple(grads)]
                return list(sent_back.values()), list(grads.values())

            closed = jax.make_jaxpr(back)(leaves, list(arriving.values()))
            sent_back, trained = names
            halves = split(closed, [True] * len(sent_back) + [False] * len(trained))
            handed = run_block(halves.activations, [*leaves, *arriving.values()])[len(sent_back) :]
            found.append(
                _Traced(
                    halves=halves,
                    leaves=len(leaves),
                    arrived={n: (tuple(x.shape), x.dtype) for n, x in arriving.items()},
                    sent_back=sent_back,
                    trained=trained,
                    handed=[(tuple(x.shape), x.dtype) for x in handed],
                    axes=[tuple(sorted(jc.varying_axes(x))) for x in handed],
                )
            )
            return ()

        jax.eval_shape(self.mapped(probe, (self.param_specs, self.value_specs), ()), *self.abstract_inputs())
        return found[-1]

    def _residuals_of(self, positions: tuple[int, ...]) -> list[int]:
        """Which of the residuals that F hands out (parameters are not) lie at some positions of the leaves."""
        own = [i for i, slot in enumerate(self.kept.slots) if not isinstance(slot, str)]
        return [at for at, i in enumerate(own) if i in positions]

    @cached_property
    def read_by_activations(self) -> list[int]:
        """Which of F's residuals B takes."""
        return self._residuals_of(self._traced.halves.read_by_activations)

    @cached_property
    def read_by_weights(self) -> list[int]:
        """Which of F's residuals W takes."""
        return self._residuals_of(self._traced.halves.read_by_weights)

    @cached_property
    def arrived_by_weights(self) -> tuple[str, ...]:
        """Names of the arrived cotangents that W reads itself."""
        traced = self._traced
        return tuple(n for i, n in enumerate(traced.arrived, traced.leaves) if i in traced.halves.read_by_weights)

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes that one device keeps for one microbatch between its B and its W."""
        traced = self._traced
        shapes = [s for s, slot in zip(self.kept.shapes, self.kept.slots, strict=True) if not isinstance(slot, str)]
        kept = [shapes[i] for i in self.read_by_weights] + traced.handed
        kept += [traced.arrived[n] for n in self.arrived_by_weights]
        return sum(math.prod(shape) * jc.itemsize(dtype) for shape, dtype in kept)

    @cached_property
    def _made_specs(self) -> list[PartitionSpec]:
        return [PartitionSpec(axes or None) for axes in self._traced.axes]

    def _inputs(self, params: Any, which: list[int], residuals: list[Any], arrived: dict[str, Any]) -> list[Any]:
        """Inputs of the backward pass on one device, None for those that were not given."""
        traced = self._traced
        used = hoist(self.micro.held, params, self.placement)
        given = dict(zip(which, (x[0] for x in residuals), strict=True))
        own = iter(range(len(self.residual_specs)))
        leaves = [used[slot] if isinstance(slot, str) else given.get(next(own)) for slot in self.kept.slots]
        return [*leaves, *(arrived.get(n) for n in traced.arrived)]

    @cached_property
    def _activations(self) -> Any:
        """jit of (parameters, residuals that B reads, cotangents of sent values) -> (cotangents of received
        activations, what B made for W)."""
        traced = self._traced
        residual_specs = [self.residual_specs[i] for i in self.read_by_activations]

        def run(params: Any, residuals: list[Any], arrived: dict[str, Any]) -> Any:
            inputs = self._inputs(params, self.read_by_activations, residuals, arrived)
            outs = run_block(traced.halves.activations, inputs)
            sent_back = dict(zip(traced.sent_back, outs, strict=False))
            return sent_back, [x[None] for x in outs[len(sent_back) :]]

        out_specs = {n: self.value_specs[n] for n in traced.sent_back}
        in_specs = (self.param_specs, residual_specs, self.cotangent_specs)
        return jax.jit(self.mapped(run, in_specs, (out_specs, self._made_specs)))

    @cached_property
    def _weights(self) -> Any:
        """jit of (parameters, what the microbatch kept, accumulators) -> accumulators."""
        traced = self._traced
        specs = Handed(
            [self.residual_specs[i] for i in self.read_by_weights],
            {n: self.cotangent_specs[n] for n in self.arrived_by_weights},
            self._made_specs,
        )

        def run(params: Any, kept: Handed, totals: dict[str, Any]) -> Any:
            inputs = self._inputs(params, self.read_by_weights, kept.residuals, kept.arrived)
            outs = run_block(traced.halves.weights, [*inputs, *(x[0] for x in kept.made)])
            return self.accumulate(totals, dict(zip(traced.trained, outs, strict=True)))

        in_specs = (self.param_specs, specs, self.total_specs)
        return jax.jit(self.mapped(run, in_specs, self.total_specs), donate_argnums=(2,))

    def activations(self, params: Any, residuals: list[Any], arrived: dict[str, Any]) -> tuple[dict[str, Any], Handed]:
        """B of one microbatch: cotangents of received activations, and what is kept for W."""
        sent_back, made = self._activations(params, [residuals[i] for i in self.read_by_activations], arrived)
        kept = Handed(
            [residuals[i] for i in self.read_by_weights], {n: arrived[n] for n in self.arrived_by_weights}, made
        )
        return sent_back, kept

    def weights(self, params: Any, kept: Handed, totals: dict[str, Any]) -> dict[str, Any]:
        """W of one microbatch: the accumulators with its weight gradients added."""
        return self._weights(params, kept, totals)

    def backward_calls(
        self, params: dict[str, Any], residuals: list[Any], arrived: dict[str, Any], totals: dict[str, Any]
    ) -> list[tuple[Any, tuple[Any, ...]]]:
        """B and W, with abstract arguments."""
        first = (params, [residuals[i] for i in self.read_by_activations], arrived)
        _, made = self._activations.trace(*first).out_info
        kept = Handed(
            [residuals[i] for i in self.read_by_weights],
            {n: arrived[n] for n in self.arrived_by_weights},
            [self._aval(x, spec) for x, spec in zip(made, self._made_specs, strict=True)],
        )
        return [(self._activations, first), (self._weights, (params, kept, totals))]


__all__ = ["Handed", "SplitPrograms"]

"""The executables of one stage group for one chunk of a sequence.

Slices that earlier chunks made are values that forward takes, whose cotangents backward gives back; the chunk's own are
among what it sends. Backward is given the earlier slices again: they lie in the group's memory once, however many
chunks read them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from planner.lowering.group_programs import GroupPrograms
from planner.lowering.stage import hoist


@dataclass(frozen=True, kw_only=True)
class ChunkPrograms(GroupPrograms):
    """Jitted programs of one stage on one group, for one chunk.

    Attributes:
        own: names of the slices that it hands to later chunks of its stage; earlier: of those that it reads.
    """

    own: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()

    def given_again(self, used: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        return {**used, **{n: values[n] for n in self.earlier}}

    @cached_property
    def lent(self) -> tuple[str, ...]:
        """The earlier slices that backward reads as they are."""
        self._probe()
        return tuple(n for n in self.earlier if n in self.kept.slots)

    @cached_property
    def backward(self) -> Any:
        """jit of (parameters, earlier slices, residuals, cotangents of sent values, accumulators) -> (cotangents of
        received activations and earlier slices, accumulators)."""
        out_specs = {n: self.value_specs[n] for n in self.micro.differentiable}

        def run(params: Any, lent: Any, residuals: list[Any], arrived: dict[str, Any], totals: dict[str, Any]) -> Any:
            again = {**hoist(self.micro.held, params, self.placement), **lent}
            own = iter(residuals)
            leaves = [again[slot] if isinstance(slot, str) else next(own)[0] for slot in self.kept.slots]
            back = jax.tree.unflatten(self.kept.tree, leaves)
            grads, sent_back = back({**self.loss_cotangents(), **arrived})
            return sent_back, self.accumulate(totals, grads)

        lent_specs = {n: self.value_specs[n] for n in self.lent}
        in_specs = (self.param_specs, lent_specs, self.residual_specs, self.cotangent_specs, self.total_specs)
        return jax.jit(self.mapped(run, in_specs, (out_specs, self.total_specs)), donate_argnums=(4,))

    def backward_calls(
        self, params: dict[str, Any], residuals: list[Any], arrived: dict[str, Any], totals: dict[str, Any]
    ) -> list[tuple[Any, tuple[Any, ...]]]:
        _, values = self.abstract_inputs()
        return [(self.backward, (params, {n: values[n] for n in self.lent}, residuals, arrived, totals))]

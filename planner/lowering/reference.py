"""The same step on one device with plain JAX, microbatch by microbatch: what an executed plan must equal."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from planner.frontend.capture import Capture, capture
from planner.frontend.graph import trained_tree
from planner.frontend.task import TrainingTask, path_string
from planner.lowering.feed import Feed
from planner.planfile.schema import Plan


@dataclass(frozen=True)
class Reference:
    """`init`, `step` and `params` of the user's own function on one device."""

    captured: Capture
    microbatches: int

    @property
    def task(self) -> TrainingTask:
        return self.captured.task

    @cached_property
    def feed(self) -> Feed:
        return Feed(self.captured, self.microbatches)

    def __repr__(self) -> str:
        return f"Reference of {self.task.name}: {self.microbatches} x {self.captured.microbatch} examples on one device"

    def init(self, params: Any, state: Any = None) -> Any:
        self.feed.named_params(params), self.feed.named_state(state)  # raise for what was not planned
        return params, jax.jit(self.task.optimizer.init)(self._trained(params)), state

    def _trained(self, params: Any) -> dict[str, Any]:
        names = trained_tree(self.task)
        leaves = {path_string(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)}
        return {n: leaves[n] for n in names}

    def _merge(self, params: Any, trained: dict[str, Any]) -> Any:
        return jax.tree_util.tree_map_with_path(lambda p, x: trained.get(path_string(p), x), params)

    @cached_property
    def _one(self) -> Any:
        task = self.task

        def loss(trained: Any, params: Any, batch: Any, state: Any, key: Any) -> Any:
            extra: dict[str, Any] = {"state": state} if task.state is not None else {}
            extra |= {"rng": key} if task.rng else {}
            result = task.loss_fn(self._merge(params, trained), batch, **extra)
            parts = list(result) if task.state is not None or task.has_aux else [result]
            value = parts.pop(0)
            new_state = parts.pop(0) if task.state is not None else None
            first, second = value if task.reduction == "weighted" else (value, jnp.zeros(()))
            return first, (second, new_state, parts.pop(0) if task.has_aux else None)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    @cached_property
    def _update(self) -> Any:
        def update(trained: Any, grads: Any, opt: Any) -> Any:
            updates, opt = self.task.optimizer.update(grads, opt, trained)
            return optax.apply_updates(trained, updates), opt

        return jax.jit(update)

    @cached_property
    def _add(self) -> Any:
        return jax.jit(lambda total, g: jax.tree.map(jnp.add, total, g))

    @cached_property
    def _scale(self) -> Any:
        return jax.jit(lambda grads, factor: jax.tree.map(lambda g: g * jnp.asarray(factor, g.dtype), grads))

    def step(self, state: Any, batch: Any, rng: Any = None) -> tuple[Any, dict[str, Any]]:
        """One step; metrics as a compiled plan gives them."""
        params, opt, carried = state
        leaves = self.feed.leaves(batch, rng)
        trained, totals, grads, auxes = self._trained(params), [0.0, 0.0], None, []
        tree = jax.tree.structure(self.task.batch)
        for i in range(self.microbatches):
            own = {n: x[i] if self.feed.is_split(n) else x for n, x in leaves.items()}
            piece = jax.tree.unflatten(tree, [own[n] for n in self.feed.batch_inputs])
            (first, (second, carried, aux)), g = self._one(trained, params, piece, carried, own.get("rng"))
            totals = [totals[0] + first, totals[1] + second]
            grads = g if grads is None else self._add(grads, g)
            auxes.append(aux)
        loss, scale = self.feed.combine(totals)
        factor = scale if scale is not None else 1.0 / self.microbatches if self.task.reduction == "mean" else 1.0
        grads = self._scale(grads, factor)
        trained, opt = self._update(trained, grads, opt)
        metrics: dict[str, Any] = {"loss": loss}
        if self.task.has_aux:
            metrics["aux"] = jax.tree.map(lambda *xs: jnp.stack([np.asarray(x) for x in xs]), *auxes)
        return (self._merge(params, trained), opt, carried), metrics

    def params(self, state: Any) -> Any:
        return state[0]

    def state(self, state: Any) -> Any:
        return state[2]


def reference(task: TrainingTask, plan: Plan) -> Reference:
    """The one-device reference of a plan: the same microbatches, the same order."""
    return Reference(capture(task, plan.microbatch_size), plan.microbatches)

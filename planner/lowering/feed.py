"""How a global batch becomes microbatches, and microbatch losses become the step's loss (`frontend/task.py` has the
law)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from costmodel.errors import InputError
from planner.frontend.capture import Capture, InputInfo
from planner.frontend.flat import Value


@dataclass(frozen=True)
class Feed:
    """Leaves of the batch by name, split into microbatches."""

    capture: Capture
    microbatches: int

    @cached_property
    def batch_inputs(self) -> dict[str, InputInfo]:
        return {n: i for n, i in self.capture.inputs.items() if i.role == "batch"}

    @cached_property
    def _dims(self) -> list[int | None]:
        return self.capture.task.batch_dim_list

    def is_split(self, name: str) -> bool:
        """Whether each microbatch sees its own part of an input."""
        return name == "rng" or (name in self.batch_inputs and self._dims[self.batch_inputs[name].leaf] is not None)

    def leaves(self, batch: Any, rng: Any = None) -> dict[str, Any]:
        """Checked leaves by name; split ones with a leading microbatch dim.

        Raises:
            InputError: the batch has another structure, shape or dtype than the task, or keys are missing.
        """
        task, m = self.capture.task, self.microbatches
        given, tree = jax.tree.flatten(batch)
        expected, structure = jax.tree.flatten(task.with_batch_size(self.capture.microbatch * m))
        if tree != structure:
            raise InputError(
                "MP118",
                f"the batch has structure {tree}, the task's is {structure}",
                "feed the pytree that was captured",
            )
        out: dict[str, Any] = {}
        for name, info in self.batch_inputs.items():
            x, want, dim = given[info.leaf], expected[info.leaf], self._dims[info.leaf]
            if tuple(x.shape) != tuple(want.shape):
                raise InputError(
                    "MP118",
                    f"batch leaf {info.path!r} has shape {tuple(x.shape)}, the plan takes {tuple(want.shape)}",
                    f"feed a global batch of {self.capture.microbatch * m} examples",
                )
            if dim is not None:
                shape = (*x.shape[:dim], m, self.capture.microbatch, *x.shape[dim + 1 :])
                library = np if isinstance(x, np.ndarray) else jnp
                x = library.moveaxis(library.reshape(x, shape), dim, 0)
            out[name] = x
        if task.rng:
            if rng is None:
                raise InputError(
                    "MP118", "the task takes rng and step() was given none", "pass rng=jax.random.key(seed)"
                )
            out["rng"] = jax.vmap(lambda i: jax.random.fold_in(rng, i))(jnp.arange(m))
        return out

    def seeds(self) -> tuple[float, ...]:
        """Cotangent of each loss part of one microbatch."""
        return {"mean": (1.0 / self.microbatches,), "sum": (1.0,), "weighted": (1.0, 0.0)}[self.capture.task.reduction]

    def combine(self, totals: list[Any]) -> tuple[Any, Any]:
        """The step's loss from sums over microbatches, and what gradients must still be multiplied by (None:
        nothing)."""
        reduction = self.capture.task.reduction
        if reduction == "mean":
            return totals[0] / self.microbatches, None
        if reduction == "sum":
            return totals[0], None
        return totals[0] / totals[1], 1.0 / totals[1]

    def named_params(self, params: Any) -> dict[str, Any]:
        """Checked parameter leaves by name."""
        task = self.capture.task
        given, tree = jax.tree.flatten(params)
        expected, structure = jax.tree.flatten(task.params)
        if tree != structure:
            raise InputError(
                "MP118",
                f"params have structure {tree}, the task's have {structure}",
                "pass the pytree that was planned",
            )
        infos = self.capture.param_inputs
        for name, info in infos.items():
            got, want = given[info.leaf], expected[info.leaf]
            if tuple(got.shape) != tuple(want.shape) or got.dtype != want.dtype:
                raise InputError(
                    "MP118",
                    f"parameter {name} is {got.dtype}{tuple(got.shape)}, planned {want.dtype}{tuple(want.shape)}",
                    "plan again for these parameters",
                )
        return {name: given[info.leaf] for name, info in infos.items()}

    def params_tree(self, named: dict[str, Any]) -> Any:
        """The user's pytree of parameters."""
        leaves: list[Any] = [None] * len(self.capture.param_inputs)
        for name, info in self.capture.param_inputs.items():
            leaves[info.leaf] = named[name]
        return jax.tree.unflatten(jax.tree.structure(self.capture.task.params), leaves)

    @cached_property
    def _state_inputs(self) -> list[str]:
        return [n for n, i in self.capture.inputs.items() if i.role == "state"]

    def named_state(self, state: Any) -> dict[str, Any]:
        if self.capture.task.state is None:
            return {}
        if jax.tree.structure(state) != jax.tree.structure(self.capture.task.state):
            raise InputError(
                "MP118", "the initial state does not have the structure of the task's state", "pass init(params, state)"
            )
        return dict(zip(self._state_inputs, jax.tree.leaves(state), strict=True))

    def state_tree(self, named: dict[str, Any]) -> Any:
        return jax.tree.unflatten(jax.tree.structure(self.capture.task.state), [named[n] for n in self._state_inputs])

    def abstract_state(self) -> dict[str, jax.ShapeDtypeStruct]:
        leaves = jax.tree.leaves(self.capture.task.state)
        return {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in zip(self._state_inputs, leaves, strict=True)}

    def fed_aval(self, name: str) -> tuple[tuple[int, ...], Any]:
        """Shape and dtype of a fed leaf."""
        value = next(v for v in self.capture.program.inputs if v.name == name)
        return ((self.microbatches, *value.shape) if self.is_split(name) else value.shape), value.aval.dtype

    def next_state(self, state: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
        """Carried state after a microbatch."""
        out = {}
        for name, operand in self.state_updates.items():
            if not isinstance(operand, Value):
                out[name] = jnp.asarray(operand.value, operand.aval.dtype)
            else:
                out[name] = made[operand.name] if operand.name in made else state[operand.name]
        return out

    @cached_property
    def state_updates(self) -> dict[str, Any]:
        """Carried state leaf name -> the operand that replaces it after each microbatch."""
        return dict(zip(self._state_inputs, self.capture.state, strict=True))

    def loss_totals(self, made: dict[str, Any]) -> list[Any]:
        """Each loss part summed over the microbatches; a constant part (a fixed weight) counts once for each."""
        return [made[o.name] if isinstance(o, Value) else self.microbatches * o.value for o in self.capture.loss]

    @cached_property
    def aux_names(self) -> tuple[str | None, ...]:
        """Names of the aux leaves that the blocks make; None for constants."""
        made = {v.name for e in self.capture.program.equations for v in e.outputs}
        return tuple(o.name if isinstance(o, Value) and o.name in made else None for o in self.capture.aux)

    def aux(self, values: dict[str, Any]) -> Any:
        """The aux pytree; each leaf has a leading microbatch dim."""
        leaves = []
        for name, operand in zip(self.aux_names, self.capture.aux, strict=True):
            if name is not None:
                leaves.append(values[name])
            else:
                fixed = self.capture.program.constants[operand] if isinstance(operand, Value) else operand.value
                leaves.append(
                    jnp.broadcast_to(jnp.asarray(fixed, operand.aval.dtype), (self.microbatches, *operand.shape))
                )
        return jax.tree.unflatten(self.capture.aux_tree, leaves)

"""The user's optimizer, traced on whole leaves, and cut where pipeline stages cut them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from costmodel.errors import InputError
from planner.frontend.branches import without_branches
from planner.frontend.cut_leaves import Cut, cut_program
from planner.frontend.flat import Program, flatten
from planner.frontend.task import TrainingTask
from planner.frontend.user_code import first_line, user_line


@dataclass(frozen=True)
class Optimizer:
    """Init and update of a set of leaves, by name.

    Attributes:
        init: of parameters by name, to the leaves of the state.
        update: of ``param/name``, ``grad/name`` and ``state/i``, to new parameters in order of `leaves` and new state.
        owners: for each leaf of the state, the parameter that it belongs to (None for step counts and the like).
    """

    leaves: dict[str, jax.ShapeDtypeStruct]
    init: Program
    update: Program
    state: tuple[jax.ShapeDtypeStruct, ...]
    owners: tuple[str | None, ...]


def trace(function: Callable[..., Any], inputs: Mapping[str, Any]) -> Program:
    """The flat program of ``function(dict of abstract inputs) -> pytree``, for running: branches are selections."""
    names = list(inputs)
    closed = jax.make_jaxpr(lambda *xs: jax.tree.leaves(function(dict(zip(names, xs, strict=True)))))(*inputs.values())
    return without_branches(flatten(closed, names, use="run"))


def traced_optimizer(task: TrainingTask, leaves: Mapping[str, jax.ShapeDtypeStruct]) -> Optimizer:
    """The task's optimizer over abstract leaves.

    Raises:
        InputError: MP115, its init or update does not trace.
    """
    abstract = abstract_state(task, leaves)
    try:
        return _traced(task, leaves, abstract)
    except InputError:
        raise
    except Exception as error:  # whatever the user's function raises
        raise optimizer_error("update", error) from error


def abstract_state(task: TrainingTask, leaves: Mapping[str, jax.ShapeDtypeStruct]) -> Any:
    """The optimizer's state for some leaves, abstractly.

    Raises:
        InputError: MP115, its init does not trace.
    """
    try:
        return jax.eval_shape(task.optimizer.init, dict(leaves))
    except Exception as error:  # whatever the user's function raises
        raise optimizer_error("init", error) from error


def optimizer_error(function: str, error: Exception) -> InputError:
    """MP115: the user's `init` or `update` raised an error."""
    return InputError(
        "MP115",
        f"the optimizer's {function} failed on abstract parameters{user_line(error)}: {first_line(error)}",
        "give an optax GradientTransformation: init(params) and update(gradients, state, params) must trace under JAX, "
        "over a flat dict of the trained parameters by path",
    )


def _traced(task: TrainingTask, leaves: Mapping[str, jax.ShapeDtypeStruct], abstract: Any) -> Optimizer:
    state, tree = jax.tree_util.tree_leaves_with_path(abstract), jax.tree.structure(abstract)
    inputs: dict[str, Any] = {f"param/{n}": x for n, x in leaves.items()}
    inputs |= {f"grad/{n}": x for n, x in leaves.items()}
    inputs |= {f"state/{i}": x for i, (_, x) in enumerate(state)}

    def step(given: Mapping[str, Any]) -> Any:
        params, grads = ({n: given[f"{kind}/{n}"] for n in leaves} for kind in ("param", "grad"))
        old = jax.tree.unflatten(tree, [given[f"state/{i}"] for i in range(len(state))])
        updates, new = task.optimizer.update(grads, old, params)
        applied = optax.apply_updates(params, updates)
        if jax.tree.structure(new) != tree:
            raise ValueError(f"it returned a state of structure {jax.tree.structure(new)}, init's is {tree}")
        for was, now in ((params, applied), (old, new)):
            for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(was), jax.tree.leaves(now), strict=True):
                if np.shape(one) != np.shape(other):
                    name = jax.tree_util.keystr(path)
                    raise ValueError(f"it made shape {np.shape(other)} of {name}, which has shape {np.shape(one)}")
        return [applied[n] for n in leaves], jax.tree.leaves(new)

    def owner(path: Any) -> str | None:
        keys = (k.key for k in reversed(path) if isinstance(k, jax.tree_util.DictKey))
        return next((key for key in keys if key in leaves), None)

    return Optimizer(
        leaves=dict(leaves),
        init=trace(task.optimizer.init, leaves),
        update=trace(step, inputs),
        state=tuple(x for _, x in state),
        owners=tuple(owner(path) for path, _ in state),
    )


def cut_update(optimizer: Optimizer, cuts: Mapping[str, Cut]) -> tuple[Program, dict[int, Cut]]:
    """The update over parts of leaves, and how leaves of the state are cut: those that come out of it in parts.

    Args:
        cuts: by leaf name.

    Raises:
        InputError: MP116, as `cut_program`.
    """
    first = len(optimizer.leaves)
    known = {f"{kind}/{n}": cut for n, cut in cuts.items() for kind in ("param", "grad")}
    results = {i: cuts[n] for i, n in enumerate(optimizer.leaves) if n in cuts}
    state: dict[int, Cut] = {}
    while True:
        inputs = known | {f"state/{i}": cut for i, cut in state.items()}
        program, came = cut_program(optimizer.update, inputs, results | {first + i: c for i, c in state.items()})
        found = {i - first: cut for i, cut in came.items() if i >= first}
        if found == state:
            return program, state
        state = found


def treats_layers_alone(task: TrainingTask) -> bool:
    """Whether the update of a leaf is the updates of its slices: tried on a small leaf of random numbers, whole and cut
    along its leading dim, for two steps. An optimizer that fails on such a leaf is not known to."""
    rng = np.random.default_rng(0)
    whole, grads = (jnp.asarray(rng.normal(size=(4, 3, 8)), jnp.float32) for _ in range(2))

    def run(cut: bool) -> Any:
        def split(x: Any) -> dict[str, Any]:
            return {"a": x[:1], "b": x[1:]} if cut else {"a": x}

        def steps(start: Any, gradient: Any) -> Any:
            params: Any = split(start)
            state = task.optimizer.init(params)
            for scale in (1.0, 0.5):
                updates, state = task.optimizer.update(
                    jax.tree.map(lambda g, scale=scale: g * scale, split(gradient)), state, params
                )
                params = optax.apply_updates(params, updates)
            return jnp.concatenate([params["a"], params["b"]]) if cut else params["a"]

        return jax.jit(steps)(whole, grads)  # one compile; op by op an optimizer is dozens

    try:
        return bool(np.allclose(run(True), run(False), rtol=1e-5, atol=1e-7))
    except Exception:  # the user's own, about a leaf that is none of its parameters
        return False

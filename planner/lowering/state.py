"""What training carries from step to step."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from costmodel.errors import InputError


class TrainState(NamedTuple):
    """A pytree of arrays where the plan puts them.

    Attributes:
        params: for each stage group, parameter value name -> array (a stage's own layers of a stacked leaf).
        optimizer: optimizer state leaf name -> array, on the stage that owns the parameter.
        carried: carried state leaf name -> array.
        unused: parameters that no block reads, as they were given.
    """

    params: tuple[dict[str, Any], ...]
    optimizer: Any
    carried: dict[str, Any]
    unused: dict[str, Any]


def require_alive(state: TrainState) -> None:
    """Raises InputError MP119 where a step has consumed the state: steps reuse its memory."""
    gone = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array) and x.is_deleted()]
    if gone:
        raise InputError(
            "MP119",
            f"this state was given to a step before: {len(gone)} of its arrays are gone, as a step reuses their memory",
            "go on from the state that the step returned: state, metrics = train.step(state, batch)",
        )


def apart(arrays: Mapping[str, Any], others: Iterable[Any] = ()) -> dict[str, Any]:
    """Arrays of which none is another one or one of `others` (an optimizer may keep the parameters themselves): a step
    gives each away."""
    seen = {id(x) for x in others}
    found = {}
    for name, x in arrays.items():
        found[name] = jnp.copy(x) if id(x) in seen else x
        seen.add(id(x))
    return found

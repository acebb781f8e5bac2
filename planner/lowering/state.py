"""What training carries from step to step."""

from typing import Any, NamedTuple


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

"""Schedules by name, for those who ask what another one would do."""

from collections.abc import Callable

from costmodel.documents import nearest
from costmodel.errors import InputError
from costmodel.schedule.actions import Schedule
from costmodel.schedule.generate import Shares, gpipe, one_f_one_b

_GENERATORS: dict[str, Callable[[int, int, Shares | None], Schedule]] = {"1f1b": one_f_one_b, "gpipe": gpipe}

NAMES = tuple(_GENERATORS)


def by_name(name: str, stages: int, microbatches: int, shares: Shares | None = None) -> Schedule:
    """The schedule of that name.

    Args:
        name: one of NAMES.
        stages: number of stages.
        microbatches: number of microbatches.
        shares: per stage and group the microbatches that it runs; by default each stage has one group.

    Raises:
        InputError: MP146 for an unknown name; MP143 and MP144 as the generators.

    Example:
        >>> by_name("gpipe", 1, 2).actions[0].actions[1].kind
        'F'
    """
    if name not in _GENERATORS:
        near = nearest(name, NAMES, limit=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError("MP146", f"there is no schedule {name!r}", f"{hint}schedules are {', '.join(NAMES)}")
    return _GENERATORS[name](stages, microbatches, shares)

"""Schedules by name, for those who ask what another one would do with the stages that there are."""

from costmodel.errors import InputError
from costmodel.schedule.actions import Schedule
from costmodel.schedule.generate import Shares
from costmodel.schedule.registry import FAMILIES, make_schedule, schedule_family

NAMES = tuple(name for name, family in FAMILIES.items() if not family.required and not family.slices)
"""Those that need nothing but the numbers of stages and microbatches, and run these as they are."""

WITH_CHUNKS = tuple(name for name, family in FAMILIES.items() if family.required == (family.chunks,))
"""Those that also need the number of chunks of each stage."""


def by_name(
    name: str, stages: int, microbatches: int, shares: Shares | None = None, chunks: int | None = None
) -> Schedule:
    """The schedule of that name.

    Args:
        name: one of NAMES, or with `chunks` of WITH_CHUNKS.
        stages: number of stages of actors.
        microbatches: number of microbatches.
        shares: per stage and group the microbatches that it runs; by default each stage has one group.
        chunks: (virtual) stages on each stage of actors, for schedules that leave these open; None for their default.

    Raises:
        InputError: MP146 for a name that there is not, one that needs more than this, or one that cannot run stages of
            several groups; and what the generator raises.

    Example:
        >>> by_name("gpipe", 1, 2).actions[0].actions[1].kind
        'F'
    """
    known = NAMES if chunks is None else (*NAMES, *WITH_CHUNKS)
    family = schedule_family(name, known)
    if name not in known and not family.slices:
        raise InputError(
            "MP146", f"schedule {name} needs {', '.join(family.required)} beside the stages", f"use {', '.join(known)}"
        )
    given = {"chunks": chunks, "layers": None if chunks is None else stages * chunks}
    parameters = {key: given[key] for key in (family.chunks,) if isinstance(key, str)}
    several = shares is not None and any(len(groups) > 1 for groups in shares)
    return make_schedule(name, stages, microbatches, shares=shares if several else None, **parameters)

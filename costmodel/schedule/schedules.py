"""Schedules by name, for those who ask what another one would do."""

from costmodel.schedule.actions import Schedule
from costmodel.schedule.generate import Shares
from costmodel.schedule.registry import FAMILIES, make_schedule

NAMES = tuple(name for name, family in FAMILIES.items() if not family.required)
"""Those that need nothing but the numbers of stages and microbatches."""


def by_name(name: str, stages: int, microbatches: int, shares: Shares | None = None) -> Schedule:
    """The schedule of that name.

    Args:
        name: one of NAMES.
        stages: number of stages.
        microbatches: number of microbatches.
        shares: per stage and group the microbatches that it runs; by default each stage has one group.

    Raises:
        InputError: MP146 for a name that there is not, or one that cannot run stages of several groups; and what the
            generator raises.

    Example:
        >>> by_name("gpipe", 1, 2).actions[0].actions[1].kind
        'F'
    """
    several = shares is not None and any(len(groups) > 1 for groups in shares)
    return make_schedule(name, stages, microbatches, shares=shares if several else None)

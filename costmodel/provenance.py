"""Where a number comes from: every figure that a report shows carries one of these words."""

from dataclasses import dataclass
from typing import Literal, get_args

Provenance = Literal["measured", "interpolated", "compiled", "fitted", "datasheet", "assumed"]
"""From strongest to weakest: timed on the device; between timed points; said by the compiler; a constant fitted to
measurements; a vendor's figure; a guess that the user should replace."""

PROVENANCES: tuple[Provenance, ...] = get_args(Provenance)


def weakest(*provenances: Provenance) -> Provenance:
    """The provenance of a figure computed from several: a chain is as good as its weakest link.

    Example:
        >>> weakest("measured", "datasheet", "compiled")
        'datasheet'
    """
    if not provenances:
        raise ValueError("weakest() needs at least one provenance")
    return max(provenances, key=PROVENANCES.index)


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and where it comes from; the unit is in the name of whatever holds the figure."""

    value: float
    provenance: Provenance

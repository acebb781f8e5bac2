"""A profile's constants from its own measurements: rates, lines of collectives and lines of copies."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from profiles.fits import fit_line, fit_rate
from profiles.grids import matmul_grid
from profiles.schema import (
    CollectiveLine,
    CollectiveSample,
    CopyLine,
    CopySample,
    Fit,
    Gap,
    LineFit,
    MatmulSample,
    Profile,
    Rates,
    Sample,
)
from profiles.timing import MeasurementError

EVEN = frozenset({"add", "normalise"})
"""Ops that read and write whole arrays once: the memory's rate is theirs; others are measured to compare with it."""

LINE = "line of "
"""How the gap of a line begins: that it could not be fitted says nothing once there are more samples."""

T = TypeVar("T")


def fitted(profile: Profile, launch_s: Fit | None = None) -> Profile:
    """The profile with its constants fitted again to its samples.

    A rate or a line of which there are no samples stays as it is, as imported profiles have rates alone.

    Args:
        launch_s: the shortest time of an op; the profile's own if None.
    """
    launch_s = launch_s or profile.rates.launch_s
    collective_lines, gaps = _collective_lines(profile.collectives)
    copy_lines, more = _copy_lines(profile.copies)
    known = {(line.kind, line.size, line.stride) for line in collective_lines}
    kept = [line for line in profile.collective_lines if (line.kind, line.size, line.stride) not in known]
    routes = {(line.route, line.lanes) for line in copy_lines}
    kept_copies = [line for line in profile.copy_lines if (line.route, line.lanes) not in routes]
    return msgspec.structs.replace(
        profile,
        rates=_rates(profile, launch_s),
        collective_lines=tuple(sorted([*collective_lines, *kept], key=lambda one: (one.kind, one.size, one.stride))),
        copy_lines=tuple(sorted([*copy_lines, *kept_copies], key=lambda one: (one.route, one.lanes))),
        gaps=(*(gap for gap in profile.gaps if not gap.what.startswith(LINE)), *gaps, *more),
    )


def _rates(profile: Profile, launch_s: Fit | None) -> Rates:
    floor_s = launch_s.value if launch_s is not None else 0.0
    large = set(matmul_grid(profile.platform))
    products = [one for one in profile.matmuls if one.batch == 1]
    by_dtype: dict[str, list[MatmulSample]] = defaultdict(list)
    for one in [one for one in products if (one.dtype, one.shape) in large] or products:
        by_dtype[one.dtype].append(one)
    rates = {
        dtype: fit_rate([one.flops for one in mine], [one.time_s for one in mine], floor_s)
        for dtype, mine in by_dtype.items()
    }
    even = [one for one in profile.bandwidths if one.op in EVEN]
    streams = fit_rate([one.memory_bytes for one in even], [one.time_s for one in even], floor_s) if even else None
    return Rates(
        matmul_flops_per_s={**profile.rates.matmul_flops_per_s, **dict(sorted(rates.items()))},
        memory_bandwidth_bytes_per_s=streams or profile.rates.memory_bandwidth_bytes_per_s,
        launch_s=launch_s,
    )


def _collective_lines(samples: Sequence[CollectiveSample]) -> tuple[list[CollectiveLine], list[Gap]]:
    return _lines(
        samples,
        lambda one: (one.kind, one.size, one.stride),
        lambda one: one.full_bytes,
        lambda key, fit: CollectiveLine(kind=key[0], size=key[1], stride=key[2], **_constants(fit)),
        lambda key: f"{LINE}{key[0]} in groups of {key[1]}, stride {key[2]}",
    )


def _copy_lines(samples: Sequence[CopySample]) -> tuple[list[CopyLine], list[Gap]]:
    return _lines(
        samples,
        lambda one: (one.route, one.lanes),
        lambda one: one.lane_bytes,
        lambda key, fit: CopyLine(route=key[0], lanes=key[1], **_constants(fit)),
        lambda key: f"{LINE}copies {key[0].replace('_', ' ')} in {key[1]} lanes",
    )


def _lines(
    samples: Sequence[Any],
    key_of: Callable[[Any], Any],
    bytes_of: Callable[[Any], float],
    make: Callable[[Any, LineFit], T],
    name: Callable[[Any], str],
) -> tuple[list[T], list[Gap]]:
    groups: dict[Any, list[Sample]] = defaultdict(list)
    for one in samples:
        groups[key_of(one)].append(one)
    lines, gaps = [], []
    for key, mine in sorted(groups.items()):
        try:
            fit = fit_line([bytes_of(one) for one in mine], [one.time_s for one in mine])
        except MeasurementError as error:
            gaps.append(Gap(what=name(key), cause=f"{type(error).__name__}: {error}"))
        else:
            lines.append(make(key, fit))
    return lines, gaps


def _constants(fit: LineFit) -> dict[str, Any]:
    return {name: getattr(fit, name) for name in LineFit.__struct_fields__}

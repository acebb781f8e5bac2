"""Cuts of a pipeline that balance its parts, where equal numbers of layers do not.

B1  part k    runs consecutive layers on devices of its stage's kind, what stands between layers with the one
              behind; the first also runs what stands before them, the last what stands behind
B2  bound     parts keep within T if each, in order, takes as many layers as it can in T and enough are left for
              one in every part behind; the least such T is found by halving
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from costmodel.units import format_bytes, format_seconds
from planner.planfile.schema import Finding
from planner.strategy.memory import StageMemory, worst
from planner.strategy.pricing import ClassTimes
from planner.strategy.scheduled import homes
from planner.strategy.stages import layers_of_parts
from planner.strategy.strategy import Strategy
from planner.strategy.work import Work

UNEVEN = 1.25
"""Times the mean that the slowest of a pipeline's stages takes, from which on another cut is looked for."""

WORTH = 0.05
"""Share of a step that another cut must save to be worth a word."""

_HALVINGS = 24


@dataclass(frozen=True)
class _Part:
    """Seconds of a part by the number of layers before its end; `before_s` those of all blocks before its start, by
    the number of layers before that."""

    until_s: Sequence[float]
    before_s: Sequence[float]
    whole_s: float


def balanced_partition(work: Work, strategy: Strategy, times: Sequence[Mapping[str, ClassTimes]]) -> tuple[int, ...]:
    """Layers of each part such that the slowest part, of all with one layer each, is as fast as can be.

    Args:
        times: of one block of each class, on each stage.
    """
    home, layers = homes(strategy), [i for i, key in enumerate(work.order) if work.classes[key].layered]
    known = {stage: _part(work, layers, times[stage]) for stage in dict.fromkeys(home)}
    parts = [known[stage] for stage in home]
    even = layers_of_parts(work, strategy)
    best, low, high = tuple(even), 0.0, _slowest_s(parts, even)
    for _ in range(_HALVINGS):
        bound = (low + high) / 2.0
        found = _within(parts, len(layers), bound)
        if found is None:
            low = bound
        else:
            best, high = found, min(bound, _slowest_s(parts, found))
    return best


def _part(work: Work, layers: Sequence[int], times: Mapping[str, ClassTimes]) -> _Part:
    each = [times[key].forward_s + times[key].backward_s for key in work.order]
    before = [0.0, *accumulate(each)]
    return _Part(
        until_s=[before[layers[0]], *(before[at + 1] for at in layers)],
        before_s=[0.0, *(before[at + 1] for at in layers)],
        whole_s=before[-1],
    )


def _slowest_s(parts: Sequence[_Part], sizes: Sequence[int]) -> float:
    at, slowest = 0, 0.0
    for k, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        end_s = part.whole_s if k == len(parts) - 1 else part.until_s[at + size]
        slowest = max(slowest, end_s - part.before_s[at])
        at += size
    return slowest


def _within(parts: Sequence[_Part], layers: int, bound_s: float) -> tuple[int, ...] | None:
    """Layers of parts none of which takes longer; None if there are none."""
    at, sizes = 0, list[int]()
    for k, part in enumerate(parts[:-1]):
        room = layers - (len(parts) - 1 - k)
        end = min(room, bisect_right(part.until_s, part.before_s[at] + bound_s) - 1)
        if end <= at:
            return None
        sizes.append(end - at)
        at = end
    last = parts[-1]
    return (*sizes, layers - at) if last.whole_s - last.before_s[at] <= bound_s else None


def balance_finding(
    sizes: Sequence[int],
    stages_s: Sequence[float],
    balanced: Sequence[int],
    step_s: float,
    other_s: float,
    memory: Sequence[StageMemory],
) -> Finding:
    """MP198: that equal parts make stages wait, and the partition that does not.

    Args:
        sizes: layers of each part; stages_s: seconds of a microbatch on each stage.
        balanced: layers of each part in their place; other_s, memory: of the step then.
    """
    slowest = max(range(len(stages_s)), key=lambda s: stages_s[s])
    mean_s = sum(stages_s) / len(stages_s)
    fullest = worst(memory)
    fit = (
        ""
        if fullest.fits
        else f", and does not fit: {format_bytes(fullest.peak_bytes)} of {format_bytes(fullest.limit_bytes)} a device"
    )
    return Finding(
        code="MP198",
        severity="warning",
        message=f"pp={len(stages_s)}: equal parts ({_written(sizes)} layers) leave stages waiting: stage {slowest} "
        f"takes {format_seconds(stages_s[slowest])} a microbatch, {stages_s[slowest] / mean_s:.2f} times their mean",
        hint=f"partition={_written(balanced)} takes {format_seconds(other_s)} a step instead of "
        f"{format_seconds(step_s)}{fit}; `meshplan plan --strategy` cuts where stages are balanced",
    )


def _written(sizes: Sequence[int]) -> str:
    return "+".join(map(str, sizes))


__all__ = ["UNEVEN", "WORTH", "balance_finding", "balanced_partition"]

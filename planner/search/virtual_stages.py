"""Which devices run each (virtual) stage of a schedule, and where the blocks are cut so that the slowest is fastest."""

from collections.abc import Sequence

import numpy as np

from costmodel.errors import InputError
from costmodel.graph import ModelGraph
from costmodel.schedule.actions import Schedule
from planner.search.cuts import uncut_borders
from planner.space.decision import Decision

MOST_TO_EVEN = 4
"""Virtual stages on the same devices up to which blocks are moved between them; more of them even out by themselves."""

Shared = tuple[float, Decision]
"""A group's share of its stage's microbatches, and how it runs them."""


def homes(schedule: Schedule) -> list[int]:
    """For each (virtual) stage of a schedule, the stage of the actor that runs it."""
    home = {action.stage: row.stage for row in schedule.actions for action in row.actions}
    return [home[stage] for stage in range(len(home))]


def most_stages(graph: ModelGraph) -> int:
    """Into how many (virtual) stages a model can be cut at most."""
    return len(graph.blocks) - len(uncut_borders(graph))


def balanced_stops(
    graph: ModelGraph,
    stages: Sequence[Sequence[Shared]],
    blocks: Sequence[int | None] | None = None,
    home: Sequence[int] | None = None,
) -> list[int]:
    """The block after each stage's last, such that the slowest stage is as fast as can be.

    Where devices run several virtual stages, blocks are then moved from one to another, one at a time, while that makes
    the busiest devices faster (all of their virtual stages together), or these alike and the slowest virtual stage.

    Args:
        stages: the groups of each (virtual) stage.
        blocks: how many blocks a stage has, None where that is free.
        home: which devices run each (virtual) stage, by a number; None where each has its own.

    Raises:
        InputError: MP160, the model has no such cut.
    """
    count, wanted = len(graph.blocks), len(stages)
    fixed = blocks or [None] * wanted
    if count < wanted:
        raise InputError("MP160", f"{wanted} stages are pinned, the model has {count} blocks", "pin fewer stages")
    uncut = uncut_borders(graph)
    best = np.full((wanted + 1, count + 1), np.inf)
    back = np.zeros((wanted + 1, count + 1), dtype=int)
    best[0, 0] = 0.0
    prefixes = [_prefix_s(graph, groups) for groups in stages]
    for s, prefix in enumerate(prefixes):
        for stop in range(1, count + 1):
            if stop < count and stop in uncut:
                continue
            size = fixed[s]
            first, last = (0, stop) if size is None else (stop - size, stop - size + 1)
            if first < 0 or last > stop:
                continue
            costs = np.maximum(best[s, first:last], prefix[stop] - prefix[first:last])
            at = int(costs.argmin())
            best[s + 1, stop], back[s + 1, stop] = costs[at], first + at
    if not np.isfinite(best[wanted, count]):
        allowed = count - 1 - len(uncut)
        reasons = "".join(f"; {reason}" for reason in dict.fromkeys(uncut.values()))
        raise InputError(
            "MP160",
            f"the model's {count} blocks cannot be cut into the {wanted} stages that are pinned "
            f"({allowed} of {count - 1} borders may be cut{reasons})",
            "pin other block counts, or none, or fewer stages",
        )
    stops, at = [], count
    for s in range(wanted, 0, -1):
        stops.append(at)
        at = int(back[s, at])
    if home is None or not 1 < wanted / len(set(home)) <= MOST_TO_EVEN:
        return stops[::-1]
    return _evened(stops[::-1], prefixes, home, frozenset(uncut), fixed)


def _evened(
    stops: list[int],
    prefixes: Sequence[np.ndarray],
    home: Sequence[int],
    uncut: frozenset[int],
    fixed: Sequence[int | None],
) -> list[int]:
    """The stops after moves of one block from a virtual stage to another, through those between, while they help."""
    free = [i for i, size in enumerate(fixed) if size is None]
    moves = [(a, b) for a in free for b in free if a != b]
    now = _busiest_s(stops, prefixes, home)
    while True:
        tried = [(_busiest_s(other, prefixes, home), other) for a, b in moves if (other := _moved(stops, a, b, uncut))]
        least = min(tried, default=(now, stops))
        if not least[0] < now:
            return stops
        now, stops = least


def _moved(stops: Sequence[int], source: int, target: int, uncut: frozenset[int]) -> list[int]:
    """The stops with one block less in one virtual stage and one more in another; none if that is no cut."""
    step, span = (-1, range(source, target)) if source < target else (1, range(target, source))
    found = list(stops)
    for border in span:
        found[border] += step
    starts = [0, *found[:-1]]
    legal = all(a < b for a, b in zip(starts, found, strict=True)) and not uncut & {found[border] for border in span}
    return found if legal else []


def _busiest_s(stops: Sequence[int], prefixes: Sequence[np.ndarray], home: Sequence[int]) -> tuple[float, float]:
    """Seconds of a microbatch on the busiest devices, and on the slowest virtual stage."""
    each = [
        float(prefix[stop] - prefix[start])
        for prefix, start, stop in zip(prefixes, [0, *stops[:-1]], stops, strict=True)
    ]
    busy: dict[int, float] = {}
    for own_s, at in zip(each, home, strict=True):
        busy[at] = busy.get(at, 0.0) + own_s
    return max(busy.values()), max(each)


def _prefix_s(graph: ModelGraph, groups: Sequence[Shared]) -> np.ndarray:
    """[L + 1] seconds of a microbatch on the blocks before each border, on the slowest group."""
    each = [[share * _block_s(decision, block.class_key) for block in graph.blocks] for share, decision in groups]
    return np.concatenate([[0.0], np.cumsum(np.max(each, axis=0))])


def _block_s(decision: Decision, key: str) -> float:
    cost = decision.costs[key]
    return cost.forward_s + cost.backward_s + cost.forward_cast_s + cost.backward_cast_s


__all__ = ["Shared", "balanced_stops", "homes", "most_stages"]

"""Which devices run each (virtual) stage of a schedule, and where the blocks are cut so that the slowest is fastest."""

from collections.abc import Sequence

import numpy as np

from costmodel.errors import InputError
from costmodel.graph import ModelGraph
from costmodel.schedule.actions import Schedule
from planner.search.cuts import uncut_borders
from planner.space.decision import Decision

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
    graph: ModelGraph, stages: Sequence[Sequence[Shared]], blocks: Sequence[int | None] | None = None
) -> list[int]:
    """The block after each stage's last, such that the slowest stage is as fast as can be.

    Args:
        stages: the groups of each (virtual) stage.
        blocks: how many blocks a stage has, None where that is free.

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
    for s, groups in enumerate(stages):
        prefix = _prefix_s(graph, groups)
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
    return stops[::-1]


def _prefix_s(graph: ModelGraph, groups: Sequence[Shared]) -> np.ndarray:
    """[L + 1] seconds of a microbatch on the blocks before each border, on the slowest group."""
    each = [[share * _block_s(decision, block.class_key) for block in graph.blocks] for share, decision in groups]
    return np.concatenate([[0.0], np.cumsum(np.max(each, axis=0))])


def _block_s(decision: Decision, key: str) -> float:
    cost = decision.costs[key]
    return cost.forward_s + cost.backward_s + cost.forward_cast_s + cost.backward_cast_s


__all__ = ["Shared", "balanced_stops", "homes", "most_stages"]

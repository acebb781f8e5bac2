"""Schedules made for a layout: for its stages' own times, links and memory."""

from collections.abc import Iterator
from dataclasses import replace

from costmodel.schedule.synthesize import synthesize
from planner.search.schedule_costs import straight_costs
from planner.search.schedule_solver import solve_words
from planner.search.score import Score, score


def synthesized(base: Score) -> Iterator[Score]:
    """A layout under schedules made for its stages: with split backwards, and with whole ones, which hold less where
    remat recomputes. None where a stage cannot hold one microbatch, or where a stage has several groups.

    Args:
        base: the layout under any straight schedule.
    """
    layout, costs = base.layout, base.costs
    if len(layout.stages) < 2 or any(len(stage.groups) > 1 for stage in layout.stages):
        return
    wait_s = max((wait.time_s for wait in costs.waits.values()), default=0.0)
    for split in (True, False):
        times, straight = costs.times(split=split), straight_costs(costs, split=split)
        if min(straight.memory_cap) < straight.least_cap:
            continue
        made = synthesize(
            straight,
            layout.microbatches,
            optimizer_s=[time.reduce_s + time.exchange_s + time.update_s for time in times.values()],
            global_norm_s=wait_s,
            joined=bool(costs.waits),
            solver=solve_words,
        )
        yield score(replace(layout, schedule=made.schedule.name, actions=made.schedule), costs)


__all__ = ["synthesized"]

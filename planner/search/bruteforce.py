"""Exhaustive search on small instances: what the solvers are tested against. Shares only the scoring functions."""

import itertools
import math
from collections.abc import Iterator

from planner.search.problem import Goal, IntraOpProblem, score
from planner.search.stages import Span, StagePlan, StageProblem, score_stages


def best_assignment(problem: IntraOpProblem, goal: Goal = Goal.time) -> tuple[float, tuple[int, ...]]:
    """The least goal of any assignment and the first assignment with it; (inf, ()) where none counts."""
    best, best_choice = math.inf, ()
    for choice in itertools.product(*(range(size) for size in problem.sizes)):
        value = score(problem, choice, goal)
        if value < best:
            best, best_choice = value, choice
    return best, best_choice


def all_stage_plans(problem: StageProblem) -> Iterator[StagePlan]:
    """Every plan that the devices and numbers of stages allow, whether it fits into memory or not."""

    def extend(first: int, left: tuple[int, ...], spans: tuple[Span, ...]) -> Iterator[StagePlan]:
        if first == len(problem.blocks):
            if len(spans) >= problem.min_stages:
                yield score_stages(problem, spans)
            return
        if len(spans) == problem.max_stages:
            return
        for option, stage in enumerate(problem.options):
            rest = tuple(have - take for have, take in zip(left, stage.devices, strict=True))
            if min(rest) >= 0:
                for end in range(first + 1, len(problem.blocks) + 1):
                    yield from extend(end, rest, (*spans, (first, end, option)))

    return extend(0, problem.devices, ())


def best_stages(problem: StageProblem) -> StagePlan | None:
    """The fastest plan that fits, or None."""
    fitting = (plan for plan in all_stage_plans(problem) if plan.fits)
    return min(fitting, key=lambda plan: plan.step_time_s, default=None)

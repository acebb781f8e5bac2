"""Exhaustive search on small instances: what the solvers are tested against. Shares only the scoring functions."""

import itertools
import math

from planner.search.problem import Goal, IntraOpProblem, score


def best_assignment(problem: IntraOpProblem, goal: Goal = Goal.time) -> tuple[float, tuple[int, ...]]:
    """The least goal of any assignment and the first assignment with it; (inf, ()) where none counts."""
    best, best_choice = math.inf, ()
    for choice in itertools.product(*(range(size) for size in problem.sizes)):
        value = score(problem, choice, goal)
        if value < best:
            best, best_choice = value, choice
    return best, best_choice

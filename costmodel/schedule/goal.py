"""What a synthesized schedule minimises: the end of the step, or the longest time that a stage is at work in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from costmodel.schedule.straight import ROUNDING, StraightCosts
from costmodel.schedule.straight_bounds import heads_s, span_lower_bounds_s, step_lower_bounds_s

Key = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Minimises max over stages of (last end + after), and among equals the same for `tie_after`.

    Args:
        after_s: per stage what is added to the end of its last action.
        tie_after_s: the same for the second criterion.
        bound_s: proven least value of the first criterion.
        tie_bound_s: of the second.
    """

    after_s: tuple[float, ...]
    tie_after_s: tuple[float, ...]
    bound_s: float
    tie_bound_s: float

    def key(self, last_end_s: Sequence[float]) -> Key:
        """Both criteria, given each stage's last end."""
        return max(map(add, last_end_s, self.after_s)), max(map(add, last_end_s, self.tie_after_s))

    def reached(self, key: Key) -> bool:
        """Whether both criteria are at their bounds, so that nothing is better."""
        return key[0] <= _up(self.bound_s) and key[1] <= _up(self.tie_bound_s)

    def worst_stage(self, last_end_s: Sequence[float]) -> int:
        """The stage that sets the first criterion that is not at its bound."""
        at_bound = self.key(last_end_s)[0] <= _up(self.bound_s)
        after_s = self.tie_after_s if at_bound else self.after_s
        return max(range(len(after_s)), key=lambda stage: last_end_s[stage] + after_s[stage])


def goal_of(
    costs: StraightCosts, microbatches: int, optimizer_s: tuple[float, ...], *, barrier: bool, spans_first: bool
) -> Goal:
    """The goal of a synthesis.

    The first action of a stage starts at its head whatever the schedule, so a stage's span is its last end less that.

    Args:
        costs: the stages.
        microbatches: m.
        optimizer_s: each stage's optimizer step.
        barrier: whether no optimizer step starts before every stage is done.
        spans_first: whether the longest span counts before the end of the step.
    """
    alike = (max(optimizer_s),) * costs.stages
    step_after_s = alike if barrier else optimizer_s
    span_after_s = tuple(after - head for after, head in zip(optimizer_s, heads_s(costs)))
    own_s = tuple(map(add, heads_s(costs), span_lower_bounds_s(costs, microbatches)))
    step_bound_s = max(map(add, own_s, step_after_s))
    step_bound_s = max(step_bound_s, max(step_lower_bounds_s(costs, microbatches)) + (alike[0] if barrier else 0.0))
    span_bound_s = max(map(add, span_lower_bounds_s(costs, microbatches), optimizer_s))
    if spans_first:
        return Goal(after_s=span_after_s, tie_after_s=step_after_s, bound_s=span_bound_s, tie_bound_s=step_bound_s)
    return Goal(after_s=step_after_s, tie_after_s=span_after_s, bound_s=step_bound_s, tie_bound_s=span_bound_s)


def better(one: Key, other: Key) -> bool:
    """Whether `one` is smaller, differences by rounding aside."""
    if one[0] < other[0] * (1.0 - 1e-12):
        return True
    return one[0] <= other[0] * (1.0 + 1e-12) and one[1] < other[1] * (1.0 - 1e-12)


def _up(value_s: float) -> float:
    return value_s * (1.0 + ROUNDING)

"""Schedules made for given costs: the best of all fixed ones, list schedules, and improvements of these, with a proof
of how far from the best possible they can be.

    1. every fixed schedule that fits the caps, and list schedules under some thirty policies (`portfolio`),
    2. the best policy improved stage by stage, the best words by swaps on critical paths (`local_search`),
    3. for many microbatches: the same for few, extended by repeating its steady state (`extend`),
    4. an exact solver, if one is given, where it is small,
    5. all this again for tighter caps, whose schedules fit too: with more memory no schedule need be slower, but what
       steps 1 to 4 find now and then is. Caps go down by the least change of memory there is, until their bound is no
       better than what is known, or LEVEL_ACTIONS actions have been scheduled.

Each step is skipped once a bound is reached. Limits count actions, not time: the same input gives the same schedule.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil, floor, inf

from costmodel.errors import InputError
from costmodel.schedule.actions import ActorActions, Schedule, require_positive
from costmodel.schedule.extend import extended_words
from costmodel.schedule.goal import Goal, Key, better, goal_of
from costmodel.schedule.greedy import Policy, list_schedule
from costmodel.schedule.local_search import improve_words
from costmodel.schedule.portfolio import fixed_candidates, improve_policy, policies
from costmodel.schedule.straight import ROUNDING, StraightCosts, Word, WordTimes, peak_memory, schedule_of, time_words

_PORTFOLIO_ACTIONS = 1_500_000
_POLICY_ACTIONS = 500_000
_SWAP_ACTIONS = 500_000
_EXTENDED_ACTIONS = 5_000
LEVEL_ACTIONS = 6_000
_SWAP_STARTS = 3

Words = tuple[Word, ...]
Solver = Callable[[StraightCosts, int, Words, WordTimes, Goal], tuple[Words, float]]
"""Improves words with their times for a goal; returns words that fit, and a proven bound of the first criterion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesizedSchedule:
    """A schedule made for given costs.

    Args:
        schedule: one actor a stage.
        makespan_s: from the first start to the end of the last optimizer step: every stage waits for the last one and
            for the norm, unless steps are validated afterwards.
        longest_stage_span_s: over stages, from a stage's first start to the end of its own optimizer step.
        peak_activations: most activations that each stage holds, by the given deltas.
        lower_bound_s: proven least value, under these costs and caps, of what was minimised: `makespan_s`, or
            `longest_stage_span_s` if steps are validated afterwards.
        gap: what was minimised / `lower_bound_s` - 1.
        method: where the schedule came from, such as ``zb-h1``, ``list``, ``swaps`` or ``exact``.
    """

    schedule: Schedule
    makespan_s: float
    longest_stage_span_s: float
    peak_activations: tuple[float, ...]
    lower_bound_s: float
    gap: float
    method: str

    @property
    def actions(self) -> tuple[ActorActions, ...]:
        """The action list of every stage."""
        return self.schedule.actions


def synthesize(
    costs: StraightCosts,
    microbatches: int,
    *,
    optimizer_s: Sequence[float] | None = None,
    global_norm_s: float = 0.0,
    post_validation: bool = False,
    joined: bool = True,
    solver: Solver | None = None,
) -> SynthesizedSchedule:
    """Makes a schedule for given costs.

    Args:
        costs: the stages.
        microbatches: m.
        optimizer_s: each stage's optimizer step, after its last action; None if it takes no time.
        global_norm_s: a reduction over all stages that every optimizer step waits for.
        post_validation: each stage steps as soon as it is done, and the norm is validated (and in rare cases the step
            rolled back) during the next step. Then only the longest span matters, and no norm is waited for.
        joined: whether optimizer steps wait for all stages and for the norm; if not, each begins as its stage is done,
            and the last of them ends the step.
        solver: for step 4.

    Raises:
        InputError: MP143 if lists have different lengths, MP147 for a time that is negative or not finite, MP149 if a
            stage cannot even hold one microbatch.
    """
    require_positive("microbatches", microbatches)
    steps_s = (0.0,) * costs.stages if optimizer_s is None else tuple(map(float, optimizer_s))
    _check(costs, steps_s, global_norm_s)
    joined = joined and not post_validation
    costs = replace(costs, memory_cap=tuple(_usable(cap, costs) for cap in costs.memory_cap))
    goal = goal_of(costs, microbatches, steps_s, barrier=joined, spans_first=post_validation)
    method, words, times, bound_s = _best(costs, microbatches, goal, solver)
    for tighter in islice(
        _tighter(costs, microbatches), LEVEL_ACTIONS // (costs.letters * costs.stages * microbatches)
    ):
        key = goal.key(times.last_end_s)
        within = goal_of(tighter, microbatches, steps_s, barrier=joined, spans_first=post_validation)
        if goal.reached(key) or not better((within.bound_s, within.tie_bound_s), key):
            break
        found = _best(tighter, microbatches, within, solver)
        if better(goal.key(found[2].last_end_s), key):
            method, words, times = found[:3]
    first_s, second_s = goal.key(times.last_end_s)
    bound_s = min(bound_s, first_s)
    added_s = global_norm_s if joined else 0.0
    step_s, span_s = (second_s, first_s) if post_validation else (first_s + added_s, second_s)
    value_s, bound_s = first_s + added_s, bound_s + added_s
    return SynthesizedSchedule(
        schedule=schedule_of(words, microbatches, "auto"),
        makespan_s=step_s,
        longest_stage_span_s=span_s,
        peak_activations=tuple(peak_memory(word, costs.memory_delta) for word in words),
        lower_bound_s=bound_s,
        gap=value_s / bound_s - 1.0 if bound_s > 0.0 else 0.0,
        method=method,
    )


def _best(costs: StraightCosts, m: int, goal: Goal, solver: Solver | None) -> tuple[str, Words, WordTimes, float]:
    """Steps 1 to 4: method, words, their times, and a proven bound of the first criterion."""
    method, words = _search(costs, m, goal)
    times, bound_s = _timed(costs, words), goal.bound_s
    if solver is not None and not goal.reached(goal.key(times.last_end_s)):
        found, proven_s = solver(costs, m, words, times, goal)
        bound_s = max(bound_s, proven_s)
        found_times = _timed(costs, found)
        if better(goal.key(found_times.last_end_s), goal.key(times.last_end_s)):
            method, words, times = "exact", found, found_times
    return method, words, times, bound_s


def _grain(costs: StraightCosts) -> float:
    """The step in which caps matter: the largest of 1 and 1/2 that divides all changes of memory, 1/2 if none does."""
    return 1.0 if all(delta == int(delta) for delta in costs.memory_delta) else 0.5


def _usable(cap: float, costs: StraightCosts) -> float:
    """What of a cap can be used, where all changes of memory are multiples of the grain."""
    grain = _grain(costs)
    whole = all(abs(delta / grain - round(delta / grain)) <= ROUNDING for delta in costs.memory_delta)
    return floor(cap / grain + ROUNDING) * grain if whole and cap < inf else cap


def _tighter(costs: StraightCosts, m: int) -> Iterator[StraightCosts]:
    """The same stages with lower and lower caps, each a multiple of the grain or the stage's own."""
    grain, caps = _grain(costs), costs.memory_cap
    level = ceil(min(max(caps), m * costs.least_cap) / grain - ROUNDING) - 1
    while level * grain >= costs.least_cap:
        yield replace(costs, memory_cap=tuple(min(cap, level * grain) for cap in caps))
        level -= 1


@dataclass(slots=True)
class _Pool:
    """The best words so far, few of them, best first."""

    goal: Goal
    entries: list[tuple[str, Words, Key]]

    def offer(self, method: str, words: Words, ends_s: Sequence[float]) -> None:
        key = self.goal.key(ends_s)
        if any(words == known for _, known, _ in self.entries):
            return
        at = len(self.entries)
        while at and better(key, self.entries[at - 1][2]):
            at -= 1
        self.entries.insert(at, (method, words, key))
        del self.entries[_SWAP_STARTS:]

    @property
    def reached(self) -> bool:
        return self.goal.reached(self.entries[0][2])


def _search(costs: StraightCosts, m: int, goal: Goal) -> tuple[str, Words]:
    """Steps 1 to 3."""
    actions = costs.letters * costs.stages * m
    pool = _Pool(goal=goal, entries=[])
    for name, words, times in fixed_candidates(costs, m):
        pool.offer(name, words, times.last_end_s)
    listed: tuple[Policy, Words, Sequence[float]] | None = None
    for policy in islice(policies(costs, m), max(6, _PORTFOLIO_ACTIONS // actions)):
        if pool.entries and pool.reached:
            return pool.entries[0][:2]
        words, ends_s = list_schedule(costs, m, policy)
        pool.offer("list", words, ends_s)
        if listed is None or better(goal.key(ends_s), goal.key(listed[2])):
            listed = policy, words, ends_s
    few = max(16, 4 * costs.stages)
    if m >= 2 * few and costs.letters * costs.stages * few <= _EXTENDED_ACTIONS and not pool.reached:
        for longer in extended_words(_search(costs, few, _goal_for(costs, few, goal))[1], few, m):
            times = time_words(costs, longer)
            if times is not None:
                pool.offer("extended", longer, times.last_end_s)
    if listed is not None and not pool.reached:
        improved = improve_policy(costs, m, listed, goal, min(400, _POLICY_ACTIONS // actions))
        pool.offer("list", *improved)
    evaluations = min(2000, _SWAP_ACTIONS // actions)
    for _, words, _ in tuple(pool.entries):
        if evaluations and not pool.reached:
            words, times = improve_words(costs, words, goal, evaluations=-(-evaluations // len(pool.entries)))
            pool.offer("swaps", words, times.last_end_s)
    return pool.entries[0][:2]


def _timed(costs: StraightCosts, words: Words) -> WordTimes:
    times = time_words(costs, words)
    assert times is not None  # words are only ever taken if they run
    return times


def _goal_for(costs: StraightCosts, m: int, goal: Goal) -> Goal:
    """The same criteria for another number of microbatches; its bounds only say when to stop."""
    plain = goal_of(costs, m, (0.0,) * costs.stages, barrier=False, spans_first=min(goal.after_s) < 0.0)
    return Goal(
        after_s=goal.after_s, tie_after_s=goal.tie_after_s, bound_s=plain.bound_s, tie_bound_s=plain.tie_bound_s
    )


def _check(costs: StraightCosts, optimizer_s: tuple[float, ...], global_norm_s: float) -> None:
    if len(optimizer_s) != costs.stages:
        raise InputError("MP143", f"optimizer_s has {len(optimizer_s)} entries for {costs.stages} stages")
    for name, time_s in (
        *((f"optimizer_s[{at}]", t) for at, t in enumerate(optimizer_s)),
        ("global_norm_s", global_norm_s),
    ):
        if not 0.0 <= time_s < inf:
            raise InputError("MP147", f"{name} is {time_s}, it must be finite and not negative")
    least = costs.least_cap
    short = [stage for stage, cap in enumerate(costs.memory_cap) if cap < least - ROUNDING]
    if short:
        caps = ", ".join(f"{costs.memory_cap[stage]:g} on stage {stage}" for stage in short[:4])
        raise InputError(
            "MP149",
            f"no schedule fits: one microbatch needs {least:g} activations on each stage, the caps are {caps}"
            + (f" and {len(short) - 4} more" if len(short) > 4 else ""),
            f"{least:g} on every stage is the smallest that works; 1F1B needs {least:g} times (p - stage)",
        )

"""Generators of schedules: GPipe and 1F1B, also where a stage has several groups with shares of the microbatches.

Both are deadlock-free whatever the shares, because every actor's list is sorted by one *global rank* under which each
action comes after all that it needs. For stage i and microbatch k:

    GPipe  all F before all B, each by microbatch.
    1F1B   rank F(i, k) = a_i + 2k,  rank B(i, k) = b_i + 2k,                                              (G1)
           b_i - a_i = 2·(w_i + ... + w_(p-1)) - 1,  a_(i+1) - a_i = 2·w_i - 1,  b_i - b_(i+1) = 1,

where the *window* w_j is how many consecutive microbatches stage j, with the link into it, holds at once. F may come
later than (G1), which saves memory: an actor holds, beyond the one that it works on, only microbatches that the stages
after it can hold,

    rank F(i, k) = max(a_i + 2k, a_i + 2·(previous own microbatch + w_i) - 1) < a_(i+1) + 2k.              (G2)

With one group a stage and w = 1 this is the usual 1F1B: p - i microbatches in flight on stage i. With one group and any
windows it is 1 + w_(i+1) + ... + w_(p-1), so w_(i+1) is the difference of warm-up counts over link (i, i+1) that the
slow-link law speaks of. DAPPLE's policy PB is w = 2.
"""

from collections.abc import Sequence
from itertools import pairwise

from costmodel.errors import InputError
from costmodel.schedule.actions import Action, ActorActions, Schedule, require_positive

Shares = Sequence[Sequence[Sequence[int]]]
"""For each stage, for each of its groups, the microbatches that the group runs."""


def gpipe(stages: int, microbatches: int, shares: Shares | None = None) -> Schedule:
    """Fill, then drain: each actor runs all its forwards, then all its backwards.

    Args:
        stages: number of stages p.
        microbatches: number of microbatches m.
        shares: per stage and group the microbatches that it runs; by default each stage has one group.

    Raises:
        InputError: MP143 for a count below 1, MP144 if the groups of a stage do not partition the microbatches.
    """
    rows = []
    for stage, groups in enumerate(checked_shares(stages, microbatches, shares)):
        for group, own in enumerate(groups):
            forwards = (Action(stage, "F", microbatch) for microbatch in own)
            backwards = (Action(stage, "B", microbatch) for microbatch in own)
            rows.append(ActorActions(stage=stage, group=group, actions=(*forwards, *backwards)))
    return Schedule(name="gpipe", microbatches=microbatches, actions=tuple(rows))


def one_f_one_b(
    stages: int, microbatches: int, shares: Shares | None = None, windows: Sequence[int] | None = None
) -> Schedule:
    """1F1B: warm-up forwards, then one backward and one forward in turn, then the backwards that are left.

    Args:
        stages: number of stages p.
        microbatches: number of microbatches m.
        shares: per stage and group the microbatches that it runs; by default each stage has one group.
        windows: w_j per stage, see the module. Larger ones hide slow links and slow groups and cost every stage before
            j memory. By default `default_windows(shares)`, 1 for a stage with one group.

    Raises:
        InputError: MP143 for a count below 1, MP144 if the groups of a stage do not partition the microbatches.
    """
    checked = checked_shares(stages, microbatches, shares)
    widths = _checked_windows(stages, windows) if windows is not None else default_windows(checked)
    rows = []
    for stage, groups in enumerate(checked):
        for group, own in enumerate(groups):
            actions = _one_f_one_b_actions(stage, own, widths[stage], sum(widths[stage:]))
            rows.append(ActorActions(stage=stage, group=group, actions=actions))
    return Schedule(name="1f1b", microbatches=microbatches, actions=tuple(rows))


def default_windows(shares: Shares) -> tuple[int, ...]:
    """Windows for shares in proportion to speed: w_i = max(r_(i-1), r_i), r_i = ceil(m / smallest share of stage i).

    While the group with the smallest share runs one microbatch, its stage runs r_i in all. A microbatch's way over
    link (i-1, i) and back then takes r_(i-1) + r_i times the stages' time T per microbatch, so by the slow-link law
    the period stays T iff w_i + 1 >= r_(i-1) + r_i, which this rule meets where either r is 1. It is a starting point,
    not an optimum: stages of unequal groups in a row run faster with larger windows, at the price of memory.
    """
    rounds = [max(-(-sum(map(len, groups)) // len(own)) for own in groups if own) for groups in shares]
    return (rounds[0], *(max(pair) for pair in pairwise(rounds)))


def spread_shares(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Deals microbatches to the groups of a stage, `counts[g]` to group g, each group's evenly spread.

    The n-th of the c microbatches of a group is due at (n + 1/2) / c of the step; they are numbered in order of due
    time. Equal counts give a round robin.

    Raises:
        InputError: MP143 if the counts do not add up to at least 1, MP144 if one is negative.

    Example:
        >>> spread_shares((3, 1))
        ((0, 1, 3), (2,))
    """
    if any(count < 0 for count in counts):
        raise InputError("MP144", f"microbatch counts {tuple(counts)} include a negative one")
    require_positive("the sum of microbatch counts", sum(counts))
    scale = 1
    for count in counts:
        scale *= max(count, 1)
    due = sorted((((2 * n + 1) * (scale // count)), group) for group, count in enumerate(counts) for n in range(count))
    shares: list[list[int]] = [[] for _ in counts]
    for microbatch, (_, group) in enumerate(due):
        shares[group].append(microbatch)
    return tuple(map(tuple, shares))


def _one_f_one_b_actions(stage: int, own: Sequence[int], window: int, span: int) -> tuple[Action, ...]:
    """Merges the forwards and backwards of one actor by rank, less a_i; equal ranks put the backward first (G2).

    Args:
        stage: i.
        own: the actor's microbatches, increasing.
        window: w_i.
        span: w_i + ... + w_(p-1).
    """
    actions, backward = [], 0
    for at, microbatch in enumerate(own):
        rank = 2 * microbatch
        if at:
            rank = max(rank, 2 * (own[at - 1] + window) - 1)
        while backward < at and 2 * (own[backward] + span) - 1 <= rank:
            actions.append(Action(stage, "B", own[backward]))
            backward += 1
        actions.append(Action(stage, "F", microbatch))
    actions.extend(Action(stage, "B", microbatch) for microbatch in own[backward:])
    return tuple(actions)


def dealt(schedule: Schedule, shares: Shares) -> Schedule:
    """A schedule of one group a stage, each stage's list dealt to its groups by microbatch.

    An order of all actions that agrees with every list agrees with every part of a list too, so what does not deadlock
    does not after it is dealt.

    Args:
        schedule: one row a stage, in order.
        shares: checked; per row, per group its microbatches.
    """
    rows = []
    for row, groups in zip(schedule.actions, shares, strict=True):
        for group, own in enumerate(map(frozenset, groups)):
            actions = tuple(action for action in row.actions if action.microbatch in own)
            rows.append(ActorActions(stage=row.stage, group=group, actions=actions))
    return Schedule(name=schedule.name, microbatches=schedule.microbatches, actions=tuple(rows))


def checked_shares(stages: int, microbatches: int, shares: Shares | None) -> Shares:
    """The shares, or those of one group a stage.

    Raises:
        InputError: MP143 for a count below 1, MP144 if the groups of a stage do not partition the microbatches.
    """
    require_positive("stages", stages)
    require_positive("microbatches", microbatches)
    everything = tuple(range(microbatches))
    if shares is None:
        return ((everything,),) * stages
    if len(shares) != stages:
        raise InputError("MP144", f"shares are given for {len(shares)} stages, the schedule has {stages}")
    for stage, groups in enumerate(shares):
        for group, own in enumerate(groups):
            if list(own) != sorted(own):
                raise InputError("MP144", f"stage {stage} group {group}: microbatches {tuple(own)} are not in order")
        given = sorted(microbatch for own in groups for microbatch in own)
        if tuple(given) != everything:
            missing = sorted(set(everything) - set(given))
            foreign = sorted(set(given) - set(everything))
            repeated = sorted({microbatch for microbatch in given if given.count(microbatch) > 1})
            raise InputError(
                "MP144",
                f"stage {stage}: the shares of its {len(groups)} groups are no partition of microbatches "
                f"0..{microbatches - 1}: missing {missing}, not among them {foreign}, in several {repeated}",
                "give each microbatch to exactly one group of each stage",
            )
    return shares


def _checked_windows(stages: int, windows: Sequence[int]) -> Sequence[int]:
    if len(windows) != stages:
        raise InputError("MP143", f"windows are given for {len(windows)} stages, the schedule has {stages}")
    for stage, window in enumerate(windows):
        require_positive(f"the window of stage {stage}", window)
    return windows

"""Zero-bubble schedules H1 and H2: the backward is split, and weight gradients fill what would be bubbles.

Stage i of p runs `warm_up` forwards, then repeats B(k), W(k - lag), F, where

    H1   warm_up = p - i,        lag = i,     peak p activations on every stage,
    H2   warm_up = 2·(p - i) - 1, lag = 2·i,  peak 2p - 1 activations,

if an activation is held until its W. With stages alike, W ≤ F and free sends the bubble of a stage is at most
(p - 1)·(F + B - W) under H1 and (p - 1)·(F + B - 2W) under H2. H2 gains only where no stage waits for the last one
before its optimizer step: its makespan keeps the (p - 1)·F of the fill.

Where stages have several groups, forwards and backwards are in the order of 1F1B with the same shares (under H2 with
windows twice as wide), and a lag counts microbatches of the stage, not of the group.
"""

from collections import deque

from costmodel.schedule.actions import Action, ActorActions, Schedule
from costmodel.schedule.generate import Shares, checked_shares, default_windows, one_f_one_b


def zb_h1(stages: int, microbatches: int, shares: Shares | None = None) -> Schedule:
    """ZB-H1: the memory of 1F1B's first stage on every stage.

    Args:
        stages: number of stages p.
        microbatches: number of microbatches m.
        shares: per stage and group the microbatches that it runs; by default each stage has one group.

    Raises:
        InputError: MP143 for a count below 1, MP144 if the groups of a stage do not partition the microbatches.
    """
    return _lagged("zb-h1", stages, microbatches, shares, 1)


def zb_h2(stages: int, microbatches: int, shares: Shares | None = None) -> Schedule:
    """ZB-H2: no bubble between a stage's first and last action if F = B = W, for almost twice the memory of ZB-H1.

    Args and Raises: as `zb_h1`.
    """
    return _lagged("zb-h2", stages, microbatches, shares, 2)


def split_backward(schedule: Schedule) -> Schedule:
    """The same order with each fused backward written as B, then W at once, so that gradients are sent before W.

    A schedule that splits its backwards comes back as it is.
    """
    if schedule.splits_backward:
        return schedule
    rows = []
    for row in schedule.actions:
        actions: list[Action] = []
        for action in row.actions:
            actions.append(action)
            if action.kind == "B":
                actions.append(Action(action.stage, "W", action.microbatch))
        rows.append(ActorActions(stage=row.stage, group=row.group, actions=tuple(actions)))
    return Schedule(name=schedule.name, microbatches=schedule.microbatches, actions=tuple(rows))


def _lagged(name: str, stages: int, microbatches: int, shares: Shares | None, window: int) -> Schedule:
    """1F1B with windows `window` times the usual ones, and each W `window · i` microbatches after its B: behind the
    first own B of a microbatch that is as late."""
    usual = default_windows(checked_shares(stages, microbatches, shares))
    ordered = one_f_one_b(stages, microbatches, shares, windows=[window * width for width in usual])
    rows = []
    for row in ordered.actions:
        lag, actions, pending = window * row.stage, [], deque[int]()
        for action in row.actions:
            actions.append(action)
            if action.kind == "B":
                pending.append(action.microbatch)
                while pending and pending[0] + lag <= action.microbatch:
                    actions.append(Action(row.stage, "W", pending.popleft()))
        actions.extend(Action(row.stage, "W", microbatch) for microbatch in pending)
        rows.append(ActorActions(stage=row.stage, group=row.group, actions=tuple(actions)))
    return Schedule(name=name, microbatches=microbatches, actions=tuple(rows))

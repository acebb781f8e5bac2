"""Zero-bubble schedules H1 and H2: the backward is split, and weight gradients fill what would be bubbles.

Stage i of p runs `warm_up` forwards, then repeats B(k), W(k - lag), F, where

    H1   warm_up = p - i,        lag = i,     peak p activations on every stage,
    H2   warm_up = 2·(p - i) - 1, lag = 2·i,  peak 2p - 1 activations,

if an activation is held until its W. With stages alike, W ≤ F and free sends the bubble of a stage is at most
(p - 1)·(F + B - W) under H1 and (p - 1)·(F + B - 2W) under H2. H2 gains only where no stage waits for the last one
before its optimizer step: its makespan keeps the (p - 1)·F of the fill.
"""

from costmodel.schedule.actions import Action, ActorActions, Schedule, require_positive


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """ZB-H1: the memory of 1F1B's first stage on every stage.

    Raises:
        InputError: MP143 for a count below 1.
    """
    return _lagged("zb-h1", microbatches, [(stages - i, i) for i in range(_checked(stages, microbatches))])


def zb_h2(stages: int, microbatches: int) -> Schedule:
    """ZB-H2: no bubble between a stage's first and last action if F = B = W, for almost twice the memory of ZB-H1.

    Raises:
        InputError: MP143 for a count below 1.
    """
    rules = [(2 * (stages - i) - 1, 2 * i) for i in range(_checked(stages, microbatches))]
    return _lagged("zb-h2", microbatches, rules)


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


def _checked(stages: int, microbatches: int) -> int:
    require_positive("stages", stages)
    require_positive("microbatches", microbatches)
    return stages


def _lagged(name: str, microbatches: int, rules: list[tuple[int, int]]) -> Schedule:
    rows = []
    for stage, (warm_up, lag) in enumerate(rules):
        warm_up, lag = min(warm_up, microbatches), min(lag, microbatches)
        actions = [Action(stage, "F", k) for k in range(warm_up)]
        for k in range(microbatches):
            actions.append(Action(stage, "B", k))
            if k >= lag:
                actions.append(Action(stage, "W", k - lag))
            if warm_up + k < microbatches:
                actions.append(Action(stage, "F", warm_up + k))
        actions.extend(Action(stage, "W", k) for k in range(microbatches - lag, microbatches))
        rows.append(ActorActions(stage=stage, group=0, actions=tuple(actions)))
    return Schedule(name=name, microbatches=microbatches, actions=tuple(rows))

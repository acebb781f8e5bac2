"""Good schedules broken at random: the validator catches every broken one, with the grid and the marked cell, and
accepts every one that is still good, as an independent judge says."""

import random
import re

import pytest

from costmodel.schedule.actions import Action, ActorActions, Schedule
from costmodel.schedule.generate import one_f_one_b, spread_shares
from costmodel.schedule.registry import FAMILIES, make_schedule
from costmodel.schedule.validate import validate_schedule

PARAMETERS = {
    "hetero-1f1b": {"delays_s": [1.0, 0.0], "stage_times_s": 1.0},
    "layer-major": {"layers": 6},
}
MUTATIONS = 12_000


def good_schedules():
    """(schedule, virtual stages) of every family, and one with several groups a stage."""
    for name, family in FAMILIES.items():
        parameters = PARAMETERS.get(name, {})
        yield make_schedule(name, 3, 4, **parameters), family.virtual_stages(3, **parameters)
    yield one_f_one_b(2, 6, [spread_shares([3, 3]), spread_shares([4, 2])]), 2


def judged_good(schedule, stages, homes, kinds):
    """Every action once, on an actor of its stage and where its F ran, in an order that runs to the end."""
    places = {}
    for index, row in enumerate(schedule.actions):
        for step, action in enumerate(row.actions):
            if action in places or not (0 <= action.stage < stages and 0 <= action.microbatch < schedule.microbatches):
                return False
            if homes[action.stage] != row.stage:
                return False
            places[action] = index, step
    if len(places) != stages * schedule.microbatches * len(kinds):
        return False
    for action, (index, _) in places.items():
        if places[Action(action.stage, "F", action.microbatch)][0] != index:
            return False
    done, at = set(), [0] * len(schedule.actions)
    before = -1
    while len(done) > before:
        before = len(done)
        for index, row in enumerate(schedule.actions):
            while at[index] < len(row.actions):
                action = row.actions[at[index]]
                needs = {
                    "F": [Action(action.stage - 1, "F", action.microbatch)] if action.stage else [],
                    "B": [Action(action.stage, "F", action.microbatch)]
                    + [Action(s, "B", action.microbatch) for s in [action.stage + 1] if s < stages],
                    "W": [Action(action.stage, "B", action.microbatch)],
                }[action.kind]
                if not all(need in done for need in needs):
                    break
                done.add(action)
                at[index] += 1
    return len(done) == len(places)


def mutated(rng, schedule):
    """One small change: swap, move, drop, double or rename an action, or move it to another actor."""
    lists = [list(row.actions) for row in schedule.actions]
    source = rng.randrange(len(lists))
    own = lists[source]
    at = rng.randrange(len(own))
    change = rng.randrange(7)
    if change == 0:
        other = min(len(own) - 1, at + 1)
        own[at], own[other] = own[other], own[at]
    elif change == 1:
        other = rng.randrange(len(own))
        own[at], own[other] = own[other], own[at]
    elif change == 2:
        own.insert(rng.randrange(len(own)), own.pop(at))
    elif change == 3:
        own.pop(at)
    elif change == 4:
        own.insert(rng.randrange(len(own) + 1), own[at])
    elif change == 5:
        action = own[at]
        own[at] = Action(
            max(0, action.stage + rng.choice([0, 0, 1, -1])),
            rng.choice("FBW"),
            max(0, action.microbatch + rng.choice([0, 1, -1])),
        )
    else:
        target = lists[rng.randrange(len(lists))]
        target.insert(rng.randrange(len(target) + 1), own.pop(at))
    rows = tuple(
        ActorActions(stage=row.stage, group=row.group, actions=tuple(actions))
        for row, actions in zip(schedule.actions, lists)
    )
    return Schedule(name=schedule.name, microbatches=schedule.microbatches, actions=rows)


@pytest.mark.parametrize("seed", range(4))
def test_every_broken_schedule_is_caught_and_every_good_one_accepted(seed):
    rng = random.Random(seed)
    originals = []
    for schedule, stages in good_schedules():
        homes = {action.stage: row.stage for row in schedule.actions for action in row.actions}
        kinds = "FBW" if schedule.splits_backward else "FB"
        assert judged_good(schedule, stages, homes, kinds)
        originals.append((schedule, stages, homes, kinds))
    good = 0
    for number in range(MUTATIONS // 4):
        schedule, stages, homes, kinds = originals[number % len(originals)]
        broken = schedule
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            if all(row.actions for row in broken.actions):
                broken = mutated(rng, broken)
        findings = validate_schedule(broken, stages)
        if broken.splits_backward != schedule.splits_backward:  # a W where there were none asks for all the others
            assert findings
            continue
        expected = judged_good(broken, stages, homes, kinds)
        good += expected
        assert (findings == ()) == expected, (number, findings[:1])
        for finding in findings:
            assert re.search(r"^step +\|", finding.message, re.MULTILINE), finding.message
            assert finding.actor is None or re.search(r">(\d+[FBW]\d+|\?)<", finding.message), finding.message
    assert MUTATIONS // 4 // 20 < good < MUTATIONS // 4 // 2

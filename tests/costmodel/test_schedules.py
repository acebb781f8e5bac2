"""Generators against the formulas of schedules, and the validator against schedules broken on purpose."""

import doctest
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.errors import InputError
from costmodel.pipeline import gpipe_in_flight, one_f_one_b_in_flight
from costmodel.schedule import generate as module
from costmodel.schedule.actions import Action, ActorActions, Schedule, format_actions, parse_schedule
from costmodel.schedule.generate import default_windows, gpipe, one_f_one_b, spread_shares
from costmodel.schedule.validate import dependency_order, in_flight, validate_schedule

GENERATORS = {"gpipe": gpipe, "1f1b": one_f_one_b}


@st.composite
def shared_pipelines(draw):
    """(stages, microbatches, shares) with 1 to 4 groups a stage and any partition, empty groups too."""
    stages, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 20))
    shares = []
    for _ in range(stages):
        groups = draw(st.integers(1, 4))
        owner = draw(st.lists(st.integers(0, groups - 1), min_size=microbatches, max_size=microbatches))
        shares.append(tuple(tuple(k for k in range(microbatches) if owner[k] == g) for g in range(groups)))
    return stages, microbatches, tuple(shares)


def broken(text, microbatches=2):
    return parse_schedule(f"schedule broken microbatches {microbatches}\n{text}")


def test_order_of_1f1b():
    rows = [format_actions(row.actions) for row in one_f_one_b(3, 4).actions]
    assert rows == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_order_of_gpipe():
    assert [format_actions(row.actions) for row in gpipe(2, 2).actions] == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 7, 16])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 7, 16, 64])
def test_peak_in_flight_is_the_closed_form(stages, microbatches):
    for schedule, closed in (
        (gpipe(stages, microbatches), gpipe_in_flight(stages, microbatches)),
        (one_f_one_b(stages, microbatches), one_f_one_b_in_flight(stages, microbatches)),
    ):
        assert validate_schedule(schedule, stages) == ()
        assert list(in_flight(schedule).values()) == list(closed)
    assert list(closed) == [min(stages - i, microbatches) for i in range(stages)]


@given(st.integers(1, 12), st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_windows_set_the_warm_up_counts(microbatches, windows):
    schedule = one_f_one_b(len(windows), microbatches, windows=windows)
    assert validate_schedule(schedule, len(windows)) == ()
    held = [min(microbatches, 1 + sum(windows[i + 1 :])) for i in range(len(windows))]
    assert list(in_flight(schedule).values()) == held
    assert list(one_f_one_b_in_flight(len(windows), microbatches, windows)) == held


def test_windows_of_two_are_dapples_policy_b():
    stages = 5
    held = in_flight(one_f_one_b(stages, 40, windows=[2] * stages))
    assert list(held.values()) == [2 * (stages - i) - 1 for i in range(stages)]


@settings(max_examples=200)
@given(shared_pipelines(), st.data())
def test_any_partition_into_groups_is_valid(pipeline, data):
    stages, microbatches, shares = pipeline
    windows = data.draw(st.none() | st.lists(st.integers(1, 6), min_size=stages, max_size=stages))
    for schedule in (gpipe(stages, microbatches, shares), one_f_one_b(stages, microbatches, shares, windows)):
        assert validate_schedule(schedule, stages) == ()
        for row in schedule.actions:
            for kind in ("F", "B"):
                own = tuple(action.microbatch for action in row.actions if action.kind == kind)
                assert own == shares[row.stage][row.group]


def test_round_robin_over_equal_groups_is_1f1b_of_each_half():
    stages, microbatches = 4, 16
    halves = spread_shares([8, 8])
    assert halves == (tuple(range(0, 16, 2)), tuple(range(1, 16, 2)))
    held = in_flight(one_f_one_b(stages, microbatches, [halves] * stages))
    assert held == {(stage, group): stages - stage for stage in range(stages) for group in range(2)}


def test_groups_of_the_last_stage_hold_one_microbatch():
    schedule = one_f_one_b(2, 16, [[range(16)], spread_shares([12, 4])])
    assert default_windows([[range(16)], spread_shares([12, 4])]) == (1, 4)
    assert in_flight(schedule) == {(0, 0): 5, (1, 0): 1, (1, 1): 1}


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(sum))
def test_spread_shares_deals_every_microbatch_evenly(counts):
    shares = spread_shares(counts)
    total = sum(counts)
    assert sorted(k for own in shares for k in own) == list(range(total))
    assert [len(own) for own in shares] == counts
    for count, own in zip(counts, shares):
        for n, microbatch in enumerate(own):
            assert abs(microbatch - (n + 0.5) * total / count) <= len(counts)


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        (lambda: gpipe(0, 4), "MP143", ["stages is 0"]),
        (lambda: one_f_one_b(2, 0), "MP143", ["microbatches is 0"]),
        (lambda: one_f_one_b(2, 4, windows=[1]), "MP143", ["1 stages", "has 2"]),
        (lambda: one_f_one_b(2, 4, windows=[1, 0]), "MP143", ["window of stage 1 is 0"]),
        (lambda: gpipe(2, 2, [[(0, 1)]]), "MP144", ["1 stages", "has 2"]),
        (lambda: gpipe(1, 3, [[(0, 1), (1,)]]), "MP144", ["missing [2]", "in several [1]"]),
        (lambda: gpipe(1, 2, [[(0, 1, 2)]]), "MP144", ["not among them [2]"]),
        (lambda: gpipe(1, 2, [[(1, 0)]]), "MP144", ["not in order"]),
        (lambda: spread_shares([0, 0]), "MP143", ["is 0"]),
        (lambda: spread_shares([3, -1]), "MP144", ["(3, -1)"]),
    ],
)
def test_bad_input_to_generators(call, code, words):
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.code == code
    assert all(word in caught.value.message for word in words), caught.value.message


def test_missing_action_is_marked():
    (finding,) = validate_schedule(broken("0.0: 0F0 0F1 0B0\n1.0: 1F0 1B0 1F1 1B1"), 2)
    assert (finding.code, finding.actor, finding.step) == ("MP610", (0, 0), 3)
    assert finding.message.splitlines() == [
        "0B1 is missing: stage 0 has no B of 1 of 2 microbatches (1)",
        "step            |   0     1     2     3",
        "stage 0 group 0 |  0F0   0F1   0B0   >?<",
        "stage 1 group 0 |  1F0   1B0   1F1   1B1",
    ]


def test_missing_action_is_marked_on_the_group_that_runs_the_rest():
    (finding,) = validate_schedule(broken("0.0: 0F0 0B0\n0.1: 0F1"), 1)
    assert (finding.code, finding.actor, finding.step) == ("MP610", (0, 1), 1)


def test_missing_stage_has_no_cell():
    findings = validate_schedule(broken("0.0: 0F0 0F1 0B0 0B1"), 2)
    assert [(f.code, f.actor) for f in findings] == [("MP610", None)] * 2
    assert "no actor runs stage 1" in findings[0].message


def test_missing_weight_gradient():
    (finding,) = validate_schedule(broken("0.0: 0F0 0F1 0B0 0W0 0B1"), 1)
    assert finding.code == "MP610"
    assert "0W1 is missing" in finding.message


def test_duplicated_action_is_marked_on_both_groups():
    findings = validate_schedule(broken("0.0: 0F0 0B0 0F1 0B1\n0.1: 0F1 0B1"), 1)
    assert [(f.code, f.actor, f.step) for f in findings] == [("MP611", (0, 1), 0), ("MP611", (0, 1), 1)]
    assert "0F1 is duplicated: step 2 of stage 0 group 0 and step 0 of stage 0 group 1" in findings[0].message
    assert findings[0].message.count(">0F1<") == 2


def test_backward_before_forward_is_out_of_order():
    (finding,) = validate_schedule(broken("0.0: 0F0 0F1 0B0 0B1\n1.0: 1F0 1B1 1F1 1B0"), 2)
    assert (finding.code, finding.actor, finding.step) == ("MP612", (1, 0), 1)
    assert "1B1 (step 1) comes before 1F1 (step 2)" in finding.message
    assert "stage 1 group 0 |  1F0  >1B1< >1F1<  1B0" in finding.message


def test_backward_on_another_group_than_forward():
    (finding,) = validate_schedule(broken("0.0: 0F0 0F1 0B0\n0.1: 0B1"), 1)
    assert finding.code == "MP612"
    assert "0B1 runs on stage 0 group 1, but 0F1 ran on stage 0 group 0" in finding.message


def test_weight_gradient_before_backward_is_out_of_order():
    (finding,) = validate_schedule(broken("0.0: 0F0 0W0 0B0", 1), 1)
    assert finding.code == "MP612"


def test_deadlock_marks_every_waiting_cell():
    (finding,) = validate_schedule(broken("0.0: 0F0 0B0 0F1 0B1\n1.0: 1F0 1F1 1B0 1B1"), 2)
    assert (finding.code, finding.actor, finding.step) == ("MP613", (0, 0), 1)
    assert finding.message.splitlines() == [
        "deadlock, 2 of 2 stopped actors wait for each other: "
        "stage 0 group 0 stops before 0B0 (step 1), which needs 1B0; "
        "stage 1 group 0 stops before 1F1 (step 1), which needs 0F1",
        "step            |   0     1     2     3",
        "stage 0 group 0 |  0F0  >0B0<  0F1   0B1",
        "stage 1 group 0 |  1F0  >1F1<  1B0   1B1",
    ]


@given(st.integers(2, 8), st.integers(2, 12), st.data())
def test_too_few_warm_ups_deadlock_unless_the_next_stage_asks_for_one(stages, microbatches, data):
    """A stage that runs fewer forwards before its first backward than the next stage does cannot go on."""
    stage = data.draw(st.integers(0, stages - 2))
    schedule = one_f_one_b(stages, microbatches)
    rows = list(schedule.actions)
    own = [Action(stage, kind, k) for k in range(microbatches) for kind in ("F", "B")]  # warm-up of one
    rows[stage] = ActorActions(stage=stage, group=0, actions=tuple(own))
    findings = validate_schedule(Schedule(name="broken", microbatches=microbatches, actions=tuple(rows)), stages)
    if stage == stages - 2:
        assert findings == ()  # the last stage asks for one at a time
    else:
        assert [finding.code for finding in findings] == ["MP613"]
        assert f">{stage}B0<" in findings[0].message
        assert f">{stage + 1}F1<" in findings[0].message
        assert f"2 of {stages} stopped actors" in findings[0].message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0.0: 0F0 0B0 0F1 0B1 0F2", "0F2 is outside the schedule's 1 stages and 2 microbatches"),
        ("0.0: 0F0 0B0 0F1 0B1 1F0", "1F0 is outside the schedule's 1 stages and 2 microbatches"),
    ],
)
def test_action_outside_the_schedule(text, words):
    findings = validate_schedule(broken(text), 1)
    assert [finding.code for finding in findings] == ["MP614"]
    assert words in findings[0].message


def test_action_on_another_stages_actor():
    findings = validate_schedule(broken("0.0: 0F0 0B0 1F0 1B0\n1.0: 0F1 0B1 1F1 1B1"), 2)
    assert {finding.code for finding in findings} == {"MP614"}
    assert "1F0 runs on stage 0 group 0, but stage 1 belongs to the actors of stage 1" in findings[0].message


def test_virtual_stages_belong_to_one_stage():
    v_shape = "0.0: 0F0 3F0 3B0 0B0\n1.0: 1F0 2F0 2B0 1B0"
    assert validate_schedule(broken(v_shape, 1), 4) == ()
    assert in_flight(broken(v_shape, 1)) == {(0, 0): 2, (1, 0): 2}
    torn = "0.0: 0F0 2F0 2B0 0B0 1F1 1B1\n1.0: 0F1 1F0 2F1 2B1 1B0 0B1"
    findings = validate_schedule(broken(torn), 3)
    assert {finding.code for finding in findings} == {"MP614"}


def test_activations_are_held_until_the_weight_gradient():
    assert in_flight(broken("0.0: 0F0 0B0 0F1 0B1 0W0 0W1"))[0, 0] == 2
    assert in_flight(broken("0.0: 0F0 0B0 0W0 0F1 0B1 0W1"))[0, 0] == 1


def test_grid_of_a_large_schedule_shows_the_bad_cell_and_stays_small():
    schedule = one_f_one_b(32, 64)
    rows = list(schedule.actions)
    actions = list(rows[30].actions)
    at = actions.index(Action(30, "F", 40))
    actions[at] = Action(30, "F", 39)
    rows[30] = ActorActions(stage=30, group=0, actions=tuple(actions))
    findings = validate_schedule(Schedule(name="broken", microbatches=64, actions=tuple(rows)), 32)
    assert [finding.code for finding in findings] == ["MP610", "MP611"]
    assert ">30F39<" in findings[1].message
    assert "(16 more actors)" in findings[1].message
    assert all(len(line) <= 120 for finding in findings for line in finding.message.splitlines())


def test_findings_are_capped():
    schedule = Schedule(name="empty", microbatches=2, actions=(ActorActions(stage=0, group=0, actions=()),))
    assert len(validate_schedule(schedule, 50)) == 10


@given(st.sampled_from(sorted(GENERATORS)), shared_pipelines(), st.randoms(use_true_random=False))
def test_shuffled_lists_never_pass_unless_they_can_run(name, pipeline, rng: random.Random):
    """Whatever the validator passes has a dependency order of all its actions; whatever it rejects says why."""
    stages, microbatches, shares = pipeline
    schedule = GENERATORS[name](stages, microbatches, shares)
    rows = []
    for row in schedule.actions:
        actions = list(row.actions)
        if actions and rng.random() < 0.5:
            i, j = rng.randrange(len(actions)), rng.randrange(len(actions))
            actions[i], actions[j] = actions[j], actions[i]
        rows.append(ActorActions(stage=row.stage, group=row.group, actions=tuple(actions)))
    shuffled = Schedule(name=name, microbatches=microbatches, actions=tuple(rows))
    findings = validate_schedule(shuffled, stages)
    order = dependency_order(shuffled, stages)
    assert bool(findings) == bool(order.stuck)
    if findings:
        assert findings[0].code in ("MP612", "MP613")
        assert ">" in findings[0].message
    else:
        place = {action: at for at, (_, action) in enumerate(order.order)}
        assert len(place) == 2 * stages * microbatches
        for stage in range(stages):
            for k in range(microbatches):
                before = [Action(s, "F", k) for s in range(stage)]
                after = [Action(s, "B", k) for s in reversed(range(stage, stages))]
                way = [place[action] for action in (*before, Action(stage, "F", k), *after)]
                assert list(np.argsort(way)) == list(range(len(way)))


def test_examples_in_docstrings():
    assert doctest.testmod(module).failed == 0

"""The text form of actions and schedules: round trip, and what bad text is told."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.errors import InputError
from costmodel.schedule import actions as module
from costmodel.schedule.actions import (
    Action,
    ActorActions,
    Schedule,
    format_actions,
    format_schedule,
    parse_action,
    parse_actions,
    parse_schedule,
)

ACTIONS = st.builds(Action, st.integers(0, 200), st.sampled_from("FBW"), st.integers(0, 5000))


@given(st.lists(ACTIONS))
def test_actions_round_trip(actions):
    assert parse_actions(format_actions(actions)) == tuple(actions)


@given(
    st.integers(1, 100),
    st.dictionaries(st.tuples(st.integers(0, 9), st.integers(0, 3)), st.lists(ACTIONS, max_size=5), min_size=1),
)
def test_schedule_round_trip(microbatches, lists):
    rows = tuple(ActorActions(stage=s, group=g, actions=tuple(actions)) for (s, g), actions in lists.items())
    schedule = Schedule(name="zb-h1", microbatches=microbatches, actions=rows)
    text = format_schedule(schedule)
    assert parse_schedule(text) == schedule
    assert format_schedule(parse_schedule(text)) == text


def test_text_of_an_action():
    assert str(Action(2, "F", 0)) == "2F0"
    assert parse_action("12W345") == Action(12, "W", 345)


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        ("2X0", "the kind is 'X', expected F, B or W"),
        ("2f0", "the kind is 'f', expected F, B or W"),
        ("20", "names no kind"),
        ("", "names no kind"),
        ("F0", "the stage is missing"),
        ("2F", "the microbatch is missing"),
        ("-1F0", "2 characters that are not digits"),
        ("1FB0", "2 characters that are not digits"),
        ("01F0", "the stage 01 has leading zeros"),
        ("1F00", "the microbatch 00 has leading zeros"),
        ("1F1234567890", "larger than 999999999"),
        ("²F0", "2 characters that are not digits"),
    ],
)
def test_bad_action_is_named_with_reason_and_position(token, reason):
    with pytest.raises(InputError) as caught:
        parse_action(token, where="action 7")
    assert caught.value.code == "MP140"
    assert caught.value.message.startswith(f"action 7: {token!r} is not an action")
    assert reason in caught.value.message
    assert "2F0" in caught.value.hint


def test_position_counts_from_one():
    with pytest.raises(InputError, match=r"action 3: '0Z0'"):
        parse_actions("0F0 0B0 0Z0 0F1")
    with pytest.raises(InputError, match=r"line 3, action 2: '1Q0'"):
        parse_schedule("schedule x microbatches 1\n0.0: 0F0 0B0\n1.0: 1F0 1Q0")


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("", "MP141", "the text is empty"),
        ("0.0: 0F0", "MP141", "line 1 is '0.0: 0F0'"),
        ("schedule x microbatches 0\n0.0: 0F0", "MP141", "not a schedule"),
        ("schedule x microbatches 1\n0: 0F0", "MP141", "line 2: '0: 0F0' names no actor"),
        ("schedule x microbatches 1\n", "MP142", "no actor"),
        ("schedule x microbatches 1\n0.0: 0F0\n0.0: 0B0", "MP142", "names stage 0 group 0 twice"),
    ],
)
def test_bad_schedule_text(text, code, message):
    with pytest.raises(InputError) as caught:
        parse_schedule(text)
    assert (caught.value.code, message in caught.value.message) == (code, True), caught.value


@pytest.mark.parametrize("microbatches", [0, -3])
def test_microbatches_must_be_positive(microbatches):
    with pytest.raises(InputError, match=str(microbatches)) as caught:
        Schedule(name="x", microbatches=microbatches, actions=(ActorActions(stage=0, group=0, actions=()),))
    assert caught.value.code == "MP143"


def test_schedule_says_whether_it_splits_backward():
    assert not parse_schedule("schedule x microbatches 1\n0.0: 0F0 0B0").splits_backward
    assert parse_schedule("schedule x microbatches 1\n0.0: 0F0 0B0 0W0").splits_backward


def test_examples_in_docstrings():
    assert doctest.testmod(module).failed == 0

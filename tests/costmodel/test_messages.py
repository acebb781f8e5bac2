"""Sends and receives written out in a schedule's text: round trip, and what wrong ones are told."""

import doctest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.errors import InputError
from costmodel.schedule import messages as module
from costmodel.schedule.actions import Action, format_schedule
from costmodel.schedule.generate import gpipe, one_f_one_b, spread_shares
from costmodel.schedule.looped import interleaved
from costmodel.schedule.messages import (
    Message,
    format_with_messages,
    parse_any_schedule,
    with_messages,
)
from costmodel.schedule.v_shape import zb_v
from costmodel.schedule.zero_bubble import zb_h1

EXPLICIT = """schedule x microbatches 1
0.0: 0F0 0SEND_F0 0RECV_B0 0B0
1.0: 1RECV_F0 1F0 1B0 1SEND_B0
"""


def test_messages_of_a_small_schedule():
    assert format_with_messages(gpipe(2, 1)) == EXPLICIT.replace("schedule x", "schedule gpipe")


@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_round_trip_of_any_schedule(stages, microbatches, which):
    shares = [[range(microbatches)], *[spread_shares([1, 1]) if microbatches == 2 else [range(microbatches)]] * 4]
    schedule = [
        lambda: one_f_one_b(stages, microbatches, shares[:stages]),
        lambda: gpipe(stages, microbatches),
        lambda: zb_h1(stages, microbatches),
        lambda: zb_v(stages, microbatches),
        lambda: interleaved(stages, microbatches, 3),
    ][which]()
    assert parse_any_schedule(format_with_messages(schedule)) == schedule
    assert parse_any_schedule(format_schedule(schedule)) == schedule


def test_no_messages_between_virtual_stages_of_one_actor():
    rows = with_messages(zb_v(2, 4))
    sends = {(step.stage, step.kind) for row in rows for step in row.steps if isinstance(step, Message)}
    assert {stage for stage, kind in sends if kind == "F"} == {0, 1, 2, 3}
    turn = [str(step) for step in rows[1].steps if isinstance(step, Message) and step.microbatch == 0]
    assert sorted(turn) == ["1RECV_F0", "1SEND_B0", "2RECV_B0", "2SEND_F0"]


def test_receives_may_come_early_if_nothing_waits_for_ever():
    early = EXPLICIT.replace("microbatches 1", "microbatches 2").replace(
        "0F0 0SEND_F0 0RECV_B0 0B0", "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1"
    )
    early = early.replace("1RECV_F0 1F0 1B0 1SEND_B0", "1RECV_F0 1RECV_F1 1F0 1B0 1F1 1B1 1SEND_B0 1SEND_B1")
    assert parse_any_schedule(early).actions[1].actions[2] == Action(1, "F", 1)


@pytest.mark.parametrize(
    ("old", "new", "code", "words"),
    [
        (" 0SEND_F0", "", "MP139", "stage 0 group 0, step 3: 0SEND_F0 is missing"),
        ("0F0 0SEND_F0", "0SEND_F0 0F0", "MP139", "0SEND_F0 comes before 0F0 (step 1)"),
        ("1RECV_F0 1F0", "1F0 1RECV_F0", "MP139", "1RECV_F0 comes after 1F0 (step 0)"),
        ("1SEND_B0", "1SEND_B0 1SEND_B0", "MP139", "1SEND_B0 is there twice"),
        ("1SEND_B0", "1SEND_B0 1SEND_F0", "MP139", "1SEND_F0 is not among the messages"),
        ("0F0 0SEND_F0 0RECV_B0", "0F0 0RECV_B0 0SEND_F0", "MP139", "waits for a send that never comes"),
        ("1RECV_F0", "1RECEIVE_F0", "MP140", "line 3, step 1: '1RECEIVE_F0' is not an action"),
        ("1RECV_F0", "1RECV_W0", "MP140", "'1RECV_W0' is not an action"),
    ],
)
def test_wrong_messages_are_told_with_their_place(old, new, code, words):
    assert parse_any_schedule(EXPLICIT).stages == 2
    with pytest.raises(InputError) as caught:
        parse_any_schedule(EXPLICIT.replace(old, new))
    assert caught.value.code == code
    assert words in caught.value.message


def test_examples_in_docstrings():
    assert doctest.testmod(module).failed == 0

"""Strategies as text: what is read, and what is refused with a word on why."""

import dataclasses

import numpy as np
import pytest

from costmodel.errors import InputError
from planner.report.estimate import strategy_words
from planner.strategy.constants import constant_value, split_constants
from planner.strategy.strategy import Strategy, parse_strategy


def test_text_mapping_and_record_give_the_same_strategy() -> None:
    text = "dp=8, tp=4,pp=2,microbatch=3,remat=selective,zero=1,sp=on,partition=10+14,gradient_dtype=bfloat16"
    parsed = parse_strategy(text)
    assert parsed == Strategy(
        dp=8,
        tp=4,
        pp=2,
        microbatch=3,
        remat="selective",
        zero=1,
        sp=True,
        partition=(10, 14),
        gradient_dtype="bfloat16",
    )
    assert parse_strategy(dataclasses.asdict(parsed)) == parse_strategy(parsed) == parsed
    assert parse_strategy(strategy_words(parsed)) == parsed


def test_short_names_of_frameworks_are_understood() -> None:
    assert parse_strategy("pp=4,vpp=2,mbs=2,recompute=full") == Strategy(pp=4, interleave=2, microbatch=2, remat="full")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names none of its fields"),
        (" , ,", "names none of its fields"),
        ({}, "names none of its fields"),
        ("dp", "no '='"),
        ("dp=8,dp=4", "twice"),
        ("dpp=8", "unknown field 'dpp'"),
        ("dp=0", "dp=0"),
        ("dp=two", "no whole number"),
        ("tp=-1", "tp=-1"),
        ("zero=4", "zero=4"),
        ("remat=some", "remat='some'"),
        ("sp=maybe", "sp=maybe"),
        ("interleave=2", "pp=1"),
        ("dp=4,ep=3", "ep=3 does not divide dp=4"),
        ("pp=2,partition=3", "names 1 parts"),
        ("pp=2,partition=3+x", "partition=3+x"),
        ("rank_order=tp-dp-pp", "rank_order"),
        (3, "not int"),
        ("pp=2,schedule=interleaved", "one part a stage is 1F1B"),
        ({"zero": True}, "zero=True"),
        ({"zero": 1.0}, "zero=1.0"),
        ({"dp": 2.0}, "dp=2.0"),
        ({"dp": True}, "dp=True"),
        ({"bucket_bytes": 1e6}, "bucket_bytes=1000000.0"),
        ({"sp": 1}, "sp=1"),
        ({"pp": 2, "partition": 5}, "partition=5"),
        ({"pp": 2, "partition": [1.0, 2.0]}, "partition=(1.0, 2.0)"),
        ({"rank_order": 3}, "rank_order=3"),
        ({"schedule": None}, "schedule=None"),
    ],
)
def test_what_makes_no_strategy_is_refused(text: object, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_strategy(text)  # type: ignore[arg-type]
    assert caught.value.code == "MP180" and words in caught.value.message


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("dp=8;tp=1", "separate fields by commas"),
        ("remat=full tp=2", "separate fields by commas"),
        ("dp=two", "write dp=8, say"),
        ("step=0.1", "also takes constants of a stack there, such as step_s=0.1"),
    ],
)
def test_what_is_written_otherwise_is_said(text: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_strategy(text)
    assert caught.value.code == "MP180" and hint in caught.value.hint


def test_constants_are_separated_by_commas_too() -> None:
    for text, hint in (("0.1;tp=2", "separate fields by commas"), ("much", "write step_s=0.1, say")):
        with pytest.raises(InputError, match="is no number") as caught:
            constant_value("step_s", text)
        assert caught.value.code == "MP182" and hint in caught.value.hint


def test_numbers_of_array_libraries_are_numbers() -> None:
    given = {"dp": np.int64(2), "pp": np.int32(2), "zero": np.int8(1), "partition": [np.int64(3), 4]}
    found = parse_strategy(given)
    assert found == Strategy(dp=2, pp=2, zero=1, partition=(3, 4)) and type(found.dp) is int


def test_constants_of_a_stack_are_told_from_the_strategy() -> None:
    own, constants = split_constants(" dp=2, step_s=0.1,stack=selene, microbatch=1")
    assert own == "dp=2,microbatch=1" and constants == {"step_s": "0.1", "stack": "selene"}
    assert split_constants({"dp": 2, "step_s": 0.1}) == ({"dp": 2}, {"step_s": 0.1})
    with pytest.raises(InputError, match="gives 'step_s' twice") as caught:
        split_constants("step_s=1,step_s=2")
    assert caught.value.code == "MP182"

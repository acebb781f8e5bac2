"""The page of estimates lists every constant of a stack, with its unit and default."""

import re
from pathlib import Path

import msgspec
import pytest

from costmodel.stack import WORDS, Stack
from planner.strategy.constants import split_constants

PAGE = (Path(__file__).parents[2] / "docs" / "estimate.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| ([^|]*) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
NAMED = {"own": None, "model": None, "as collectives": None, "on": True, "off": False, "empty": ""}
LISTED = {name: cells for name, *cells in ROW.findall(PAGE.partition("## Software stacks")[2])}
FIELDS = {field.name: field for field in msgspec.structs.fields(Stack)}


def test_every_constant_is_listed_in_order() -> None:
    assert list(LISTED) == list(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_its_default_and_unit_are_those_of_the_code(name: str) -> None:
    unit, default, meaning = LISTED[name]
    value = FIELDS[name].default
    if value is msgspec.NODEFAULT:
        assert default == "required"
    elif name in WORDS:
        assert default == f"`{value}`" and unit == "word" and all(f"`{word}`" in meaning for word in WORDS[name])
    elif default in NAMED:
        assert NAMED[default] == value and type(NAMED[default]) is type(value)
    else:
        assert float(default) == value
    assert not name.endswith("_s") or unit == "s"
    assert not name.endswith("_bytes") or unit == "bytes" or "bytes" in LISTED[name][0]


def test_which_of_them_may_stand_among_a_strategy() -> None:
    apart = {"name", "attention", "fitted_on"}
    assert f"all but {', '.join(f'`{name}`' for name in ('name', 'attention'))} and `fitted_on` may" in PAGE
    for name in FIELDS:
        assert (name in split_constants({name: 0})[1]) == (name not in apart)

"""Paths in a document to lines of its text."""

import json

from hypothesis import given
from hypothesis import strategies as st

from planner.planfile.codec import encode
from planner.planfile.layout import dumps
from planner.planfile.lines import find_lines
from tests.plans import tiny_plan


def test_lines_of_a_plan():
    text = encode(tiny_plan()).decode()
    lines = text.splitlines()
    paths = (
        "name",
        "stages[1].groups[0].kind",
        "schedule.actors[1]",
        "certificate.gap",
        "stages[0].groups[0].memory.in_flight",
    )
    found = find_lines(text, paths)
    for path, line in zip(paths, found, strict=True):
        key = path.split(".")[-1].split("[")[0]
        assert f'"{key}"' in lines[line - 1] or "[" in path.split(".")[-1]
    assert '"1F0' in lines[found[2] - 1]


def test_unknown_paths_get_their_parent():
    text = '{\n "a": {\n  "b": [\n   1,\n   2\n  ]\n }\n}'
    assert find_lines(text, ("a.b[1]", "a.b[7]", "a.c.d", "z", "", "a.b[0].q")) == (5, 3, 2, 1, 1, 4)


def test_strings_with_brackets_and_quotes():
    text = json.dumps({"a]": '}{",\\"', "b": {"c": []}, "d": [[], {}, "x"]}, indent=1)
    lines = text.splitlines()
    for path, part in (("b.c", '"c"'), ("d[2]", '"x"'), ("d[1]", "{}"), ("d", '"d"')):
        assert part in lines[find_lines(text, (path,))[0] - 1]


leaves = st.none() | st.integers() | st.text()


@given(st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30))
def test_any_document_is_walked(data):
    for text in (dumps(data), json.dumps(data, indent=2)):
        assert 1 <= find_lines(text, ("x.y[0]",))[0] <= text.count("\n") + 1

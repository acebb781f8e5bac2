"""Lines of a JSON text by path, so that a finding about ``stages[1].groups[0].devices`` can point into the file."""

import json
import re
from typing import Any

_BLANK = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SCALAR = re.compile(r"[^\s,\]}]+")


def find_lines(text: str, paths: tuple[str, ...]) -> tuple[int, ...]:
    """The line (from 1) on which the value at each path begins.

    Args:
        text: a valid JSON document.
        paths: such as ``stages[0].blocks``; a path that is not in the document gets the line of its nearest parent.
    """
    starts = _starts(text)
    breaks = [at for at, char in enumerate(text) if char == "\n"]
    return tuple(_line(breaks, _nearest(starts, path)) for path in paths)


def _nearest(starts: dict[str, int], path: str) -> int:
    while path and path not in starts:
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return starts.get(path, 0)


def _line(breaks: list[int], position: int) -> int:
    low, high = 0, len(breaks)
    while low < high:
        middle = (low + high) // 2
        if breaks[middle] < position:
            low = middle + 1
        else:
            high = middle
    return low + 1


def _starts(text: str) -> dict[str, int]:
    """Position of every value (for an object's entry: of its key) by path."""
    starts: dict[str, int] = {}
    stack: list[list[Any]] = []  # [path, next index or None for an object]
    position, path = _skip(text, 0), ""
    starts[""] = position
    expect_value = True
    while position < len(text):
        char = text[position]
        if expect_value and char in "{[":
            stack.append([path, 0 if char == "[" else None])
            position = _skip(text, position + 1)
            if text[position] in "}]":
                expect_value = False
                continue
            position, path = _entry(text, position, stack, starts)
        elif char in "}]":
            stack.pop()
            position, expect_value = _skip(text, position + 1), False
        elif char == ",":
            position, path = _entry(text, _skip(text, position + 1), stack, starts)
            expect_value = True
        else:
            position, expect_value = _skip(text, _scalar_end(text, position)), False
    return starts


def _entry(text: str, position: int, stack: list[list[Any]], starts: dict[str, int]) -> tuple[int, str]:
    """Position of the next entry's value and its path."""
    parent, index = stack[-1]
    if index is None:
        end = _scalar_end(text, position)
        key = json.loads(text[position:end])
        path = f"{parent}.{key}" if parent else key
        starts[path] = position
        colon = _skip(text, end)
        return _skip(text, colon + 1), path
    path = f"{parent}[{index}]"
    stack[-1][1] += 1
    starts[path] = position
    return position, path


def _skip(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match else position


def _scalar_end(text: str, position: int) -> int:
    match = (_STRING if text[position] == '"' else _SCALAR).match(text, position)
    return match.end() if match else position + 1

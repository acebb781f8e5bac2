"""JSON text of plain data: the shortest layout that stays readable and gives small diffs.

A table or list that fits on a line is written on one; others get one line an entry, indented by one blank a level. Keys
keep the order in which they are given; the caller decides what is canonical.
"""

import json
from typing import Any

WIDTH = 110


def dumps(data: Any) -> str:
    """`dumps({"a": [1, 2]})` is ``'{"a": [1, 2]}'``. NaN and infinities raise ValueError, since JSON has none."""
    return "".join(_render(data, 0)[0])


def _render(data: Any, depth: int) -> tuple[list[str], int]:
    """Pieces of the text and its length in characters, or a length above WIDTH where it takes several lines."""
    if not isinstance(data, dict | list | tuple) or not data:
        text = json.dumps(data, ensure_ascii=False, allow_nan=False)
        return [text], len(text)
    if isinstance(data, dict):
        entries = [
            ([f"{json.dumps(key, ensure_ascii=False)}: ", *pieces], length + len(key) + 4)
            for key, (pieces, length) in ((key, _render(value, depth + 1)) for key, value in data.items())
        ]
        opening, closing = "{", "}"
    else:
        entries = [_render(value, depth + 1) for value in data]
        opening, closing = "[", "]"
    length = sum(length for _, length in entries) + 2 * len(entries)
    if depth + length <= WIDTH:
        separator, start, end = ", ", opening, closing
    else:
        indent = "\n" + " " * (depth + 1)
        separator, start, end = f",{indent}", f"{opening}{indent}", f"\n{' ' * depth}{closing}"
        length = WIDTH + 1
    pieces = [start]
    for at, (entry, _) in enumerate(entries):
        if at:
            pieces.append(separator)
        pieces.extend(entry)
    pieces.append(end)
    return pieces, length

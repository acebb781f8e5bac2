"""Runs of block names: ``layers[0]``, ``layers[1]``, ... ``layers[11]`` is written ``layers[0:12]``.

The last ``[number]`` of a name counts; what stands before and after it must be equal along a run. The range is half
open, as in Python.
"""

import re
from collections.abc import Iterable

from costmodel.errors import InputError

MAX_RUN = 1_000_000

_INDEXED = re.compile(r"(?P<head>.*)\[(?P<index>0|[1-9][0-9]{0,8})\](?P<tail>[^\[\]]*)", re.DOTALL)
_RUN = re.compile(
    r"(?P<head>.*)\[(?P<start>0|[1-9][0-9]{0,8}):(?P<stop>[1-9][0-9]{0,8})\](?P<tail>[^\[\]]*)", re.DOTALL
)


def compress_names(names: Iterable[str]) -> tuple[str, ...]:
    """Writes consecutive indices as runs; the order stays.

    Raises:
        ValueError: a name that already reads as a run, which could not be told from one.

    Example:
        >>> compress_names(["embedding", "layers[0]", "layers[1]", "layers[2]", "head"])
        ('embedding', 'layers[0:3]', 'head')
    """
    runs: list[tuple[str, int, int, str]] = []  # head, start, stop, tail; start < 0 for a name without index
    for name in names:
        if _RUN.fullmatch(name):
            raise ValueError(f"{name!r} reads as a run of names, it cannot be the name of one block")
        match = _INDEXED.fullmatch(name)
        if match is None:
            runs.append((name, -1, -1, ""))
            continue
        head, index, tail = match["head"], int(match["index"]), match["tail"]
        if runs and runs[-1][0] == head and runs[-1][2] == index and runs[-1][3] == tail:
            runs[-1] = (head, runs[-1][1], index + 1, tail)
        else:
            runs.append((head, index, index + 1, tail))
    return tuple(_text(*run) for run in runs)


def expand_names(runs: Iterable[str]) -> tuple[str, ...]:
    """Every name of the runs, in order; the inverse of `compress_names`.

    Raises:
        InputError: MP155 for a run that is empty or longer than MAX_RUN.

    Example:
        >>> expand_names(["embedding", "layers[0:2]"])
        ('embedding', 'layers[0]', 'layers[1]')
    """
    names: list[str] = []
    for run in runs:
        match = _RUN.fullmatch(run)
        if match is None:
            names.append(run)
            continue
        start, stop = int(match["start"]), int(match["stop"])
        if not 0 < stop - start <= MAX_RUN:
            raise InputError(
                "MP155",
                f"{run!r} names {stop - start} blocks, a run has 1 to {MAX_RUN}",
                "write name[first:last+1], such as layers[0:12]",
            )
        names.extend(f"{match['head']}[{index}]{match['tail']}" for index in range(start, stop))
    return tuple(names)


def _text(head: str, start: int, stop: int, tail: str) -> str:
    if start < 0:
        return head
    return f"{head}[{start}]{tail}" if stop == start + 1 else f"{head}[{start}:{stop}]{tail}"

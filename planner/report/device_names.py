"""Device ids for people: ``a100/0/0``, ``a100/0/1``, ... of two nodes of eight are written ``a100/0-1/0-7``."""

from typing import NamedTuple


class _Run(NamedTuple):
    """Devices of consecutive nodes, the same indices on each."""

    group: str
    first: int
    last: int
    indices: tuple[int, ...]


def device_runs(devices: tuple[str, ...]) -> tuple[str, ...]:
    """Joins ids to runs in their order, which is that of the mesh; only ascending runs are joined.

    Example:
        >>> device_runs(("a100/0/0", "a100/0/1", "a100/0/3"))
        ('a100/0/0-1,3',)
    """
    nodes: list[_Run] = []
    for device in devices:
        group, node, index = _parts(device)
        if nodes and nodes[-1][:2] == (group, node) and node >= 0:
            nodes[-1] = nodes[-1]._replace(indices=(*nodes[-1].indices, index))
        else:
            nodes.append(_Run(group, node, node, (index,)))
    joined: list[_Run] = []
    for run in nodes:
        before = joined[-1] if joined else None
        if before and before.group == run.group and before.indices == run.indices and run.first == before.last + 1:
            joined[-1] = before._replace(last=run.last)
        else:
            joined.append(run)
    return tuple(map(_text, joined))


def _parts(device: str) -> tuple[str, int, int]:
    """An id that is not ``group/node/index`` stands by itself, marked by node -1."""
    group, _, place = device.partition("/")
    node, _, index = place.partition("/")
    return (group, int(node), int(index)) if node.isdecimal() and index.isdecimal() else (device, -1, -1)


def _text(run: _Run) -> str:
    if run.first < 0:
        return run.group
    spans: list[list[int]] = []
    for index in run.indices:
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    indices = ",".join(_span(*span) for span in spans)
    return f"{run.group}/{_span(run.first, run.last)}/{indices}"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"

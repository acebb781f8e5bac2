"""Where a model may be cut into stages, and what crosses there."""

import math
from collections.abc import Sequence

from costmodel.graph import ModelGraph
from planner.search.layout import crossing_bytes, crossing_values


def border_bytes(graph: ModelGraph) -> list[float]:
    """Bytes of a microbatch that cross each border between blocks, forward and backward together; inf where no plan
    cuts. Border i lies before block i + 1."""
    uncut = uncut_borders(graph)
    return [
        math.inf if border in uncut else float(sum(crossing_bytes(graph, crossing_values(graph, border))))
        for border in range(1, len(graph.blocks))
    ]


def uncut_borders(graph: ModelGraph) -> dict[int, str]:
    """Borders that no plan cuts, with the reason.

    They lie inside a run whose layers each make an item of one stacked value; between readers of the same item of a
    stacked parameter (some may read the stack whole), which has one home; between layers that the optimizer cannot
    update apart; and between the first reader of a carried state leaf and the block that replaces it (the next
    microbatch would wait for the last stage).
    """
    made: dict[str, list[int]] = {}
    for i, block in enumerate(graph.blocks):
        for source in block.outputs:
            if source.index is not None:
                made.setdefault(source.value, []).append(i)
    read = {s.value for b in graph.blocks for s in b.inputs} | set(graph.results) | set(graph.loss)
    found: dict[int, str] = {}
    for value, span in made.items():
        if value in read:
            found |= _inside(span, f"layers make items of one value, {value}")
    items: dict[str, dict[int | None, list[int]]] = {}
    for i, block in enumerate(graph.blocks):
        for source in block.inputs:
            if source.value in graph.params:
                items.setdefault(source.value, {}).setdefault(source.index, []).append(i)
    for name, readers in items.items():
        whole = readers.pop(None, [])
        if name in graph.joins.uncut and readers:
            found |= _inside([i for span in readers.values() for i in span], graph.joins.uncut[name])
        for span in readers.values():  # none where all read the leaf whole: its stages exchange it
            found |= _inside([*span, *whole], f"blocks on both sides read the same layers of {name}")
    for leaf, value in graph.carried.items():
        first = [i for i, b in enumerate(graph.blocks) if any(s.value == leaf for s in b.inputs)]
        last = [i for i, b in enumerate(graph.blocks) if any(s.value == value for s in b.outputs)]
        if first and last:
            found |= _inside([min(first), max(last)], f"the next microbatch needs {leaf} at its start")
    return found


def _inside(span: Sequence[int], reason: str) -> dict[int, str]:
    return dict.fromkeys(range(min(span) + 1, max(span) + 1), reason)

"""Where a model may be cut into stages, and what crosses there."""

import math

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


def uncut_borders(graph: ModelGraph) -> frozenset[int]:
    """Borders that no plan cuts: inside a run whose layers each make an item of one stacked value, and between the
    first reader of a carried state leaf and the block that replaces it (the next microbatch would wait for the last
    stage)."""
    spans: dict[str, list[int]] = {}
    for i, block in enumerate(graph.blocks):
        for source in block.outputs:
            if source.index is not None:
                spans.setdefault(source.value, []).append(i)
    read = {s.value for b in graph.blocks for s in b.inputs} | set(graph.results) | set(graph.loss)
    found = {i for value, span in spans.items() if value in read for i in range(min(span) + 1, max(span) + 1)}
    for leaf, value in graph.carried.items():
        readers = [i for i, b in enumerate(graph.blocks) if any(s.value == leaf for s in b.inputs)]
        makers = [i for i, b in enumerate(graph.blocks) if any(s.value == value for s in b.outputs)]
        if readers and makers:
            found.update(range(min(readers) + 1, max(makers) + 1))
    return frozenset(found)

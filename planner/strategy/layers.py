"""Which blocks of a model are its layers, that pipelines count and cut between, and what one hands to the next.

Layers are the steps of scans over stacked parameters. A model without such a scan, written out layer by layer, has the
blocks that it repeats; one that repeats none has all of its blocks.
"""

from collections import Counter

from costmodel.graph import ModelGraph
from planner.space.backward import is_layered


def layer_classes(graph: ModelGraph) -> frozenset[str]:
    """Classes of the blocks that are layers."""
    scans = frozenset(key for key in graph.classes if is_layered(graph, key))
    if scans:
        return scans
    counts = Counter(block.class_key for block in graph.blocks)
    return frozenset(key for key, count in counts.items() if count > 1) or frozenset(counts)


def streams(graph: ModelGraph) -> dict[str, frozenset[str]]:
    """Class of a layer -> inputs that the block before it, a layer too, hands it."""
    layers = layer_classes(graph)
    found: dict[str, set[str]] = {key: set() for key in layers}
    repeated = len(layers) < len(graph.blocks)
    for a, b in zip(graph.blocks, graph.blocks[1:], strict=False):
        if b.class_key not in layers or (repeated and a.class_key != b.class_key):
            continue
        names = graph.classes[b.class_key].inputs
        found[b.class_key] |= {name for name, source in zip(names, b.inputs, strict=True) if source in a.outputs}
    return {key: frozenset(names) for key, names in found.items()}

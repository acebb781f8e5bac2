"""Which blocks of a model are its layers, that pipelines count and cut between, and what one hands to the next.

Layers are the steps of scans over stacked parameters. A model without such a scan, written out layer by layer, has the
blocks that it repeats; one that repeats none has all of its blocks. Blocks repeat where they run the same ops on the
same shapes: the first layer is one of them even if no gradient crosses its input, which makes its class another.
"""

from collections import Counter

from costmodel.graph import BlockClass, ModelGraph

Shape = tuple[int, ...]
OpShapes = tuple[str, tuple[Shape | None, ...], tuple[Shape | None, ...]]


def layer_classes(graph: ModelGraph) -> frozenset[str]:
    """Classes of the blocks that are layers."""
    if graph.layered:
        return graph.layered
    alike = {key: _op_shapes(cls) for key, cls in graph.classes.items()}
    counts = Counter(alike[block.class_key] for block in graph.blocks)
    return frozenset(key for key, ops in alike.items() if counts[ops] > 1) or frozenset(graph.classes)


def _op_shapes(cls: BlockClass) -> tuple[OpShapes, ...]:
    """Primitive, shapes of operands and of results of each op, None for a constant or a result that nothing reads."""

    def shapes(names: tuple[str, ...]) -> tuple[Shape | None, ...]:
        return tuple(cls.tensors[name].shape if name else None for name in names)

    return tuple((op.primitive, shapes(op.inputs), shapes(op.outputs)) for op in cls.ops)


def streams(graph: ModelGraph) -> dict[str, frozenset[str]]:
    """Class of a layer -> inputs that the block before it, a layer of the same ops and shapes, hands it."""
    layers = layer_classes(graph)
    alike = {key: _op_shapes(graph.classes[key]) for key in layers}
    found: dict[str, set[str]] = {key: set() for key in layers}
    repeated = len(set(alike.values())) < len(graph.blocks)
    for a, b in zip(graph.blocks, graph.blocks[1:], strict=False):
        if b.class_key not in layers or (repeated and alike.get(a.class_key) != alike[b.class_key]):
            continue
        names = graph.classes[b.class_key].inputs
        found[b.class_key] |= {name for name, source in zip(names, b.inputs, strict=True) if source in a.outputs}
    return {key: frozenset(names) for key, names in found.items()}

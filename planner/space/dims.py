"""Which dims of a model's tensors follow from dims of its batch: along which examples or positions lie."""

from collections.abc import Mapping

from costmodel.graph import ModelGraph
from costmodel.sharding import major_factor

DimsByClass = dict[str, dict[str, frozenset[int]]]  # block class -> tensor -> dims


def following_dims(graph: ModelGraph, start: Mapping[str, int | None]) -> DimsByClass:
    """Dims of each block class's tensors that are, through the ops, dims of batch leaves.

    Args:
        start: batch leaf -> its dim, or None.
    """
    values: dict[str, frozenset[int]] = {n: frozenset() if d is None else frozenset({d}) for n, d in start.items()}
    found: DimsByClass = {}
    for block in graph.blocks:
        cls = graph.classes[block.class_key]
        dims: dict[str, frozenset[int]] = {}
        for name, source in zip(cls.inputs, block.inputs, strict=True):
            own = values.get(source.value, frozenset())
            dims[name] = own if source.index is None else frozenset(d - 1 for d in own if d > 0)
        for op in cls.ops:
            loops = {
                major_factor(op, tensor, d)
                for name, tensor in zip(op.inputs, op.in_dims, strict=True)
                for d in dims.get(name, frozenset())
            }
            for name, tensor in zip(op.outputs, op.out_dims, strict=True):
                dims[name] = frozenset(d for d in range(len(tensor)) if major_factor(op, tensor, d) in loops - {-1})
        for name, source in zip(cls.outputs, block.outputs, strict=True):
            own = dims.get(name, frozenset())
            values[source.value] = own if source.index is None else frozenset(d + 1 for d in own)
        known = found.setdefault(block.class_key, {})
        for name, own in dims.items():
            known[name] = known.get(name, frozenset()) | own
    return found


def batch_dims(graph: ModelGraph) -> DimsByClass:
    """Block class -> tensor -> dims that examples lie along."""
    return following_dims(graph, graph.batch_dims)


def sequence_dims(graph: ModelGraph) -> DimsByClass:
    """Block class -> tensor -> dims that positions lie along: those of the dim after the batch dim of each leaf."""
    start = {
        name: dim + 1 if dim is not None and len(graph.values[name].shape) > dim + 1 else None
        for name, dim in graph.batch_dims.items()
    }
    return following_dims(graph, start)

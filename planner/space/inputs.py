"""What a stage holds of the step's inputs: its microbatches of every batch leaf, and the carried state.

A step's batch is placed before its first microbatch runs, split as the first block that reads it takes it.
"""

from collections.abc import Iterable, Sequence

from costmodel.graph import Block, ModelGraph, Tensor
from costmodel.sharding import Spec, split_factor


def first_reads(graph: ModelGraph, blocks: Iterable[Block]) -> dict[str, tuple[str, str]]:
    """Batch and state leaves that blocks read -> (class, input) of the first reader."""
    found: dict[str, tuple[str, str]] = {}
    for block in blocks:
        for name, source in zip(graph.classes[block.class_key].inputs, block.inputs, strict=True):
            value = graph.values.get(source.value)
            if value is not None and value.role in ("batch", "state"):
                found.setdefault(source.value, (block.class_key, name))
    return found


def input_bytes(graph: ModelGraph, value: Tensor, spec: Spec, mesh: Sequence[int], microbatches: int) -> float:
    """Bytes of a leaf on one device: of all microbatches, where each has its own part."""
    times = 1 if graph.batch_dims.get(value.name) is None else microbatches
    return times * value.bytes / split_factor(spec, tuple(mesh))


__all__ = ["first_reads", "input_bytes"]

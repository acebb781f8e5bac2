"""What a stage holds of the step's inputs: its microbatches of every batch leaf, and the carried state.

A step's batch is placed before its first microbatch runs, split as the first block that reads it takes it.
"""

from collections.abc import Sequence

from costmodel.graph import ModelGraph, Tensor
from costmodel.sharding import Spec, split_factor


def input_bytes(graph: ModelGraph, value: Tensor, spec: Spec, mesh: Sequence[int], microbatches: int) -> float:
    """Bytes of a leaf on one device: of all microbatches, where each has its own part."""
    times = 1 if graph.batch_dims.get(value.name) is None else microbatches
    return times * value.bytes / split_factor(spec, tuple(mesh))


__all__ = ["input_bytes"]

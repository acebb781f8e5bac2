"""The parameters of a model as one device of the tensor-parallel group holds them, and those that a stage holds."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from costmodel.graph import Parameter


@dataclass(frozen=True)
class Leaf:
    """A parameter as one device of the tensor-parallel group holds it.

    Attributes:
        elements: that one block of a reading class needs; shape: of these, on one device.
        tensor_dim: dim that tensor parallelism splits, if any.
        expert_dim: dim that expert parallelism splits, if any.
        data_dim: dim that replicas split, which compute on their examples together and each with its own part; if any.
        small: whether it is so small that plans keep it whole (`planner.space.model_space.is_small`).
        layered: whether every block reads an item of its own.
        readers: positions of blocks.
    """

    facts: Parameter
    elements: float
    shape: tuple[int, ...]
    tensor_dim: int | None
    expert_dim: int | None
    data_dim: int | None
    small: bool
    layered: bool
    readers: frozenset[int]


@dataclass(frozen=True)
class HeldLeaf:
    """A parameter that a stage holds: its elements on one device of the tensor-parallel group, before ZeRO splits any,
    and how many of the stage's blocks read it."""

    leaf: Leaf
    elements: float
    reading: int


def held(leaves: Iterable[Leaf], positions: frozenset[int]) -> Iterator[HeldLeaf]:
    """Leaves that a stage of the blocks at these positions holds."""
    for leaf in leaves:
        if reading := len(leaf.readers & positions):
            yield HeldLeaf(leaf, leaf.elements * (reading if leaf.layered else 1), reading)


__all__ = ["HeldLeaf", "Leaf", "held"]

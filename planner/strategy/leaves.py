"""The parameters of a model as one device uses them, and those that a stage holds."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from costmodel.graph import Parameter


@dataclass(frozen=True)
class Leaf:
    """A parameter as the ops of one device use it: the part that lies there under ZeRO-0.

    Attributes:
        elements: that one block of a reading class needs; shape: of these, on one device.
        split: dims that axes split by their role: ``model``, ``expert``; ``batch`` and ``context`` where replicas
            compute on their examples together and each with its own part of the parameter.
        small: whether it is so small that plans keep it whole (`planner.space.model_space.is_small`).
        layered: whether every block reads an item of its own.
        readers: positions of blocks.
    """

    facts: Parameter
    elements: float
    shape: tuple[int, ...]
    split: Mapping[str, int]
    small: bool
    layered: bool
    readers: frozenset[int]


@dataclass(frozen=True)
class HeldLeaf:
    """A parameter that a stage holds: its elements as the ops of one device use them, before ZeRO splits any, and how
    many of the stage's blocks read it."""

    leaf: Leaf
    elements: float
    reading: int


def held(leaves: Iterable[Leaf], positions: frozenset[int]) -> Iterator[HeldLeaf]:
    """Leaves that a stage of the blocks at these positions holds."""
    for leaf in leaves:
        if reading := len(leaf.readers & positions):
            yield HeldLeaf(leaf, leaf.elements * (reading if leaf.layered else 1), reading)


__all__ = ["HeldLeaf", "Leaf", "held"]

"""Blocks of a model that a part of a pipeline runs, or a stage all of its parts together."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Blocks:
    """Some blocks of a model.

    Attributes:
        positions: in the order of the model's blocks.
        classes: how many there are of each class.
    """

    positions: frozenset[int]
    classes: Mapping[str, int]

    @classmethod
    def of(cls, order: Sequence[str], positions: Iterable[int]) -> "Blocks":
        """The blocks at these positions of the model, whose blocks are of the classes that `order` names."""
        at = sorted(positions)
        return cls(frozenset(at), Counter(order[i] for i in at))

    @cached_property
    def key(self) -> tuple[tuple[str, int], ...]:
        """What blocks that cost the same share."""
        return tuple(self.classes.items())


def joined(parts: Iterable[Blocks]) -> Blocks:
    """Blocks of several parts together."""
    own = list(parts)
    if len(own) == 1:
        return own[0]
    positions, classes = frozenset[int](), Counter[str]()
    for part in own:
        positions |= part.positions
        classes.update(part.classes)
    return Blocks(positions, classes)

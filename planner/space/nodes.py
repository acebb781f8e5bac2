"""The kinds of decisions of a `ModelSpace`, each with its options, and the values on their way between blocks.

group       ops that share a strategy (`groups.py`), one node for each group of each block class
port        the spec in which a block class takes an input; between blocks casts lead from producer to port
parameter   where a parameter, its gradient and its optimizer state live (`parameters.py`)
batch       whether a batch leaf arrives split or whole
end         what the loss (a pending sum is fine) and other results must become
"""

from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.graph import Tensor
from costmodel.sharding import Spec
from planner.space.groups import Group, GroupStrategy
from planner.space.parameters import Storage


@dataclass(frozen=True)
class GroupNode:
    class_key: str
    group: Group
    options: tuple[GroupStrategy, ...]


@dataclass(frozen=True)
class PortNode:
    class_key: str
    tensor: str
    options: tuple[Spec, ...]


@dataclass(frozen=True)
class ParameterNode:
    """A parameter (or the equal parameters of equal blocks). `places` are the (class, input tensor) that read it."""

    names: tuple[str, ...]
    tensor: Tensor
    places: tuple[tuple[str, str], ...]
    count: int
    options: tuple[Storage, ...]


@dataclass(frozen=True)
class BatchNode:
    name: str
    options: tuple[Spec, ...]


@dataclass(frozen=True)
class EndNode:
    name: str
    options: tuple[Spec, ...]


AnyNode = GroupNode | PortNode | ParameterNode | BatchNode | EndNode


@dataclass(frozen=True)
class Link:
    """A value on its way from one block to another: `count` times each microbatch."""

    producer: int
    give: tuple[Spec, ...]  # spec that each option of the producer leaves, in the consumer's dims
    consumer: int
    tensor: Tensor
    count: int

    def ends(self, nodes: Sequence[AnyNode]) -> tuple[Spec, ...]:
        """Specs that the consumer may take it in."""
        node = nodes[self.consumer]
        assert isinstance(node, PortNode | EndNode)
        return node.options

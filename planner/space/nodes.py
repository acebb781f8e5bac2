"""The kinds of decisions of a `ModelSpace`, each with its options, and the values on their way between blocks.

group       ops that share a strategy (`groups.py`), one node for each group of each block class
port        the spec in which a block class takes an input; between blocks casts lead from producer to port
parameter   where a parameter, its gradient and its optimizer state live (`parameters.py`)
batch       whether a batch leaf arrives split or whole
end         what the loss (a pending sum is fine) and other results must become
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from costmodel.graph import Tensor
from costmodel.sharding import Spec, shifted
from planner.space.groups import Group, GroupStrategy
from planner.space.parameters import Storage

Place = tuple[str, str]  # block class, input tensor


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
    """A parameter, or parameters that equal blocks read in one place.

    Attributes:
        tensor: what a block reads: the leaf, or one layer's item of a stack.
        places: (class, input tensor) that read it.
        count: leaves or items; shares: class -> how many of them one of its blocks reads.
        options: ways to store it, in the dims of `tensor`.
        whole: the places that read a whole stack where others read its items, with the stack's tensor.
    """

    names: tuple[str, ...]
    tensor: Tensor
    places: tuple[Place, ...]
    count: int
    shares: Mapping[str, float]
    options: tuple[Storage, ...]
    whole: Mapping[Place, Tensor] = field(default_factory=dict)

    def read_at(self, place: Place) -> Tensor:
        """What a place reads."""
        return self.whole.get(place, self.tensor)

    def spec_at(self, place: Place, spec: Spec) -> Spec:
        """A spec in the dims of what a place reads."""
        return shifted(spec, 1) if place in self.whole else spec


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

"""What the ops of one group cost on one device under one strategy: seconds, bytes that they keep for the backward pass,
and bytes that are live while they run."""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from costmodel.block_times import weight_share
from costmodel.sharding import Spec, operand_spec, result_spec, split_factor
from planner.space.backward import kept_bytes
from planner.space.groups import Group, GroupStrategy
from planner.space.nodes import GroupNode

if TYPE_CHECKING:
    from planner.space.model_space import ModelSpace


def group_cost(space: "ModelSpace", node: GroupNode, option: GroupStrategy) -> tuple[float, float, float]:
    """Seconds of a group's ops on one device: forward, backward, and what full remat adds to the backward pass."""
    own, full = (space.again[node.class_key, remat].runs for remat in ("none", "full"))
    forward = backward = again = 0.0
    for op, strategy in zip(node.group.ops, option.ops, strict=True):
        cost = space.op_cost(node.class_key, op, strategy)
        forward += cost.forward_s
        regions = own.get(op.name, 0)  # the user's own remat
        backward += cost.backward_s + regions * cost.forward_s
        again += (full.get(op.name, 0) - regions) * cost.forward_s
    return forward, backward, again


def weight_seconds(space: "ModelSpace", node: GroupNode, option: GroupStrategy) -> float:
    """Seconds of a group's backward ops on one device that only weight gradients need, an action W of their own where a
    schedule splits backwards.
    """
    tensors = space.graph.classes[node.class_key].tensors
    derived = space.derived[node.class_key]
    total = 0.0
    for op, strategy in zip(node.group.ops, option.ops, strict=True):
        if share := weight_share(op, tensors, derived):
            total += share * space.op_cost(node.class_key, op, strategy).backward_s
    scale = space.scales.get(node.class_key)
    return total if scale is None else total * scale.weight


def sharers_of(space: "ModelSpace", key: str) -> Counter[str]:
    """Tensor -> number of groups of a class that keep it for the backward pass."""
    kept = space.kept[key]
    return Counter(
        n for group in space.groups[key] for n in frozenset().union(*(kept[op.name].names for op in group.ops))
    )


def group_kept(
    space: "ModelSpace", node: GroupNode, option: GroupStrategy, specs: Mapping[str, Spec]
) -> dict[tuple[str, Spec], float]:
    """Bytes that a group keeps on one device, by tensor and spec.

    Args:
        specs: `specs_in_group`.
    """
    cls = space.graph.classes[node.class_key]
    ops = [cls.ops_by_name[op.name] for op in node.group.ops]  # of the space's microbatch size
    return kept_bytes(ops, option.ops, space.kept[node.class_key], cls.tensors, specs, space.mesh)


def group_saved(space: "ModelSpace", node: GroupNode, option: GroupStrategy, sharers: Mapping[str, int]) -> float:
    """The same as one number. A tensor that several groups keep is shared among them (in equal specs, as is usual), one
    that all layers keep together among the layers."""
    once, layers = space.once[node.class_key], space.counts[node.class_key]
    return sum(
        size / sharers.get(name, 1) / (layers if name in once else 1)
        for (name, _), size in sorted(group_kept(space, node, option, specs_in_group(node.group, option)).items())
    )


def group_live(
    space: "ModelSpace",
    node: GroupNode,
    option: GroupStrategy,
    held: Mapping[str, Spec] = MappingProxyType({}),
    hidden: frozenset[str] = frozenset(),
) -> float:
    """Bytes that are live on one device while a group runs backward: what it reads and leaves, and their cotangents, as
    far as they are in memory.

    Args:
        hidden: tensors that a kernel of their own keeps out of memory (scores in flash attention).
        held: parameters that lie there anyway, by the spec in which they do: taken as they lie they are no bytes more,
            nor are their cotangents, which are the microbatch's gradient.
    """
    cls = space.graph.classes[node.class_key]
    pairs = [*zip(node.group.reads, option.needs, strict=True), *zip(node.group.exports, option.gives, strict=True)]
    parts = [(n, split_factor(s, space.mesh)) for n, s in pairs]
    there = {n: split_factor(s, space.mesh) for n, s in held.items()}
    memory = space.in_memory[node.class_key] - hidden
    return 2.0 * sum(cls.tensors[n].bytes / k for n, k in parts if n in memory and there.get(n) != k)


def specs_in_group(group: Group, option: GroupStrategy) -> dict[str, Spec]:
    """Spec of every tensor that a group reads or makes."""
    specs: dict[str, Spec] = {}
    for op, strategy in zip(group.ops, option.ops, strict=True):
        for i, name in enumerate(op.inputs):
            if name:
                specs.setdefault(name, operand_spec(op, i, strategy))
        for i, name in enumerate(op.outputs):
            specs[name] = result_spec(op, i, strategy)
    return specs

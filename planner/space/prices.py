"""Prices of a space's options and casts, of one block and one microbatch, and the problem of any setting made of them.

Times are seconds of one step: microbatches x (forward + backward) + once. The memory row is
``(state + in_flight x saved + batch) / stages`` against what the device kind has free. State includes one microbatch's
gradient beside the accumulator.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodel.graph import BlockClass, Tensor
from costmodel.sharding import Spec, split_factor
from planner.search.problem import Floats, IntraOpProblem, Node, TensorEdge
from planner.space.backward import gives_cotangent, takes_again
from planner.space.group_costs import group_cost, group_live, group_saved, sharers_of
from planner.space.inputs import input_bytes
from planner.space.nodes import AnyNode, GroupNode, ParameterNode, Place, PortNode
from planner.space.parameters import arising_bytes, parameter_matrix, state_bytes, update_bytes, whole_read_matrix
from planner.space.setting import Remat, Setting

if TYPE_CHECKING:
    from planner.space.model_space import ModelSpace


@dataclass(frozen=True)
class NodePrices:
    """One node's options: seconds and bytes of one block and one microbatch; `count` blocks share the node.

    `class_key` is that of the block class whose ops the node is; '' for others.
    """

    name: str
    class_key: str
    count: int
    forward_s: Floats
    backward_s: Floats
    again_s: Floats  # of the forward pass, what full remat runs again
    adding_s: Floats  # gradients to those of other microbatches (`planner.space.accumulation`)
    once_s: Floats
    state_bytes: Floats
    batch_bytes: Floats  # of all blocks, for each microbatch of the step
    arising_bytes: dict[bool, Floats]  # by whether gradients accumulate
    saved_bytes: Floats  # kept without remat
    entry_bytes: Floats  # kept under full remat: the block's inputs
    live_bytes: Floats


@dataclass(frozen=True)
class EdgePrices:
    """Casts of one tensor: seconds each microbatch, and once a step.

    Attributes:
        again: by remat, for each target whether its cast runs again for the backward pass.
    """

    tensor: TensorEdge
    count: int
    forward_s: Floats
    backward_s: Floats
    once_s: Floats | None
    again: dict[Remat, Floats]


@dataclass(frozen=True)
class SpacePrices:
    nodes: tuple[NodePrices, ...]
    edges: tuple[EdgePrices, ...]
    fixed_bytes: int  # on every device, whatever the choice

    @staticmethod
    def of(space: "ModelSpace") -> "SpacePrices":
        names = {index: "/".join(key) for key, index in space.index.items() if key[0] != "place"}
        edges = [e for key, cls in space.graph.classes.items() for e in _edges_inside(space, key, cls)]
        for i, node in enumerate(space.nodes):
            if isinstance(node, ParameterNode):
                edges += _parameter_edges(space, i, node)
        edges += [
            _edge(
                space,
                "link",
                link.tensor,
                link.producer,
                link.give,
                [(link.consumer, link.ends(space.nodes))],
                link.count,
            )
            for link in space.links
        ]
        nodes = tuple(_node_prices(space, names[i], node) for i, node in enumerate(space.nodes))
        return SpacePrices(nodes, tuple(edges), space.graph.optimizer_bytes)

    def _heaviest(self) -> str:
        """The block class that saves most while it runs again: a row has one block of one class at a time."""
        saved: dict[str, float] = {}
        for p in self.nodes:
            saved[p.class_key] = saved.get(p.class_key, 0.0) + float(p.saved_bytes.max(initial=0.0))
        return max(saved, key=lambda key: (saved[key], key))

    def problem(self, setting: Setting, limit_bytes: float) -> IntraOpProblem:
        full, times = setting.remat == "full", setting.microbatches
        heaviest, nodes = self._heaviest(), []
        for p in self.nodes:
            per_microbatch = p.forward_s + p.backward_s + (p.again_s if full else 0.0)
            per_microbatch = per_microbatch + (p.adding_s if setting.accumulates else 0.0)
            kept = p.entry_bytes if full else p.saved_bytes
            state = p.state_bytes + p.arising_bytes[setting.accumulates]
            memory = (p.count * (state + setting.in_flight * kept) + times * p.batch_bytes) / setting.stages
            if full and p.class_key == heaviest:
                memory = memory + p.saved_bytes  # one block at a time is run again and kept
            nodes.append(
                Node(
                    name=p.name,
                    time_s=p.count * (times * per_microbatch + p.once_s),
                    memory_bytes=memory[None, :],
                    transient_bytes=p.live_bytes,
                )
            )
        edges = []
        for e in self.edges:
            per_microbatch = e.forward_s * (1.0 + e.again[setting.remat]) + e.backward_s
            cost = e.count * times * per_microbatch
            if e.once_s is not None:
                cost = cost + e.count * e.once_s
            edges.append(replace(e.tensor, cast_time_s=cost))
        budget = np.array([limit_bytes - self.fixed_bytes])
        return IntraOpProblem(nodes=tuple(nodes), tensors=tuple(edges), budget_bytes=budget)


def _node_prices(space: "ModelSpace", name: str, node: AnyNode) -> NodePrices:
    options = len(node.options)
    zero = np.zeros(options)
    forward, backward, again, adding, once, state, batch, saved, entry, live = (zero.copy() for _ in range(10))
    arising = {False: zero.copy(), True: zero.copy()}
    count = 1
    if isinstance(node, GroupNode):
        count = space.counts[node.class_key]
        sharers = sharers_of(space, node.class_key)
        for j, option in enumerate(node.options):
            forward[j], backward[j], again[j] = group_cost(space, node, option)
            saved[j] = group_saved(space, node, option, sharers)
            live[j] = group_live(space, node, option)
    elif isinstance(node, PortNode):
        count = space.counts[node.class_key]
        tensor = space.graph.classes[node.class_key].tensors[node.tensor]
        layers = count if node.tensor in space.once[node.class_key] else 1
        if any(name == node.tensor for _, name in space.again[node.class_key, "full"].reads):
            entry[:] = [tensor.bytes / split_factor(spec, space.mesh) / layers for spec in node.options]
        for value in space.first_inputs[node.class_key].get(node.tensor, ()):
            for j, spec in enumerate(node.options):
                if space.graph.batch_dims.get(value.name) is None:
                    state[j] += input_bytes(space.graph, value, spec, space.mesh, 1) / count
                else:
                    batch[j] += input_bytes(space.graph, value, spec, space.mesh, 1)
    elif isinstance(node, ParameterNode):
        count, facts, elements = node.count, space.graph.params[node.names[0]], math.prod(node.tensor.shape)
        for j, storage in enumerate(node.options):
            state[j] = sum(state_bytes(facts, elements, storage, space.mesh))
            for accumulates, row in arising.items():
                row[j] = arising_bytes(facts, elements, storage, space.mesh, accumulates=accumulates, fuses=space.fuses)
            once[j] = space.pricing.update_s(update_bytes(facts, elements, storage, space.mesh))
    key = node.class_key if isinstance(node, GroupNode) else ""
    return NodePrices(
        name, key, count, forward, backward, again, adding, once, state, batch, arising, saved, entry, live
    )


def _edges_inside(space: "ModelSpace", key: str, cls: BlockClass) -> list[EdgePrices]:
    out = []
    for name in dict.fromkeys([*cls.inputs, *(n for g in space.groups[key] for n in g.exports)]):
        consumers = space.consumers(key, name)
        if ("place", key, name) in space.index or not consumers:
            continue
        producer, specs = space.maker(key, name) or (space.whole_source(name), (space.whole,))
        others = [(node, needs) for node, needs in consumers if node != producer]
        if others:
            inside, layers = [(key, name)] * len(others), space.counts[key]
            edge = _edge(space, f"{key}/{name}", cls.tensors[name], producer, specs, others, layers, inside)
            if name in space.once[key]:  # one cast for all layers, and one each for their backward passes
                again = {r: row + row * (layers - 1) for r, row in edge.again.items()}
                edge = replace(edge, forward_s=edge.forward_s / layers, again=again)
            out.append(edge)
    return out


def _parameter_edges(space: "ModelSpace", index: int, node: ParameterNode) -> list[EdgePrices]:
    """Casts of a parameter to where it is read; those of a whole stack apart from those of its items."""
    reads = [(place, c) for place in node.places if place not in node.whole for c in space.consumers(*place)]
    edges = []
    if reads:
        places, consumers, targets = _reads(reads)
        forward, backward, once = parameter_matrix(
            node.tensor,
            node.options,
            targets,
            space.pricing,
            trained=space.graph.params[node.names[0]].trained,
            leaf_share=len(node.names) / node.count,
        )
        edge = _parameter_tensor_edge(node, index, consumers, targets)
        again = _again(space, consumers, places, targets)
        backward = np.where(_moving(space, consumers, places, targets) > 0.0, backward, 0.0)
        edges.append(EdgePrices(edge, node.count, forward, backward, once, again))
    for place, stack in node.whole.items():
        places, consumers, targets = _reads([(place, c) for c in space.consumers(*place)])
        if consumers:
            forward, backward = whole_read_matrix(stack, node.options, targets, space.pricing)
            edge = _parameter_tensor_edge(node, index, consumers, targets)
            again = _again(space, consumers, places, targets)
            backward = np.where(_moving(space, consumers, places, targets) > 0.0, backward, 0.0)
            edges.append(EdgePrices(edge, space.counts[place[0]], forward, backward, None, again))
    return edges


Reader = tuple[int, tuple[Spec, ...]]  # a group node, and the spec that each of its options needs


def _reads(reads: Sequence[tuple[Place, Reader]]) -> tuple[list[Place], list[Reader], list[Spec]]:
    """Places and their readers side by side, and every spec that some reader needs."""
    return (
        [place for place, _ in reads],
        [reader for _, reader in reads],
        list(dict.fromkeys(s for _, (_, specs) in reads for s in specs)),
    )


def _parameter_tensor_edge(
    node: ParameterNode, index: int, consumers: Sequence[Reader], targets: Sequence[Spec]
) -> TensorEdge:
    return _tensor_edge("+".join(node.names[:2]), index, range(len(node.options)), node.options, consumers, targets)


def _again(
    space: "ModelSpace",
    consumers: Sequence[tuple[int, Sequence[Spec]]],
    places: Sequence[tuple[str, str]],
    targets: Sequence[Spec],
) -> dict[Remat, Floats]:
    """By remat, for each target spec 1 where some consumer that may need it takes the tensor again.

    Args:
        places: (class, tensor) that each consumer reads; none for casts between blocks, which are outside any remat.
    """
    found: dict[Remat, Floats] = {"none": np.zeros(len(targets)), "full": np.zeros(len(targets))}
    for (key, name), (index, specs) in zip(places, consumers, strict=False):
        node = space.nodes[index]
        assert isinstance(node, GroupNode)
        for remat, row in found.items():
            if takes_again(node.group.ops, name, space.again[key, remat]):
                row[[targets.index(s) for s in set(specs)]] = 1.0
    return found


def _moving(
    space: "ModelSpace",
    consumers: Sequence[tuple[int, Sequence[Spec]]],
    places: Sequence[tuple[str, str]],
    targets: Sequence[Spec],
) -> Floats:
    """For each target spec 1 where some consumer that may need it gives a cotangent back."""
    row = np.zeros(len(targets))
    for (key, name), (index, specs) in zip(places, consumers, strict=True):
        node = space.nodes[index]
        assert isinstance(node, GroupNode)
        if gives_cotangent(node.group.ops, name, space.graph.classes[key].tensors):
            row[[targets.index(s) for s in set(specs)]] = 1.0
    return row


def _edge(
    space: "ModelSpace",
    name: str,
    tensor: Tensor,
    producer: int,
    give: Sequence[Spec],
    consumers: Sequence[tuple[int, Sequence[Spec]]],
    count: int,
    places: Sequence[tuple[str, str]] = (),
) -> EdgePrices:
    sources = list(dict.fromkeys(give))
    targets = list(dict.fromkeys(s for _, specs in consumers for s in specs))
    forward, backward = space.pricing.cast_matrix(tensor, sources, targets)
    again = _again(space, consumers, places, targets)
    if places:
        backward = np.where(_moving(space, consumers, places, targets) > 0.0, backward, 0.0)
    return EdgePrices(
        _tensor_edge(name, producer, give, sources, consumers, targets), count, forward, backward, None, again
    )


def _tensor_edge(
    name: str,
    producer: int,
    give: Sequence[Any],
    sources: Sequence[Any],
    consumers: Sequence[tuple[int, Sequence[Spec]]],
    targets: Sequence[Spec],
) -> TensorEdge:
    """An edge whose casts are priced later. `give` are the producer's options in terms of `sources`."""
    row = {s: i for i, s in enumerate(sources)} if not isinstance(give, range) else {i: i for i in give}
    column = {s: i for i, s in enumerate(targets)}
    shape = (len(sources), len(targets))
    return TensorEdge(
        name=name,
        producer=producer,
        source=np.array([row[s] for s in give]),
        consumers=tuple((n, np.array([column[s] for s in specs])) for n, specs in consumers),
        cast_time_s=np.zeros(shape),
        cast_memory_bytes=np.zeros((1, *shape)),
    )

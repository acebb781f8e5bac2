"""The decisions of a whole model on one mesh, as an intra-op problem: what each number of `IntraOpProblem` means.

One stage's devices are assumed to hold `1/stages` of the model (the DP checks each stage exactly afterwards). Equal
blocks share their decisions, so the size does not depend on depth. Nodes:

    group       ops that share a strategy (`groups.py`), one node for each group of each block class
    port        the spec in which a block class takes an input; between blocks casts lead from producer to port
    parameter   where a parameter, its gradient and its optimizer state live (`parameters.py`)
    batch       whether a batch leaf arrives split or whole
    end         what the loss (a pending sum is fine) and other results must become

Times are seconds of one step: microbatches x (forward + backward) + once. The memory row is
``(state + in_flight x saved) / stages`` against what the device kind has free.
"""

import math
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal

import numpy as np

from costmodel.errors import InputError
from costmodel.estimator import Pricing, Traffic
from costmodel.graph import BlockClass, ModelGraph, Source, Tensor, derived_from_parameters
from costmodel.sharding import PARTIAL, REPLICATED, Spec, divides, operand_spec, result_spec, split_factor
from planner.search.problem import Floats, IntraOpProblem, Node, TensorEdge
from planner.space.backward import Again, Kept, kept_by, kept_bytes, kept_once, read_again, takes_again
from planner.space.borders import carries, port_specs
from planner.space.groups import Group, GroupStrategy, group_ops, group_strategies
from planner.space.parameters import Storage, parameter_matrix, state_bytes, storages, update_bytes, whole_storage

Remat = Literal["none", "full"]
PORT_LIMIT = 48
HEAVY = 0.01  # share of the model's FLOPs from which an op is split over every axis that can split it
SMALL = 1e-3  # share of the model's parameters below which one is kept whole


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is fixed while one problem is solved."""

    microbatches: int
    stages: int
    in_flight: int
    remat: Remat


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

    def ends(self, space: "ModelSpace") -> tuple[Spec, ...]:
        """Specs that the consumer may take it in."""
        node = space.nodes[self.consumer]
        assert isinstance(node, PortNode | EndNode)
        return node.options


@dataclass(kw_only=True)
class ModelSpace:
    """Nodes and edges of one model on one mesh. Build once, then `problem(setting)` for each setting."""

    graph: ModelGraph
    pricing: Pricing
    nodes: list[AnyNode] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    groups: dict[str, tuple[Group, ...]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    index: dict[tuple[str, ...], int] = field(default_factory=dict)
    traffic: dict[str, Traffic] = field(default_factory=dict)
    derived: dict[str, frozenset[str]] = field(default_factory=dict)
    kept: dict[str, dict[str, Kept]] = field(default_factory=dict)
    once: dict[str, frozenset[str]] = field(default_factory=dict)
    carries: dict[str, dict[int, int]] = field(default_factory=dict)
    again: dict[tuple[str, Remat], Again] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.graph
        self.counts = Counter(block.class_key for block in graph.blocks)
        for key, cls in graph.classes.items():
            outputs = frozenset(name for name in cls.outputs if name)
            self.groups[key] = group_ops(cls.ops, cls.tensors, outputs)
            self.traffic[key] = Traffic.of_block(cls.ops, cls.tensors, outputs)
            derived = self.derived[key] = derived_from_parameters(cls.ops, cls.tensors)
            self.kept[key] = kept_by(cls.ops, cls.tensors, derived)
            self.once[key] = kept_once(graph, key)
            self.carries[key] = carries(graph, key)
            for remat in typing.get_args(Remat):
                self.again[key, remat] = read_again(cls.ops, cls.tensors, derived, full=remat == "full")
            for i, group in enumerate(self.groups[key]):
                options = self._working(key, group, group_strategies(group, self.mesh, cls.tensors))
                self._add(("group", key, str(i)), GroupNode(key, group, options))
        self._parameters()
        for name, dim in graph.batch_dims.items():
            self._add(("batch", name), BatchNode(name, self._batch_specs(graph.values[name], dim)))
        self._ports()
        self._ends()

    def _working(self, key: str, group: Group, options: tuple[GroupStrategy, ...]) -> tuple[GroupStrategy, ...]:
        """Without options that run a heavy product whole on some axis though it could be split there."""
        heavy = [
            i
            for i, op in enumerate(group.ops)
            if op.work in ("matmul", "conv") and op.flops * self.counts[key] >= HEAVY * self.graph.forward_flops
        ]
        for axis in range(len(self.mesh)):
            split = tuple(o for o in options if all(o.ops[i][axis] >= 0 for i in heavy))
            options = split or options
        return options

    @property
    def mesh(self) -> tuple[int, ...]:
        return self.pricing.mesh

    @property
    def whole(self) -> Spec:
        return (REPLICATED,) * len(self.mesh)

    def _add(self, key: tuple[str, ...], node: AnyNode) -> int:
        self.index[key] = len(self.nodes)
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _batch_specs(self, tensor: Tensor, dim: int | None) -> tuple[Spec, ...]:
        codes = (REPLICATED,) if dim is None else (REPLICATED, dim)
        return tuple(s for s in product(codes, repeat=len(self.mesh)) if divides(tensor.shape, s, self.mesh))

    # parameters

    def _parameters(self) -> None:
        """One node for each parameter; equal parameters of equal (unrolled) blocks share one."""
        readers: dict[tuple[str, ...], list[tuple[str, str]]] = {}
        names: dict[tuple[str, ...], dict[str, None]] = {}
        items: dict[tuple[str, ...], set[tuple[str, int | None]]] = {}
        for key, cls in self.graph.classes.items():
            blocks = [b for b in self.graph.blocks if b.class_key == key]
            for i, name in enumerate(cls.inputs):
                sources = [b.inputs[i] for b in blocks]
                if sources[0].value not in self.graph.params:
                    continue
                values = {s.value for s in sources}
                node = ("param", sources[0].value) if len(values) == 1 else ("param", key, name)
                readers.setdefault(node, []).append((key, name))
                names.setdefault(node, {}).update(dict.fromkeys(s.value for s in sources))
                items.setdefault(node, set()).update((s.value, s.index) for s in sources)
        for node, places in readers.items():
            key, name = places[0]
            tensor = self.graph.classes[key].tensors[name]
            if len({self.graph.classes[k].tensors[n].shape for k, n in places}) > 1:
                raise InputError(
                    "MP117",
                    f"parameter {next(iter(names[node]))} is read layer by layer and also whole: not planned yet",
                    "read the stack in one way: put a penalty on it into the layers' own loop, or into the optimizer",
                )
            facts = self.graph.params[next(iter(names[node]))]
            small = facts.elements < SMALL * sum(p.elements for p in self.graph.params.values())
            options = (whole_storage(len(self.mesh)),) if small else storages(tensor.shape, self.mesh, facts.trained)
            index = self._add(node, ParameterNode(tuple(names[node]), tensor, tuple(places), len(items[node]), options))
            for place in places:
                self.index["place", *place] = index

    # values between blocks

    def _producers(self) -> dict[str, tuple[str, int, bool]]:
        """Value -> (class, output position, whether it is one item of a stacked value)."""
        return {
            source.value: (block.class_key, i, source.index is not None)
            for block in self.graph.blocks
            for i, source in enumerate(block.outputs)
        }

    def _gives(self, source: Source, made: dict[str, tuple[str, int, bool]]) -> tuple[int, tuple[Spec, ...]] | None:
        """Node that makes a value, and the spec that each of its options leaves; None for whole inputs."""
        if ("batch", source.value) in self.index:
            node = self.index["batch", source.value]
            return node, self.nodes[node].options  # type: ignore[return-value]
        if source.value not in made:
            return None
        key, position, item = made[source.value]
        cls = self.graph.classes[key]
        carry = next((i for i, j in self.carries[key].items() if j == position), None)
        if carry is not None:
            node = self.index["port", key, cls.inputs[carry]]
            return node, self.nodes[node].options  # type: ignore[return-value]
        found = self.maker(key, cls.outputs[position])
        if found is None:
            return None
        node, specs = found
        shift = (1 if item else 0) - (1 if source.index is not None else 0)
        return node, tuple(tuple(c + shift if c >= 0 else c for c in s) for s in specs)

    def maker(self, key: str, name: str) -> tuple[int, tuple[Spec, ...]] | None:
        for i, group in enumerate(self.groups[key]):
            if name in group.exports:
                node = self.index["group", key, str(i)]
                at = group.exports.index(name)
                return node, tuple(o.gives[at] for o in self.nodes[node].options)  # type: ignore[union-attr]
        if ("port", key, name) in self.index:  # an input handed through
            node = self.index["port", key, name]
            return node, self.nodes[node].options  # type: ignore[return-value]
        return None

    def _ports(self) -> None:
        made = self._producers()
        for key, cls in self.graph.classes.items():
            for i, name in enumerate(cls.inputs):
                first = next(b for b in self.graph.blocks if b.class_key == key).inputs[i]
                if first.value in self.graph.params:
                    continue
                tensor = cls.tensors[name]
                wanted: dict[Spec, None] = {}
                for j, group in enumerate(self.groups[key]):
                    if name in group.reads:
                        at = group.reads.index(name)
                        options = self.nodes[self.index["group", key, str(j)]].options
                        wanted.update((o.needs[at], None) for o in options)  # type: ignore[union-attr]
                plain = port_specs(tensor, wanted, self.mesh, shared=name in self.once[key])
                specs = tuple(plain)[:PORT_LIMIT] or (self.whole,)
                if self.whole not in specs:
                    specs = (self.whole, *specs)
                self._add(("port", key, name), PortNode(key, name, specs))
        counts: Counter[tuple[int, tuple[Spec, ...], int]] = Counter()
        tensors: dict[int, Tensor] = {}
        consts: set[tuple[int, int, str]] = set()
        before = ""
        for block in self.graph.blocks:
            key, cls = block.class_key, self.graph.classes[block.class_key]
            for i, source in enumerate(block.inputs):
                name = cls.inputs[i]
                if ("port", key, name) not in self.index or (key == before and i in self.carries[key]):
                    continue
                port = self.index["port", key, name]
                found = self._gives(source, made)
                producer, give = found if found is not None else (self.whole_source(source.value), (self.whole,))
                if (producer, port, source.value) in consts and source.index is None:
                    continue  # one value that many equal blocks read is cast once
                consts.add((producer, port, source.value))
                counts[producer, give, port] += 1
                tensors[port] = cls.tensors[name]
            before = key
        for key, cls in self.graph.classes.items():
            for i, j in self.carries[key].items():
                maker, port = self.maker(key, cls.outputs[j]), self.index["port", key, cls.inputs[i]]
                tensors[port] = cls.tensors[cls.inputs[i]]
                if maker is not None:
                    counts[maker[0], maker[1], port] += self.counts[key]  # every layer casts its output
        self.links += [Link(p, give, c, tensors[c], n) for (p, give, c), n in counts.items() if p != c]

    def whole_source(self, value: str) -> int:
        """A node with one option for inputs that every device holds whole (keys, state, constants)."""
        key = ("whole", value)
        return self.index[key] if key in self.index else self._add(key, BatchNode(value, (self.whole,)))

    def _ends(self) -> None:
        made = self._producers()
        sums = tuple(product((REPLICATED, PARTIAL), repeat=len(self.mesh)))
        for names, options in ((self.graph.loss, sums), (self.graph.results, (self.whole,))):
            for name in dict.fromkeys(n for n in names if n):
                found = self._gives(Source(name), made)
                if found is None:
                    continue
                end = self._add(("end", name), EndNode(name, options))
                tensor = self.graph.values[name]
                if names is self.graph.results:  # no cotangent comes back
                    tensor = replace(tensor, needs_grad=False)
                self.links.append(Link(found[0], found[1], end, tensor, 1))

    # numbers

    @cached_property
    def prices(self) -> "SpacePrices":
        """Prices of one block and one microbatch, independent of the setting."""
        return SpacePrices.of(self)

    def problem(self, setting: Setting, *, limit_bytes: float) -> IntraOpProblem:
        """The problem for one setting; `limit_bytes` is what a device has for state and activations."""
        return self.prices.problem(setting, limit_bytes)


@dataclass(frozen=True)
class NodePrices:
    """One node's options: seconds and bytes of one block and one microbatch; `count` blocks share the node."""

    name: str
    count: int
    forward_s: Floats
    backward_s: Floats
    once_s: Floats
    state_bytes: Floats
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

    @staticmethod
    def of(space: ModelSpace) -> "SpacePrices":
        names = {index: "/".join(key) for key, index in space.index.items() if key[0] != "place"}
        edges = [e for key, cls in space.graph.classes.items() for e in _edges_inside(space, key, cls)]
        for i, node in enumerate(space.nodes):
            if isinstance(node, ParameterNode):
                edges += _parameter_edge(space, i, node)
        edges += [
            _edge(space, "link", link.tensor, link.producer, link.give, [(link.consumer, link.ends(space))], link.count)
            for link in space.links
        ]
        nodes = tuple(_node_prices(space, names[i], node) for i, node in enumerate(space.nodes))
        return SpacePrices(nodes, tuple(edges))

    def problem(self, setting: Setting, limit_bytes: float) -> IntraOpProblem:
        full, times = setting.remat == "full", setting.microbatches
        nodes = []
        for p in self.nodes:
            per_microbatch = p.forward_s * (2.0 if full else 1.0) + p.backward_s
            kept = p.entry_bytes if full else p.saved_bytes
            memory = p.count * (p.state_bytes + setting.in_flight * kept) / setting.stages
            if full:
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
        return IntraOpProblem(nodes=tuple(nodes), tensors=tuple(edges), budget_bytes=np.array([limit_bytes]))


def _node_prices(space: ModelSpace, name: str, node: AnyNode) -> NodePrices:
    options = len(node.options)
    zero = np.zeros(options)
    forward, backward, once, state, saved, entry, live = (zero.copy() for _ in range(7))
    count = 1
    if isinstance(node, GroupNode):
        count = space.counts[node.class_key]
        sharers = sharers_of(space, node.class_key)
        for j, option in enumerate(node.options):
            forward[j], backward[j] = group_cost(space, node, option)
            saved[j] = group_saved(space, node, option, sharers)
            live[j] = group_live(space, node, option)
    elif isinstance(node, PortNode):
        count = space.counts[node.class_key]
        tensor = space.graph.classes[node.class_key].tensors[node.tensor]
        layers = count if node.tensor in space.once[node.class_key] else 1
        if any(name == node.tensor for _, name in space.again[node.class_key, "full"]):
            entry[:] = [tensor.bytes / split_factor(spec, space.mesh) / layers for spec in node.options]
    elif isinstance(node, ParameterNode):
        count, facts, elements = node.count, space.graph.params[node.names[0]], math.prod(node.tensor.shape)
        for j, storage in enumerate(node.options):
            state[j] = sum(state_bytes(facts, elements, storage, space.mesh))
            once[j] = space.pricing.update_s(update_bytes(facts, elements, storage, space.mesh))
    return NodePrices(name, count, forward, backward, once, state, saved, entry, live)


def _edges_inside(space: ModelSpace, key: str, cls: BlockClass) -> list[EdgePrices]:
    out = []
    for name in dict.fromkeys([*cls.inputs, *(n for g in space.groups[key] for n in g.exports)]):
        consumers = consumers_of(space, key, name)
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


def _parameter_edge(space: ModelSpace, index: int, node: ParameterNode) -> list[EdgePrices]:
    pairs = [(place, c) for place in node.places for c in consumers_of(space, *place)]
    places, consumers = [place for place, _ in pairs], [c for _, c in pairs]
    if not consumers:
        return []
    targets = list(dict.fromkeys(s for _, specs in consumers for s in specs))
    trained = space.graph.params[node.names[0]].trained
    forward, backward, once = parameter_matrix(
        node.tensor, node.options, targets, space.pricing, trained=trained, leaf_share=len(node.names) / node.count
    )
    edge = _tensor_edge("+".join(node.names[:2]), index, range(len(node.options)), node.options, consumers, targets)
    return [EdgePrices(edge, node.count, forward, backward, once, _again(space, consumers, places, targets))]


def _again(
    space: ModelSpace,
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


def _edge(
    space: ModelSpace,
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


def consumers_of(space: ModelSpace, key: str, name: str) -> list[tuple[int, tuple[Spec, ...]]]:
    """Group nodes of a class that read a tensor, with the spec that each option needs."""
    found = []
    for i, group in enumerate(space.groups[key]):
        if name in group.reads:
            node = space.index["group", key, str(i)]
            at = group.reads.index(name)
            found.append((node, tuple(o.needs[at] for o in space.nodes[node].options)))  # type: ignore[union-attr]
    return found


def group_cost(space: ModelSpace, node: GroupNode, option: GroupStrategy) -> tuple[float, float]:
    """Forward and backward seconds of a group's ops on one device."""
    tensors, traffic = space.graph.classes[node.class_key].tensors, space.traffic[node.class_key]
    forward = backward = 0.0
    for op, strategy in zip(node.group.ops, option.ops, strict=True):
        cost = space.pricing.op(op, strategy, tensors, traffic)
        forward += cost.forward_s
        backward += cost.backward_s + (cost.forward_s if op.scope >= 0 else 0.0)  # the user's own remat
    return forward, backward


def sharers_of(space: ModelSpace, key: str) -> Counter[str]:
    """Tensor -> number of groups of a class that keep it for the backward pass."""
    kept = space.kept[key]
    return Counter(
        n for group in space.groups[key] for n in frozenset().union(*(kept[op.name].names for op in group.ops))
    )


def group_kept(space: ModelSpace, node: GroupNode, option: GroupStrategy) -> dict[tuple[str, Spec], float]:
    """Bytes that a group keeps on one device, by tensor and spec."""
    cls = space.graph.classes[node.class_key]
    specs = specs_in_group(node.group, option)
    return kept_bytes(node.group.ops, option.ops, space.kept[node.class_key], cls.tensors, specs, space.mesh)


def group_saved(space: ModelSpace, node: GroupNode, option: GroupStrategy, sharers: Mapping[str, int]) -> float:
    """The same as one number. A tensor that several groups keep is shared among them (in equal specs, as is usual), one
    that all layers keep together among the layers."""
    once, layers = space.once[node.class_key], space.counts[node.class_key]
    return sum(
        size / sharers.get(name, 1) / (layers if name in once else 1)
        for (name, _), size in sorted(group_kept(space, node, option).items())
    )


def group_live(space: ModelSpace, node: GroupNode, option: GroupStrategy) -> float:
    """Bytes that are live on one device while a group runs backward: what it reads and leaves, and their cotangents."""
    cls = space.graph.classes[node.class_key]
    pairs = [*zip(node.group.reads, option.needs, strict=True), *zip(node.group.exports, option.gives, strict=True)]
    return 2.0 * sum(cls.tensors[n].bytes / split_factor(s, space.mesh) for n, s in pairs)


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

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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

import numpy as np

from costmodel.estimator import Pricing, Traffic
from costmodel.graph import BlockClass, ModelGraph, Source, Tensor, derived_from_parameters
from costmodel.sharding import PARTIAL, REPLICATED, Spec, divides, operand_spec, result_spec, split_factor
from planner.search.problem import IntraOpProblem, Node, TensorEdge
from planner.space.groups import Group, GroupStrategy, group_ops, group_strategies
from planner.space.parameters import Storage, parameter_cost, state_bytes, storages, update_bytes

Remat = Literal["none", "full"]
PORT_LIMIT = 48


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

    def __post_init__(self) -> None:
        graph = self.graph
        self.counts = Counter(block.class_key for block in graph.blocks)
        for key, cls in graph.classes.items():
            outputs = frozenset(name for name in cls.outputs if name)
            self.groups[key] = group_ops(cls.ops, cls.tensors, outputs)
            self.traffic[key] = Traffic.of_block(cls.ops, cls.tensors, outputs)
            self.derived[key] = derived_from_parameters(cls.ops, cls.tensors)
            for i, group in enumerate(self.groups[key]):
                self._add(("group", key, str(i)), GroupNode(key, group, group_strategies(group, self.mesh, cls.tensors)))
        self._parameters()
        for name, dim in graph.batch_dims.items():
            self._add(("batch", name), BatchNode(name, self._batch_specs(graph.values[name], dim)))
        self._ports()
        self._ends()

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
            facts = self.graph.params[next(iter(names[node]))]
            options = storages(tensor.shape, self.mesh, facts.trained)
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
        name = self.graph.classes[key].outputs[position]
        found = self._maker(key, name)
        if found is None:
            return None
        node, specs = found
        shift = (1 if item else 0) - (1 if source.index is not None else 0)
        return node, tuple(tuple(c + shift if c >= 0 else c for c in s) for s in specs)

    def _maker(self, key: str, name: str) -> tuple[int, tuple[Spec, ...]] | None:
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
                plain = {s: None for s in wanted if PARTIAL not in s and divides(tensor.shape, s, self.mesh)}
                specs = tuple(plain)[:PORT_LIMIT] or (self.whole,)
                if self.whole not in specs:
                    specs = (self.whole, *specs)
                self._add(("port", key, name), PortNode(key, name, specs))
        counts: Counter[tuple[int, tuple[Spec, ...], int]] = Counter()
        tensors: dict[int, Tensor] = {}
        consts: set[tuple[int, int, str]] = set()
        for block in self.graph.blocks:
            cls = self.graph.classes[block.class_key]
            for i, source in enumerate(block.inputs):
                name = cls.inputs[i]
                if ("port", block.class_key, name) not in self.index:
                    continue
                port = self.index["port", block.class_key, name]
                found = self._gives(source, made)
                producer, give = found if found is not None else (self._whole_source(source.value), (self.whole,))
                if (producer, port, source.value) in consts and source.index is None:
                    continue  # one value that many equal blocks read is cast once
                consts.add((producer, port, source.value))
                counts[producer, give, port] += 1
                tensors[port] = cls.tensors[name]
        self.links += [Link(p, give, c, tensors[c], n) for (p, give, c), n in counts.items()]

    def _whole_source(self, value: str) -> int:
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
                self.links.append(Link(found[0], found[1], end, self.graph.values[name], 1))

    # numbers

    def problem(self, setting: Setting, *, limit_bytes: float) -> IntraOpProblem:
        """The problem for one setting; `limit_bytes` is what a device has for state and activations."""
        numbers = _Numbers(self, setting)
        nodes = tuple(numbers.node(i, node) for i, node in enumerate(self.nodes))
        return IntraOpProblem(nodes=nodes, tensors=tuple(numbers.edges()), budget_bytes=np.array([limit_bytes]))


class _Numbers:
    """Prices of a space under one setting."""

    def __init__(self, space: ModelSpace, setting: Setting):
        self.space, self.setting = space, setting
        self.pricing = space.pricing
        self.saved = {key: saved_by(space, key, setting.remat) for key in space.graph.classes}

    def node(self, index: int, node: AnyNode) -> Node:
        count = len(node.options)
        time, memory, transient = np.zeros(count), np.zeros(count), np.zeros(count)
        setting = self.setting
        if isinstance(node, GroupNode):
            times = setting.microbatches * self.space.counts[node.class_key]
            for j, option in enumerate(node.options):
                forward, backward = group_cost(self.space, node, option)
                again = forward if setting.remat == "full" else 0.0
                time[j] = times * (forward + backward + again)
                held = group_saved(self.space, node, option, self.saved[node.class_key])
                live = group_live(self.space, node, option)
                if setting.remat == "full":
                    every = group_saved(self.space, node, option, saved_by(self.space, node.class_key, "none"))
                    memory[j] = every  # one block at a time
                else:
                    memory[j] = setting.in_flight * held * self.space.counts[node.class_key] / setting.stages
                transient[j] = live
        elif isinstance(node, PortNode):
            tensor = self.space.graph.classes[node.class_key].tensors[node.tensor]
            if setting.remat == "full" and tensor.role in ("activation", "batch"):
                for j, spec in enumerate(node.options):
                    local = tensor.bytes / split_factor(spec, self.pricing.mesh)
                    memory[j] = setting.in_flight * local * self.space.counts[node.class_key] / setting.stages
        elif isinstance(node, ParameterNode):
            facts = self.space.graph.params[node.names[0]]
            elements = math.prod(node.tensor.shape)
            for j, storage in enumerate(node.options):
                memory[j] = node.count * sum(state_bytes(facts, elements, storage, self.pricing.mesh)) / setting.stages
                touched = update_bytes(facts, elements, storage, self.pricing.mesh)
                time[j] = node.count * self.pricing.update_s(touched)
        return Node(name="/".join(map(str, next(k for k, v in self.space.index.items() if v == index))),
                    time_s=time, memory_bytes=memory[None, :], transient_bytes=transient)

    def edges(self) -> list[TensorEdge]:
        out = []
        for key, cls in self.space.graph.classes.items():
            out += self._inside(key, cls)
        for i, node in enumerate(self.space.nodes):
            if isinstance(node, ParameterNode):
                out += self._parameter(i, node)
        for link in self.space.links:
            ends = self.space.nodes[link.consumer].options
            factor = self.setting.microbatches * link.count
            out.append(self._edge("link", link.tensor, link.producer, link.give, [(link.consumer, ends)], factor))  # type: ignore[arg-type]
        return [e for e in out if e is not None]

    def _inside(self, key: str, cls: BlockClass) -> list[TensorEdge | None]:
        factor = self.setting.microbatches * self.space.counts[key]
        out = []
        for name in dict.fromkeys([*cls.inputs, *(n for g in self.space.groups[key] for n in g.exports)]):
            consumers = consumers_of(self.space, key, name)
            if ("place", key, name) in self.space.index or not consumers:
                continue
            found = self.space._maker(key, name)
            if found is None:  # a captured constant, whole everywhere
                producer, specs = self.space._whole_source(name), (self.space.whole,)
            else:
                producer, specs = found
            consumers = [(node, specs_) for node, specs_ in consumers if node != producer]
            if consumers:
                again = name in self.space.derived[key]
                out.append(self._edge(f"{key}/{name}", cls.tensors[name], producer, specs, consumers, factor, again))
        return out

    def _parameter(self, index: int, node: ParameterNode) -> list[TensorEdge | None]:
        consumers = [c for place in node.places for c in consumers_of(self.space, *place)]
        targets = list(dict.fromkeys(s for _, specs in consumers for s in specs))
        trained = self.space.graph.params[node.names[0]].trained
        cost = np.full((len(node.options), len(targets)), np.inf)
        for a, storage in enumerate(node.options):
            for b, need in enumerate(targets):
                price = parameter_cost(node.tensor, storage, need, self.pricing, trained=trained)
                each = price.forward_s + price.backward_s
                cost[a, b] = node.count * (self.setting.microbatches * each + price.once_s)
        column = {spec: b for b, spec in enumerate(targets)}
        return [
            TensorEdge(
                name="+".join(node.names[:2]), producer=index, source=np.arange(len(node.options)),
                consumers=tuple((n, np.array([column[s] for s in specs])) for n, specs in consumers),
                cast_time_s=cost, cast_memory_bytes=np.zeros((1, *cost.shape)),
            )
        ] if consumers else []

    def _edge(
        self, name: str, tensor: Tensor, producer: int, give: Sequence[Spec], consumers: Sequence[tuple[int, Sequence[Spec]]],
        factor: float, again: bool = False,
    ) -> TensorEdge:
        sources = list(dict.fromkeys(give))
        targets = list(dict.fromkeys(s for _, specs in consumers for s in specs))
        cost = np.array([[self._cast(tensor, a, b, again) for b in targets] for a in sources]) * factor
        row, column = ({s: i for i, s in enumerate(specs)} for specs in (sources, targets))
        return TensorEdge(
            name=name, producer=producer, source=np.array([row[s] for s in give]),
            consumers=tuple((n, np.array([column[s] for s in specs])) for n, specs in consumers),
            cast_time_s=cost, cast_memory_bytes=np.zeros((1, *cost.shape)),
        )

    def _cast(self, tensor: Tensor, source: Spec, target: Spec, again: bool) -> float:
        """Seconds of a cast both ways; it runs again for the backward pass under full remat, and where it is of a weight."""
        forward, backward = self.pricing.cast(tensor, source, target)
        return forward + backward + (forward if again or self.setting.remat == "full" else 0.0)


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
        backward += cost.backward_s
    return forward, backward


def saved_by(space: ModelSpace, key: str, remat: Remat) -> dict[str, int]:
    """Tensor -> number of groups that keep it for the backward pass (parameters are there anyway)."""
    if remat == "full":
        return {}
    cls = space.graph.classes[key]
    derived = space.derived[key]
    found: Counter[str] = Counter()
    for group in space.groups[key]:
        kept = {n for op in group.ops for n in op.saves if cls.tensors[n].role in ("activation", "batch") and n not in derived}
        found.update(kept)
    return dict(found)


def group_saved(space: ModelSpace, node: GroupNode, option: GroupStrategy, sharers: dict[str, int]) -> float:
    """Bytes that a group keeps on one device; a tensor that several groups keep is shared among them."""
    cls = space.graph.classes[node.class_key]
    specs = specs_in_group(node.group, option)
    kept = {name for op in node.group.ops for name in op.saves}
    return sum(
        cls.tensors[name].bytes / split_factor(specs[name], space.mesh) / sharers[name] for name in sorted(kept) if name in sharers
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


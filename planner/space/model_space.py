"""The decisions of a whole model on one mesh: nodes with options, and the values on their way between them.

One stage's devices are assumed to hold `1/stages` of the model (the DP checks each stage exactly afterwards). Equal
blocks share their decisions, so the size does not depend on depth. `nodes.py` has the kinds of decisions, `prices.py`
what they cost.
"""

import copy
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from costmodel.block_times import BlockScales
from costmodel.estimator import OpCost, Pricing
from costmodel.graph import ModelGraph, Op, Source, Tensor, derived_from_parameters
from costmodel.sharding import PARTIAL, REPLICATED, Spec, Strategy, divides
from costmodel.traffic import Traffic
from planner.search.problem import IntraOpProblem
from planner.space.accumulation import with_accumulation
from planner.space.backward import Again, Kept, done_again, kept_by, kept_once
from planner.space.borders import carries, port_specs
from planner.space.groups import Group, GroupStrategy, group_ops, group_strategies
from planner.space.kernels import names_in_memory
from planner.space.nodes import AnyNode, BatchNode, EndNode, GroupNode, Link, ParameterNode, Place, PortNode
from planner.space.parameters import storages, whole_storage
from planner.space.prices import SpacePrices
from planner.space.setting import Remat, Setting

PORT_LIMIT = 48
FAST_MEMORY = 4.01e12  # bytes/s: between a GH200's and an H20's
HEAVY = 0.01  # share of the model's FLOPs from which an op is split over every axis that can split it
SMALL = 1e-3  # share of the model's parameters below which one is kept whole


@dataclass(kw_only=True)
class ModelSpace:
    """Nodes and edges of one model on one mesh. Build once, then `problem(setting)` for each setting.

    Args:
        scales: of the classes whose blocks were measured, what the prices of their ops are multiplied by.
    """

    graph: ModelGraph
    pricing: Pricing
    scales: BlockScales = field(default_factory=dict)
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
    _op_costs: dict[tuple[str, str, Strategy], OpCost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.graph
        heavy_flops = HEAVY * graph.forward_flops
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
                self.again[key, remat] = done_again(cls.ops, cls.tensors, derived, full=remat == "full")
            for i, group in enumerate(self.groups[key]):
                options = self._working(key, group, group_strategies(group, self.mesh, cls.tensors), heavy_flops)
                self._add(("group", key, str(i)), GroupNode(key, group, options))
        self._parameters()
        for name, dim in graph.batch_dims.items():
            self._add(("batch", name), BatchNode(name, self._batch_specs(graph.values[name], dim)))
        self._ports()
        self._ends()

    def _working(
        self, key: str, group: Group, options: tuple[GroupStrategy, ...], heavy_flops: float
    ) -> tuple[GroupStrategy, ...]:
        """Without options that run a heavy product whole on some axis though it could be split there."""
        heavy = [
            i
            for i, op in enumerate(group.ops)
            if op.work in ("matmul", "conv") and op.flops * self.counts[key] >= heavy_flops
        ]
        for axis in range(len(self.mesh)):
            split = tuple(o for o in options if all(o.ops[i][axis] >= 0 for i in heavy))
            options = split or options
        return options

    def op_cost(self, key: str, op: Op, strategy: Strategy) -> OpCost:
        """What an op of a class costs on one device; many strategies of its group share it."""
        known = key, op.name, strategy
        if known not in self._op_costs:
            tensors, traffic = self.graph.classes[key].tensors, self.traffic[key]
            cost = self.pricing.op(op, strategy, tensors, traffic)
            scale = self.scales.get(key)
            self._op_costs[known] = cost if scale is None else scale.apply(cost, whole=not self.mesh)
        return self._op_costs[known]

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
        """One node for each parameter; those that equal (unrolled) blocks read in one place share one."""
        read: dict[Place, list[Source]] = {}
        for block in self.graph.blocks:
            for name, source in zip(self.graph.classes[block.class_key].inputs, block.inputs, strict=True):
                if source.value in self.graph.params:
                    read.setdefault((block.class_key, name), []).append(source)
        for places in _sharing(read):
            tensors = {p: self.graph.classes[p[0]].tensors[p[1]] for p in places}
            tensor = min(tensors.values(), key=lambda t: len(t.shape))  # items, where a stack is read both ways
            whole = {p: t for p, t in tensors.items() if len(t.shape) > len(tensor.shape)}
            names = tuple(dict.fromkeys(s.value for p in places for s in read[p]))
            items: dict[str, set[Source]] = {}
            for place in places:
                stack = whole[place].shape[0] if place in whole else 0
                every = [Source(s.value, i) for s in read[place] for i in range(stack)] or read[place]
                items.setdefault(place[0], set()).update(every)
            count = len(frozenset().union(*items.values()))
            shares = {key: len(own) / self.counts[key] for key, own in items.items()}
            facts = self.graph.params[names[0]]
            small = is_small(self.graph, names[0])
            options = (whole_storage(len(self.mesh)),) if small else storages(tensor.shape, self.mesh, facts.trained)
            key = ("param", names[0]) if len(names) == 1 else ("param", *places[0])
            index = self._add(key, ParameterNode(names, tensor, places, count, shares, options, whole))
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

    @property
    def fuses(self) -> bool:
        """Whether the device kind's compiler fuses elementwise ops into what reads them; the CPU's hardly does."""
        return self.pricing.kind.platform != "cpu"

    @property
    def triton(self) -> bool:
        """Whether XLA makes Triton kernels for the device kind: a GPU of compute capability 8.0, the first with
        products of bfloat16, or later."""
        return self.pricing.kind.platform == "gpu" and "bfloat16" in self.pricing.kind.peak_flops_per_s

    @property
    def fast(self) -> bool:
        """Whether the device kind's memory is so fast that XLA computes less again (`planner.space.in_memory`, L4)."""
        return self.pricing.kind.memory_bandwidth_bytes_per_s >= FAST_MEMORY

    @cached_property
    def in_memory(self) -> dict[str, frozenset[str]]:
        """Block class -> tensors that its program has in memory."""
        return {
            key: names_in_memory(cls) if self.fuses else frozenset(cls.tensors)
            for key, cls in self.graph.classes.items()
        }

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

    def consumers(self, key: str, name: str) -> list[tuple[int, tuple[Spec, ...]]]:
        """Group nodes of a class that read a tensor, with the spec that each option needs."""
        found = []
        for i, group in enumerate(self.groups[key]):
            if name in group.reads:
                node = self.index["group", key, str(i)]
                at = group.reads.index(name)
                found.append((node, tuple(o.needs[at] for o in self.nodes[node].options)))  # type: ignore[union-attr]
        return found

    def _ports(self) -> None:
        made = self._producers()
        for key, cls in self.graph.classes.items():
            for i, name in enumerate(cls.inputs):
                first = next(b for b in self.graph.blocks if b.class_key == key).inputs[i]
                if first.value in self.graph.params:
                    continue
                tensor = cls.tensors[name]
                wanted = {spec: None for _, specs in self.consumers(key, name) for spec in specs}
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

    @cached_property
    def first_inputs(self) -> dict[str, dict[str, list[Tensor]]]:
        """Class -> input -> leaves of the batch and of carried state that no block before reads."""
        found: dict[str, dict[str, list[Tensor]]] = {key: {} for key in self.graph.classes}
        for value, (key, name) in self.graph.first_reads(0, len(self.graph.blocks)).items():
            found[key].setdefault(name, []).append(self.graph.values[value])
        return found

    @cached_property
    def prices(self) -> SpacePrices:
        """Prices of one block and one microbatch, independent of the setting."""
        return with_accumulation(self, SpacePrices.of(self))

    def with_graph(self, graph: ModelGraph) -> "ModelSpace":
        """The same nodes for the same model at another microbatch size, to count bytes in: what ops of groups compute
        stays what it was.

        Args:
            graph: with the names and block classes of this one.
        """
        return self._changed(graph=graph)

    def with_assignment(self, nodes: Sequence[AnyNode], pricing: Pricing) -> "ModelSpace":
        """The same nodes with other options, on another mesh, to count bytes in: casts between blocks, which hold no
        memory, are left out."""
        return self._changed(nodes=list(nodes), pricing=pricing, links=[])

    def _changed(self, **fields: object) -> "ModelSpace":
        """A copy with other fields. Nothing is built again; what was worked out from sizes is forgotten."""
        other = copy.copy(self)
        for known in ("prices", "first_inputs"):
            other.__dict__.pop(known, None)
        other.__dict__.update(fields, _op_costs={})
        return other

    def problem(self, setting: Setting, *, limit_bytes: float) -> IntraOpProblem:
        """The problem for one setting; `limit_bytes` is what a device has for state and activations."""
        return self.prices.problem(setting, limit_bytes)


def is_small(graph: ModelGraph, name: str) -> bool:
    """Whether a parameter is so small that it lies whole on every device."""
    return graph.params[name].elements < SMALL * graph.parameter_elements


def _sharing(read: Mapping[Place, Sequence[Source]]) -> list[tuple[Place, ...]]:
    """Places in sets that read the same parameters: a parameter lies in one way, whoever reads it."""
    sets: list[tuple[set[str], list[Place]]] = []
    for place, sources in read.items():
        values = {s.value for s in sources}
        first, *others = [one for one in sets if one[0] & values] or [(set(), [])]
        for theirs, places in others:
            first[0].update(theirs)
            first[1].extend(places)
        first[0].update(values)
        first[1].append(place)
        sets = [one for one in sets if all(one is not other for other in others)]
        if len(first[1]) == 1:
            sets.append(first)
    return [tuple(places) for _, places in sets]

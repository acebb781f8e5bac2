"""One solved assignment of a space: the strategies by name, and what each block costs under them.

`CandidateCost` has the terms that the stage DP needs, per block class: seconds per microbatch forward and backward,
seconds once a step, and bytes that are state, saved per microbatch in flight, and transient.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from costmodel.graph import Op, Tensor
from costmodel.sharding import (
    PARTIAL,
    REPLICATED,
    VARYING,
    Spec,
    Strategy,
    cast,
    internal_reductions,
    local_fraction,
    split_factor,
)
from planner.space.accumulation import accumulate_s
from planner.space.backward import (
    Handed,
    cotangent_name,
    gives_cotangent,
    handed_by,
    is_layered,
    own_name,
    runs_again,
    takes_again,
)
from planner.space.group_costs import group_cost, group_kept, group_live, specs_in_group, weight_seconds
from planner.space.inputs import input_bytes
from planner.space.liveness import BlockLiveness
from planner.space.model_space import ModelSpace
from planner.space.nodes import BatchNode, EndNode, GroupNode, ParameterNode, Place, PortNode
from planner.space.parameters import (
    Storage,
    arising_bytes,
    gradient_collectives,
    hoisted,
    reduction_s,
    state_bytes,
    update_bytes,
)
from planner.space.setting import Setting

Collective = tuple[str, str, int]  # phase (forward, backward, once), kind, axis


@dataclass(frozen=True, slots=True)
class Move:
    """Collectives of one kind on one axis that a block runs in a phase: seconds are ``starts * fixed + bytes * slope``
    of the axis's line, and linear in both.

    Attributes:
        moved_bytes: of all of them together, as `costmodel.collectives.collective_time_s` counts them.
        weight: whether only weight gradients need it. A stored parameter's own gathers are `gathers`.
    """

    phase: str
    kind: str
    axis: int
    moved_bytes: float
    starts: float
    weight: bool = False
    gathers: bool = False


@dataclass(kw_only=True)
class BlockCost:
    """What one block of a class costs on one device of the group. Seconds per microbatch unless said otherwise.

    Attributes:
        forward_s, backward_s: of computation; the accumulation of gradients is part of the latter.
        forward_cast_s, backward_cast_s: of casts, parameters' gathers included.
        weight_s: the part of `backward_s` and `backward_cast_s` together that only weight gradients need.
        once_s: gradient reduction and gather of the update, once a step.
        update_s: optimizer update, once a step.
        collectives: phase, kind and axis -> count per microbatch.
        arising_bytes: a microbatch's gradient, beside the accumulator. inputs_bytes: batch and carried state.
        moves: the collectives behind the seconds of casts and gradients.
        lying_bytes: of a stage that is one program, what the compiler has lie there of `saved_bytes`.
        run_cast_s, run_collectives: of forward casts that a scan does once for all its layers, as JAX hoists what does
            not change from layer to layer. Each layer's share is part of `forward_cast_s`, not of `collectives`.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_cast_s: float = 0.0
    backward_cast_s: float = 0.0
    weight_s: float = 0.0
    once_s: float = 0.0
    update_s: float = 0.0
    parameter_bytes: float = 0.0
    gradient_bytes: float = 0.0
    arising_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    inputs_bytes: float = 0.0
    saved_bytes: float = 0.0
    lying_bytes: float = 0.0
    transient_bytes: float = 0.0
    collectives: Counter[Collective] = field(default_factory=Counter)
    moves: list[Move] = field(default_factory=list)
    run_cast_s: float = 0.0
    run_collectives: Counter[Collective] = field(default_factory=Counter)

    @property
    def state_bytes(self) -> float:
        gradients = self.gradient_bytes + self.arising_bytes
        return self.parameter_bytes + gradients + self.optimizer_bytes + self.inputs_bytes


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A choice of every node of a space.

    Attributes:
        choice: option index of each node.
        time_s: seconds of one step as the problem counts them; bound_s: proven least.
    """

    space: ModelSpace
    setting: Setting
    choice: tuple[int, ...]
    time_s: float
    bound_s: float

    def option(self, *key: str) -> object:
        index = self.space.index[key]
        return self.space.nodes[index].options[self.choice[index]]

    @cached_property
    def op_strategies(self) -> dict[str, dict[str, Strategy]]:
        """Block class -> op name -> strategy."""
        found: dict[str, dict[str, Strategy]] = {key: {} for key in self.space.graph.classes}
        for node, pick in zip(self.space.nodes, self.choice, strict=True):
            if isinstance(node, GroupNode):
                found[node.class_key].update(
                    (op.name, s) for op, s in zip(node.group.ops, node.options[pick].ops, strict=True)
                )
        return found

    @cached_property
    def storage(self) -> dict[str, Storage]:
        """Parameter name -> specs in the dims of one block's slice."""
        return {
            name: node.options[pick]
            for node, pick in zip(self.space.nodes, self.choice, strict=True)
            if isinstance(node, ParameterNode)
            for name in node.names
        }

    def needs(self, node: ParameterNode) -> list[Spec]:
        """Specs in which the ops take a parameter."""
        return [
            specs[self.choice[consumer]] for place in node.places for consumer, specs in self.space.consumers(*place)
        ]

    def gradient_collectives(self, node: ParameterNode) -> list[Collective]:
        """Collectives of the gradient and update of each of a node's leaves, on a stage that owns it."""
        if not self.space.graph.params[node.names[0]].trained:
            return []
        storage = node.options[self.choice[self.space.index["place", *node.places[0]]]]
        return gradient_collectives(storage, hoisted(storage.value, self.needs(node)), self.space.mesh)

    @cached_property
    def parameter_nodes(self) -> dict[str, ParameterNode]:
        return {name: n for n in self.space.nodes if isinstance(n, ParameterNode) for name in n.names}

    @cached_property
    def input_specs(self) -> dict[str, dict[str, Spec]]:
        """Block class -> input -> spec in which the class takes it (parameters: as they are through the step)."""
        found: dict[str, dict[str, Spec]] = {key: {} for key in self.space.graph.classes}
        for node, pick in zip(self.space.nodes, self.choice, strict=True):
            if isinstance(node, PortNode):
                found[node.class_key][node.tensor] = node.options[pick]
            elif isinstance(node, ParameterNode):
                through = hoisted(node.options[pick].value, self.needs(node))
                for place in node.places:
                    found[place[0]][place[1]] = node.spec_at(place, through)
        return found

    @cached_property
    def output_specs(self) -> dict[str, dict[str, Spec]]:
        """Block class -> output tensor -> spec in which the class makes it."""
        found: dict[str, dict[str, Spec]] = {}
        for key, cls in self.space.graph.classes.items():
            specs = dict(self.input_specs[key])
            for i, group in enumerate(self.space.groups[key]):
                specs |= specs_in_group(group, self.option("group", key, str(i)))  # type: ignore[arg-type]
            found[key] = {name: specs[name] for name in cls.outputs if name in specs}
        return found

    @cached_property
    def costs(self) -> dict[str, BlockCost]:
        """Block class -> what one of its blocks costs, with a share of the casts between blocks."""
        found = {}
        for key in self.space.graph.classes:
            found[key] = cost = self._cost(key)
            for link in self.space.links:
                consumer = self.space.nodes[link.consumer]
                # A result (new state, an aux output) is made whole by the block that makes it.
                at = self.space.nodes[link.producer] if isinstance(consumer, EndNode) else consumer
                if isinstance(at, PortNode | GroupNode) and at.class_key == key:
                    pair = (
                        link.give[self.choice[link.producer]],
                        link.ends(self.space.nodes)[self.choice[link.consumer]],
                    )
                    self.charge(link.tensor, *pair, cost, share=link.count / self.space.counts[key])
        return found

    @cached_property
    def inner_costs(self) -> dict[str, BlockCost]:
        """Block class -> what one of its blocks costs, without the casts between blocks."""
        return {key: self._cost(key) for key in self.space.graph.classes}

    def _cost(self, key: str) -> BlockCost:
        space, remat = self.space, self.setting.remat
        cls, cost = space.graph.classes[key], BlockCost()
        for i, group in enumerate(space.groups[key]):
            index = space.index["group", key, str(i)]
            node, option = space.nodes[index], space.nodes[index].options[self.choice[index]]
            assert isinstance(node, GroupNode)
            forward, backward = group_cost(space, node, option)  # type: ignore[arg-type]
            cost.forward_s += forward
            cost.backward_s += backward + (forward if remat == "full" else 0.0)
            cost.weight_s += weight_seconds(space, node, option)  # type: ignore[arg-type]
            for op, strategy in zip(group.ops, option.ops, strict=True):  # type: ignore[union-attr]
                again = (remat == "full" or op.scope >= 0) and runs_again(op, space.again[key, remat])
                forward_counts = cost.run_collectives if own_name(op) in space.once[key] else cost.collectives
                for axis in internal_reductions(op, strategy):
                    forward_counts["forward", "all_reduce", axis] += 1
                    cost.collectives["backward", "all_reduce", axis] += again
                    size = sum(cls.tensors[o].bytes for o in op.outputs) * local_fraction(op, strategy, space.mesh)
                    cost.moves += _moves(("forward", "backward") if again else ("forward",), "all_reduce", axis, size)
        for name in dict.fromkeys([*cls.inputs, *(n for g in space.groups[key] for n in g.exports)]):
            self._casts_inside(key, name, cost)
        for node in {space.index["place", key, n] for n in cls.inputs if ("place", key, n) in space.index}:
            self._parameter(node, key, cost)
        for name, values in space.first_inputs[key].items():
            spec, times = self.input_specs[key][name], self.setting.microbatches
            held = sum(input_bytes(space.graph, value, spec, space.mesh, times) for value in values)
            cost.inputs_bytes += held / space.counts[key]
        once, layers = space.once[key], space.counts[key]
        cost.saved_bytes = sum(size / (layers if name in once else 1) for (name, _), size in self.kept[key].items())
        cost.transient_bytes = self.live_bytes(key, rerun=remat == "full")
        return cost

    @cached_property
    def lying(self) -> dict[str, dict[tuple[str, Spec], float]]:
        """As `kept`, in a program that holds both passes: outside of scans what fuses is computed again from what lies
        in memory anyway."""
        found = {}
        for key, cls in self.space.graph.classes.items():
            if (
                self.space.fuses
                and self.setting.remat == "none"
                and not is_layered(self.space.graph, key)
                and all(op.scope < 0 for op in cls.ops)
            ):
                lying = self._liveness(key).lying()
                found[key] = lying if sum(lying.values()) < sum(self.kept[key].values()) else self.kept[key]
            else:
                found[key] = self.kept[key]
        return found

    def live_bytes(self, key: str, *, rerun: bool) -> float:
        """The most that is live on a device while a block of a class runs backward, beside parameters, gradients and
        what was kept.

        Args:
            rerun: its forward ops run just before, so that nothing was kept but its inputs.
        """
        if not self.space.fuses:
            return self._unfused_bytes(key)
        at = (key, rerun)
        if at not in self._live:
            kept = {name for name, _ in self.kept[key]}
            layered = is_layered(self.space.graph, key)
            self._live[at] = self._liveness(key).peak_bytes(rerun=rerun, kept=kept, sliced=layered)
        return self._live[at]

    def forward_bytes(self, key: str) -> float:
        """The most that is live on a device while a layer of a class runs forward, what it keeps included."""
        return self._liveness(key).forward_bytes(name for name, _ in self.kept[key])

    def waiting_bytes(self, key: str, gradients: float) -> tuple[float, float]:
        """What lies on a device for a block's weight gradients of so many bytes while it runs backward, and after."""
        liveness = self._liveness(key)
        return gradients if liveness.scatters_weights else 0.0, liveness.waiting_bytes(gradients)

    def _unfused_bytes(self, key: str) -> float:
        """`live_bytes` where every group leaves its results in memory, whatever ran before."""
        whole, live = self._whole_leaves(key), 0.0
        for i in range(len(self.space.groups[key])):
            node = self.space.nodes[self.space.index["group", key, str(i)]]
            assert isinstance(node, GroupNode)
            live = max(live, group_live(self.space, node, self.option("group", key, str(i)), whole))  # type: ignore[arg-type]
        return live + (sum(self._kept_inside(key).values()) if self.setting.remat == "full" else 0.0)

    def _whole_leaves(self, key: str) -> dict[str, Spec]:
        """Parameters that a class reads as whole leaves, with their spec through the step."""
        if is_layered(self.space.graph, key):
            return {}
        names = (n for n in self.space.graph.classes[key].inputs if ("place", key, n) in self.space.index)
        return {name: self.input_specs[key][name] for name in names}

    def _liveness(self, key: str) -> BlockLiveness:
        cls = self.space.graph.classes[key]
        specs = {name: self.input_specs[key].get(name, self.space.whole) for name in cls.inputs}
        return BlockLiveness(
            cls, self.space.mesh, self.op_strategies[key], specs, self.space.derived[key], triton=self.space.triton
        )

    @cached_property
    def _live(self) -> dict[tuple[str, bool], float]:
        return {}

    @cached_property
    def kept(self) -> dict[str, dict[tuple[str, Spec], float]]:
        """Block class -> tensor and spec -> bytes that a block keeps on one device for its backward pass."""
        if self.setting.remat == "none":
            return self.kept_without_remat
        found: dict[str, dict[tuple[str, Spec], float]] = {}
        for key, cls in self.space.graph.classes.items():
            again = {name for _, name in self.space.again[key, "full"]}
            found[key] = {
                (name, spec): cls.tensors[name].bytes / split_factor(spec, self.space.mesh)
                for name, spec in self.input_specs[key].items()
                if cls.tensors[name].role != "param" and name in again
            }
        return found

    @cached_property
    def kept_without_remat(self) -> dict[str, dict[tuple[str, Spec], float]]:
        """The same if nothing was recomputed."""
        return {key: self._kept_inside(key) for key in self.space.graph.classes}

    @cached_property
    def kept_for_weights(self) -> dict[str, dict[tuple[str, Spec], float]]:
        """The same between B and W, where a schedule splits backwards: what W reads of what B had or recomputed, and
        the cotangents that weight gradients are made of. Recomputed, it is no less than what is kept without remat: W
        reads results of the second run that the first would not have kept, in a user's remat region as under full
        remat."""
        found: dict[str, dict[tuple[str, Spec], float]] = {}
        for key, cls in self.space.graph.classes.items():
            handed = handed_by(cls.ops, cls.tensors, self.space.derived[key], cls.outputs)
            own: dict[tuple[str, Spec], float] = {}
            for i, group in enumerate(self.space.groups[key]):
                option = self.option("group", key, str(i))
                specs = specs_in_group(group, option)  # type: ignore[arg-type]
                for op in group.ops:
                    kept = handed.get(op.name, Handed())
                    again = self._made_again(key, op) if op.scope >= 0 else frozenset[str]()
                    for name in kept.names | again:
                        own[name, specs[name]] = cls.tensors[name].bytes / split_factor(specs[name], self.space.mesh)
                    for name, alike in kept.cotangents:
                        split = tuple(max(code, REPLICATED) for code in specs[name])  # a pending sum's is whole
                        own[cotangent_name(alike), split] = cls.tensors[name].bytes / split_factor(
                            split, self.space.mesh
                        )
            whole = self.kept_without_remat[key]
            rerun = self.setting.remat == "full" and sum(own.values()) < sum(whole.values())
            found[key] = whole if rerun else own
        return found

    def _made_again(self, key: str, op: Op) -> frozenset[str]:
        """Of an op in a user's remat region, what its backward pass reads and the region's second run makes."""
        tensors, derived = self.space.graph.classes[key].tensors, self.space.derived[key]
        return frozenset(n for n in op.saves if tensors[n].role != "param" and n not in derived)

    def _kept_inside(self, key: str) -> dict[tuple[str, Spec], float]:
        found: dict[tuple[str, Spec], float] = {}
        for i in range(len(self.space.groups[key])):
            index = self.space.index["group", key, str(i)]
            node = self.space.nodes[index]
            assert isinstance(node, GroupNode)
            found |= group_kept(self.space, node, node.options[self.choice[index]])
        return found

    def _casts_inside(self, key: str, name: str, cost: BlockCost) -> None:
        space = self.space
        if ("place", key, name) in space.index:
            return
        found = space.maker(key, name)
        if found is None:
            source, producer = space.whole, -1
        else:
            producer, specs = found
            source = specs[self.choice[producer]]
        layers = space.counts[key] if name in space.once[key] else 1
        for target, (again, moves) in sorted(self._targets(key, name, without=producer).items()):
            tensor = space.graph.classes[key].tensors[name]
            self.charge(tensor, source, target, cost, again=again, moves=moves, layers=layers)

    def _targets(self, key: str, name: str, without: int = -1) -> dict[Spec, tuple[bool, bool]]:
        """Specs in which a class's ops take a tensor, with whether the backward pass takes it so again, and whether a
        cotangent comes back."""
        again, tensors = self.space.again[key, self.setting.remat], self.space.graph.classes[key].tensors
        found: dict[Spec, tuple[bool, bool]] = {}
        for index, specs in self.space.consumers(key, name):
            node = self.space.nodes[index]
            assert isinstance(node, GroupNode)
            if index != without:
                target = specs[self.choice[index]]
                before = found.get(target, (False, False))
                found[target] = (
                    before[0] or takes_again(node.group.ops, name, again),
                    before[1] or gives_cotangent(node.group.ops, name, tensors),
                )
        return found

    def charge(
        self,
        tensor: Tensor,
        source: Spec,
        target: Spec,
        cost: BlockCost,
        *,
        again: bool = False,
        moves: bool = True,
        share: float = 1.0,
        layers: int = 1,
    ) -> None:
        """Charges a cast; `layers` share its forward pass. `moves`: a cotangent comes back."""
        if source == target:
            return
        forward, backward = self.space.pricing.cast(tensor, source, target)
        cost.forward_cast_s += share * forward / layers
        cost.run_cast_s += share * forward if layers > 1 else 0.0
        forward_counts = cost.run_collectives if layers > 1 else cost.collectives
        cost.backward_cast_s += share * ((backward if moves else 0.0) + (forward if again else 0.0))
        steps = cast(tensor.shape, tensor.itemsize, source, target, self.space.mesh) or ()
        for step in steps:
            if step.forward:
                cost.moves += _moves(("forward",), step.forward, step.axis, step.full_bytes, share / layers)
                cost.moves += _moves(("backward",) if again else (), step.forward, step.axis, step.full_bytes, share)
                forward_counts["forward", step.forward, step.axis] += share  # type: ignore[assignment]
                if again:
                    cost.collectives["backward", step.forward, step.axis] += share  # type: ignore[assignment]
            if step.backward and tensor.needs_grad and moves:
                cost.moves += _moves(("backward",), step.backward, step.axis, step.full_bytes, share)
                cost.collectives["backward", step.backward, step.axis] += share  # type: ignore[assignment]

    def _parameter(self, index: int, key: str, cost: BlockCost) -> None:
        """Parameters are charged to the first class that reads them; gathers to the class whose ops need them."""
        space = self.space
        node = space.nodes[index]
        assert isinstance(node, ParameterNode)
        storage = node.options[self.choice[index]]
        facts = space.graph.params[node.names[0]]
        elements = math.prod(node.tensor.shape)
        share = node.count / space.counts[key]
        owner = node.places[0][0] == key
        through = hoisted(storage.value, self.needs(node))
        for place in node.places:
            if place[0] == key:
                self._take_parameter(node, place, through, cost)
        if owner:
            local = node.tensor.bytes / split_factor(storage.value, space.mesh)
            for phase, kind, axis in self.gradient_collectives(node):
                leaf_share = len(node.names) / node.count
                seconds = share * reduction_s(space.pricing, kind, axis, local, leaf_share)
                cost.moves.append(Move(phase, kind, axis, share * local, share * leaf_share, weight=True))
                if phase == "once":
                    cost.once_s += seconds
                else:
                    cost.backward_cast_s += seconds
                    cost.weight_s += seconds
        accumulation_s = node.shares[key] * accumulate_s(space, node, storage)
        cost.backward_s += accumulation_s
        cost.weight_s += accumulation_s
        value, gradient, optimizer = state_bytes(facts, elements, storage, space.mesh)
        if owner or not node.whole:  # one stage has all readers of a stack that some read whole
            cost.parameter_bytes += node.shares[key] * value
        if owner:
            cost.gradient_bytes += share * gradient
            added = self.setting.accumulates
            cost.arising_bytes += share * arising_bytes(facts, elements, storage, space.mesh, accumulates=added)
            cost.optimizer_bytes += share * optimizer
            cost.update_s += share * space.pricing.update_s(update_bytes(facts, elements, storage, space.mesh))

    def _take_parameter(self, node: ParameterNode, place: Place, through: Spec, cost: BlockCost) -> None:
        """Charges the casts of a parameter to what the ops at one place need."""
        space, (key, name) = self.space, place
        tensor, source = node.read_at(place), node.spec_at(place, through)
        trained = space.graph.params[node.names[0]].trained
        once = name in space.once[key]
        forward_counts = cost.run_collectives if once else cost.collectives
        for need, (again, moves) in sorted(self._targets(key, name).items()):
            forward, backward = space.pricing.cast(tensor, source, need)
            backward = backward if moves else 0.0
            cost.forward_cast_s += forward / (space.counts[key] if once else 1)
            cost.run_cast_s += forward if once else 0.0
            cost.backward_cast_s += backward + (forward if again else 0.0)
            cost.weight_s += backward
            for step in cast(tensor.shape, tensor.itemsize, source, need, space.mesh) or ():
                if step.forward:
                    forward_counts["forward", step.forward, step.axis] += 1
                    cost.collectives["backward", step.forward, step.axis] += again
                    times = 1.0 / space.counts[key] if once else 1.0
                    cost.moves.append(
                        Move("forward", step.forward, step.axis, times * step.full_bytes, times, False, True)
                    )
                    if again:
                        cost.moves.append(Move("backward", step.forward, step.axis, step.full_bytes, 1.0, False, True))
                if step.backward and trained and moves:
                    cost.moves.append(Move("backward", step.backward, step.axis, step.full_bytes, 1.0, True, True))
                    cost.collectives["backward", step.backward, step.axis] += 1


def _moves(phases: Sequence[str], kind: str, axis: int, size: float, count: float = 1.0) -> list[Move]:
    """`count` equal collectives in each of some phases."""
    return [Move(phase, kind, axis, count * size, count) for phase in phases]


def loss_is_fine(spec: Spec) -> bool:
    """A loss part may be whole or a pending sum on each axis."""
    return all(code in (REPLICATED, PARTIAL) for code in spec)


def batch_specs(decision: Decision) -> dict[str, Spec]:
    """Spec in which each batch leaf arrives."""
    return {
        node.name: node.options[pick]
        for node, pick in zip(decision.space.nodes, decision.choice, strict=True)
        if isinstance(node, BatchNode)
    }


__all__ = ["VARYING", "BlockCost", "Collective", "Decision", "Sequence", "batch_specs", "loss_is_fine"]

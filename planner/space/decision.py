"""One solved assignment of a space, and what each block costs under it (`BlockCost`)."""

import math
from dataclasses import dataclass
from functools import cached_property

from costmodel.graph import Tensor
from costmodel.sharding import (
    PARTIAL,
    REPLICATED,
    Spec,
    cast,
    internal_reductions,
    local_fraction,
    split_factor,
)
from planner.space.accumulation import accumulate_s
from planner.space.assignment_memory import AssignmentMemory
from planner.space.backward import gives_cotangent, own_name, takes_again
from planner.space.block_cost import BlockCost, Move, equal_moves
from planner.space.group_costs import group_cost, weight_seconds
from planner.space.inputs import input_bytes
from planner.space.nodes import BatchNode, EndNode, GroupNode, ParameterNode, Place, PortNode
from planner.space.parameters import arising_bytes, hoisted, reduction_s, state_bytes, update_bytes


@dataclass(frozen=True, kw_only=True)
class Decision(AssignmentMemory):
    """An assignment with what its blocks cost."""

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
            forward, backward, rerun = group_cost(space, node, option)  # type: ignore[arg-type]
            cost.forward_s += forward
            cost.backward_s += backward + (rerun if remat == "full" else 0.0)
            cost.weight_s += weight_seconds(space, node, option)  # type: ignore[arg-type]
            for op, strategy in zip(group.ops, option.ops, strict=True):  # type: ignore[union-attr]
                again = space.again[key, remat].runs.get(op.name, 0)
                forward_counts = cost.run_collectives if own_name(op) in space.once[key] else cost.collectives
                for axis in internal_reductions(op, strategy):
                    forward_counts["forward", "all_reduce", axis] += 1
                    cost.collectives["backward", "all_reduce", axis] += again
                    size = sum(cls.tensors[o].bytes for o in op.outputs) * local_fraction(op, strategy, space.mesh)
                    cost.moves += equal_moves(("forward", *("backward",) * again), "all_reduce", axis, size)
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
                cost.moves += equal_moves(("forward",), step.forward, step.axis, step.full_bytes, share / layers)
                cost.moves += equal_moves(
                    ("backward",) if again else (), step.forward, step.axis, step.full_bytes, share
                )
                forward_counts["forward", step.forward, step.axis] += share  # type: ignore[assignment]
                if again:
                    cost.collectives["backward", step.forward, step.axis] += share  # type: ignore[assignment]
            if step.backward and tensor.needs_grad and moves:
                cost.moves += equal_moves(("backward",), step.backward, step.axis, step.full_bytes, share)
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
        if self.setting.accumulates:
            accumulation_s = node.shares[key] * accumulate_s(space, node, storage)
            cost.backward_s += accumulation_s
            cost.weight_s += accumulation_s
        value, gradient, optimizer = state_bytes(facts, elements, storage, space.mesh)
        if owner or not node.whole:  # one stage has all readers of a stack that some read whole
            cost.parameter_bytes += node.shares[key] * value
        if owner:
            cost.gradient_bytes += share * gradient
            added = self.setting.accumulates
            cost.arising_bytes += share * arising_bytes(
                facts, elements, storage, space.mesh, accumulates=added, fuses=space.fuses
            )
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


__all__ = ["Decision", "batch_specs", "loss_is_fine"]

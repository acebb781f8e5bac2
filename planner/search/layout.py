"""A whole plan as the search holds it: which blocks, devices, strategies and microbatches each stage has."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from costmodel.cluster import Cluster, Device
from costmodel.graph import ModelGraph
from costmodel.schedule.actions import Schedule
from costmodel.transfers import Transfers
from planner.search.backward_peak import fullest_moment, saved_bytes
from planner.search.stage_links import link_cost
from planner.space.block_cost import BlockCost
from planner.space.decision import Decision
from planner.space.inputs import input_bytes
from planner.space.parameters import arising_bytes, state_bytes


@dataclass(frozen=True, kw_only=True)
class GroupChoice:
    """Devices of one kind that run a stage for a share of its microbatches."""

    pool: str
    devices: tuple[Device, ...]
    decision: Decision
    microbatches: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StageChoice:
    """Blocks ``start..stop-1`` and the groups that run them."""

    start: int
    stop: int
    groups: tuple[GroupChoice, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Stages in order, the schedule's name and the number of microbatches of `graph.microbatch` examples.

    Attributes:
        transfers: what stages see of each other on the layout's cluster.
        actions: the schedule itself, where its name and the stages do not say it all.
    """

    graph: ModelGraph
    transfers: Transfers
    stages: tuple[StageChoice, ...]
    schedule: str
    microbatches: int
    actions: Schedule | None = None

    @property
    def cluster(self) -> Cluster:
        return self.transfers.cluster

    @cached_property
    def crossings(self) -> tuple[tuple[str, ...], ...]:
        """For each border between stages, the values that cross it (those that skip stages cross each border)."""
        return tuple(crossing_values(self.graph, stage.stop) for stage in self.stages[:-1])


def crossing_values(graph: ModelGraph, border: int) -> tuple[str, ...]:
    """Values made before block `border` and read from it on. Batch leaves, keys and parameters do not cross."""
    made = {s.value for b in graph.blocks[:border] for s in b.outputs}
    return tuple(dict.fromkeys(s.value for b in graph.blocks[border:] for s in b.inputs if s.value in made))


def crossing_bytes(graph: ModelGraph, values: Iterable[str]) -> tuple[int, int]:
    """Bytes forward, and of the cotangents backward."""
    tensors = [graph.values[v] for v in values]
    return sum(t.bytes for t in tensors), sum(t.bytes for t in tensors if t.needs_grad)


def stage_cost(
    graph: ModelGraph, decision: Decision, start: int, stop: int, microbatches: int, *, alone: bool
) -> BlockCost:
    """What the blocks of a stage cost together; a parameter that several of them read is held once.

    Args:
        microbatches: that the group runs.
        alone: whether the stage's one group is the whole plan, whose step is one program.
    """
    total, before = BlockCost(), ""
    for block in graph.blocks[start:stop]:
        cost = decision.inner_costs[block.class_key]
        if block.class_key != before:  # what a run of layers does once
            layers = sum(b.class_key == block.class_key for b in graph.blocks[start:stop])
            total.forward_cast_s += cost.run_cast_s * (1.0 - layers / decision.space.counts[block.class_key])
            total.collectives.update(cost.run_collectives)
        before = block.class_key
        total.forward_s += cost.forward_s
        total.backward_s += cost.backward_s
        total.forward_cast_s += cost.forward_cast_s
        total.backward_cast_s += cost.backward_cast_s
        total.weight_s += cost.weight_s
        total.once_s += cost.once_s
        total.update_s += cost.update_s
        total.collectives.update(cost.collectives)
    links = link_cost(graph, decision, start, stop)
    total.forward_cast_s += links.forward_cast_s
    total.backward_cast_s += links.backward_cast_s
    total.collectives.update(links.collectives)
    _charge_leaves(graph, decision, start, stop, total)
    _charge_memory(graph, decision, start, stop, microbatches, total, alone=alone)
    return total


def _charge_memory(
    graph: ModelGraph, decision: Decision, start: int, stop: int, microbatches: int, total: BlockCost, *, alone: bool
) -> None:
    """Adds the bytes of a stage to what its blocks cost together; arguments as of `stage_cost`."""
    total.saved_bytes = saved_bytes(graph, decision.kept, decision, start, stop)
    state = held_state(graph, decision, start, stop)
    total.parameter_bytes, total.optimizer_bytes = state.parameter_bytes, state.optimizer_bytes
    total.inputs_bytes += inputs_held_bytes(graph, decision, start, stop, microbatches)
    moment = fullest_moment(graph, decision, start, stop, alone=alone)
    (total.gradient_bytes, total.arising_bytes, total.lying_bytes, total.transient_bytes) = moment.items(
        state.gradient_bytes, state.arising_bytes, accumulates=decision.setting.accumulates
    )


def inputs_held_bytes(graph: ModelGraph, decision: Decision, start: int, stop: int, microbatches: int) -> float:
    """Bytes of batch and carried state that a device of the stage holds for a step of so many microbatches."""
    total = 0.0
    for name, (key, at) in graph.first_reads(start, stop).items():
        spec, mesh = decision.input_specs[key][at], decision.space.mesh
        total += input_bytes(graph, graph.values[name], spec, mesh, microbatches)
    return total


def until_weights_bytes(graph: ModelGraph, decision: Decision, start: int, stop: int) -> tuple[float, float]:
    """Bytes that a device of the stage keeps for one microbatch from its B to its W, where a schedule splits backwards,
    and those of them that B makes."""
    kept, before = decision.kept_for_weights, decision.kept
    made = {key: {n: size for n, size in own.items() if n not in before[key]} for key, own in kept.items()}
    return saved_bytes(graph, kept, decision, start, stop), saved_bytes(graph, made, decision, start, stop)


def _charge_leaves(graph: ModelGraph, decision: Decision, start: int, stop: int, total: BlockCost) -> None:
    """Counts the gradient collectives, one for each leaf that the stage holds: a part of a stack is reduced at once.

    Blocks were charged their share of what a leaf's collective takes whatever its size; the rest is charged here.
    """
    earlier = {s.value for b in graph.blocks[:start] for s in b.inputs}
    for name, items in held_parameters(graph, start, stop).items():
        node = decision.parameter_nodes[name]
        held = 1.0 if items is None else (items[1] - items[0]) * len(node.names) / node.count
        for phase, kind, axis in decision.gradient_collectives(node):
            if kind == "all_gather" and items is None and name in earlier:
                continue  # the owner of a tied parameter updates it
            total.collectives[phase, kind, axis] += 1
            rest_s = max(0.0, 1.0 - held) * decision.space.pricing.collective_s(kind, axis, 0.0)
            if phase == "once":
                total.once_s += rest_s
            else:
                total.backward_cast_s += rest_s
                total.weight_s += rest_s


@dataclass(frozen=True)
class HeldState:
    """Bytes of parameters, gradients and optimizer state that a device of a stage holds, and of gradients that arise
    beside these. The state of a tied parameter is on the stage that owns it."""

    parameter_bytes: float
    gradient_bytes: float
    arising_bytes: float
    optimizer_bytes: float


def held_state(graph: ModelGraph, decision: Decision, start: int, stop: int) -> HeldState:
    """Of a stage of blocks ``start..stop-1``."""
    mesh, added, fuses = decision.space.mesh, decision.setting.accumulates, decision.space.fuses
    earlier = {s.value for b in graph.blocks[:start] for s in b.inputs}
    values = gradients = arising = optimizers = 0.0
    for name, (elements, whole) in graph.held_elements(start, stop).items():
        facts, storage = graph.params[name], decision.storage[name]
        value, gradient, optimizer = state_bytes(facts, elements, storage, mesh)
        values += value
        gradients += gradient
        arising += arising_bytes(facts, elements, storage, mesh, accumulates=added, fuses=fuses)
        optimizers += optimizer if not (whole and name in earlier) else 0.0
    return HeldState(values, gradients, arising, optimizers + graph.optimizer_bytes)


def held_parameters(graph: ModelGraph, start: int, stop: int) -> dict[str, tuple[int, int] | None]:
    """Parameters that a range of blocks reads, with the slice of the leading dim (None for whole leaves)."""
    held: dict[str, list[int | None]] = {}
    for block in graph.blocks[start:stop]:
        for source in block.inputs:
            if source.value in graph.params:
                held.setdefault(source.value, []).append(source.index)
    return {n: None if None in items else (min(items), max(items) + 1) for n, items in held.items()}  # type: ignore[type-var, operator]

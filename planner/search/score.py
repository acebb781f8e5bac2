"""Scores a layout: exact memory of every group and the step time by event simulation. Plans, candidates and baselines
all pass through here."""

import math
from dataclasses import dataclass
from functools import cached_property

from costmodel.collectives import transfer_time_s
from costmodel.errors import InputError
from costmodel.schedule import registry
from costmodel.schedule.actions import Actor, Schedule
from costmodel.schedule.validate import held_at_peak, held_bytes
from costmodel.sharding import split_factor
from costmodel.simulate import SendTimes, Simulation, StageTimes, UpdateWait, simulate
from costmodel.simulation.ending import waits_of_actors
from planner.search.layout import GroupChoice, Layout, crossing_bytes, held_parameters, saved_bytes, stage_cost
from planner.search.update_barrier import update_waits
from planner.search.update_memory import update_peak_bytes
from planner.space.decision import BlockCost


@dataclass(frozen=True, kw_only=True)
class GroupScore:
    """One group's costs and itemised bytes on each of its devices.

    Attributes:
        exchange_s: see `StageTimes`.
        saved_bytes: activations of all microbatches in flight.
    """

    cost: BlockCost
    exchange_s: float
    in_flight: int
    saved_bytes: float
    buffers_bytes: float
    update_peak_bytes: float
    reserve_bytes: int
    limit_bytes: int

    @property
    def _passing_bytes(self) -> float:
        """What is there during the last backward pass and no more when the update runs."""
        return self.saved_bytes + self.cost.transient_bytes + self.buffers_bytes

    @property
    def update_bytes(self) -> float:
        """What the update takes beyond what is free by then."""
        gradients = self.cost.gradient_bytes + self.cost.arising_bytes
        return max(0.0, self.update_peak_bytes - gradients - self._passing_bytes)

    @property
    def total_bytes(self) -> float:
        return self.cost.state_bytes + self._passing_bytes + self.update_bytes + self.reserve_bytes

    @property
    def missing_bytes(self) -> float:
        return max(0.0, self.total_bytes - self.limit_bytes)


@dataclass(frozen=True, kw_only=True)
class Score:
    """A layout's schedule, simulation and memory. `missing_bytes` is the most by which a group misses its limit;
    `times` what was simulated; `waits` what the updates of stages wait for."""

    layout: Layout
    schedule: Schedule
    simulation: Simulation
    groups: dict[Actor, GroupScore]  # by (virtual) stage and group
    times: dict[Actor, StageTimes]
    waits: dict[int, UpdateWait]

    @property
    def time_s(self) -> float:
        return self.simulation.makespan_s

    @property
    def missing_bytes(self) -> float:
        limits = {actor: self.groups[places[0]].limit_bytes for actor, places in self.places.items()}
        return max(max(0.0, size - limits[actor]) for actor, size in self.device_bytes.items())

    @cached_property
    def places(self) -> dict[Actor, list[Actor]]:
        """Actor -> the (virtual stages, group) that it runs."""
        return {
            row.actor: [Actor(stage, row.group) for stage in sorted({a.stage for a in row.actions})] or [row.actor]
            for row in self.schedule.actions
        }

    @cached_property
    def device_bytes(self) -> dict[Actor, float]:
        """Bytes on each device of an actor. Its virtual stages run one action at a time: they share the reserve and the
        largest transient."""
        found = {}
        for actor, places in self.places.items():
            each = [self.groups[place] for place in places]
            shared = [g.cost.transient_bytes + g.reserve_bytes for g in each]
            found[actor] = sum(g.total_bytes for g in each) - (sum(shared) - max(shared))
        return found

    @property
    def feasible(self) -> bool:
        return self.missing_bytes == 0.0 and math.isfinite(self.time_s)


def make_schedule(layout: Layout) -> Schedule:
    """The action lists of a layout. Stages on the same devices are virtual stages of one actor.

    Raises:
        InputError: MP146, the schedule cannot run the layout's groups.
    """
    name, stages = layout.schedule, len(layout.stages)
    family = registry.schedule_family(name)
    if "shares" in family.optional:
        shares = [tuple(g.microbatches for g in stage.groups) for stage in layout.stages]
        return family.generate(stages, layout.microbatches, shares)
    for s, stage in enumerate(layout.stages):
        if len(stage.groups) > 1:
            message = f"schedule {name} runs one group a stage, stage {s} has {len(stage.groups)}"
            raise InputError("MP146", message, "use 1f1b or gpipe, or one group a stage")
    actors = len({tuple(d.id for d in stage.groups[0].devices) for stage in layout.stages})
    chunks = {"chunks": stages // actors} if family.chunks == "chunks" else {}
    return registry.make_schedule(name, actors, layout.microbatches, **chunks)


def score(layout: Layout) -> Score:
    """Memory and simulated time of a layout."""
    schedule = make_schedule(layout)
    costs: dict[Actor, BlockCost] = {}
    groups: dict[Actor, GroupScore] = {}
    times: dict[Actor, StageTimes] = {}
    tied = tied_seconds(layout)
    for s, stage in enumerate(layout.stages):
        for g, group in enumerate(stage.groups):
            runs = len(group.microbatches)
            costs[Actor(s, g)] = stage_cost(layout.graph, group.decision, stage.start, stage.stop, runs)
    flying = held_at_peak(schedule, {actor: cost.saved_bytes for actor, cost in costs.items()})
    held = _activation_bytes(layout, schedule, costs, flying)
    for s, stage in enumerate(layout.stages):
        exchange_s = exchange_seconds(layout, s) + tied[s]
        for g, group in enumerate(stage.groups):
            actor = Actor(s, g)
            cost = costs[actor]
            kind = group.decision.space.pricing.kind
            groups[actor] = GroupScore(
                cost=cost,
                exchange_s=exchange_s,
                in_flight=flying.get(actor, 0),
                saved_bytes=held.get(actor, 0.0),
                buffers_bytes=_buffer_bytes(layout, s, group),
                update_peak_bytes=update_peak_bytes(layout, s, g),
                reserve_bytes=kind.reserve_bytes,
                limit_bytes=kind.memory_bytes,
            )
            weight_s = cost.weight_s if schedule.splits_backward else 0.0
            times[actor] = StageTimes(
                forward_s=cost.forward_s + cost.forward_cast_s,
                backward_s=cost.backward_s + cost.backward_cast_s - weight_s,
                weight_s=weight_s,
                reduce_s=cost.once_s,
                exchange_s=exchange_s,
                update_s=cost.update_s,
            )
    waits = update_waits(layout)
    joined = waits_of_actors(schedule, waits)
    simulation = simulate(schedule, times, _sends(layout), waits=joined, keep_timeline=False)
    return Score(layout=layout, schedule=schedule, simulation=simulation, groups=groups, times=times, waits=waits)


def _activation_bytes(
    layout: Layout, schedule: Schedule, costs: dict[Actor, BlockCost], flying: dict[Actor, int]
) -> dict[Actor, float]:
    """Bytes of activations at the fullest moment of each actor. Between B and W a microbatch holds about what it
    would without remat: what B recomputed is W's input."""
    if len(costs) == 1:  # one program, which holds both passes
        return {actor: count * costs[actor].lying_bytes for actor, count in flying.items()}
    if not schedule.splits_backward:
        return {actor: count * costs[actor].saved_bytes for actor, count in flying.items()}
    until_weights = {}
    for s, stage in enumerate(layout.stages):
        for g, group in enumerate(stage.groups):
            decision = group.decision
            whole = saved_bytes(layout.graph, decision.kept_without_remat, decision, stage.start, stage.stop)
            until_weights[Actor(s, g)] = max(whole, costs[Actor(s, g)].saved_bytes)
    return held_bytes(schedule, {actor: cost.saved_bytes for actor, cost in costs.items()}, until_weights)


def _sends(layout: Layout) -> dict[tuple[Actor, Actor], SendTimes]:
    """Seconds of each message between groups of neighbouring stages, forward and backward."""
    sends: dict[tuple[Actor, Actor], SendTimes] = {}
    for s, values in enumerate(layout.crossings):
        forward, backward = crossing_bytes(layout.graph, values)
        for a, one in enumerate(layout.stages[s].groups):
            for b, other in enumerate(layout.stages[s + 1].groups):
                there = layout.transfers.link(one.devices, other.devices)
                back = layout.transfers.link(other.devices, one.devices)
                sends[Actor(s, a), Actor(s + 1, b)] = SendTimes(
                    activation_s=transfer_time_s(float(forward), there) - (there.latency_s if forward else 0.0),
                    gradient_s=transfer_time_s(float(backward), back) - (back.latency_s if backward else 0.0),
                    latency_s=max(there.latency_s, back.latency_s),
                )
    return sends


def _buffer_bytes(layout: Layout, stage: int, group: GroupChoice) -> float:
    """Bytes that a device holds of arriving and leaving values, both ways, two deep; split as the stage's batch is."""
    total = 0
    for border in (stage - 1, stage):
        if 0 <= border < len(layout.crossings):
            total += sum(crossing_bytes(layout.graph, layout.crossings[border]))
    parts = max((split_factor(s, group.decision.space.mesh) for s in _entry_specs(layout, stage, group)), default=1)
    return 2.0 * total / parts


def _entry_specs(layout: Layout, stage: int, group: GroupChoice) -> list[tuple[int, ...]]:
    block = layout.graph.blocks[layout.stages[stage].start]
    cls = layout.graph.classes[block.class_key]
    specs = group.decision.input_specs[block.class_key]
    return [specs[n] for n in cls.inputs if n in specs and cls.tensors[n].role == "activation"]


def exchange_seconds(layout: Layout, stage: int) -> float:
    """Gradients of a stage's groups meet on the first group; new parameters come back."""
    choice = layout.stages[stage]
    if len(choice.groups) < 2:
        return 0.0
    held = held_parameters(layout.graph, choice.start, choice.stop)
    size = 0.0
    for name, items in held.items():
        facts = layout.graph.params[name]
        share = 1.0 if items is None else (items[1] - items[0]) / facts.shape[0]
        size += facts.elements * share * facts.gradient_itemsize if facts.trained else 0.0
    first = choice.groups[0]
    return sum(
        transfer_time_s(size, layout.transfers.link(one, other))
        for group in choice.groups[1:]
        for one, other in ((group.devices, first.devices), (first.devices, group.devices))
    )


def tied_parameters(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Parameters that several stages hold whole, with those stages; the first owns it."""
    places: dict[str, list[int]] = {}
    for s, stage in enumerate(layout.stages):
        for name, items in held_parameters(layout.graph, stage.start, stage.stop).items():
            if items is None:
                places.setdefault(name, []).append(s)
    return {n: tuple(p) for n, p in places.items() if len(p) > 1}


def tied_seconds(layout: Layout) -> list[float]:
    """Once a step, for each stage: gradients of tied parameters go to the owner, new values come back."""
    out = [0.0] * len(layout.stages)
    for name, stages in tied_parameters(layout).items():
        facts = layout.graph.params[name]
        if not facts.trained:
            continue
        owner = layout.stages[stages[0]].groups[0].devices
        for s in stages[1:]:
            other = layout.stages[s].groups[0].devices
            there, back = layout.transfers.link(other, owner), layout.transfers.link(owner, other)
            time_s = transfer_time_s(float(facts.elements * facts.gradient_itemsize), there)
            time_s += transfer_time_s(float(facts.elements * facts.itemsize), back)
            out[s] += time_s
            out[stages[0]] += time_s
    return out

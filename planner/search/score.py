"""Scores a layout: exact memory of every group and the step time by event simulation. Plans, candidates and baselines
all pass through here."""

import math
from collections.abc import Mapping
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
from planner.search.layout import (
    GroupChoice,
    Layout,
    StageChoice,
    crossing_bytes,
    held_parameters,
    stage_cost,
    until_weights_bytes,
)
from planner.search.update_barrier import update_waits
from planner.search.update_memory import update_peak_bytes
from planner.space.block_cost import BlockCost


@dataclass(frozen=True, kw_only=True)
class GroupScore:
    """One group's costs and itemised bytes on each of its devices.

    Attributes:
        exchange_s: see `StageTimes`.
        saved_bytes: activations of all microbatches in flight; of a step that is one program what lies there of them.
        until_weights_bytes: what one microbatch holds between its B and its W, under a schedule that has any;
            made_bytes: what of that B makes.
    """

    cost: BlockCost
    exchange_s: float
    in_flight: int
    saved_bytes: float
    until_weights_bytes: float
    made_bytes: float
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
    `times` what was simulated; `waits` what the updates of stages wait for; `costs` what the same stages cost under
    another schedule."""

    layout: Layout
    schedule: Schedule
    simulation: Simulation
    groups: dict[Actor, GroupScore]  # by (virtual) stage and group
    times: dict[Actor, StageTimes]
    waits: dict[int, UpdateWait]
    costs: "LayoutCosts"

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

    @property
    def straight(self) -> bool:
        """Whether each stage runs one range of blocks."""
        return len(self.schedule.actions) == sum(len(stage.groups) for stage in self.layout.stages)


def make_schedule(layout: Layout) -> Schedule:
    """The action lists of a layout. Stages on the same devices are virtual stages of one actor.

    Raises:
        InputError: MP146, the schedule cannot run the layout's groups.
    """
    if layout.actions is not None:
        return layout.actions
    name, stages = layout.schedule, len(layout.stages)
    family = registry.schedule_family(name)
    shares = [tuple(g.microbatches for g in stage.groups) for stage in layout.stages]
    if family.chunks == 1:
        actors = shares
    else:
        devices = [tuple(d.id for g in stage.groups for d in g.devices) for stage in layout.stages]
        actors = list(dict(zip(devices, shares, strict=True)).values())
    several = next((s for s, groups in enumerate(shares) if len(groups) > 1), None)
    if several is not None and "shares" not in family.optional:
        others = ", ".join(n for n, other in registry.FAMILIES.items() if "shares" in other.optional)
        message = f"schedule {name} runs one group a stage, stage {several} has {len(shares[several])}"
        raise InputError("MP146", message, f"use one of {others}, or one group a stage")
    virtual = {"chunks": stages // len(actors), "layers": stages}
    parameters: dict[str, object] = {key: virtual[key] for key in (family.chunks,) if isinstance(key, str)}
    if "shares" in family.optional:
        parameters["shares"] = actors
    return registry.make_schedule(name, len(actors), layout.microbatches, **parameters)


@dataclass(frozen=True, kw_only=True)
class LayoutCosts:
    """What the stages of a layout cost under any schedule of these stages."""

    layout: Layout

    @property
    def alone(self) -> bool:
        """Whether one group runs the whole model: its step is one program."""
        return len(self._groups) == 1

    @cached_property
    def blocks(self) -> dict[Actor, BlockCost]:
        """By (virtual) stage and group."""
        return {
            Actor(s, g): stage_cost(
                self.layout.graph,
                group.decision,
                stage.start,
                stage.stop,
                len(group.microbatches),
                alone=self.alone,
            )
            for s, g, stage, group in self._groups
        }

    @cached_property
    def _until_weights(self) -> dict[Actor, tuple[float, float]]:
        return {
            Actor(s, g): until_weights_bytes(self.layout.graph, group.decision, stage.start, stage.stop)
            for s, g, stage, group in self._groups
        }

    @property
    def saved_bytes(self) -> dict[Actor, float]:
        """What a microbatch holds between its F and its B."""
        return {actor: cost.saved_bytes for actor, cost in self.blocks.items()}

    @property
    def until_weights_bytes(self) -> dict[Actor, float]:
        """What a microbatch holds between its B and its W."""
        return {actor: kept for actor, (kept, _) in self._until_weights.items()}

    @property
    def made_bytes(self) -> dict[Actor, float]:
        """What of that B makes, beside all that it still holds itself."""
        return {actor: made for actor, (_, made) in self._until_weights.items()}

    @cached_property
    def exchange_s(self) -> list[float]:
        tied = tied_seconds(self.layout)
        return [exchange_seconds(self.layout, s) + tied[s] for s in range(len(self.layout.stages))]

    @cached_property
    def buffer_bytes(self) -> dict[Actor, float]:
        return {Actor(s, g): _buffer_bytes(self.layout, s, group) for s, g, _, group in self._groups}

    @cached_property
    def update_peak_bytes(self) -> dict[Actor, float]:
        return {Actor(s, g): update_peak_bytes(self.layout, s, g) for s, g, _, _ in self._groups}

    @cached_property
    def sends(self) -> dict[tuple[Actor, Actor], SendTimes]:
        return sends_of(self.layout)

    @cached_property
    def waits(self) -> dict[int, UpdateWait]:
        return update_waits(self.layout)

    @cached_property
    def _groups(self) -> list[tuple[int, int, StageChoice, GroupChoice]]:
        return [
            (s, g, stage, group) for s, stage in enumerate(self.layout.stages) for g, group in enumerate(stage.groups)
        ]

    def times(self, *, split: bool) -> dict[Actor, StageTimes]:
        """Seconds of every group.

        Args:
            split: whether weight gradients are actions of their own.
        """
        found = {}
        for actor, cost in self.blocks.items():
            backward_s = cost.backward_s + cost.backward_cast_s
            weight_s = min(cost.weight_s, backward_s) if split else 0.0  # sums of one whole: above it by rounding only
            found[actor] = StageTimes(
                forward_s=cost.forward_s + cost.forward_cast_s,
                backward_s=backward_s - weight_s,
                weight_s=weight_s,
                reduce_s=cost.once_s,
                exchange_s=self.exchange_s[actor.stage],
                update_s=cost.update_s,
            )
        return found


def score(layout: Layout, costs: LayoutCosts | None = None) -> Score:
    """Memory and simulated time of a layout.

    Args:
        costs: those of the same stages under another schedule, where they are known.
    """
    schedule = make_schedule(layout)
    known = LayoutCosts(layout=layout) if costs is None else costs
    flying = held_at_peak(schedule, known.saved_bytes)
    held = _activation_bytes(schedule, known, flying)
    groups: dict[Actor, GroupScore] = {}
    for actor, cost in known.blocks.items():
        kind = layout.stages[actor.stage].groups[actor.group].decision.space.pricing.kind
        groups[actor] = GroupScore(
            cost=cost,
            exchange_s=known.exchange_s[actor.stage],
            in_flight=flying.get(actor, 0),
            saved_bytes=held.get(actor, 0.0),
            until_weights_bytes=known.until_weights_bytes[actor],
            made_bytes=known.made_bytes[actor],
            buffers_bytes=known.buffer_bytes[actor],
            update_peak_bytes=known.update_peak_bytes[actor],
            reserve_bytes=kind.reserve_bytes,
            limit_bytes=kind.memory_bytes,
        )
    times = known.times(split=schedule.splits_backward)
    joined = waits_of_actors(schedule, known.waits)
    simulation = simulate(schedule, times, known.sends, waits=joined, keep_timeline=False)
    return Score(
        layout=layout,
        schedule=schedule,
        simulation=simulation,
        groups=groups,
        times=times,
        waits=known.waits,
        costs=known,
    )


def _activation_bytes(schedule: Schedule, costs: LayoutCosts, flying: Mapping[Actor, int]) -> dict[Actor, float]:
    """What microbatches keep on a device of each group when its actor holds the most."""
    if costs.alone:  # both passes are one program, whatever the schedule
        return {actor: count * costs.blocks[actor].lying_bytes for actor, count in flying.items()}
    if schedule.splits_backward:
        return held_bytes(schedule, costs.saved_bytes, costs.until_weights_bytes, costs.made_bytes)
    return {actor: count * costs.saved_bytes[actor] for actor, count in flying.items()}


def sends_of(layout: Layout) -> dict[tuple[Actor, Actor], SendTimes]:
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

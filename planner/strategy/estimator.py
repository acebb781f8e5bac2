"""Estimates of strategies on one cluster: everything that does not change from one to the next is kept."""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from costmodel.cluster import Cluster
from costmodel.collectives import NO_LINK
from costmodel.compute import peak_flops_per_s
from costmodel.device_kind import DeviceKind
from costmodel.errors import InputError
from costmodel.stack import Stack
from planner.frontend.microbatch import DECLARE
from planner.planfile.schema import Finding
from planner.search.facts import Facts
from planner.strategy.balance import UNEVEN, WORTH, balance_finding, balanced_partition
from planner.strategy.blocks import Blocks
from planner.strategy.captured import CapturedModel
from planner.strategy.compose import StepTime, step_time
from planner.strategy.findings import (
    degree_findings,
    held_in_estimate,
    idle_findings,
    meeting_finding,
    spanning_findings,
)
from planner.strategy.layer_table import LayerTable, MeasuredStage, Passes
from planner.strategy.links import AxisLinks, strategy_links
from planner.strategy.memory import StageMemory, microbatches_held, one_program_memory, stage_memory
from planner.strategy.one_program import is_one_program
from planner.strategy.pricing import AXES, DATA, EXPERT_DATA, ClassTimes, class_times
from planner.strategy.scheduled import stage_blocks
from planner.strategy.stages import cut_bytes, layers_of_parts, parts_of
from planner.strategy.strategy import Strategy, microbatches_of
from planner.strategy.work import Work

_LinksKey = tuple[int, int, int, int, int, str]


def _links_key(strategy: Strategy) -> _LinksKey:
    """What the place of a strategy's devices in the cluster depends on."""
    return strategy.dp, strategy.cp, strategy.tp, strategy.pp, strategy.ep, strategy.rank_order


@dataclass(kw_only=True)
class StrategyEstimator:
    """Times and memory of strategies for one model on one cluster under one stack.

    Args:
        facts: what was measured, by device kind name; the cluster's own figures where nothing is.
        layers: measured layer times of the model on one of the kinds.
    """

    model: CapturedModel
    cluster: Cluster
    stack: Stack
    facts: Mapping[str, Facts] = field(default_factory=dict)
    layers: LayerTable | None = None
    _links: dict[_LinksKey, tuple[AxisLinks, ...]] = field(default_factory=dict)
    _slowest: dict[_LinksKey, list[tuple[DeviceKind, float]]] = field(default_factory=dict)
    _times: dict[tuple[object, ...], dict[str, ClassTimes]] = field(default_factory=dict)
    _parts: dict[tuple[object, ...], list[Blocks]] = field(default_factory=dict)
    _findings: dict[tuple[int, int, int, int, int, bool], tuple[Finding, ...]] = field(default_factory=dict)

    def microbatches(self, strategy: Strategy, global_batch: int) -> int:
        """Microbatches of a step on each replica.

        Raises:
            InputError: MP185 if the batch does not divide; MP170 if it must not be split.
        """
        count = microbatches_of(strategy, global_batch)
        if count > 1 and not self.model.microbatches.splits:
            message = (
                f"microbatch={strategy.microbatch} makes {count} microbatches, but {self.model.microbatches.message}"
            )
            raise InputError("MP170", message, f"microbatch={global_batch // strategy.dp} keeps it whole; or {DECLARE}")
        return count

    def facts_of(self, kind: DeviceKind) -> Facts:
        """What is known of a kind: measured, or the cluster's own figures."""
        return self.facts.get(kind.name) or Facts(kind)

    def together(self, strategy: Strategy) -> bool:
        """Whether replicas compute on all of their examples together: those of the planner's own programs, where
        examples meet. Frameworks run a function on each replica's by themselves."""
        own = self.stack.keeps_as_planned and strategy.dp > strategy.ep
        return own and not self.model.meeting.splits

    def work(self, kind: DeviceKind, strategy: Strategy) -> Work:
        """What a microbatch is on one device of a kind."""
        return self.model.work(self.facts_of(kind), strategy, together=self.together(strategy))

    def links(self, strategy: Strategy) -> tuple[AxisLinks, ...]:
        """What each stage sees of the cluster."""
        key = _links_key(strategy)
        if key not in self._links:
            self._links[key] = strategy_links(self.cluster, strategy, self.stack)
        return self._links[key]

    def kinds(self, strategy: Strategy) -> list[DeviceKind]:
        """The device kind of each stage: of the slowest devices, where it has several."""
        return [kind for kind, _ in self._paces(strategy)]

    def _paces(self, strategy: Strategy) -> list[tuple[DeviceKind, float]]:
        """The kind of each stage's slowest devices, and how many times as long they take as others of it."""
        key = _links_key(strategy)
        if key not in self._slowest:
            self._slowest[key] = [
                max(used, key=lambda one: (one[1] / self._rate(one[0]), one[0].name)) for used in self._used(strategy)
            ]
        return self._slowest[key]

    def _rate(self, kind: DeviceKind) -> float:
        """What the model's products reach on a kind, in FLOP/s."""
        return peak_flops_per_s(self.model.main_dtype, kind, is_matmul=True).value * kind.matmul_efficiency

    def _used(self, strategy: Strategy) -> list[list[tuple[DeviceKind, float]]]:
        """Kinds and slowdowns of each stage's devices."""
        self.links(strategy)  # refuses a strategy of more devices than there are, which would leave stages without
        groups = {g.name: self.facts_of(g.device).kind for g in self.cluster.groups}
        if len(groups) == 1 and not self.cluster.groups[0].overrides.slow:
            return [[(kind, 1.0) for kind in groups.values()]] * strategy.pp
        order = list(reversed(strategy.rank_order.split("-")))
        inner = math.prod(getattr(strategy, axis) for axis in order[order.index("pp") + 1 :])
        found: list[set[tuple[str, float]]] = [set() for _ in range(strategy.pp)]
        for i, device in enumerate(self.cluster.devices[: strategy.devices]):
            found[(i // inner) % strategy.pp].add((device.group, device.slowdown))
        return [[(groups[name], slowdown) for name, slowdown in sorted(used)] for used in found]

    def _check_dtype(self, strategy: Strategy, kinds: Sequence[DeviceKind]) -> None:
        """Raises InputError MP180 for products in a dtype that a stage's devices have no rate for."""
        dtype = strategy.matmul_dtype
        for kind in kinds:
            if dtype is not None and dtype not in kind.peak_flops_per_s:
                message = f"matmul_dtype={dtype}: {kind.name} has no rate for it"
                raise InputError("MP180", message, f"it has {', '.join(sorted(kind.peak_flops_per_s))}")

    def times(
        self,
        work: Work,
        strategy: Strategy,
        kind: DeviceKind,
        slowdown: float = 1.0,
        *,
        stage: int = 0,
        free: bool = False,
    ) -> dict[str, ClassTimes]:
        """Seconds of one block of each class on devices of a kind that take `slowdown` times as long as it does.

        Args:
            stage: whose links they have.
            free: as if collectives took no time.
        """
        sp, links = strategy.sp and strategy.tp > 1, self.links(strategy)[stage]
        key = (
            kind.name, slowdown, links.like, strategy.dp, strategy.cp, strategy.tp, strategy.pp, strategy.ep,
            strategy.rank_order, sp, free, strategy.attention, strategy.matmul_dtype, strategy.microbatch,
            strategy.remat, strategy.overlap_tensor, work.parted,
        )  # fmt: skip
        if key not in self._times:
            axes = tuple(name for name in AXES if getattr(strategy, name) > 1)
            axes = (DATA if strategy.ep == 1 else EXPERT_DATA, *axes) if work.replicas > 1 else axes
            links = AxisLinks(dict.fromkeys(axes, NO_LINK), 1) if free else links
            overlap = strategy.overlap_tensor and not free
            self._times[key] = class_times(
                work, kind, self.stack, links, axes, strategy.remat, overlap=overlap, slowdown=slowdown
            )
        return self._times[key]

    def _parts_of(self, work: Work, strategy: Strategy) -> list[Blocks]:
        """`parts_of`, once for each way to cut; classes have other names where a graph of another size was captured."""
        key = (work.order, strategy.pp, strategy.interleave, strategy.schedule, strategy.partition)
        if key not in self._parts:
            self._parts[key] = parts_of(work, strategy)
        return self._parts[key]

    def step(self, strategy: Strategy, global_batch: int) -> StepTime:
        """Time of a step."""
        count = self.microbatches(strategy, global_batch)
        paces = self._paces(strategy)
        kinds = [kind for kind, _ in paces]
        work, times = self._times_of_stages(strategy, paces)
        parts = self._parts_of(work, strategy)
        measured = self.measured(work, strategy)
        self._check_dtype(strategy, kinds)
        return step_time(work, parts, times, paces, self.links(strategy), strategy, self.stack, count, measured)

    def _times_of_stages(
        self, strategy: Strategy, paces: Sequence[tuple[DeviceKind, float]]
    ) -> tuple[Work, list[dict[str, ClassTimes]]]:
        """The model's work, and times of its blocks on each stage."""
        works = {kind.name: self.work(kind, strategy) for kind, _ in paces}
        times = [
            self.times(works[kind.name], strategy, kind, slowdown, stage=s) for s, (kind, slowdown) in enumerate(paces)
        ]
        return works[paces[0][0].name], times

    def balance_findings(self, strategy: Strategy, global_batch: int, step: StepTime) -> tuple[Finding, ...]:
        """MP198, where an equal cut makes stages wait that another would not.

        Args:
            step: of the strategy.
        """
        each = [stage.microbatch_s for stage in step.stages]
        if len(each) == 1 or strategy.partition is not None or max(each) * len(each) < UNEVEN * sum(each):
            return ()
        work, times = self._times_of_stages(strategy, self._paces(strategy))
        sizes, found = layers_of_parts(work, strategy), balanced_partition(work, strategy, times)
        other = replace(strategy, partition=found)
        other_s = self.step(other, global_batch).step_s
        if other_s > (1.0 - WORTH) * step.step_s:
            return ()
        memory = self.memory(other, global_batch)
        return (balance_finding(sizes, each, found, step.step_s, other_s, memory),)

    def measured(self, work: Work, strategy: Strategy) -> list[MeasuredStage | None] | None:
        """Measured times of each stage, on its slowest devices; None for stages of a kind that was not measured."""
        if self.layers is None:
            return None
        own = self._measured_stage(strategy, self.layers)
        if own is None:
            return list[MeasuredStage | None]([None] * strategy.pp)
        found = self.layers.stages(work, strategy, self._collectives(strategy, own))
        return [
            one.on(slowdown) if kind.name == self.layers.kind else None
            for one, (kind, slowdown) in zip(found, self._paces(strategy), strict=True)
        ]

    def _measured_stage(self, strategy: Strategy, layers: LayerTable) -> int | None:
        """The first stage on devices of the kind that layers were measured on."""
        return next((s for s, kind in enumerate(self.kinds(strategy)) if kind.name == layers.kind), None)

    def _collectives(self, strategy: Strategy, stage: int) -> dict[str, Passes]:
        """Seconds of the collectives of one block of each class, forward and backward, that nothing hides: what its
        time has more than it had if they took none. Only layers run again for their backward pass."""
        work = self.work(self.kinds(strategy)[stage], strategy)
        found = self._exposed(work, strategy, stage)
        once = self._exposed(work, replace(strategy, remat="none"), stage) if strategy.remat == "full" else found
        return {key: found[key] if one.layered else once[key] for key, one in work.classes.items()}

    def _exposed(self, work: Work, strategy: Strategy, stage: int) -> dict[str, Passes]:
        kind = self.kinds(strategy)[stage]
        whole, alone = (self.times(work, strategy, kind, stage=stage, free=free) for free in (False, True))
        return {
            key: (one.forward_s - alone[key].forward_s, one.backward_s - alone[key].backward_s)
            for key, one in whole.items()
        }

    def findings(self, strategy: Strategy, constants: Container[str] = ()) -> tuple[Finding, ...]:
        """What the strategy asks for and does not get.

        Args:
            constants: of the stack, that were written among the strategy.
        """
        key = (strategy.dp, strategy.tp, strategy.cp, strategy.ep, strategy.zero, strategy.sp)
        if key not in self._findings:
            work = self.work(self.kinds(strategy)[0], strategy)
            held = held_in_estimate(work, strategy, self.stack)
            self._findings[key] = tuple(degree_findings(held, strategy))
        of_layers = self._layer_findings(strategy)
        idle = idle_findings(strategy, self.stack, attention=self.model.has_attention, constants=constants)
        spanning = spanning_findings(self.links(strategy))
        return (*self._findings[key], *idle, *of_layers, *spanning, *self._meeting_findings(strategy))

    def _meeting_findings(self, strategy: Strategy) -> tuple[Finding, ...]:
        if strategy.dp == strategy.ep or self.stack.keeps_as_planned or self.model.meeting.splits:
            return ()
        return (meeting_finding(self.model.meeting.why, strategy, self.stack),)

    def _layer_findings(self, strategy: Strategy) -> tuple[Finding, ...]:
        if self.layers is None:
            return ()
        own = self._measured_stage(strategy, self.layers)
        if own is None:
            return ()
        kind = self.kinds(strategy)[own]
        work = self.work(kind, strategy)
        times = self.times(work, strategy, kind, stage=own)
        priced = {key: one.forward_s + one.backward_s for key, one in times.items()}
        return tuple(self.layers.findings(work, strategy, priced))

    def counts_program(self, strategy: Strategy) -> bool:
        """Whether a strategy's memory is that of one program of the planner's, or else counted block by block."""
        return self.stack.keeps_as_planned and is_one_program(strategy)

    def memory(self, strategy: Strategy, global_batch: int) -> tuple[StageMemory, ...]:
        """Memory of every stage."""
        count = self.microbatches(strategy, global_batch)
        kinds = self.kinds(strategy)
        devices = [[kind for kind, _ in used] for used in self._used(strategy)]
        work = self.work(kinds[0], strategy)
        parts = self._parts_of(work, strategy)
        flying, crossing = microbatches_held(work, parts, strategy, self.stack, count), cut_bytes(work, parts)
        if self.counts_program(strategy):
            together = self.together(strategy)
            step = self.model.step_bytes(self.facts_of(kinds[0]), strategy, accumulates=count > 1, together=together)
            return (one_program_memory(step, kinds[0], self.stack, flying[0], count, devices[0]),)
        return tuple(
            stage_memory(work, blocks, kinds[s], strategy, self.stack, flying[s], devices[s], crossing)
            for s, blocks in enumerate(stage_blocks(parts, strategy))
        )

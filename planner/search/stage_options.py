"""What stages may be made of, and the problem of cutting the blocks and handing out devices over all of that.

Each mesh of each plausible number of devices of each pool is an option, with its decision without and with remat; and
two groups of different pools, each with a share of the microbatches by its speed.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from costmodel.cluster import Cluster, Device, DeviceGroup
from costmodel.graph import ModelGraph
from costmodel.schedule.generate import spread_shares
from planner.search.candidates import Candidates
from planner.search.layout import GroupChoice, Layout, StageChoice
from planner.search.meshes import meshes, pool_devices, stage_sizes
from planner.search.stages import GroupCosts, ScheduleKind, StageOption, StagePlan, StageProblem
from planner.search.windows import windows
from planner.space.block_cost import BlockCost
from planner.space.decision import Decision

FAR = 1.2  # inner axis sizes slower than this times the best are not tried again
UNCUT_BYTES = 1e18  # what crosses a border that no plan cuts

OfInterest = Callable[[int, int], float]
"""From a pool and a number of its devices to the seconds above which a mesh of them is of no use."""


@dataclass(frozen=True)
class BuiltOption:
    """A stage option with what it was made of: per group the pool and the decision."""

    option: StageOption
    groups: tuple[tuple[DeviceGroup, Decision], ...]


def inner_size(mesh: tuple[int, ...]) -> int:
    """Size of the inner one of two axes; 1 for meshes of one axis."""
    return mesh[1] if len(mesh) == 2 else 1


@dataclass
class StageOptions:
    """The options of one search, which remembers what was far off.

    Attributes:
        schedule: whose closed form finds layouts.
        groups_meet: whether two groups of different pools may share a stage.
        near: inner axis sizes of each pool that came within reach of the fastest mesh of as many devices.
    """

    cluster: Cluster
    candidates: Candidates
    schedule: ScheduleKind
    groups_meet: bool
    near: dict[str, set[int]] = field(default_factory=dict)

    @cached_property
    def pools(self) -> list[DeviceGroup]:
        """Device groups that have devices."""
        return [g for g in self.cluster.groups if pool_devices(self.cluster, g.name)]

    @cached_property
    def counts(self) -> list[int]:
        """Devices of each pool."""
        return [len(pool_devices(self.cluster, g.name)) for g in self.pools]

    def every(
        self, stages: int, size: int, count: int, in_flight: int, of_interest_s: OfInterest
    ) -> Iterator[BuiltOption]:
        """Every mesh of every plausible number of devices of each pool, and mixed options of two pools.

        Args:
            stages: of the pipeline; size, count: of its microbatches; in_flight: of these, held by one stage.
        """
        whole: list[dict[int, list[Decision]]] = [{} for _ in self.pools]
        for p, pool in enumerate(self.pools):
            for devices in self._sizes(p, stages):
                every = list(meshes(devices, pool.devices_per_node))
                near = [m for m in every if inner_size(m) in self.near.get(pool.name, {inner_size(m)})]
                for mesh in near or every:
                    for decision in self.candidates.both(
                        pool,
                        mesh,
                        size,
                        microbatches=count,
                        stages=stages,
                        in_flight=in_flight,
                        of_interest_s=of_interest_s(p, devices),
                    ):
                        whole[p].setdefault(devices, []).append(decision)
                        used = tuple(devices if q == p else 0 for q in range(len(self.pools)))
                        yield BuiltOption(self._option(used, [(decision, 1, 1)]), ((pool, decision),))
        if len(self.pools) == 2 and self.groups_meet and count > 1:
            yield from self._mixed(stages, count, whole)

    def remember(self, built: list[BuiltOption]) -> None:
        """Inner axis sizes of each pool that come within reach of the fastest mesh of the same number of devices."""
        times: dict[tuple[str, int], dict[int, float]] = {}
        for b in built:
            for pool, decision in b.groups:
                mesh = decision.space.mesh
                own = times.setdefault((pool.name, int(np.prod(mesh)) if mesh else 1), {})
                own[inner_size(mesh)] = min(own.get(inner_size(mesh), np.inf), decision.bound_s)
        for (pool_name, _), own in times.items():
            if len(own) > 1:
                self.near[pool_name] = {i for i, t in own.items() if t <= FAR * min(own.values())}

    def _sizes(self, pool: int, stages: int) -> tuple[int, ...]:
        total, per_node = self.counts[pool], self.pools[pool].devices_per_node
        sizes = stage_sizes(total, per_node)
        if total <= 8:
            return tuple(n for n in sizes if n <= max(1, sum(self.counts) - stages + 1))
        if len(self.pools) == 1:
            return tuple(n for n in sizes if n == total // stages) or (
                max(n for n in sizes if n <= max(1, total // stages)),
            )
        share = sum(self.counts) / stages
        near = tuple(n for n in sizes if share / 2 <= n <= 1.5 * share)
        return near or (min(sizes, key=lambda n: abs(n - share)),)

    def _mixed(self, stages: int, count: int, whole: list[dict[int, list[Decision]]]) -> Iterator[BuiltOption]:
        """Stages of two groups, each with a share of the microbatches by its speed."""
        for a, first in whole[0].items():
            for b, second in whole[1].items():
                if a + b > 1.5 * sum(self.counts) / stages and stages > 1:
                    continue
                one, other = (min(d, key=lambda x: x.time_s) for d in (first, second))
                share = round(count * (1 / one.time_s) / (1 / one.time_s + 1 / other.time_s))
                if 0 < share < count:
                    option = self._option((a, b), [(one, share, count), (other, count - share, count)])
                    yield BuiltOption(option, ((self.pools[0], one), (self.pools[1], other)))

    def _option(self, devices: tuple[int, ...], groups: list[tuple[Decision, int, int]]) -> StageOption:
        return StageOption(
            name=" + ".join(f"{d.space.pricing.kind.name}{d.space.mesh} {d.setting.remat}" for d, _, _ in groups),
            devices=devices,
            groups=tuple(self._group(d, n, m) for d, n, m in groups),
        )

    def _group(self, decision: Decision, share: int, of: int) -> GroupCosts:
        costs = [decision.costs[k] for k in decision.space.graph.classes]
        kind = decision.space.pricing.kind

        def column(pick: Callable[[BlockCost], float]) -> np.ndarray:
            return np.array([pick(c) for c in costs])

        return GroupCosts(
            forward_s=column(lambda c: c.forward_s + c.forward_cast_s),
            backward_s=column(lambda c: c.backward_s + c.backward_cast_s),
            once_s=column(lambda c: c.once_s + c.update_s),
            state_bytes=np.ceil(column(lambda c: c.state_bytes)),
            saved_bytes=np.ceil(column(lambda c: c.saved_bytes)),
            transient_bytes=np.ceil(column(lambda c: c.transient_bytes)),
            memory_limit_bytes=kind.usable_bytes - self.candidates.buffer_bytes(decision),
            share_numerator=share,
            share_denominator=of,
        )

    def problem(
        self, graph: ModelGraph, options: list[StageOption], count: int, held: tuple[int, ...], least: int
    ) -> StageProblem:
        """The cut of the blocks into at least `least` stages, each of one of the options.

        Args:
            held: microbatches that stages hold, the last stage's first; as many as there may be stages.
        """
        number = {key: i for i, key in enumerate(graph.classes)}
        crossing = [min(size, UNCUT_BYTES) for size in self.candidates.borders(graph.microbatch)]
        latency, rate = self._links(options)
        return StageProblem(
            blocks=tuple(number[b.class_key] for b in graph.blocks),
            devices=tuple(self.counts),
            options=tuple(options),
            boundary_bytes=np.array(crossing),
            send_latency_s=latency,
            send_s_per_byte=rate,
            microbatches=count,
            schedule=self.schedule,
            max_stages=len(held),
            min_stages=least,
            held=held,
        )

    def _links(self, options: list[StageOption]) -> tuple[np.ndarray, np.ndarray]:
        """Latency and seconds a byte between stages, by the pools of their first groups."""
        pools = [next(i for i, n in enumerate(o.devices) if n) for o in options]
        cluster = self.cluster
        cache: dict[tuple[int, int, int, int], tuple[float, float]] = {}

        def link(i: int, j: int) -> tuple[float, float]:
            key = (pools[i], options[i].devices[pools[i]], pools[j], options[j].devices[pools[j]])
            if key not in cache:
                one = pool_devices(cluster, self.pools[key[0]].name)
                other = pool_devices(cluster, self.pools[key[2]].name)
                source, target = one[: key[1]], other[-key[3] :]
                if set(source) & set(target):  # the whole pool: such stages never follow each other
                    source, target = one[:1], other[-1:]
                found = self.candidates.transfers.link(source, target)
                cache[key] = (2 * found.latency_s, 1.0 / found.bandwidth_bytes_per_s)
            return cache[key]

        pairs = np.array([[link(i, j) for j in range(len(options))] for i in range(len(options))])
        return pairs[:, :, 0], pairs[:, :, 1]

    def layout(self, graph: ModelGraph, built: list[BuiltOption], plan: StagePlan, count: int) -> Layout:
        """The devices that a cut's options stand for."""
        taken: dict[str, Iterator[tuple[Device, ...]]] = {}
        for pool in self.pools:
            counts = [
                math.prod(decision.space.mesh)
                for stage in plan.stages
                for own, decision in built[stage.option].groups
                if own.name == pool.name
            ]
            taken[pool.name] = iter(windows(pool_devices(self.cluster, pool.name), counts))
        stages = []
        for stage in plan.stages:
            b = built[stage.option]
            numerators = [g.share_numerator for g in b.option.groups]
            shares = spread_shares(numerators) if len(numerators) > 1 else (tuple(range(count)),)
            groups = []
            for g, (pool, decision) in enumerate(b.groups):
                devices = next(taken[pool.name])
                there = self.candidates.on_devices(decision, pool, devices)
                groups.append(
                    GroupChoice(pool=pool.name, devices=devices, decision=there, microbatches=tuple(shares[g]))
                )
            stages.append(StageChoice(start=stage.first, stop=stage.end, groups=tuple(groups)))
        return Layout(
            graph=graph,
            transfers=self.candidates.transfers,
            stages=tuple(stages),
            schedule=self.schedule,
            microbatches=count,
        )


__all__ = ["BuiltOption", "StageOptions"]

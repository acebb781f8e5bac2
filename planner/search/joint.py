"""The search over everything: microbatch size, stages, devices, meshes, strategies, storage, schedule.

For every number of stages and a microbatch size:

1. the intra-op problem of each mesh that a stage may have is solved, once without its memory row (`Candidates.free`),
   and again with it where that does not fit, without and with full remat;
2. the stage DP (`inter_op`) cuts the blocks and hands out devices over all of these options, exactly for its closed
   form;
3. the best few are scored by event simulation, under several schedules (`schedule_choice`), and the best plan is kept.

The microbatch size starts where activations take about half of memory and moves to smaller or larger divisors of the
global batch while that helps; inner axis sizes that were far off are not tried again. Under ``auto`` schedules are made
for the best layouts (`layout_schedules`). The winner's decisions are solved once more to a tight gap.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from costmodel.cluster import Cluster, Device, DeviceGroup
from costmodel.errors import InfeasibleError, InputError
from costmodel.graph import ModelGraph
from costmodel.schedule.generate import spread_shares
from planner.planfile.schema import Certificate
from planner.search.bounds import certificate
from planner.search.candidates import (
    FINAL,
    Candidates,
    Facts,
    Remat,
    Restrict,
    footprint,
    meshes,
    pool_devices,
    stage_sizes,
)
from planner.search.infeasible import explain_miss
from planner.search.inter_op import plan_stages
from planner.search.layout import GroupChoice, Layout, StageChoice
from planner.search.layout_schedules import synthesized
from planner.search.pinned import StagePin, pinned_layout
from planner.search.problem import SearchBudget
from planner.search.schedule_choice import (
    held_by_place,
    least_bubble,
    least_stages,
    require_stages,
    runs_groups,
    sized_for,
    under_schedules,
)
from planner.search.score import Score, score
from planner.search.stages import GroupCosts, ScheduleKind, StageOption, StagePlan, StageProblem
from planner.search.virtual_stages import most_stages
from planner.search.windows import windows
from planner.space.decision import Decision

Say = Callable[[str, int, int], None]
KEEP = 3  # plans of one DP that are simulated
FINALISTS = 2  # layouts that a schedule is made for
FAR = 1.2  # inner axis sizes slower than this times the best are not tried again
PATIENCE = 2  # numbers of stages in a row that were no better, before larger ones are not tried
UNCUT_BYTES = 1e18  # what crosses a border that no plan cuts
DP = SearchBudget(relative_gap=0.005)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to plan.

    Attributes:
        graph_of: the model graph at a microbatch size.
        facts: prices' inputs by device kind name.
        sizes: microbatch sizes to try, largest first.
        schedule: a name, ``auto`` for the best of all and of those made for the layout, None for the best of the usual.
        stages, pins: what the user fixed.
        chunks: virtual stages a stage under a schedule that leaves them open, None to choose.
        restrict, remats: what a strategy leaves of the space.
        one_group: carried state goes from microbatch to microbatch, so one group runs all of a stage's.
    """

    cluster: Cluster
    graph_of: Callable[[int], ModelGraph]
    facts: Mapping[str, Facts]
    global_batch: int
    sizes: tuple[int, ...]
    schedule: str | None = None
    stages: int | None = None
    pins: tuple[StagePin, ...] | None = None
    chunks: int | None = None
    restrict: Restrict | None = None
    remats: tuple[Remat, ...] = ("none", "full")
    one_group: bool = False


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    score: Score
    certificate: Certificate


@dataclass(frozen=True)
class _Built:
    """A stage option with what it was made of: per group the pool and the decision."""

    option: StageOption
    groups: tuple[tuple[DeviceGroup, Decision], ...]


def search(request: Request, say: Say) -> SearchResult:
    """The best plan found.

    Raises:
        InfeasibleError: nothing fits; the message says what comes nearest, by how much it misses, and what would fit.
    """
    return _Search(request, say).run()


def microbatch_sizes(global_batch: int, *, largest: int | None = None) -> tuple[int, ...]:
    """Divisors of the global batch within what the user asked for, largest first."""
    small = [n for n in range(1, math.isqrt(global_batch) + 1) if global_batch % n == 0]
    divisors = sorted({*small, *(global_batch // n for n in small)}, reverse=True)
    return tuple(n for n in divisors if largest is None or n <= largest)


def inner_size(mesh: tuple[int, ...]) -> int:
    """Size of the inner one of two axes; 1 for meshes of one axis."""
    return mesh[1] if len(mesh) == 2 else 1


@dataclass
class _Search:
    request: Request
    say: Say
    best: Score | None = None
    missed: list[Score] = field(default_factory=list)
    straight: list[Score] = field(default_factory=list)
    near: dict[str, set[int]] = field(default_factory=dict)
    limit_fired: bool = False
    candidates: Candidates = field(init=False)

    def __post_init__(self) -> None:
        r = self.request
        self.candidates = Candidates(
            cluster=r.cluster, graph_of=r.graph_of, facts=r.facts, restrict=r.restrict, remats=r.remats
        )
        self.pools = [g for g in r.cluster.groups if pool_devices(r.cluster, g.name)]
        self.counts = [len(pool_devices(r.cluster, g.name)) for g in self.pools]
        self.first = r.graph_of(r.sizes[0])

    def run(self) -> SearchResult:
        request = self.request
        if request.pins is not None:
            self._pinned(request.pins)
        else:
            self._searched()
        if request.schedule == "auto":
            self._synthesized()
        if self.best is None:
            raise explain_miss(request, self.missed, self.candidates)
        self._offer(self._polished(self.best))
        return SearchResult(
            score=self.best,
            certificate=certificate(
                request, self.best, self.candidates, self.limit_fired or self.candidates.limit_fired
            ),
        )

    def _searched(self) -> None:
        counts = self._stage_counts()
        worse, last = 0, np.inf
        for done, stages in enumerate(counts):
            self.say("searching", done, len(counts))
            found = self._climb(stages)
            worse = worse + 1 if found > last and last < np.inf else 0
            last = min(last, found)
            if worse == PATIENCE:
                break

    def _synthesized(self) -> None:
        """Makes schedules for the best layouts of one group a stage; for those that miss least where none fits."""
        fitting = sorted((s for s in self.straight if s.feasible), key=lambda s: s.time_s)
        missing = sorted((s for s in self.straight if not s.feasible), key=lambda s: s.missing_bytes)
        finalists = (fitting or missing)[:FINALISTS]
        for done, found in enumerate(finalists):
            self.say("making schedules", done, len(finalists))
            for made in synthesized(found):
                self._offer(made)

    def _pinned(self, pins: tuple[StagePin, ...]) -> None:
        asked, count = self.request.schedule, len(pins)
        require_stages(asked, count, count, most_stages(self.first), chunks=self.request.chunks)
        failure: InfeasibleError | None = None
        for done, size in enumerate(self.request.sizes):
            self.say("searching", done, len(self.request.sizes))
            try:
                found = pinned_layout(
                    self.candidates,
                    pins,
                    microbatch=size,
                    microbatches=self.request.global_batch // size,
                    schedule=self._dp_schedule,
                )
            except InfeasibleError as error:
                failure = error
                continue
            self._offer_all(found.layout)
        if self.best is None and not self.missed and failure is not None:
            raise failure

    def _stage_counts(self) -> tuple[int, ...]:
        devices, blocks = sum(self.counts), len(self.first.blocks)
        most = min(devices, blocks)
        if self.request.stages is not None:
            if self.request.stages > most:
                raise InputError(
                    "MP160",
                    f"stages={self.request.stages} was asked for; the model has {blocks} blocks and the cluster "
                    f"{devices} devices",
                    f"ask for at most {most}",
                )
            require_stages(self.request.schedule, self.request.stages, self.request.stages, most_stages(self.first))
            return (self.request.stages,)
        least = require_stages(
            self.request.schedule, least_stages(self.request.schedule), most, most_stages(self.first)
        )
        tried = range(1, 9) if devices <= 8 else (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
        fitting = [
            p
            for p in tried
            if least <= p <= most and (p == least or self.request.global_batch // self.request.sizes[-1] >= p)
        ]
        if len(self.pools) == 1 and devices > 8:
            fitting = [p for p in fitting if devices % p == 0] or [least]
        return tuple(fitting)

    @property
    def _dp_schedule(self) -> ScheduleKind:
        """The schedule whose closed form finds layouts."""
        return "gpipe" if self.request.schedule == "gpipe" else "1f1b"

    def _climb(self, stages: int) -> float:
        """Microbatch sizes for one number of stages, moving while that helps. Returns the best step time."""
        batch, sizes = self.request.global_batch, self.request.sizes
        seen: dict[int, float] = {}

        def value(i: int) -> float:
            if i not in seen:
                seen[i] = self._try(stages, sizes[i])
            return seen[i]

        at = self._start(stages)
        while value(at) == np.inf and at + 1 < len(sizes):  # too large for memory: smaller ones
            at += 1
        for step in (-1, 1):
            while 0 <= at + step < len(sizes) and batch // sizes[at + step] >= stages and value(at + step) < value(at):
                at += step
        return value(at)

    def _start(self, stages: int) -> int:
        """The largest microbatch whose activations take about half of a stage's memory, and with which a pipeline
        has four microbatches a stage."""
        batch, sizes = self.request.global_batch, self.request.sizes
        least = 4 * stages if stages > 1 else 1
        room = (
            0.5 * sum(self.request.facts[d.kind.name].kind.usable_bytes for d in self.request.cluster.devices) / stages
        )
        each = self._bytes_per_example() / stages
        fitting = (i for i, n in enumerate(sizes) if batch // n >= least and n * each <= room)
        return next(fitting, len(sizes) - 1)

    def _bytes_per_example(self) -> float:
        """What one example's activations take at least: without remat, or with full remat and one block run again."""
        _, saved, entries, largest = footprint(self.first)
        return min(saved, entries + largest) / self.first.microbatch

    def _try(self, stages: int, size: int) -> float:
        """Best step time with up to `stages` stages at one microbatch size."""
        count = self.request.global_batch // size
        best, crowded = np.inf, False
        for at, name in enumerate(sized_for(self.request.schedule)):
            if at == 0 or name != "zb-h1" or crowded:
                found_s, missed = self._sized(stages, size, held_by_place(name, stages, count))
                best, crowded = min(best, found_s), crowded or missed
        return best

    def _sized(self, stages: int, size: int, held: tuple[int, ...]) -> tuple[float, bool]:
        """Best step time of stages that hold so many microbatches each, the last first, and whether some schedule
        needed more memory than these have."""
        count = self.request.global_batch // size
        built = list(self._options(stages, size, count, held[-1]))
        if not built:
            return np.inf, False
        best, missed = np.inf, False
        alone = [b for b in built if len(b.groups) == 1]
        # Stages of several groups hold up their neighbours in ways that the closed form does not see, looped schedules
        # most: the best layouts without any are tried as well.
        for options in (built, alone) if 0 < len(alone) < len(built) else (built,):
            for found in self._layouts(size, options, held):
                best = min(best, found.time_s) if found.feasible else best
                missed = missed or not found.feasible
        if best < np.inf:
            self._remember(built)
        return best, missed

    def _layouts(self, size: int, built: list[_Built], held: tuple[int, ...]) -> Iterator[Score]:
        """Offers the best few layouts of the DP over some options."""
        count, graph = self.request.global_batch // size, self.request.graph_of(size)
        problem = self._problem(graph, [b.option for b in built], count, held)
        result = plan_stages(problem, keep=KEEP, budget=DP)
        self.limit_fired |= result.limit_fired
        for plan in result.plans or ((result.nearest,) if result.nearest is not None else ()):
            yield from self._offer_all(self._layout(graph, built, plan, count))

    def _remember(self, built: list[_Built]) -> None:
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

    def _polished(self, best: Score) -> Score:
        """The best plan with each group's decision solved to a tight gap."""
        stages = []
        for stage in best.layout.stages:
            groups = []
            for group in stage.groups:
                old = group.decision
                pool, setting = self.request.cluster.group(group.pool), old.setting
                new = self.candidates.decide(pool, old.space.mesh, best.layout.graph.microbatch, setting, budget=FINAL)
                if new is not None:
                    new = self.candidates.on_devices(new, pool, group.devices)
                groups.append(replace(group, decision=new if new is not None and new.time_s < old.time_s else old))
            stages.append(replace(stage, groups=tuple(groups)))
        return score(replace(best.layout, stages=tuple(stages)))

    def _offer_all(self, layout: Layout) -> list[Score]:
        """Offers a layout under each schedule that may be best; returns what it became."""
        best_s = self.best.time_s if self.best else np.inf
        every = list(under_schedules(layout, self.request.schedule, best_s, chunks=self.request.chunks))
        for found in every:
            self._offer(found)
        straight = [found for found in every if found.straight]
        if straight:
            self.straight.append(min(straight, key=lambda found: (not found.feasible, found.time_s)))
        return every

    def _offer(self, found: Score) -> None:
        if not found.feasible:
            self.missed.append(found)
        elif self.best is None or found.time_s < self.best.time_s:
            self.best = found

    def _options(self, stages: int, size: int, count: int, in_flight: int) -> Iterator[_Built]:
        """Stage options: every mesh of every plausible number of devices of each pool, and mixed ones of two pools."""
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
                        of_interest_s=self._of_interest(stages, p, devices, count),
                    ):
                        whole[p].setdefault(devices, []).append(decision)
                        used = tuple(devices if q == p else 0 for q in range(len(self.pools)))
                        yield _Built(self._option(used, [(decision, 1, 1)]), ((pool, decision),))
        if len(self.pools) == 2 and not self.request.one_group and count > 1 and runs_groups(self.request.schedule):
            yield from self._mixed(stages, count, whole)

    def _of_interest(self, stages: int, pool: int, devices: int, count: int) -> float:
        """A mesh is of no use where even all such stages together, with the least bubble and no border, are slower
        than the best plan.

        Only for one pool: with two the other one can make up for it.
        """
        if self.best is None or len(self.pools) > 1:
            return np.inf
        bubble = least_bubble(self.request.schedule) * (stages - 1) / count
        return self.best.time_s * (self.counts[pool] / devices) / (1 + bubble) * 1.02

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

    def _mixed(self, stages: int, count: int, whole: list[dict[int, list[Decision]]]) -> Iterator[_Built]:
        """Stages of two groups, each with a share of the microbatches by its speed."""
        for a, first in whole[0].items():
            for b, second in whole[1].items():
                if a + b > 1.5 * sum(self.counts) / stages and stages > 1:
                    continue
                one, other = (min(d, key=lambda x: x.time_s) for d in (first, second))
                share = round(count * (1 / one.time_s) / (1 / one.time_s + 1 / other.time_s))
                if 0 < share < count:
                    option = self._option((a, b), [(one, share, count), (other, count - share, count)])
                    yield _Built(option, ((self.pools[0], one), (self.pools[1], other)))

    def _option(self, devices: tuple[int, ...], groups: list[tuple[Decision, int, int]]) -> StageOption:
        return StageOption(
            name=" + ".join(f"{d.space.pricing.kind.name}{d.space.mesh} {d.setting.remat}" for d, _, _ in groups),
            devices=devices,
            groups=tuple(self._group(d, n, m) for d, n, m in groups),
        )

    def _group(self, decision: Decision, share: int, of: int) -> GroupCosts:
        costs = [decision.costs[k] for k in decision.space.graph.classes]
        kind = decision.space.pricing.kind

        def column(pick: Callable[[object], float]) -> np.ndarray:
            return np.array([pick(c) for c in costs])

        return GroupCosts(
            forward_s=column(lambda c: c.forward_s + c.forward_cast_s),  # type: ignore[attr-defined]
            backward_s=column(lambda c: c.backward_s + c.backward_cast_s),  # type: ignore[attr-defined]
            once_s=column(lambda c: c.once_s + c.update_s),  # type: ignore[attr-defined]
            state_bytes=np.ceil(column(lambda c: c.state_bytes)),  # type: ignore[attr-defined]
            saved_bytes=np.ceil(column(lambda c: c.saved_bytes)),  # type: ignore[attr-defined]
            transient_bytes=np.ceil(column(lambda c: c.transient_bytes)),  # type: ignore[attr-defined]
            memory_limit_bytes=kind.usable_bytes - self.candidates.buffer_bytes(decision),
            share_numerator=share,
            share_denominator=of,
        )

    def _problem(
        self, graph: ModelGraph, options: list[StageOption], count: int, held: tuple[int, ...]
    ) -> StageProblem:
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
            schedule=self._dp_schedule,
            max_stages=len(held),
            min_stages=len(held) if self.request.stages is not None else least_stages(self.request.schedule),
            held=held,
        )

    def _links(self, options: list[StageOption]) -> tuple[np.ndarray, np.ndarray]:
        """Latency and seconds a byte between stages, by the pools of their first groups."""
        pools = [next(i for i, n in enumerate(o.devices) if n) for o in options]
        cluster = self.request.cluster
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

    def _layout(self, graph: ModelGraph, built: list[_Built], plan: StagePlan, count: int) -> Layout:
        taken: dict[str, Iterator[tuple[Device, ...]]] = {}
        for pool in self.pools:
            counts = [
                math.prod(decision.space.mesh)
                for stage in plan.stages
                for own, decision in built[stage.option].groups
                if own.name == pool.name
            ]
            taken[pool.name] = iter(windows(pool_devices(self.request.cluster, pool.name), counts))
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
            schedule=self._dp_schedule,
            microbatches=count,
        )


__all__ = ["Request", "SearchResult", "microbatch_sizes", "search"]

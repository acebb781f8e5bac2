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

from costmodel.cluster import Cluster
from costmodel.errors import InfeasibleError, InputError
from costmodel.graph import ModelGraph
from planner.planfile.schema import Certificate
from planner.search.bounds import certificate
from planner.search.candidates import FINAL, Candidates, Remat, Restrict, footprint
from planner.search.facts import Facts
from planner.search.infeasible import explain_miss
from planner.search.inter_op import plan_stages
from planner.search.layout import Layout
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
from planner.search.stage_options import BuiltOption, StageOptions
from planner.search.stages import ScheduleKind
from planner.search.virtual_stages import most_stages

Say = Callable[[str, int, int], None]
KEEP = 3  # plans of one DP that are simulated
FINALISTS = 2  # layouts that a schedule is made for
PATIENCE = 2  # numbers of stages in a row that were no better, before larger ones are not tried
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


@dataclass
class _Search:
    request: Request
    say: Say
    best: Score | None = None
    missed: list[Score] = field(default_factory=list)
    straight: list[Score] = field(default_factory=list)
    limit_fired: bool = False
    candidates: Candidates = field(init=False)
    options: StageOptions = field(init=False)

    def __post_init__(self) -> None:
        r = self.request
        self.candidates = Candidates(
            cluster=r.cluster, graph_of=r.graph_of, facts=r.facts, restrict=r.restrict, remats=r.remats
        )
        self.options = StageOptions(
            cluster=r.cluster,
            candidates=self.candidates,
            schedule=self._dp_schedule,
            groups_meet=not r.one_group and runs_groups(r.schedule),
        )
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
                    nearest=True,
                )
            except InfeasibleError as error:
                failure = error
                continue
            self._offer_all(found.layout)
        if self.best is None and not self.missed and failure is not None:
            raise failure

    def _stage_counts(self) -> tuple[int, ...]:
        devices, blocks = sum(self.options.counts), len(self.first.blocks)
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
        if len(self.options.pools) == 1 and devices > 8:
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
        built = list(
            self.options.every(
                stages, size, count, held[-1], lambda pool, devices: self._of_interest(stages, pool, devices, count)
            )
        )
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
            self.options.remember(built)
        return best, missed

    def _layouts(self, size: int, built: list[BuiltOption], held: tuple[int, ...]) -> Iterator[Score]:
        """Offers the best few layouts of the DP over some options."""
        count, graph = self.request.global_batch // size, self.request.graph_of(size)
        least = len(held) if self.request.stages is not None else least_stages(self.request.schedule)
        problem = self.options.problem(graph, [b.option for b in built], count, held, least)
        result = plan_stages(problem, keep=KEEP, budget=DP)
        self.limit_fired |= result.limit_fired
        for plan in result.plans or ((result.nearest,) if result.nearest is not None else ()):
            yield from self._offer_all(self.options.layout(graph, built, plan, count))

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

    def _of_interest(self, stages: int, pool: int, devices: int, count: int) -> float:
        """A mesh is of no use where even all such stages together, with the least bubble and no border, are slower
        than the best plan.

        Only for one pool: with two the other one can make up for it.
        """
        if self.best is None or len(self.options.pools) > 1:
            return np.inf
        bubble = least_bubble(self.request.schedule) * (stages - 1) / count
        return self.best.time_s * (self.options.counts[pool] / devices) / (1 + bubble) * 1.02


__all__ = ["Request", "SearchResult", "microbatch_sizes", "search"]

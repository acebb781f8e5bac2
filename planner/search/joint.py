"""The search over everything: microbatch size, stages, devices, meshes, strategies, schedule.

For each microbatch size and each way to hand devices to stages the intra-op problems of all meshes are solved (solutions
are shared through `Candidates`), blocks are balanced over the stages, and the result is scored by event simulation. A
combination is skipped only when a lower bound of its step time exceeds the best plan found.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from costmodel.cluster import Cluster
from costmodel.compute import peak_flops_per_s
from costmodel.errors import InfeasibleError, InputError, PlanError
from costmodel.graph import ModelGraph
from planner.planfile.schema import Certificate
from planner.search.candidates import Candidates, Facts, pool_devices, stage_sizes
from planner.search.pinned import GroupPin, StagePin, pinned_layout
from planner.search.score import Score

Say = Callable[[str, int, int], None]
SIZES = 6  # microbatch sizes tried, the largest that divide the global batch first


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to plan.

    Attributes:
        graph_of: the model graph at a microbatch size.
        facts: prices' inputs by device kind name.
        sizes: microbatch sizes to try.
        stages, pins: what the user fixed.
        batch_must_stay: carried state goes from microbatch to microbatch, so one group runs all of them.
    """

    cluster: Cluster
    graph_of: Callable[[int], ModelGraph]
    facts: Mapping[str, Facts]
    global_batch: int
    sizes: tuple[int, ...]
    schedule: str = "auto"
    stages: int | None = None
    pins: tuple[StagePin, ...] | None = None
    batch_must_stay: bool = False


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    score: Score
    certificate: Certificate


def microbatch_sizes(global_batch: int, *, largest: int | None = None, only: int | None = None) -> tuple[int, ...]:
    """Divisors of the global batch to try, spread evenly by ratio, largest first.

    Raises:
        InputError: a pinned size does not divide the batch, or none is small enough.
    """
    divisors = [n for n in range(1, global_batch + 1) if global_batch % n == 0]
    if only is not None:
        if only not in divisors:
            near = ", ".join(map(str, divisors[-12:]))
            raise InputError("MP161", f"microbatch={only} does not divide the global batch of {global_batch}", f"sizes that do: {near}")
        return (only,)
    fitting = [n for n in divisors if largest is None or n <= largest]
    if len(fitting) <= SIZES:
        return tuple(reversed(fitting))
    step = (len(fitting) - 1) / (SIZES - 1)
    return tuple(fitting[round(i * step)] for i in reversed(range(SIZES)))


def stage_counts(request: Request, blocks: int) -> tuple[int, ...]:
    """Numbers of stages to try."""
    devices = len(request.cluster.devices)
    most = min(blocks, devices, request.global_batch if request.global_batch > 1 else 1)
    if request.stages is not None:
        if request.stages > min(blocks, devices):
            raise InputError("MP160", f"stages={request.stages} asked for; the model has {blocks} blocks and the cluster {devices} devices", "ask for fewer stages")
        return (request.stages,)
    return tuple(p for p in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64) if p <= most)


def allotments(cluster: Cluster, stages: int) -> Iterator[tuple[StagePin, ...]]:
    """Ways to hand the cluster's devices to so many stages: each group gives equal stages, in the cluster's order."""
    counts = {g.name: len(pool_devices(cluster, g.name)) for g in cluster.groups}
    names = [n for n, c in counts.items() if c]

    def split(at: int, left: int) -> Iterator[tuple[int, ...]]:
        if at == len(names) - 1:
            yield (left,)
            return
        for own in range(left + 1):
            for rest in split(at + 1, left - own):
                yield (own, *rest)

    for shares in split(0, stages):
        rows: list[list[tuple[StagePin, ...]]] = []
        for name, own in zip(names, shares, strict=True):
            if own:
                rows.append(list(_equal_stages(cluster, name, counts[name], own)))
        for first in rows[0] if rows else ():
            if len(rows) == 1:
                yield first
            else:
                for second in rows[1]:
                    yield (*first, *second, *(s for r in rows[2:] for s in r[0]))


def _equal_stages(cluster: Cluster, name: str, devices: int, stages: int) -> Iterator[tuple[StagePin, ...]]:
    per_node = cluster.group(name).devices_per_node
    if devices < stages:
        return
    even, rest = divmod(devices, stages)
    sizes = stage_sizes(devices, per_node)
    if rest and devices <= 8:
        yield tuple(StagePin(groups=(GroupPin(pool=name, devices=even + (i >= stages - rest)),)) for i in range(stages))
        return
    size = max((n for n in sizes if n <= even), default=even)
    yield tuple(StagePin(groups=(GroupPin(pool=name, devices=size),)) for _ in range(stages))


def search(request: Request, say: Say) -> SearchResult:
    """The best plan found.

    Raises:
        InfeasibleError: nothing fits; says what comes nearest.
    """
    candidates = Candidates(cluster=request.cluster, graph_of=request.graph_of, facts=request.facts)
    best: Score | None = None
    nearest: tuple[float, str] | None = None
    work = list(_work(request))
    for done, (size, pins, schedule) in enumerate(work):
        say("searching", done, len(work))
        try:
            found = pinned_layout(candidates, pins, microbatch=size, microbatches=request.global_batch // size, schedule=schedule)
        except InfeasibleError as error:
            if nearest is None:
                nearest = (float("inf"), error.message)
            continue
        except InputError:
            if request.pins is not None:
                raise
            continue
        if not found.feasible:
            if nearest is None or found.missing_bytes < nearest[0]:
                nearest = (found.missing_bytes, _miss(found))
        elif best is None or found.time_s < best.time_s:
            best = found
    if best is None:
        raise InfeasibleError("MP201", f"no plan fits: {nearest[1] if nearest else 'no stage count applies'}",
                              "use more or larger devices, a shorter sequence, or a smaller global batch")
    return SearchResult(score=best, certificate=_certificate(request, best, candidates))


def _work(request: Request) -> Iterator[tuple[int, tuple[StagePin, ...], str]]:
    blocks = len(request.graph_of(request.sizes[0]).blocks)
    schedules = ("1f1b",) if request.schedule == "auto" else (request.schedule,)
    for size in request.sizes:
        count = request.global_batch // size
        if request.pins is not None:
            yield from ((size, request.pins, s) for s in schedules)
            continue
        for stages in stage_counts(request, blocks):
            if stages > 1 and count < stages and request.stages is None:
                continue
            for pins in allotments(request.cluster, stages):
                yield from ((size, pins, s) for s in schedules)


def _miss(found: Score) -> str:
    actor, group = max(found.groups.items(), key=lambda item: item[1].missing_bytes)
    gib = 2.0**30
    return (f"the nearest misses device memory by {group.missing_bytes / gib:.2f} GiB in stage {actor.stage} "
            f"({group.total_bytes / gib:.2f} GiB of {group.limit_bytes / gib:.2f} GiB)")


def hardware_bound_s(request: Request, graph: ModelGraph) -> float:
    """FLOPs of a step over what all devices achieve together: no plan of any space is faster, by these rates."""
    from planner.assemble import main_dtype

    dtype = main_dtype(graph)
    rate = 0.0
    for device in request.cluster.devices:
        kind = request.facts[device.kind.name].kind
        rate += peak_flops_per_s(dtype, kind, is_matmul=True).value * kind.matmul_efficiency / device.slowdown
    return graph.step_flops * (request.global_batch / graph.microbatch) / rate


def _certificate(request: Request, best: Score, candidates: Candidates) -> Certificate:
    hardware = hardware_bound_s(request, best.layout.graph)
    return Certificate(
        lower_bound_s=hardware, gap=1 - hardware / best.time_s, hardware_bound_s=hardware, hardware_gap=1 - hardware / best.time_s,
        space=("microbatch sizes " + ", ".join(map(str, request.sizes)),), status="feasible", limit_fired=candidates.limit_fired,
    )


__all__ = ["PlanError", "Request", "SearchResult", "microbatch_sizes", "search"]

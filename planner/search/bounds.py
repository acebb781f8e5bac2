"""The certificate of a plan: a bound for the declared space, a bound for any space, and what the space is.

* B1  hardware: FLOPs of a step over what all devices achieve together.
* B2  space: whatever the stages, every block runs somewhere. Let ``w(c, g, n)`` be the least device-seconds a step of a
  block of class c on a stage of n devices of group g, memory aside and everything recomputed only where wanted: n times
  the free optimum of that mesh. The devices together give ``N`` device-seconds a second, so
  step >= sum over blocks of min over options of w / N, with each option's device-seconds counted in shares of all.

B2 holds for the meshes and microbatch sizes that the search solved; where it lies below B1, B1 counts.
"""

from typing import TYPE_CHECKING

from costmodel.compute import peak_flops_per_s
from costmodel.graph import ModelGraph
from planner.assemble import main_dtype
from planner.planfile.schema import Certificate
from planner.search.candidates import Candidates
from planner.search.score import Score

if TYPE_CHECKING:
    from planner.search.joint import Request


def hardware_bound_s(request: "Request", graph: ModelGraph) -> float:
    """B1 in seconds, with the achieved rate of each device kind."""
    dtype = main_dtype(graph)
    rate = 0.0
    for device in request.cluster.devices:
        kind = request.facts[device.kind.name].kind
        rate += peak_flops_per_s(dtype, kind, is_matmul=True).value * kind.matmul_efficiency / device.slowdown
    return graph.step_flops * (request.global_batch / graph.microbatch) / rate


def space_bound_s(request: "Request", candidates: Candidates) -> float:
    """B2 in seconds.

    A step of the whole model on one stage of n devices takes at least that mesh's free optimum T(g, n). A cluster of
    ``N_g / n`` such stages a group can at best run at the sum of their rates, whatever blocks each takes.
    """
    fastest: dict[tuple[str, int], float] = {}
    for key, solution in candidates.free_solutions():
        pool, devices = key
        fastest[pool, devices] = min(fastest.get((pool, devices), float("inf")), solution)
    counts: dict[str, int] = {}
    for device in request.cluster.devices:
        counts[device.group] = counts.get(device.group, 0) + 1
    rate = 0.0
    for pool, count in counts.items():
        rate += max((count / n / seconds for (p, n), seconds in fastest.items() if p == pool and seconds > 0), default=0.0)
    return 1.0 / rate if rate else 0.0


def certificate(request: "Request", best: Score, candidates: Candidates) -> Certificate:
    """What is proven of the best plan."""
    hardware = hardware_bound_s(request, best.layout.graph)
    bound = min(best.time_s, max(hardware, space_bound_s(request, candidates)))
    return Certificate(
        lower_bound_s=bound,
        gap=1 - bound / best.time_s,
        hardware_bound_s=hardware,
        hardware_gap=1 - hardware / best.time_s,
        space=describe_space(request),
        status="optimal" if bound >= best.time_s * (1 - 1e-9) else "feasible",
        limit_fired=candidates.limit_fired,
    )


def describe_space(request: "Request") -> tuple[str, ...]:
    """What was and was not searched, in sentences."""
    sizes = ", ".join(map(str, sorted(request.sizes))) if len(request.sizes) <= 8 else f"{len(request.sizes)} divisors of {request.global_batch}"
    return (
        "searched: each op's split over one or two mesh axes, parameters, gradients and optimizer state each replicated or "
        "split (ZeRO-0 to 3, tensor, sequence and expert parallel), no or full remat a stage",
        f"searched: microbatch sizes among {sizes}, from four microbatches a stage while moving helps",
        "searched: contiguous stages on devices of one group, or on one group each of two; schedule "
        + ("1f1b" if request.schedule == "auto" else request.schedule),
        "not searched: three mesh axes, selective remat, offload, interleaved or zero-bubble schedules, context parallel "
        "attention kernels, padding of dims that do not divide",
        "the bound counts stages of the meshes that were solved, with memory, bubbles and transfers left out",
    )

"""The certificate of a plan: a bound for the declared space, a bound for any space, and what the space is.

* B1  hardware: FLOPs of a step over what all devices achieve together, in the fastest dtype that the model has, in the
  fastest measured product, or in the measured block that is furthest above its prices.
* B2  space: for a microbatch size and a number of stages, let ``T(g, n)`` be the proven least time of a whole step on
  one stage of n devices of group g that holds its share of the model. ``N_g / n`` such stages of each group together
  run at best at the sum of their rates, whatever blocks each takes:
  step >= 1 / sum over g of max over n of N_g / (n T(g, n)).
  The bound is the least over the microbatch sizes and stage counts that were solved.

Both come from the prices that made the plan. A bound above the plan's own time would be a defect of meshplan: it is
then not used, and the certificate says so instead of calling the plan optimal.
"""

import math
from typing import TYPE_CHECKING

from costmodel.compute import peak_flops_per_s
from costmodel.graph import ModelGraph
from planner.planfile.schema import Certificate
from planner.search.candidates import Candidates
from planner.search.schedule_choice import describe_schedules
from planner.search.score import Score
from planner.space.model_space import HEAVY, SMALL

if TYPE_CHECKING:
    from planner.search.joint import Request

ROUNDING = 1e-9


def hardware_bound_s(request: "Request", graph: ModelGraph) -> float:
    """B1 in seconds: all FLOPs on every device at the highest rate that it reaches for any dtype or op of the model."""
    ops = [op for cls in graph.classes.values() for op in cls.ops if op.flops]
    seen = {t.dtype for cls in graph.classes.values() for t in cls.tensors.values() if "float" in t.dtype}
    inside = {dtype for op in ops for own in (op.inside, op.inside_backward) if own for dtype, _ in own.matmul_flops}
    dtypes = sorted(seen | inside)
    highest: dict[str, float] = {}
    for name, facts in request.facts.items():
        kind, measured = facts.kind, facts.op_times_of(graph)
        rates = [
            op.flops / measured[op.key].forward_s for op in ops if op.key in measured and measured[op.key].forward_s
        ]
        rates += [peak_flops_per_s("float32", kind, is_matmul=False).value]
        if facts.products is not None:
            rates.append(facts.products.highest_rate())
        for dtype in dtypes:
            rates.append(peak_flops_per_s(dtype, kind, is_matmul=True).value * kind.matmul_efficiency)
            rates.append(peak_flops_per_s(dtype, kind, is_matmul=False).value)
        scales = facts.block_scales_of(graph).values()
        least = min((min(scale.forward, scale.backward) for scale in scales), default=1.0)
        highest[name] = max(rates) / min(1.0, least)
    rate = sum(highest[device.kind.name] / device.slowdown for device in request.cluster.devices)
    return graph.step_flops * (request.global_batch / graph.microbatch) / rate


def space_bound_s(request: "Request", candidates: Candidates) -> float:
    """B2 in seconds; 0 where nothing was solved."""
    counts: dict[str, int] = {}
    for device in request.cluster.devices:
        counts[device.group] = counts.get(device.group, 0) + 1
    fastest: dict[tuple[int, int], dict[tuple[str, int], float]] = {}
    for (pool, devices, microbatch, stages), bound_s in candidates.bounds():
        own = fastest.setdefault((microbatch, stages), {})
        own[pool, devices] = min(own.get((pool, devices), math.inf), bound_s)
    bounds = []
    for own in fastest.values():
        rate = sum(
            max((count / n / t for (p, n), t in own.items() if p == pool and t > 0), default=0.0)
            for pool, count in counts.items()
        )
        bounds.append(1.0 / rate if rate else 0.0)
    return min(bounds, default=0.0)


def certificate(request: "Request", best: Score, candidates: Candidates, limit_fired: bool = False) -> Certificate:
    """What is proven of the best plan."""
    found = {
        "hardware": hardware_bound_s(request, best.layout.graph),
        "space": space_bound_s(request, candidates),
    }
    used = {n: min(value, best.time_s) for n, value in found.items() if value <= best.time_s * (1 + ROUNDING)}
    notes = [
        f"not used: the {name} bound of {found[name]:.4g} s, which exceeds the plan's own {best.time_s:.4g} s (a "
        "defect of meshplan; please report it)"
        for name in found
        if name not in used
    ]
    bound, hardware = max(used.values(), default=0.0), used.get("hardware", 0.0)
    return Certificate(
        lower_bound_s=bound,
        gap=1 - bound / best.time_s,
        hardware_bound_s=hardware,
        hardware_gap=1 - hardware / best.time_s,
        space=(*describe_space(request), *notes),
        status="optimal" if bound >= best.time_s * (1 - ROUNDING) else "feasible",
        limit_fired=limit_fired,
    )


def describe_space(request: "Request") -> tuple[str, ...]:
    """What was and was not searched, in sentences."""
    sizes = (
        ", ".join(map(str, sorted(request.sizes)))
        if len(request.sizes) <= 8
        else f"{len(request.sizes)} divisors of {request.global_batch}"
    )
    return (
        "searched: each op's split over one or two mesh axes, parameters, gradients and optimizer state each "
        "replicated or split (ZeRO-0 to 3, tensor, sequence and expert parallel), no or full remat a stage",
        f"searched: microbatch sizes among {sizes}, from where activations take about half of memory while moving "
        "helps; numbers of stages while more of them help, and inner mesh axes that came near the best before",
        "searched: for each mesh and number of stages the shardings that suit a stage with an equal share of the model "
        "and as many microbatches in flight as the first stage",
        "searched: contiguous stages on devices of one group"
        + (", or on one group each of two" if len(request.cluster.groups) == 2 else "")
        + f"; {describe_schedules(request.schedule)}",
        f"not searched: matrix products with over {HEAVY:.0%} of the FLOPs whole on an axis that can split them, "
        f"splits of parameters with under {SMALL:.1%} of all elements",
        "not searched: three mesh axes, selective remat, offload, context parallel attention kernels, padding of dims "
        "that do not divide",
        "the bound counts stages of the meshes that were solved, with bubbles and transfers left out",
    )

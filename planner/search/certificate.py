"""Lower bounds on the step time, for the certificate of a plan: step ≥ bound, gap = 1 − bound / step.

`stage_bound_s` bounds the closed form S1 of `planner.search.stages` over all plans of one problem, with memory, sends
and the order of stages left out. With t_o(b) the seconds of one microbatch of block b under option o (a stage of two
groups takes at least the time of either; the one with more work overall is counted):

* C1  bottleneck ≥ max over prices π ≥ 0 of  Σ_b min_o (π·devices_o)·t_o(b) / (π·devices):  a plan whose stages take at
  most T offers at most T × devices of device time, priced; a linear program over π
* C2  bottleneck ≥ max_b min_o t_o(b)
* C3  fill ≥ Σ_b min_o t_o(b)
* C4  once ≥ max_b min_o once_o(b)
* C5  step ≥ C3 + (m − 1)·max(C1, C2) + C4

`plan_stages` gives a tighter bound with its result; this one is independent of it and costs a millisecond. A space of
several problems (microbatch sizes, schedules, rematerialisation) has the least of their bounds: `certify`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from planner.search.problem import Floats
from planner.search.solver import LinearProgram, ProgramStatus, minimise
from planner.search.stages import StageProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What is proven about a plan.

    Attributes:
        time_s: step time of the plan.
        bound_s: no plan of the declared space is faster, by the same cost model.
        free_bound_s: no use of the cluster is faster: arithmetic over the total achievable rate.
    """

    time_s: float
    bound_s: float
    free_bound_s: float

    @property
    def gap(self) -> float:
        """Share of the step time that a better plan of the space could at most save."""
        return gap(self.bound_s, self.time_s)

    @property
    def free_gap(self) -> float:
        """Share of the step time that anything at all could at most save."""
        return gap(self.free_bound_s, self.time_s)


def gap(bound_s: float, time_s: float) -> float:
    """1 − bound / time, from 0 (proven best) to 1 (nothing known)."""
    if time_s <= 0 or math.isinf(time_s):
        return 0.0 if bound_s >= time_s else 1.0
    return min(max(1.0 - bound_s / time_s, 0.0), 1.0)


def certify(time_s: float, bounds_s: Iterable[float], free_bound_s: float = 0.0) -> Certificate:
    """Certificate of a plan in a space of several problems.

    Args:
        bounds_s: a lower bound for each problem of the space, the plan's own among them.

    Raises:
        ValueError: a bound exceeds every plan although the plan is one: some cost was counted twice or not at all.
    """
    bound_s = min(bounds_s, default=0.0)
    free_bound_s = min(free_bound_s, bound_s)
    if bound_s > time_s * (1 + 1e-6):
        raise ValueError(f"the lower bound {bound_s!r} s of the space exceeds the plan's {time_s!r} s")
    return Certificate(time_s=time_s, bound_s=min(bound_s, time_s), free_bound_s=free_bound_s)


def free_bound_s(flops: float, devices: Iterable[int], achievable_flops_per_s: Iterable[float]) -> float:
    """Arithmetic of one step over the total achievable rate of the cluster, in seconds.

    Args:
        flops: of one step, forward and backward, without rematerialisation.
        devices, achievable_flops_per_s: number and rate of the devices of each pool.
    """
    rate = sum(count * each for count, each in zip(devices, achievable_flops_per_s, strict=True))
    return flops / rate if rate > 0 else math.inf


def stage_bound_s(problem: StageProblem) -> float:
    """C5 for one problem; inf where some block runs under no option that the devices allow."""
    have = np.array(problem.devices)
    usable = [option for option in problem.options if (np.array(option.devices) <= have).all()]
    classes, counts = np.unique(np.array(problem.blocks), return_counts=True)
    if not usable:
        return math.inf
    longest = np.stack([np.max([g.share * (g.forward_s + g.backward_s)[classes] for g in o.groups], 0) for o in usable])
    once = np.stack([np.max([g.once_s[classes] for g in o.groups], axis=0) for o in usable])
    once = np.where(np.isfinite(longest), once, np.inf)
    if not np.isfinite(longest.min(axis=0)).all():
        return math.inf
    additive = np.stack([_busiest_group(option.groups, classes, counts) for option in usable])
    additive = np.where(np.isfinite(longest), additive, np.inf)
    used = np.array([option.devices for option in usable], dtype=np.float64)
    bottleneck_s = max(_device_time_s(additive, counts, used, have), float(longest.min(axis=0).max()))
    fill_s = float(additive.min(axis=0) @ counts)
    return fill_s + (problem.microbatches - 1) * bottleneck_s + float(once.min(axis=0).max())


def _busiest_group(groups: tuple, classes: np.ndarray, counts: np.ndarray) -> Floats:
    """[classes] seconds of the group with most work: their sum over a range never exceeds the stage's time."""
    each = [group.share * (group.forward_s + group.backward_s)[classes] for group in groups]
    return max(each, key=lambda costs: float(np.where(np.isfinite(costs), costs, 0.0) @ counts))


def _device_time_s(cost_s: Floats, counts: np.ndarray, used: Floats, have: np.ndarray) -> float:
    """C1: maximise Σ counts·z with z_c ≤ (π·used_o)·cost_oc for every option o, and π·have = 1.

    Args:
        cost_s: [O, classes].  used: [O, P].
    """
    pools = np.flatnonzero(have > 0)
    options, classes = np.nonzero(np.isfinite(cost_s))
    scale_s = max(float(cost_s[options, classes].max(initial=0.0)), 1e-300)
    each = len(options)
    prices = -(used[options][:, pools] * cost_s[options, classes][:, None]) / scale_s  # z − π·used·cost ≤ 0
    row = np.arange(each)
    price_column = len(counts) + np.arange(len(pools))
    result = minimise(
        LinearProgram(
            objective=np.concatenate([-counts.astype(np.float64), np.zeros(len(pools))]),
            lower=np.zeros(len(counts) + len(pools)),
            upper=np.full(len(counts) + len(pools), np.inf),
            integer=np.zeros(len(counts) + len(pools), dtype=bool),
            rows=np.concatenate([row, np.repeat(row, len(pools)), np.full(len(pools), each)]),
            columns=np.concatenate([classes, np.tile(price_column, each), price_column]),
            values=np.concatenate([np.ones(each), prices.ravel(), have[pools] / have.max()]),
            row_lower=np.append(np.full(each, -np.inf), 1.0),
            row_upper=np.append(np.zeros(each), 1.0),
        )
    )
    if result.status is not ProgramStatus.optimal:
        return 0.0
    pi = np.maximum(
        result.values[len(counts) :], 0.0
    )  # recomputed, so that rounding in the solver cannot lift the bound
    finite = np.isfinite(cost_s)
    priced = np.where(finite, (used[:, pools] @ pi)[:, None] * np.where(finite, cost_s, 0.0), np.inf)
    return float(priced.min(axis=0) @ counts) / float(pi @ have[pools])

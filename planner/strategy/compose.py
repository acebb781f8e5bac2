"""From times of blocks to the time of a step.

    S1  stage        F, B = sums over its blocks, B with adding up gradients (read, read and written);
                     T = F + B + microbatch_s + stall_s + send_exposed * 2 v c
    S2  pipeline     m t + (sum T - max T) / v + (p - 1) * 2 c                              1F1B, interleaved v times
                     t = max T; with v = 1 at least (sum of T_k + 2 (p - 1 - s) c) / (p - s) over k >= s, any s
                     E2 of `costmodel.pipeline` for GPipe; other schedules are simulated (`scheduled`)
    S3  gradients    reduction of a stage's gradients over dp and cp, less what of it runs beside the last backward
    S4  step         (S2 + max over stages of (S3 + update) + step_s) * slowdown * (1 + skew log2 nodes)

S2 is exact for equal stages and free sends; interleaved with fewer than p microbatches is simulated. The bound on t is
a microbatch's way from stage s to the last and back, of which 1F1B has p - s under way at once. `c` is one send of an
activation (a gradient is as large).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.device_kind import DeviceKind
from costmodel.pipeline import gpipe_time_s
from costmodel.stack import Stack
from planner.strategy.blocks import Blocks
from planner.strategy.layer_table import MeasuredStage
from planner.strategy.links import AxisLinks
from planner.strategy.pricing import ClassTimes
from planner.strategy.scheduled import has_formula, homes, pipeline_s, stage_blocks
from planner.strategy.stages import cut_bytes
from planner.strategy.state import gradient_itemsize, states_of
from planner.strategy.strategy import Strategy
from planner.strategy.work import Work


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage: of a microbatch, and once a step.

    Attributes:
        reduce_s: of its gradients, of which exposed_s is not hidden.
    """

    forward_s: float
    backward_s: float
    comm_s: float
    send_s: float
    gather_s: float
    reduce_s: float
    exposed_s: float
    update_s: float

    @property
    def microbatch_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step and its parts, which add up to it."""

    step_s: float
    compute_s: float
    communication_s: float
    sends_s: float
    bubble_s: float
    gradients_s: float
    optimizer_s: float
    overhead_s: float
    stages: tuple[StageTime, ...]


def step_time(
    work: Work,
    parts: Sequence[Blocks],
    times: Sequence[dict[str, ClassTimes]],
    paces: Sequence[tuple[DeviceKind, float]],
    links: Sequence[AxisLinks],
    strategy: Strategy,
    stack: Stack,
    microbatches: int,
    measured: Sequence[MeasuredStage | None] | None = None,
) -> StepTime:
    """A step of `microbatches` microbatches.

    Args:
        parts: blocks by class of each part that the schedule runs.
        times, paces, links: of each stage; a pace is a device kind, and how many times as long its devices take.
        measured: of each stage, where its layers were: in place of `times`.
    """
    stages = stage_blocks(parts, strategy)
    crossing = cut_bytes(work, parts)
    send_s = _send_s(crossing, links, strategy, stack)
    several, m = len(stages) > 1, microbatches
    holders, single = list[int](), frozenset[int]()
    if several:  # one stage shares nothing
        holders = [sum(not leaf.readers.isdisjoint(blocks.positions) for blocks in stages) for leaf in work.leaves]
    rows, known = [], dict[tuple[object, ...], StageTime]()
    for s, blocks in enumerate(stages):
        own = measured[s] if measured is not None else None
        if several:
            single = frozenset(
                i
                for i, leaf in enumerate(work.leaves)
                if not leaf.layered and not leaf.readers.isdisjoint(blocks.positions)
            )
        alike = (blocks.key, single, paces[s][0].name, paces[s][1], links[s].like, own)
        if alike not in known:
            known[alike] = _stage_time(
                work, blocks, holders, times[s], paces[s], links[s], strategy, stack, send_s, m, own
            )
        rows.append(known[alike])
    p, v = len(rows), strategy.interleave
    exposed = stack.send_exposed * 2.0 * v * send_s if p > 1 else 0.0
    stall_s = _stall_s(crossing, links[0], strategy, stack)
    beside_s = stack.microbatch_s + stall_s
    each = [row.microbatch_s + beside_s + exposed for row in rows]
    if strategy.schedule == "gpipe":
        ahead = [row.forward_s + (beside_s + exposed) / 2 for row in rows]
        behind = [row.backward_s + (beside_s + exposed) / 2 for row in rows]
        whole_s = float(gpipe_time_s(ahead, behind, m, send_s if p > 1 else 0.0))
    elif not has_formula(strategy, m):
        exposed = 0.0  # sends are simulated
        whole_s = _simulated_s(parts, rows, times, strategy, beside_s, m, send_s)
    else:
        around = [row.microbatch_s + beside_s for row in rows]
        ways = [(sum(around[s:]) + 2.0 * (p - 1 - s) * send_s) / (p - s) for s in range(p)] if v == 1 else []
        whole_s = m * max([*each, *ways]) + (sum(each) - max(each)) / v + (p - 1) * 2.0 * send_s
    slowest = max(range(p), key=lambda s: each[s])
    ends = [row.exposed_s + row.update_s for row in rows]
    last = max(range(p), key=lambda s: ends[s])
    plain_s = whole_s + ends[last] + stack.step_s
    step_s = plain_s * stack.slowdown * (1.0 + stack.skew * math.log2(max(1, links[0].nodes)))
    busy = rows[slowest]
    compute_s = m * (busy.microbatch_s - busy.comm_s - busy.gather_s)
    communication_s = m * (busy.comm_s + busy.gather_s)
    sends_s = m * (exposed + stall_s) + (p - 1) * 2.0 * send_s
    overhead_s = m * stack.microbatch_s + stack.step_s + (step_s - plain_s)
    told_s = compute_s + communication_s + sends_s + overhead_s + ends[last]
    return StepTime(
        step_s=step_s,
        compute_s=compute_s,
        communication_s=communication_s,
        sends_s=sends_s,
        bubble_s=max(0.0, step_s - told_s),
        gradients_s=rows[last].exposed_s,
        optimizer_s=rows[last].update_s,
        overhead_s=overhead_s,
        stages=tuple(rows),
    )


def _simulated_s(
    parts: Sequence[Blocks],
    rows: Sequence[StageTime],
    times: Sequence[dict[str, ClassTimes]],
    strategy: Strategy,
    beside_s: float,
    microbatches: int,
    send_s: float,
) -> float:
    """The pipeline under a schedule without a formula. What a stage does beside its blocks (gathers of parameters,
    adding up gradients), and what each microbatch takes beside (`beside_s`), are spread evenly over its parts."""
    home = homes(strategy)
    forward = [
        sum(n * times[home[k]][key].forward_s for key, n in blocks.classes.items()) for k, blocks in enumerate(parts)
    ]
    backward = [
        sum(n * times[home[k]][key].backward_s for key, n in blocks.classes.items()) for k, blocks in enumerate(parts)
    ]
    weight = [
        sum(n * times[home[k]][key].weight_s for key, n in blocks.classes.items()) for k, blocks in enumerate(parts)
    ]
    for stage, row in enumerate(rows):
        own = [part for part in range(len(parts)) if home[part] == stage]
        ahead = row.forward_s + beside_s / 2.0 - sum(forward[part] for part in own)
        behind = row.backward_s + beside_s / 2.0 - sum(backward[part] for part in own)
        for part in own:
            forward[part] += ahead / len(own)
            backward[part] += behind / len(own)
    return pipeline_s(strategy, microbatches, forward, backward, weight, send_s)


def _send_s(size_bytes: float, stages: Sequence[AxisLinks], strategy: Strategy, stack: Stack) -> float:
    """A microbatch's activations (or their cotangents), `size_bytes` whole, from a device of a stage to its peer of the
    next."""
    if strategy.pp == 1:
        return 0.0
    link = stages[0].by_axis["pp"]
    size = size_bytes / strategy.cp / strategy.ep
    joined_s = 0.0
    if strategy.scatter_gather and not strategy.sp:  # the parts are put together again
        joined_s = max(links.seconds("all_gather", "tp", size) for links in stages)
    if strategy.sp or strategy.scatter_gather:
        size /= strategy.tp
    starts = stack.start_s is not None or stack.inter_start_s is not None  # planned transfers have none (`transfers`)
    return (link.start_s if starts else 0.0) + link.latency_s + size / link.bandwidth_bytes_per_s + joined_s


def _stall_s(size_bytes: float, links: AxisLinks, strategy: Strategy, stack: Stack) -> float:
    """What a microbatch waits for short messages that were lost (`Stack.stall_s`)."""
    split = strategy.tp > 1 and (strategy.sp or strategy.scatter_gather)
    if strategy.pp == 1 or not split or links.by_axis["pp"].tree_latency_s is None:  # None: inside nodes
        return 0.0
    return stack.stall_s if size_bytes / strategy.cp / strategy.ep / strategy.tp < stack.stall_bytes else 0.0


def _stage_time(
    work: Work,
    blocks: Blocks,
    holders: Sequence[int],
    times: dict[str, ClassTimes],
    pace: tuple[DeviceKind, float],
    links: AxisLinks,
    strategy: Strategy,
    stack: Stack,
    send_s: float,
    microbatches: int,
    measured: MeasuredStage | None = None,
) -> StageTime:
    forward = sum(n * times[key].forward_s for key, n in blocks.classes.items())
    backward = sum(n * times[key].backward_s for key, n in blocks.classes.items())
    comm = sum(n * sum(times[key].comm_s.values()) for key, n in blocks.classes.items())
    if measured is not None:  # what collectives take of what was measured is not told apart
        forward, backward, comm = measured.forward_s, measured.backward_s, sum(measured.modelled_s)
    states = states_of(work.held(blocks), strategy, stack)
    kind, slowdown = pace
    bandwidth = kind.memory_bandwidth_bytes_per_s * kind.bandwidth_efficiency / slowdown
    update_s = sum(one.moved for one in states) / bandwidth
    if (microbatches > 1 or strategy.pp > 1) and measured is None:  # added to those before
        kept = sum(one.kept_gradients if strategy.zero >= 2 else one.gradients for one in states)
        backward += 3.0 * kept / bandwidth
    if measured is not None and measured.update_s is not None:
        everything = sum(one.moved_whole for one in states)
        update_s = measured.update_s * (sum(one.moved for one in states) / everything if everything else 1.0)
    gather_s = renewed_s = reduce_s = 0.0  # each microbatch; new values of parameters, and gradients, once a step
    for one in states:
        reduce_s += one.rest_s(links)
        if strategy.zero == 3:
            gather_s += 2.0 * one.split_s(links, "all_gather", one.weights, one.gathers)
            gather_s += one.split_s(links, "reduce_scatter", one.gradients, one.scatters)
            continue
        renewed_s += one.split_s(links, "all_gather", one.trained, one.starts)
        scatter_s = one.split_s(links, "reduce_scatter", one.gradients, one.starts)
        gather_s += scatter_s if strategy.zero == 2 else 0.0
        reduce_s += scatter_s if strategy.zero == 1 else 0.0
    if strategy.zero == 3:
        hidden = stack.parameter_overlap * (forward + backward - comm) if strategy.overlap_parameters else 0.0
        gather_s = max(0.0, gather_s - hidden)
        forward, backward = forward + gather_s / 3.0, backward + 2.0 * gather_s / 3.0
    elif strategy.zero == 2:
        if strategy.overlap_gradients:
            gather_s = max(0.0, gather_s - stack.gradient_overlap * (backward - comm / 2.0))
        backward += gather_s
    behind = _window_s(backward, strategy, microbatches) * stack.gradient_overlap if strategy.overlap_gradients else 0.0
    before = forward * stack.parameter_overlap if strategy.overlap_parameters else 0.0
    exposed_s = max(0.0, reduce_s - behind) + max(0.0, renewed_s - before)
    meeting_s = _meeting_s(work, blocks, holders, links, strategy) if strategy.pp > 1 else 0.0
    whole_s = reduce_s + renewed_s + meeting_s
    return StageTime(forward, backward, comm, send_s, gather_s, whole_s, exposed_s + meeting_s, update_s)


def _window_s(backward_s: float, strategy: Strategy, microbatches: int) -> float:
    """Backward time during which a stage's gradients are already there, part by part.

    A part's gradients are whole after its last microbatch. Interleaved, the last p microbatches run part after part, so
    that all parts but the last to finish have the passes of those that follow to hide behind; in one part, about one
    microbatch's backward is left.
    """
    p, v = min(strategy.pp, microbatches), strategy.interleave
    return backward_s * (p * (v - 1) / v + 1.0 / v) if v > 1 else backward_s


def _meeting_s(work: Work, blocks: Blocks, holders: Sequence[int], links: AxisLinks, strategy: Strategy) -> float:
    """Gradients of parameters that several stages hold meet in an all-reduce of these.

    Args:
        holders: of each of the model's leaves, how many stages hold it.
    """
    link = links.by_axis["pp"]
    moved = 0.0
    for leaf, count in zip(work.leaves, holders, strict=True):
        if count > 1 and not leaf.layered and leaf.facts.trained and leaf.readers & blocks.positions:
            moved += 2.0 * (count - 1) / count * leaf.elements * gradient_itemsize(leaf, strategy)
    return link.start_s + moved / link.bandwidth_bytes_per_s if moved else 0.0

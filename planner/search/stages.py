"""Records of the stage DP: blocks in order, device pools, what a stage may be, and the one function that scores a plan.

The closed form that the DP minimises, for m microbatches and stages s in pipeline order:

* S1  step = Σ_s t_s + Σ_cuts send + (m − 1)·max_s t_s + max_s once_s
* S2  t_s = max over the stage's groups of share × Σ_blocks (forward + backward)
* S3  memory of a group: Σ state + n·Σ saved + max transient ≤ its limit, with n = ⌈in_flight × share⌉ and in_flight =
  min(stages to the end, this one counted; m) for 1F1B, m for GPipe, and as the problem says for any other schedule
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np

from planner.search.problem import Floats, SearchStatus

ScheduleKind = Literal["1f1b", "gpipe"]

Span = tuple[int, int, int]
"""(first block, block after the last, option) of one stage."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupCosts:
    """What one group of devices of a stage pays for a block, by block class (C classes).

    Attributes:
        forward_s, backward_s: [C] seconds of one microbatch; inf where the group cannot run the class.
        once_s: [C] seconds once a step (gradient reduction, optimizer).
        state_bytes: [C] bytes a device that stay over the step, whole numbers.
        saved_bytes: [C] bytes a device for each microbatch in flight, whole numbers.
        transient_bytes: [C] bytes a device while the block runs, whole numbers; a stage pays its largest.
        memory_limit_bytes: usable bytes of one device.
        share_numerator, share_denominator: part of the microbatches that the group runs.
    """

    forward_s: Floats
    backward_s: Floats
    once_s: Floats
    state_bytes: Floats
    saved_bytes: Floats
    transient_bytes: Floats
    memory_limit_bytes: float
    share_numerator: int = 1
    share_denominator: int = 1

    @property
    def share(self) -> float:
        """Part of the microbatches that the group runs."""
        return self.share_numerator / self.share_denominator

    def in_flight(self, stage_in_flight: int) -> int:
        """Most microbatches that the group holds when the stage holds `stage_in_flight`, dealt out evenly."""
        return -(-stage_in_flight * self.share_numerator // self.share_denominator)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageOption:
    """One way to build a stage: mesh shapes and a point of the strategy front, as its costs.

    Attributes:
        devices: number of devices that it takes from each pool.
        groups: its groups, usually one.
    """

    name: str
    devices: tuple[int, ...]
    groups: tuple[GroupCosts, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageProblem:
    """Blocks to cut into stages.

    Attributes:
        blocks: class of each block, in order (L blocks).
        devices: number of devices in each pool.
        options: O ways to build a stage.
        boundary_bytes: [L − 1] bytes of one microbatch that cross between block i and i + 1.
        send_latency_s, send_s_per_byte: [O, O] of a cut between a stage of the row's option and a following stage of
            the column's, forward and backward together.
        max_stages, min_stages: most and least stages of a plan.
        held: microbatches in flight on the last stage, the one before it, …, where another schedule than `schedule`
            holds others; never falling.

    Raises:
        ValueError: shapes do not fit together or a cost is negative.
    """

    blocks: tuple[int, ...]
    devices: tuple[int, ...]
    options: tuple[StageOption, ...]
    boundary_bytes: Floats
    send_latency_s: Floats
    send_s_per_byte: Floats
    microbatches: int
    schedule: ScheduleKind
    max_stages: int
    min_stages: int = 1
    held: tuple[int, ...] | None = None

    def __post_init__(self):
        count, options = len(self.blocks), len(self.options)
        _require(count > 0 and options > 0, f"{count} blocks and {options} options: at least one of each is needed")
        _require(self.microbatches >= 1 and self.max_stages >= 1, "microbatches and max_stages start at 1")
        _require(
            1 <= self.min_stages <= self.max_stages,
            f"min_stages is {self.min_stages}, it goes from 1 to max_stages, {self.max_stages}",
        )
        _require(
            self.held is None
            or (len(self.held) == self.max_stages and all(a <= b for a, b in pairwise((1, *self.held)))),
            f"held has {self.max_stages} counts of at least 1 that never fall, got {self.held}",
        )
        _require(
            self.boundary_bytes.shape == (count - 1,),
            f"{count} blocks have {count - 1} boundaries, got boundary_bytes of shape {self.boundary_bytes.shape}",
        )
        for name, matrix in (("send_latency_s", self.send_latency_s), ("send_s_per_byte", self.send_s_per_byte)):
            _require(
                matrix.shape == (options, options) and bool((matrix >= 0).all()),
                f"{name} of shape {matrix.shape} is no {options} × {options} matrix of costs",
            )
        classes = max(self.blocks) + 1
        for option in self.options:
            _require(
                len(option.devices) == len(self.devices) and len(option.groups) > 0 and sum(option.devices) > 0,
                f"option {option.name!r} takes devices {option.devices} of pools {self.devices}",
            )
            for group in option.groups:
                for name in ("forward_s", "backward_s", "once_s", "state_bytes", "saved_bytes", "transient_bytes"):
                    costs = getattr(group, name)
                    _require(
                        len(costs) >= classes and bool((costs >= 0).all()),
                        f"option {option.name!r}: {name} needs {classes} costs of at least 0, got {costs}",
                    )

    def in_flight(self, stages_to_end: int) -> int:
        """Microbatches that a stage holds at most, `stages_to_end` counting itself (S3)."""
        if self.held is not None:
            return self.held[stages_to_end - 1]
        return min(stages_to_end, self.microbatches) if self.schedule == "1f1b" else self.microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a plan.

    Attributes:
        first, end: blocks first … end − 1.
        option: index of its option.
        time_s: seconds of one microbatch, forward and backward (S2).
        memory_bytes: of one device of each group.
        excess_bytes: by how much the worst group exceeds its limit; negative where all fit.
    """

    first: int
    end: int
    option: int
    in_flight: int
    time_s: float
    once_s: float
    memory_bytes: tuple[float, ...]
    excess_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Stages in pipeline order, and the terms of S1.

    Attributes:
        fill_s: Σ t_s.  sends_s: Σ send.  bottleneck_s: max t_s.  once_s: max once_s.
    """

    stages: tuple[Stage, ...]
    step_time_s: float
    fill_s: float
    sends_s: float
    bottleneck_s: float
    once_s: float

    @property
    def spans(self) -> tuple[Span, ...]:
        """(first, end, option) of each stage: what identifies the plan."""
        return tuple((stage.first, stage.end, stage.option) for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Whether every stage can run and fits into memory."""
        return math.isfinite(self.step_time_s) and all(stage.excess_bytes <= 0 for stage in self.stages)

    @property
    def worst(self) -> Stage:
        """The stage that exceeds its memory by most, or comes nearest to it."""
        return max(self.stages, key=lambda stage: stage.excess_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """Outcome of `plan_stages`.

    Attributes:
        plans: best first; the first is the answer, the others are good plans that differ in stages or options.
        bound_s: proven lower bound on S1 over every plan; inf where none exists.
        nearest: where memory is infeasible, a plan whose worst stage (`nearest.worst`) misses its limit by least.
        effort: counts of work, for reports.
    """

    plans: tuple[StagePlan, ...]
    bound_s: float
    status: SearchStatus
    nearest: StagePlan | None = None
    limit_fired: bool = False
    effort: dict[str, int] = field(default_factory=dict)


def score_stages(problem: StageProblem, spans: tuple[Span, ...]) -> StagePlan:
    """Score one plan by S1 to S3: the only place where costs are added up for a plan that leaves this package."""
    stages = []
    sends_s = 0.0
    for place, (first, end, option) in enumerate(spans):
        classes = np.array(problem.blocks[first:end])
        groups = problem.options[option].groups
        in_flight = problem.in_flight(len(spans) - place)
        memory = [
            float(
                group.state_bytes[classes].sum()
                + group.in_flight(in_flight) * group.saved_bytes[classes].sum()
                + group.transient_bytes[classes].max()
            )
            for group in groups
        ]
        stages.append(
            Stage(
                first=first,
                end=end,
                option=option,
                in_flight=in_flight,
                time_s=max(g.share * float(g.forward_s[classes].sum() + g.backward_s[classes].sum()) for g in groups),
                once_s=max(float(g.once_s[classes].sum()) for g in groups),
                memory_bytes=tuple(memory),
                excess_bytes=max(used - g.memory_limit_bytes for used, g in zip(memory, groups, strict=True)),
            )
        )
        if place + 1 < len(spans):
            following = spans[place + 1][2]
            sends_s += float(
                problem.send_latency_s[option, following]
                + problem.send_s_per_byte[option, following] * problem.boundary_bytes[end - 1]
            )
    fill_s = sum(stage.time_s for stage in stages)
    bottleneck_s = max(stage.time_s for stage in stages)
    once_s = max(stage.once_s for stage in stages)
    steady_s = (problem.microbatches - 1) * bottleneck_s if problem.microbatches > 1 else 0.0
    return StagePlan(
        stages=tuple(stages),
        step_time_s=fill_s + sends_s + steady_s + once_s,
        fill_s=fill_s,
        sends_s=sends_s,
        bottleneck_s=bottleneck_s,
        once_s=once_s,
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)

"""A model captured for estimates: its work under each tensor-parallel layout, at any microbatch size.

Graphs are captured at two microbatch sizes, so that the model has the same options at both: primes that have no divisor
in common with an axis of the layout, times the devices of expert parallelism. What every strategy moves and computes
lies on the line through them (`work.interpolated`), so that thousands of strategies cost no further capture. What was
measured lies on no line: with a profile's products, ops or blocks a graph is captured at each size that is asked for,
and so is that of a function that runs other ops at other sizes.

Replicas of data parallelism have nothing to do with each other but where examples meet: where tokens of all of them
are sorted together, say. The planner's own programs then compute on all replicas' examples together, and a layout has
an axis of replicas too.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from costmodel.collectives import AxisLink
from costmodel.estimator import Pricing
from costmodel.graph import ModelGraph
from planner.assemble import main_dtype
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.frontend.microbatch import MicrobatchCheck, check_microbatches
from planner.frontend.task import TrainingTask
from planner.search.facts import Facts
from planner.space.decision import Decision
from planner.space.model_space import ModelSpace
from planner.space.setting import Remat, Setting
from planner.strategy.attention import attention_cores
from planner.strategy.class_work import work_of
from planner.strategy.one_program import StepBytes, step_bytes
from planner.strategy.replica import Replicas
from planner.strategy.restricted import Role, choose
from planner.strategy.sized import same_ops, sized_graph
from planner.strategy.strategy import Attention, Strategy
from planner.strategy.work import Work, interpolated

_SMALLEST = 7  # of the sizes that graphs are captured at

_LINK = AxisLink(size=2, bandwidth_bytes_per_s=200e9, latency_s=2e-6, start_s=20e-6)
"""Of every axis while work is captured, whatever the cluster: it only ranks ways to lay out what a strategy leaves
open, so that a model's work is the same on all clusters. What moves is priced by the cluster's own links."""
_Layout = tuple[str, int, int, int, int, bool, Attention, str | None, bool]
"""Kind, data, cp, tp, ep, sp, attention, matmul dtype, parted; data is 1 where replicas have nothing to do with each
other, and parted whether each of those that do holds a part of the parameters (ZeRO-3)."""


@dataclass
class CapturedModel:
    """A task's graphs and the work of every layout that was asked for."""

    task: TrainingTask
    _graphs: dict[int, ModelGraph] = field(default_factory=dict)
    _samples: dict[tuple[_Layout, int], Work] = field(default_factory=dict)
    _work: dict[tuple[_Layout, int], Work] = field(default_factory=dict)
    _decisions: dict[tuple[_Layout, int], Decision] = field(default_factory=dict)
    _lines: dict[tuple[int, int], bool] = field(default_factory=dict)
    _sized: dict[tuple[int, int, int], ModelGraph] = field(default_factory=dict)
    _replicas: dict[tuple[_Layout, int], Replicas] = field(default_factory=dict)

    def graph(self, microbatch: int) -> ModelGraph:
        if microbatch not in self._graphs:
            known = next(iter(self._graphs.values()), None)
            self._graphs[microbatch] = model_graph(
                capture(self.task, microbatch), known.joins if known is not None else None
            )
        return self._graphs[microbatch]

    @cached_property
    def microbatches(self) -> MicrobatchCheck:
        """Whether the task's batch may be split into microbatches."""
        return check_microbatches(self.task)

    @cached_property
    def has_attention(self) -> bool:
        """Whether some block has attention cores."""
        return any(attention_cores(cls) for cls in self.graph(_SMALLEST).classes.values())

    @cached_property
    def meeting(self) -> MicrobatchCheck:
        """Whether examples meet elsewhere than in the loss, whatever the task says of its microbatches: then replicas
        exchange values."""
        task = self.task
        if not task.independent_microbatches:
            return self.microbatches
        return check_microbatches(replace(task, independent_microbatches=False))

    @cached_property
    def example_flops(self) -> float:
        """FLOPs of one example's forward and backward pass, nothing recomputed."""
        return self.graph(_SMALLEST).step_flops / _SMALLEST

    @cached_property
    def main_dtype(self) -> str:
        """The dtype that most matrix-product FLOPs run in."""
        return main_dtype(self.graph(_SMALLEST))

    def work(self, facts: Facts, strategy: Strategy, *, together: bool = False) -> Work:
        """What one microbatch of the strategy's size is on one device of a replica, of a kind and as measured there.

        Args:
            together: whether replicas compute on all of their examples together (`meeting`).
        """
        layout = _layout(facts, strategy, together)
        at = (layout, strategy.microbatch * _shared(layout))
        examples = at[1]
        if at not in self._work and (facts.measured_any or not self._lies_on_lines(layout)):
            self._work[at], _ = self._captured(facts, layout, examples, None)
        elif at not in self._work:
            samples = []
            choice: tuple[int, ...] | None = None
            for size in _sizes(layout):
                if (layout, size) not in self._samples:
                    self._samples[layout, size], choice = self._captured(facts, layout, size, choice)
                samples.append(self._samples[layout, size])
            self._work[at] = interpolated(samples[0], samples[1], examples)
        return self._work[at]

    def _lies_on_lines(self, layout: _Layout) -> bool:
        """Whether the model runs the same ops at both sizes that lines are drawn through: a function may look at how
        many examples it gets."""
        sizes = _sizes(layout)
        if sizes not in self._lines:
            one, other = map(self.graph, sizes)
            self._lines[sizes] = same_ops(one, other)
        return self._lines[sizes]

    def step_bytes(self, facts: Facts, strategy: Strategy, *, accumulates: bool, together: bool = False) -> StepBytes:
        """Bytes on a device of a strategy whose step is one program (`is_one_program`).

        Args:
            accumulates: whether there are several microbatches, whose gradients add up.
            together: as in `work`.
        """
        layout = _layout(facts, strategy, together)
        examples = strategy.microbatch * _shared(layout)
        remat: Remat = "full" if strategy.remat == "full" else "none"
        data, zero = strategy.dp // strategy.ep // layout[1], strategy.zero
        self.work(facts, strategy, together=together)
        exact = (layout, examples) in self._decisions
        one, other = (examples, examples) if exact else _sizes(layout)
        if (layout, one) not in self._replicas:
            self._replicas[layout, one] = Replicas(self._decisions[layout, one], _roles(layout))
        replicas = self._replicas[layout, one]
        state = replicas.state(data=data, zero=zero, accumulates=accumulates)
        return step_bytes(
            state, replicas.passes(self._sized_graph(one, other, examples), data=data, zero=zero, remat=remat)
        )

    def _sized_graph(self, one: int, other: int, examples: int) -> ModelGraph:
        """The graph of so many examples, on the line through two that were captured."""
        sizes = (one, other, examples)
        if sizes not in self._sized:
            self._sized[sizes] = sized_graph(self.graph(one), self.graph(other), examples)
        return self._sized[sizes]

    def _captured(
        self, facts: Facts, layout: _Layout, size: int, choice: tuple[int, ...] | None
    ) -> tuple[Work, tuple[int, ...]]:
        _, data, cp, tp, ep, sp, attention, matmul_dtype, parted = layout
        mesh, roles = tuple(n for n in (data, cp, tp, ep) if n > 1), _roles(layout)
        pricing = Pricing(
            kind=facts.kind,
            mesh=mesh,
            axis_names=roles,
            links=tuple(replace(_LINK, size=n) for n in mesh),
            op_times=facts.op_times_of(self.graph(size)),
            products=facts.products,
        )
        scales = facts.block_scales_of(self.graph(size))
        space = ModelSpace(graph=self.graph(size), pricing=pricing, scales=scales)
        if choice is None:
            choice = choose(space, roles, sp=sp, parted=parted)
        decisions = {remat: _decision(space, choice, remat) for remat in ("none", "full")}
        self._decisions[layout, size] = decisions["none"]
        return replace(work_of(decisions, attention, matmul_dtype, replicas=data), parted=parted), choice


def _layout(facts: Facts, strategy: Strategy, together: bool) -> _Layout:
    sp, data = strategy.sp and strategy.tp > 1, strategy.dp // strategy.ep if together else 1
    parted = data > 1 and strategy.zero == 3
    return (
        facts.kind.name, data, strategy.cp, strategy.tp, strategy.ep, sp, strategy.attention, strategy.matmul_dtype,
        parted,
    )  # fmt: skip


def _shared(layout: _Layout) -> int:
    """Microbatches of one replica that a layout's devices compute on together."""
    return layout[1] * layout[4]


def _roles(layout: _Layout) -> tuple[Role, ...]:
    """Of the axes of a layout's mesh."""
    _, data, cp, tp, ep, *_ = layout
    named: tuple[tuple[int, Role], ...] = ((data, "batch"), (cp, "context"), (tp, "model"), (ep, "expert"))
    return tuple(role for n, role in named if n > 1)


def _sizes(layout: _Layout) -> tuple[int, int]:
    """Examples of the two microbatches that a layout is captured at."""
    one, other = _primes(math.prod(layout[1:5]))
    return one * _shared(layout), other * _shared(layout)


@lru_cache(maxsize=256)
def _primes(degrees: int) -> tuple[int, int]:
    """The two least primes from `_SMALLEST` on that divide none of the degrees."""
    found, at = list[int](), _SMALLEST
    while len(found) < 2:
        if degrees % at and all(at % d for d in range(2, math.isqrt(at) + 1)):
            found.append(at)
        at += 1
    return found[0], found[1]


def _decision(space: ModelSpace, choice: tuple[int, ...], remat: Remat) -> Decision:
    setting = Setting(microbatches=2, stages=1, in_flight=1, remat=remat)
    return Decision(space=space, setting=setting, choice=choice, time_s=0.0, bound_s=0.0)

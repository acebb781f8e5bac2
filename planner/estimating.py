"""What a given configuration would take: `estimate`, from the planner's own space, costs and memory.

A model is captured once, and a cluster's links are worked out once; every further strategy is arithmetic on arrays.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from costmodel.cluster import Cluster
from costmodel.compute import roofline_provenance, utilisation_peak
from costmodel.documents import convert
from costmodel.errors import InputError
from costmodel.provenance import Provenance, weakest
from costmodel.stack import Stack, check_stack
from planner import arguments as given
from planner.api import load_task
from planner.fitted_constants import kind_findings
from planner.frontend.task import TrainingTask
from planner.planfile.schema import Finding
from planner.profile_facts import facts_of_kinds, with_measured_size
from planner.search.facts import Facts
from planner.strategy.captured import CapturedModel
from planner.strategy.compose import StepTime
from planner.strategy.constants import STACK, constant_value, split_constants
from planner.strategy.estimator import StrategyEstimator
from planner.strategy.layer_table import LayerTable
from planner.strategy.memory import StageMemory, worst
from planner.strategy.strategy import AnyStrategy, Strategy, parse_strategy
from profiles.block_table import layer_model, layer_models
from profiles.constants import COMPILED, Constants, find_stack
from profiles.schema import Profile

MemoryModel = Literal["program", "blocks"]


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a step's seconds; they add up to it. Those of the slowest stage, then what is waited for."""

    compute_s: float
    communication_s: float
    sends_s: float
    bubble_s: float
    gradients_s: float
    optimizer_s: float
    overhead_s: float


class MemoryEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of every stage's devices; iterates over the stages."""

    stages: tuple[StageMemory, ...]

    @property
    def peak_bytes(self) -> int:
        """Of the device that needs most of what it has."""
        return worst(self.stages).peak_bytes

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.stages)

    @property
    def worst_stage(self) -> int:
        return self.stages.index(worst(self.stages))

    def __iter__(self) -> Iterator[StageMemory]:
        return iter(self.stages)

    def __getitem__(self, stage: int) -> StageMemory:
        return self.stages[stage]

    def __len__(self) -> int:
        return len(self.stages)


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a strategy is predicted to give.

    Attributes:
        error_bar: least and most step time, seconds, that nine of ten such configurations stay within.
        mfu: model FLOPs over the devices' peak in the main dtype, nothing recomputed counted.
        provenance: where compute, communication and memory figures come from.
        memory_model: how memory was counted. ``program``: as in a plan, whose compiler sees the whole step and computes
            again what it need not keep. ``blocks``: all that each block keeps, of pipelines, and of what no plan
            decides. Where programs keep less, figures of both kinds are not to be compared.
        findings: what the strategy asks for and does not get (MP169, MP176 to MP179, MP198, MP199).
    """

    strategy: Strategy
    global_batch: int
    microbatches: int
    devices: int
    step_time_s: float
    error_bar: tuple[float, float]
    breakdown: Breakdown
    memory: MemoryEstimate
    examples_per_s: float
    tokens_per_s_per_device: float | None
    mfu: float
    stack: str
    provenance: dict[str, str]
    memory_model: MemoryModel
    findings: tuple[Finding, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether every stage fits its devices."""
        return self.memory.fits


@dataclass(kw_only=True)
class Estimator:
    """Estimates of one model on one cluster; `planner.estimate` for many strategies.

    Args:
        model: a task, or what `planner.load_task` takes.
        cluster: a cluster or its file.
        profile: measured costs or their file. One with a table of layer times (`meshplan profile import`) gives whole
            stages' times in place of kernels' prices.
        layer_model: whose layer times they are, where the profile has those of several models.
        stack: name of a shipped software stack, a document of constants, or a `Stack`; None for the planner's own
            programs.
    """

    model: TrainingTask | str | Path
    cluster: Cluster | str | Path
    profile: Profile | str | Path | None = None
    stack: Stack | str | None = None
    sequence: int | None = None
    layer_model: str | None = None
    _task: TrainingTask = field(init=False)
    _captured: CapturedModel = field(init=False)
    _facts: Mapping[str, Facts] = field(init=False)
    _layers: LayerTable | None = field(init=False)
    _target: Cluster = field(init=False)
    _estimators: dict[tuple[Stack, Constants | None], tuple[StrategyEstimator, tuple[Finding, ...]]] = field(
        default_factory=dict, init=False
    )
    _peaks: dict[int, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        call = 'planner.estimate(task, "cluster.toml", "dp=8,tp=4,microbatch=1", global_batch=512)'
        model = given.require_model(self.model, call)
        self._target = given.require_cluster(self.cluster, call)
        measured = given.require_profile(self.profile, call)
        sequence = given.optional_count("sequence", self.sequence)
        if not isinstance(model, str):
            given.require_no_sequence(sequence)
        self._task = load_task(model, sequence) if isinstance(model, str) else model
        self._captured = CapturedModel(self._task)
        self._facts = {}
        if measured is not None:
            kinds = facts_of_kinds(self._target, measured)
            self._facts = with_measured_size(kinds, measured, self._captured.graph, (1,)).facts
        self._layers = _layer_table(self._target, measured, given.require_text("layer_model", self.layer_model))

    def __call__(self, strategy: AnyStrategy, global_batch: int) -> Estimate:
        """The estimate of one strategy.

        Raises:
            InputError: MP180 to MP187, for a strategy that cannot be or that the cluster, the model or the batch does
                not admit.
        """
        batch = given.require_count("global_batch", global_batch, most=given.LARGEST_BATCH)
        text, stack = split_constants(strategy)
        wanted = parse_strategy(text)
        estimator, of_constants = self._estimator(stack) if stack else self._plain
        step = estimator.step(wanted, batch)
        memory = MemoryEstimate(stages=estimator.memory(wanted, batch))
        balance = estimator.balance_findings(wanted, batch, step)
        found = (*of_constants, *balance, *estimator.findings(wanted, stack))
        return self._record(wanted, batch, estimator, step, memory, found)

    def many(self, strategies: Iterable[AnyStrategy], global_batch: int) -> list[Estimate]:
        """Estimates of many strategies, in order.

        Raises:
            InputError: as for one, with which of them it is.
        """
        found = []
        for at, strategy in enumerate(strategies):
            try:
                found.append(self(strategy, global_batch))
            except InputError as error:
                shown = repr(strategy) if isinstance(strategy, str) else f"number {at + 1}"
                raise InputError(error.code, f"strategy {shown}: {error.message}", error.hint) from None
        return found

    @cached_property
    def _plain(self) -> tuple[StrategyEstimator, tuple[Finding, ...]]:
        """Of strategies without constants of their own."""
        return self._estimator({})

    def _estimator(self, changes: Mapping[str, Any]) -> tuple[StrategyEstimator, tuple[Finding, ...]]:
        """The estimator under the given stack with some constants changed, and what of its document changes nothing."""
        stack, constants = self._stack(changes)
        if (stack, constants) not in self._estimators:
            cluster = constants.on(self._target) if constants is not None else self._target
            estimator = StrategyEstimator(
                model=self._captured, cluster=cluster, stack=stack, facts=self._facts, layers=self._layers
            )
            self._estimators[stack, constants] = estimator, kind_findings(constants, self._target)
        return self._estimators[stack, constants]

    def _stack(self, changes: Mapping[str, Any]) -> tuple[Stack, Constants | None]:
        changes = dict(changes)
        stack, constants = given_stack(changes.pop(STACK, self.stack))
        if changes:
            numbers = {key: constant_value(key, value) for key, value in changes.items()}
            stack = convert({**msgspec.to_builtins(stack), **numbers}, Stack, code="MP182", root="the stack")
        check_stack(stack, "the stack")
        return stack, constants

    def _record(
        self,
        strategy: Strategy,
        batch: int,
        estimator: StrategyEstimator,
        step: StepTime,
        memory: MemoryEstimate,
        findings: tuple[Finding, ...],
    ) -> Estimate:
        stack, time_s = estimator.stack, step.step_s
        tokens = self._task.tokens_per_example
        wide = math.exp(stack.error)
        return Estimate(
            strategy=strategy,
            global_batch=batch,
            microbatches=estimator.microbatches(strategy, batch),
            devices=strategy.devices,
            step_time_s=time_s,
            error_bar=(time_s / wide, time_s * wide),
            breakdown=Breakdown(
                compute_s=step.compute_s,
                communication_s=step.communication_s,
                sends_s=step.sends_s,
                bubble_s=step.bubble_s,
                gradients_s=step.gradients_s,
                optimizer_s=step.optimizer_s,
                overhead_s=step.overhead_s,
            ),
            memory=memory,
            examples_per_s=batch / time_s,
            tokens_per_s_per_device=batch * tokens / time_s / strategy.devices if tokens else None,
            mfu=self._captured.example_flops * batch / (time_s * self._peak_flops_per_s(strategy.devices)),
            stack=stack.name,
            provenance=_provenance(estimator, strategy, self._captured.main_dtype),
            memory_model="program" if estimator.counts_program(strategy) else "blocks",
            findings=findings,
        )

    def _peak_flops_per_s(self, devices: int) -> float:
        """What utilisation is a share of, of the cluster's first devices together."""
        if devices not in self._peaks:
            dtype, counts = self._captured.main_dtype, Counter(d.group for d in self._target.devices[:devices])
            rates = {}
            for group in self._target.groups:
                facts = self._facts.get(group.device.name)
                rates[group.name] = utilisation_peak(dtype, group.device, group.device if facts is None else facts.kind)
            self._peaks[devices] = sum(count * rates[name] for name, count in counts.items())
        return self._peaks[devices]


def estimate(
    model: TrainingTask | str | Path,
    cluster: Cluster | str | Path,
    strategy: AnyStrategy,
    *,
    global_batch: int,
    profile: Profile | str | Path | None = None,
    stack: Stack | str | None = None,
    sequence: int | None = None,
    layer_model: str | None = None,
) -> Estimate:
    """What a configuration would give: step time, memory, throughput.

    For more than one strategy make an `Estimator`, which captures the model once.

    Args:
        model: a task, or what `planner.load_task` takes.
        strategy: text such as ``dp=8,tp=8,pp=12,microbatch=1,schedule=1f1b,remat=full,zero=1,sp=on``, a mapping of the
            same, or a `Strategy`. Constants of the software stack may be among them: ``stack=NAME``, ``step_s=0.1``.
        profile, stack, layer_model: as in `Estimator`.

    Raises:
        InputError: something given cannot be used; the message says what.
    """
    estimator = Estimator(
        model=model, cluster=cluster, profile=profile, stack=stack, sequence=sequence, layer_model=layer_model
    )
    return estimator(strategy, global_batch)


def _layer_table(cluster: Cluster, profile: Profile | None, model: str | None) -> LayerTable | None:
    """The layer times of a profile, if it has any."""
    if profile is None:
        if model is not None:
            message = f"layer_model={model!r} without a profile"
            raise InputError("MP163", message, "give the profile that has the layer times")
        return None
    if model is None and not layer_models(profile):
        return None
    named = layer_model(profile, model)
    kinds = [g.device for g in cluster.groups]
    own = next(k for k in kinds if k.name == profile.device_kind or profile.jax_device_kind in k.jax_names)
    return LayerTable(profile=profile, model=named, kind=own.name)


def given_stack(named: object) -> tuple[Stack, Constants | None]:
    """A stack, and the constants of device kinds that come with it: of a shipped name, a document's file, a `Stack`, or
    None for the planner's own programs.

    Raises:
        InputError: MP187 there is no such stack or document; MP163 for anything else.
    """
    if named is None:
        return COMPILED, None
    if isinstance(named, Stack):
        return named, None
    if isinstance(named, str | Path):
        return find_stack(str(named))
    message = f"stack is {type(named).__name__}"
    raise InputError("MP163", message, "give a shipped stack's name, a document of constants, or a Stack")


def _provenance(estimator: StrategyEstimator, strategy: Strategy, dtype: str) -> dict[str, str]:
    stack = estimator.stack
    compute: list[Provenance] = []
    kinds = estimator.kinds(strategy)
    tables = estimator.measured(estimator.work(kinds[0], strategy), strategy)
    for kind, table in zip(kinds, tables or [None] * len(kinds), strict=True):
        if table is not None:
            compute.append(table.provenance)
            continue
        facts = estimator.facts.get(kind.name)
        share = kind.provenance_of("matmul_efficiency")
        timed = facts is not None and bool(facts.op_times)
        rated = share if share == "fitted" else roofline_provenance(dtype, kind, is_matmul=True)
        compute.append("measured" if timed else rated)
    links: list[Provenance] = []
    for group in estimator.cluster.groups:
        links += [tier.achieved_provenance if stack.tier_share is None else "fitted" for tier in group.intra]
        if group.inter is not None:
            links.append(group.inter.achieved_provenance if stack.inter_share is None else "fitted")
    found: dict[str, Provenance] = {"compute": weakest(*compute)}
    if strategy.devices > 1 and links:
        found["communication"] = weakest(*links)
    step = weakest(*found.values())
    return {**found, "memory": "assumed" if stack.reserve_bytes is None else "fitted", "step_time": step}


__all__ = ["Breakdown", "Estimate", "Estimator", "MemoryEstimate", "estimate"]

"""Constants fitted to a user's own measured runs: `calibrate`.

K1  fit         a few constants of device kinds and of the software stack, robustly and with the base's as priors
                (`profiles.calibrate`); those alone on which the runs' predictions depend
K2  held out    each part of the runs is predicted with constants fitted to the others; repeats of a configuration
                are in one part
K3  kept        where K2 is no better than the base, the base's constants are kept
K4  error bar   the interval that holds 90% of the errors of K2 (of the base's own where it is kept)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from costmodel.cluster import Cluster
from costmodel.device_kind import DeviceKind
from costmodel.errors import InputError
from costmodel.stack import Stack
from planner import arguments as given
from planner.api import load_task
from planner.estimating import given_stack
from planner.fitted_constants import before, candidates, fitted_kinds, kind_findings, put, with_kinds
from planner.frontend.task import TrainingTask
from planner.measured_runs import MeasuredRun, given_runs, read_runs
from planner.planfile.schema import Finding
from planner.run_times import require_seconds
from planner.strategy.captured import CapturedModel
from planner.strategy.estimator import StrategyEstimator
from profiles.calibrate import FEWEST, Calibration, Constant, half_width
from profiles.calibrate import calibrate as fit
from profiles.constants import Constants

Floats = NDArray[np.float64]

FEWEST_CONFIGURATIONS = 3
"""Different configurations below which nothing can be held out."""

PARTS = 12
"""Most parts that runs are held out in: one run each up to that number, so that many runs stay quick."""

ROUNDS, ROUNDS_HELD_OUT = 25, 12
"""Most steps of a fit; those without a part begin at the whole fit's constants and have little way to go."""

MATTERS = 0.002
"""Share by which some run's predicted time must change when a constant moves by its spread, for it to be fitted."""


@dataclass(frozen=True, kw_only=True)
class FittedConstant:
    """One constant.

    Attributes:
        owner: ``stack`` or a device kind.
        before: the base's; None for the links' own.
        told: factor within which runs and prior place it.
    """

    owner: str
    name: str
    before: float | None
    after: float
    told: float


@dataclass(frozen=True, kw_only=True)
class RunError:
    """One run and its predicted seconds: by the base, by the fit, and by a fit to the others."""

    run: MeasuredRun
    before_s: float
    after_s: float
    held_out_s: float


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """What came of a calibration.

    Attributes:
        constants: the document to write: one stack with its error bar, and what the cluster's kinds achieve.
        improved: whether held-out runs are predicted better than by the base; if not, `constants` has the base's.
        fitted: as fitted, also where they were not kept.
        parts: in which runs were held out.
        findings: what was given and changes nothing (MP178).
    """

    constants: Constants
    source: str
    base: str
    improved: bool
    fitted: tuple[FittedConstant, ...]
    runs: tuple[RunError, ...]
    parts: int
    findings: tuple[Finding, ...] = ()

    @property
    def stack(self) -> Stack:
        return self.constants.stacks[0]

    def mean_error(self, which: str) -> float:
        """Mean of abs(predicted / measured - 1) over runs; `which` is ``before``, ``after`` or ``held_out``."""
        return float(np.mean(np.abs(self.errors(which))))

    def errors(self, which: str) -> Floats:
        """predicted / measured - 1 of each run."""
        return np.array([getattr(one, f"{which}_s") / one.run.step_time_s - 1.0 for one in self.runs])


@dataclass
class _Predictor:
    """Predicted seconds of runs under a stack and device kinds; models are captured once."""

    runs: Sequence[MeasuredRun]
    cluster: Cluster
    tasks: Mapping[tuple[str | None, int | None], TrainingTask]
    models: dict[int, CapturedModel] = field(default_factory=dict)

    def __call__(self, stack: Stack, kinds: Mapping[str, DeviceKind]) -> Floats:
        cluster = with_kinds(self.cluster, kinds)
        estimators: dict[int, StrategyEstimator] = {}
        found = []
        for run in self.runs:
            task = self.tasks[run.model, run.sequence]
            model = self.models.setdefault(id(task), CapturedModel(task))
            if id(task) not in estimators:
                estimators[id(task)] = StrategyEstimator(model=model, cluster=cluster, stack=stack)
            try:
                found.append(estimators[id(task)].step(run.strategy, run.global_batch).step_s)
            except InputError as error:
                raise InputError(error.code, f"{run.place}: {error.message}", error.hint) from None
        return np.array(found)


def calibrate(
    runs: str | Path | Sequence[Mapping[str, Any]],
    cluster: Cluster | str | Path,
    model: TrainingTask | str | Path | None = None,
    *,
    stack: Stack | str | None = None,
    sequence: int | None = None,
    name: str = "calibrated",
    progress: Callable[[str, int, int], None] | None = None,
) -> Calibrated:
    """Fits constants to measured runs, so that estimates on this cluster with this software come near to them.

    Args:
        runs: a CSV file (`planner.measured_runs`), or mappings with the same keys.
        model: of the runs that name none.
        stack: the base whose constants are the priors: a shipped stack's name, a document's file, or a `Stack`; None
            for the planner's own programs.
        sequence: sequence length of `model`.
        name: of the fitted stack.
        progress: told which part of the runs is held out, how many are done, and of how many.

    Returns:
        Constants to give to `estimate(..., stack=...)` once written by `profiles.constants.write_constants`, with
        each run's measured and predicted time.

    Raises:
        InputError: MP186 fewer than five runs or three configurations, or a time that is no positive number or far from
            any that constants explain (`planner.run_times`); MP188 the runs cannot be read; MP180 to MP185 a strategy
            that cannot be, or that the cluster, the model or the batch does not admit, with the line of the run.
    """
    call = 'planner.calibrate("runs.csv", "cluster.toml", "gpt2")'
    target = given.require_cluster(cluster, call)
    named = None if model is None else given.require_model(model, call)
    base, constants = given_stack(stack)
    given.require_text("name", name)
    if isinstance(runs, str | Path):
        found, source = read_runs(runs), Path(runs).name
    else:
        found, source = given_runs(runs), "measured runs"
    _require_enough(found, source)
    predict = _Predictor(found, target, _tasks(found, named, sequence))
    own = {group.device.name: group.device for group in target.groups}
    kinds = {key: constants.of(kind) for key, kind in own.items()} if constants is not None else own
    result = _calibrated(predict, base, kinds, own, source, name, progress)
    unused = _unused_arguments(found, model, sequence)
    return replace(result, findings=(*unused, *kind_findings(constants, target)))


def _calibrated(
    predict: _Predictor,
    base: Stack,
    kinds: Mapping[str, DeviceKind],
    own: Mapping[str, DeviceKind],
    source: str,
    name: str,
    progress: Callable[[str, int, int], None] | None,
) -> Calibrated:
    runs = predict.runs
    measured = np.array([run.step_time_s for run in runs])
    before_s = predict(base, kinds)
    require_seconds(runs, before_s, base.name)
    per_step = max(run.global_batch // (run.strategy.dp * run.strategy.microbatch) for run in runs)
    matters = _mattering(predict, base, kinds, candidates(base, kinds, float(measured.min()), per_step))
    whole = _fit(predict, base, kinds, matters, measured)
    after_s = measured * np.exp(whole.residuals)
    held_out_s, parts = np.empty(len(runs)), _parts(runs)
    for at, part in enumerate(parts):
        if progress is not None:
            progress("holding runs out", at, len(parts))
        others = [i for i in range(len(runs)) if i not in part]
        rest = replace(predict, runs=[runs[i] for i in others])
        values = _fit(rest, base, kinds, matters, measured[others], whole.values, fewest=1).values
        held_out_s[part] = replace(predict, runs=[runs[i] for i in part])(*put(values, base, kinds))
    log_before, log_held_out = np.log(before_s / measured), np.log(held_out_s / measured)
    improved = bool(matters) and float(np.abs(log_held_out).mean()) < float(np.abs(log_before).mean())
    count = f"{len(runs)} runs of {source}"
    fitted_on = count if improved else f"{base.name}, no better when fitted to {count}"
    stack, used = put(whole.values, base, kinds) if improved else (base, dict(kinds))
    error = half_width(log_held_out if improved else log_before)
    stack = msgspec.structs.replace(stack, name=name, error=error, fitted_on=fitted_on)
    fitted = []
    for key, value in whole.values.items():
        owner, field_name = key.rsplit(".", 1)
        told = whole.told[key]
        fitted.append(
            FittedConstant(owner=owner, name=field_name, before=before(key, base, kinds), after=value, told=told)
        )
    return Calibrated(
        constants=Constants(stacks=(stack,), fitted=fitted_kinds(used, own, fitted_on)),
        source=source,
        base=base.name,
        improved=improved,
        fitted=tuple(fitted),
        runs=tuple(
            RunError(run=run, before_s=b, after_s=a, held_out_s=h)
            for run, b, a, h in zip(runs, before_s.tolist(), after_s.tolist(), held_out_s.tolist(), strict=True)
        ),
        parts=len(parts),
    )


def _fit(
    predict: _Predictor,
    base: Stack,
    kinds: Mapping[str, DeviceKind],
    constants: Sequence[Constant],
    measured_s: Floats,
    start: Mapping[str, float] | None = None,
    *,
    fewest: int = FEWEST,
) -> Calibration:
    if not constants:
        return Calibration({}, np.log(predict(base, kinds) / measured_s))
    return fit(constants, lambda values: predict(*put(values, base, kinds)), measured_s, fewest=fewest, start=start)


def _mattering(
    predict: _Predictor, base: Stack, kinds: Mapping[str, DeviceKind], constants: Sequence[Constant]
) -> list[Constant]:
    """Constants on which some run depends; the others would stay at their priors."""
    usual = {one.name: one.prior for one in constants}
    log_usual = np.log(predict(*put(usual, base, kinds)))
    found = []
    for one in constants:
        moved = [min(one.high, one.prior * one.spread), one.prior / one.spread]
        changes = [np.log(predict(*put({**usual, one.name: value}, base, kinds))) - log_usual for value in moved]
        if float(np.abs(changes).max()) >= MATTERS:
            found.append(one)
    return found


def _parts(runs: Sequence[MeasuredRun]) -> list[list[int]]:
    """Indices of the runs of each part that is held out."""
    configurations = list(dict.fromkeys(run.configuration for run in runs))
    count = min(PARTS, len(configurations))
    part_of = {configuration: at % count for at, configuration in enumerate(configurations)}
    return [[i for i, run in enumerate(runs) if part_of[run.configuration] == part] for part in range(count)]


def _require_enough(runs: Sequence[MeasuredRun], source: str) -> None:
    hint = "measure more configurations: other degrees, microbatches, device counts"
    if len(runs) < FEWEST:
        raise InputError("MP186", f"{source} has {len(runs)} measured runs, calibration needs {FEWEST}", hint)
    different = len({run.configuration for run in runs})
    if different < FEWEST_CONFIGURATIONS:
        message = f"{source} has {different} different configurations, calibration needs {FEWEST_CONFIGURATIONS}"
        raise InputError("MP186", message, hint)


def _tasks(
    runs: Sequence[MeasuredRun], model: TrainingTask | str | None, sequence: int | None
) -> dict[tuple[str | None, int | None], TrainingTask]:
    """The task of each model and sequence length that runs name."""
    found: dict[tuple[str | None, int | None], TrainingTask] = {}
    for run in runs:
        key = (run.model, run.sequence)
        if key in found:
            continue
        named = run.model if run.model is not None else model
        if named is None:
            message = f"{run.place}: the run names no model, and none is given"
            raise InputError("MP188", message, "give --model, or a column 'model'")
        length = run.sequence if run.sequence is not None else sequence
        if not isinstance(named, str):
            if run.sequence is not None:
                message = f"{run.place}: seq is given, and the model is a task of its own sequence length"
                raise InputError("MP188", message, "name the model by its text, or leave seq out")
            found[key] = named
            continue
        try:
            found[key] = load_task(named, length)
        except InputError as error:
            raise InputError(error.code, f"{run.place}: {error.message}", error.hint) from None
    return found


def _unused_arguments(runs: Sequence[MeasuredRun], model: object, sequence: int | None) -> list[Finding]:
    """MP178 of a model or sequence length that every run names its own of."""
    unused = []
    if model is not None and all(run.model is not None for run in runs):
        unused.append("the model that is given changes nothing: every run names its own")
    if sequence is not None and all(run.sequence is not None for run in runs):
        unused.append(f"sequence length {sequence} changes nothing: every run names its own")
    return [Finding(code="MP178", severity="note", message=message) for message in unused]


__all__ = ["Calibrated", "FittedConstant", "RunError", "calibrate"]

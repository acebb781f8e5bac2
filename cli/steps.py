"""Running steps, timing them, and comparing two runs of the same steps."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from costmodel.errors import MismatchError
from costmodel.units import format_seconds
from planner.frontend.capture import Capture
from planner.frontend.task import TrainingTask
from planner.lowering.verify import Verification
from planner.models import example_batch, init_params, init_state
from planner.planfile.schema import Plan


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences that rounding explains: of a loss, and of the change of all parameters over the run
    (a ratio of norms; Adam amplifies the rounding of small gradients)."""

    loss: float
    update: float


SINGLE, SHORT = Tolerance(1e-4, 1e-2), Tolerance(1e-2, 0.2)
"""Where all is float32 or wider, and where some values have 16 bits or fewer: those round at the third digit. Of small
bfloat16 models under Adam, plans whose float32 twins agree to 2e-4 have come out up to 0.104 apart after three steps; a
gradient that is wrong moves the parameters another way, by 1 or so."""


def tolerance_of(captured: Capture) -> Tolerance:
    """What rounding explains in a model, by the shortest of its floating-point values."""
    tensors = [t for cls in captured.classes.values() for t in cls.tensors.values()]
    short = any(t.itemsize < 4 and "float" in t.dtype for t in (*captured.values.values(), *tensors))
    return SHORT if short else SINGLE


@dataclass(frozen=True, kw_only=True)
class Run:
    """Losses and times of the steps, the parameters before and after."""

    losses: tuple[float, ...]
    times_s: tuple[float, ...]
    before: Any
    after: Any

    @property
    def steady_s(self) -> float | None:
        """Median time of the steps after the first, which compiles; None for one step."""
        return statistics.median(self.times_s[1:]) if len(self.times_s) > 1 else None

    def to_plain(self, plan: Plan) -> dict[str, Any]:
        """For JSON."""
        return {
            "steps": [
                {"step": at, "loss": _finite(loss), "time_s": time_s}
                for at, (loss, time_s) in enumerate(zip(self.losses, self.times_s, strict=True))
            ],
            "predicted_step_time_s": plan.prediction.step_time_s,
            "measured_step_time_s": self.steady_s,
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How far two runs are apart, relative to the second, and how far they may be."""

    loss: float
    update: float
    tolerance: Tolerance

    @property
    def text(self) -> str:
        """One line."""
        return f"largest difference of a loss {self.loss:.2e}, of the parameters' change {self.update:.2e} (relative)"

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        limits = {"loss_tolerance": self.tolerance.loss, "update_tolerance": self.tolerance.update}
        return {"loss_difference": _finite(self.loss), "update_difference": _finite(self.update), **limits}

    def require_equal(self) -> None:
        """Raises MismatchError MP413 for a difference that rounding does not explain."""
        limit = self.tolerance
        if self.loss <= limit.loss and self.update <= limit.update:
            return
        message = f"the plan does not compute what one device does: {self.text}, limits are {limit.loss:g} and "
        message += f"{limit.update:g}"
        raise MismatchError("MP413", message, "this is a defect of meshplan, or the model overflows: please report it")


def run_steps(runner: Any, task: TrainingTask, plan: Plan, steps: int, seed: int, say: Callable[[str], None]) -> Run:
    """Runs steps on random batches.

    Args:
        runner: what `compile_plan` or `reference` returns: ``init``, ``step``, ``params``.
        task: the training task.
        plan: its global batch is the size of each batch.
        steps: at least 1.
        seed: of parameters and batches; step i draws its batch from ``seed + i``.
        say: told a line a step.
    """
    params = init_params(task, seed)
    state = runner.init(params) if task.state is None else runner.init(params, init_state(task))
    losses, times_s = [], []
    key = jax.random.key(seed)
    for step in range(steps):
        batch = example_batch(task, plan.global_batch, seed + step)
        extra = {"rng": jax.random.fold_in(key, step)} if task.rng else {}
        start_s = time.perf_counter()
        state, metrics = runner.step(state, batch, **extra)
        jax.block_until_ready((state, metrics))
        times_s.append(time.perf_counter() - start_s)
        losses.append(float(metrics["loss"]))
        say(f"step {step}  loss {losses[-1]:.6g}  {format_seconds(times_s[-1])}{'  (compiles)' if not step else ''}")
    return Run(losses=tuple(losses), times_s=tuple(times_s), before=params, after=runner.params(state))


def step_time_text(run: Run, plan: Plan, comparable: bool) -> str:
    """Predicted beside measured."""
    predicted_s = plan.prediction.step_time_s
    text = f"predicted step time {format_seconds(predicted_s)}"
    if run.steady_s is None:
        return f"{text}; run two steps or more to measure it without compilation"
    text += f", measured {format_seconds(run.steady_s)} (median of {len(run.times_s) - 1})"
    if not comparable:
        return f"{text}, on devices of which the plan's figures say nothing"
    return f"{text}: measured / predicted {run.steady_s / predicted_s:.2f}"


def verified_text(found: Verification) -> str:
    """One line about programs that are what was planned."""
    counted = sum(sum(g.written.values()) for g in found.groups)
    kept = max((abs(g.saved_deviation) for g in found.groups), default=0.0)
    return f"programs are as planned: {counted:g} collectives by kind, axis and phase, kept bytes within {kept:.1%}"


def compare_runs(run: Run, reference: Run, tolerance: Tolerance = SINGLE) -> Comparison:
    """Differences relative to `reference`; infinite where one run has a NaN and the other has not."""
    losses = [_relative(one, other) for one, other in zip(run.losses, reference.losses, strict=True)]
    pairs = list(zip(*map(jax.tree.leaves, (reference.before, run.after, reference.after)), strict=True))
    changed = difference = 0.0
    for before, ours, theirs in pairs:
        if jnp.issubdtype(theirs.dtype, jnp.floating):
            first, one, other = (jnp.asarray(jax.device_get(x), jnp.float32) for x in (before, ours, theirs))
            changed += float(jnp.sum((other - first) ** 2))
            difference += float(jnp.sum((one - other) ** 2))
    if math.isnan(difference):
        update = math.inf
    else:
        update = math.sqrt(difference / changed) if changed else (0.0 if not difference else math.inf)
    return Comparison(loss=max(losses), update=update, tolerance=tolerance)


def _relative(one: float, other: float) -> float:
    if math.isnan(one) or math.isnan(other):
        return 0.0 if math.isnan(one) and math.isnan(other) else math.inf
    return abs(one - other) / max(abs(other), 1e-6)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

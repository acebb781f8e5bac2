"""Timing to a steady state within a budget: warm up, repeat, take the median and say how far it can be trusted."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from profiles.schema import Sample

Clock = Callable[[], float]

WARM = 0.1
"""Runs are warm when two in a row differ by less than this share."""

STEADY = 0.01
"""Enough runs were made when the median's standard error is below this share of it."""


LEAST = 2
"""Fewest runs that count."""


class MeasurementError(RuntimeError):
    """A measurement that gave no number, with the cause."""


@dataclass(frozen=True)
class Budget:
    """Time that may be spent, on a clock that tests can replace."""

    end_s: float
    clock: Clock = time.perf_counter

    @staticmethod
    def of(seconds: float, clock: Clock = time.perf_counter) -> "Budget":
        """A budget that starts now."""
        return Budget(clock() + seconds, clock)

    @property
    def left_s(self) -> float:
        """Seconds left; negative when overspent."""
        return self.end_s - self.clock()


def measure(
    run: Callable[[], float],
    runs_s: float,
    *,
    clock: Clock = time.perf_counter,
    most: int = 40,
    before_s: float | None = None,
) -> Sample:
    """Runs until the median is steady or the time is spent.

    No run is begun that would take longer than the time left, but two are made in any case: a single one says nothing
    of noise.

    Args:
        run: does the thing once and returns the seconds that it took.
        runs_s: time to spend.
        most: how many runs count, without those for warming up.
        before_s: what it took when it ran last, if it ran already.

    Returns:
        Median, median absolute deviation and drift of the runs that count, and how many those are.
    """
    budget = Budget.of(runs_s, clock)
    times = _warm_up(run, budget, run() if before_s is None else before_s)
    while len(times) < LEAST or (len(times) < most and budget.left_s > times[-1] and not _steady(times)):
        times.append(run())
    return summarise(times)


def _warm_up(run: Callable[[], float], budget: Budget, before_s: float, most: int = 6) -> list[float]:
    """Runs until two in a row agree. Returns those that count for want of time for others: these two, or the last one.

    The first run allocates and wakes clocks, so that it counts only where the second takes as long.
    """
    last = before_s
    for _ in range(most):
        now = run()
        if abs(now - last) <= WARM * last:
            return [last, now] if budget.left_s <= LEAST * now else []
        last = now
        if budget.left_s <= now:
            return [last]
    return []


def _steady(times: list[float]) -> bool:
    middle = median(times)
    return len(times) >= 5 and 1.4826 * _deviation(times, middle) <= STEADY * middle * len(times) ** 0.5


def _deviation(times: list[float], middle: float) -> float:
    return median(abs(one - middle) for one in times)


def summarise(times: list[float]) -> Sample:
    """Median, spread and drift of runs in the order in which they were made."""
    middle, half = median(times), len(times) // 2
    early, late = (median(times[:half]), median(times[half:])) if half else (middle, middle)
    drift = round(late / early - 1, 4) if early > 0 else 0.0
    return Sample(time_s=middle, spread_s=_deviation(times, middle), drift=drift, samples=len(times))


def combine(sample: Sample, *, repeats: int, call_s: float, each_s: float) -> Sample:
    """From runs of a program that does something `repeats` times to seconds of one.

    Args:
        call_s: what a run takes beside its repetitions; each_s: what a repetition takes beside the thing itself.

    Raises:
        MeasurementError: nothing is left.
    """
    one_s = (sample.time_s - call_s) / repeats - each_s
    if one_s <= 0:
        took = f"{sample.time_s / repeats:.2e} s a run against {call_s / repeats + each_s:.2e} s without it"
        raise MeasurementError(f"too short to tell from the cost of calling it: {took}")
    spread_s = rounded(sample.spread_s / repeats)
    return Sample(time_s=rounded(one_s), spread_s=spread_s, drift=sample.drift, samples=sample.samples)


def rounded(value: float) -> float:
    """Six digits: no clock gives more."""
    return float(f"{value:.6g}")

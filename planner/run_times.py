"""Whether measured step times can be those of their runs: times in another unit than seconds are far from any."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import InputError
from costmodel.units import format_count, format_seconds
from planner.measured_runs import TIME, MeasuredRun

FARTHEST = 100.0
"""Times that a step may take what is predicted for it, or the prediction what it takes: the slowest runs of published
tables take about ten times, and milliseconds are a thousand."""

WAITED_S = 0.1
"""Of a step, that software may take whatever the model: a small one's step is hardly more."""


def require_seconds(runs: Sequence[MeasuredRun], predicted_s: NDArray[np.float64], base: str) -> None:
    """Raises InputError MP186 for a run whose step time no constants explain.

    Args:
        predicted_s: of each run, with the constants of the stack named `base`.
    """
    measured_s = np.array([run.step_time_s for run in runs])
    far = (measured_s > FARTHEST * (predicted_s + WAITED_S)) | (predicted_s > FARTHEST * measured_s)
    if not far.any():
        return
    at = int(np.argmax(far))
    run, ours = runs[at], float(predicted_s[at])
    slow = run.step_time_s > ours
    times = run.step_time_s / ours if slow else ours / run.step_time_s
    message = (
        f"{run.place}: {TIME} is {run.step_time_s:g}, {times:,.0f} times as {'long' if slow else 'short'} as the "
        f"{format_seconds(ours)} that the constants of {base} predict ({int(far.sum())} of "
        f"{format_count(len(runs), 'run')} are so far off)"
    )
    unit = "milliseconds are divided by 1000" if slow else "minutes are multiplied by 60"
    raise InputError("MP186", message, f"{TIME} is in seconds: {unit}; leave failed runs out")


__all__ = ["require_seconds"]

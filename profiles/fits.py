"""Constants from measurements, without JAX.

    F1  time = fixed + slope * bytes       least squares of the relative error, neither constant negative
    F2  rate = work / time                 geometric mean over large samples: least squares of the error of log(time)

Relative errors, as times range over orders of magnitude and a plan meets all of them.
"""

import math
from collections.abc import Sequence

import numpy as np

from profiles.schema import Fit, LineFit
from profiles.timing import MeasurementError, rounded

LARGE = 1 / 64
"""Samples with less than this share of the largest sample's work do not count for a rate."""

ABOVE_FLOOR = 4.0
"""Samples that take less than this many times the shortest time of an op do not count for a rate."""


def fit_line(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> LineFit:
    """The line through times by size (F1).

    Raises:
        MeasurementError: fewer than two different sizes.
    """
    size, time = np.array(sizes_bytes, dtype=np.float64), np.array(times_s, dtype=np.float64)
    if len(np.unique(size)) < 2:
        raise MeasurementError(f"a line needs two sizes, got {len(np.unique(size))}")
    columns = np.stack([1 / time, size / time], axis=1)
    scale = columns.max(axis=0)
    solution = np.linalg.lstsq(columns / scale, np.ones(len(time)), rcond=None)[0] / scale
    if solution.min() < 0:  # on the border of what is allowed one constant is 0
        alone = [float(column.sum() / (column @ column)) for column in columns.T]
        left = [float(((column * value - 1) ** 2).sum()) for column, value in zip(columns.T, alone, strict=True)]
        solution = np.array([alone[0], 0.0] if left[0] <= left[1] else [0.0, alone[1]])
    error = float(np.sqrt(np.mean((columns @ solution - 1) ** 2)))
    fixed_s, slope = (rounded(float(one)) for one in solution)
    return LineFit(fixed_s=fixed_s, s_per_byte=slope, error=round(error, 4), samples=len(time))


def fit_rate(work: Sequence[float], times_s: Sequence[float], floor_s: float = 0.0) -> Fit:
    """Work per second of large ops (F2).

    Args:
        work: FLOPs or bytes of each sample.
        floor_s: shortest time of an op. Where no sample is well above it, the largest one counts alone.

    Raises:
        MeasurementError: no samples.
    """
    if not work:
        raise MeasurementError("a rate needs a sample, got none")
    most = max(work)
    pairs = [(w, t) for w, t in zip(work, times_s, strict=True) if w >= LARGE * most and t >= ABOVE_FLOOR * floor_s]
    used = pairs or [max(zip(work, times_s, strict=True))]
    rate = math.exp(sum(math.log(w / t) for w, t in used) / len(used))
    error = math.sqrt(sum((w / rate / t - 1) ** 2 for w, t in used) / len(used))
    return Fit(value=rounded(rate), error=round(error, 4), samples=len(used))

"""Fitting a few physical constants to measured times: robustly, and with priors, so that few measurements suffice.

    minimise over x   sum over measurements  rho(log(predicted(x) / measured) / SIGMA)
                    + sum over constants     ((log x - log prior) / log spread)^2

with rho(z) = FAR^2 log(1 + (z / FAR)^2), Cauchy's loss: a measurement that is far off (a cluster in trouble) pulls the
less the further it is. Such a loss may have many minima; so half of the steps are taken under soft-L1 first, which has
one where predictions are near to linear. Constants are fitted in the logarithm, so that they stay positive and a spread
is a factor.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.sparse import issparse

from costmodel.errors import InputError

Floats = NDArray[np.float64]

SIGMA = 0.03
"""Error of a measured step time that counts as usual: repeats of one configuration differ by 0.1 to 3% in published
logs."""

FAR = 2.0
"""Errors in SIGMA from which on a measurement is taken to be in trouble rather than to tell something."""

FEWEST = 5
"""Measurements below which a fit does more harm than good (one row doubled the error on published tables)."""


@dataclass(frozen=True)
class Constant:
    """A constant to fit: its name, its likeliest value, the factor by which that may well be off, and its range."""

    name: str
    prior: float
    spread: float = 1.5
    low: float = 0.0
    high: float = float("inf")


@dataclass(frozen=True)
class Calibration:
    """Fitted constants by name, and what is left.

    Attributes:
        residuals: log(predicted / measured) of each measurement.
        told: factor within which measurements and priors together place each constant (one standard deviation); near
            the prior's own spread where the measurements say nothing of it.
        half_width: the interval ``time * exp(+-half_width)`` holds 90% of the measurements.
    """

    values: Mapping[str, float]
    residuals: Floats
    told: Mapping[str, float] = field(default_factory=dict)

    @property
    def half_width(self) -> float:
        return half_width(self.residuals)


def half_width(residuals: Sequence[float] | Floats, share: float = 0.9) -> float:
    """The least bound on |log error| that holds for a share of new measurements: the quantile of those at hand with a
    place for the one to come (split conformal prediction: rank ceil(share (n + 1)))."""
    errors = np.sort(np.abs(np.asarray(residuals, dtype=np.float64)))
    if not len(errors):
        return 0.0
    rank = int(np.ceil(share * (len(errors) + 1)))
    return float(errors[min(rank, len(errors)) - 1])


def calibrate(
    constants: Sequence[Constant],
    predict: Callable[[Mapping[str, float]], Floats],
    measured_s: Sequence[float] | Floats,
    *,
    fewest: int = FEWEST,
    evaluations: int = 40,
    depends: NDArray[np.bool_] | None = None,
    start: Mapping[str, float] | None = None,
) -> Calibration:
    """Fits constants to measured times.

    Args:
        predict: predicted seconds of every measurement under constants by name.
        measured_s: seconds.
        fewest: measurements that are needed.
        depends: [measurement, constant] whether one depends on the other, where many do not: constants without a
            measurement in common are then varied together.
        start: constants to begin at, those of a fit to nearly the same measurements; the priors where not given.

    Raises:
        InputError: MP186 too few measurements, or one that is no positive number.
    """
    measured = np.asarray(measured_s, dtype=np.float64)
    if len(measured) < fewest:
        message = f"{len(measured)} measured runs were given, calibration needs {fewest}"
        raise InputError("MP186", message, "measure more configurations: other degrees, microbatches, device counts")
    if not (np.isfinite(measured).all() and (measured > 0).all()):
        at = int(np.flatnonzero(~(np.isfinite(measured) & (measured > 0)))[0])
        raise InputError("MP186", f"measurement {at} is {measured[at]} s", "times are positive seconds")
    names = [one.name for one in constants]
    prior = np.log([one.prior for one in constants])
    spread = np.log([one.spread for one in constants])
    low = np.array([np.log(one.low) if one.low > 0 else -np.inf for one in constants])
    high = np.array([np.log(one.high) if np.isfinite(one.high) else np.inf for one in constants])

    def errors(x: Floats) -> Floats:
        return np.log(predict(dict(zip(names, np.exp(x), strict=True))) / measured)

    def cost(x: Floats, loss: Callable[[Floats], Floats]) -> Floats:
        scaled = errors(x) / SIGMA
        return np.concatenate([np.sign(scaled) * np.sqrt(loss(scaled)), (x - prior) / spread])  # priors stay squared

    first = prior if start is None else np.log([start[name] for name in names])
    begin = np.clip(first, low + 1e-9, high - 1e-9)
    pattern = None if depends is None else np.vstack([depends, np.eye(len(names), dtype=bool)]).astype(int)
    scale = np.maximum(spread, 1e-3)
    for loss in (_soft_l1, _cauchy):
        found = least_squares(
            cost,
            begin,
            bounds=(low, high),
            max_nfev=max(1, evaluations // 2),
            x_scale=scale,
            jac_sparsity=pattern,
            args=(loss,),
        )
        begin = np.clip(found.x, low + 1e-9, high - 1e-9)
    return Calibration(
        dict(zip(names, np.exp(found.x).tolist(), strict=True)),
        errors(found.x),
        dict(zip(names, _told(found.jac).tolist(), strict=True)),
    )


def _soft_l1(z: Floats) -> Floats:
    return 2.0 * (np.sqrt(1.0 + z**2) - 1.0)


def _cauchy(z: Floats) -> Floats:
    return FAR**2 * np.log1p((z / FAR) ** 2)


def _told(jacobian: Any) -> Floats:
    """Standard deviations of the constants, as factors, from the slopes of the cost's terms at the fit."""
    slopes = np.asarray(jacobian.toarray() if issparse(jacobian) else jacobian)
    return np.exp(np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes))))

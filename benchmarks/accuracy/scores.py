"""Scores of predictions: error, rank correlation, selection regret, and whether error bars hold."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.accuracy.cases import Case


@dataclass(frozen=True)
class Scores:
    """Of one table. Errors are relative to the measured time.

    Attributes:
        regret: mean over groups of at least three configurations of how much longer the one ranked first takes than the
            best measured; None without such groups.
    """

    rows: int
    mean: float
    median: float
    worst: float
    bias: float
    rank: float
    regret: float | None
    worst_regret: float | None
    regret_groups: int


def score(cases: Sequence[Case], predicted_s: Sequence[float]) -> Scores:
    """Scores of predictions of cases that have a measured time."""
    measured = np.array([case.measured_s or math.nan for case in cases])
    errors = np.array(predicted_s) / measured - 1.0
    regrets = regret(cases, predicted_s)
    return Scores(
        rows=len(cases),
        mean=float(np.abs(errors).mean()),
        median=float(np.median(np.abs(errors))),
        worst=float(errors[np.abs(errors).argmax()]),
        bias=float(errors.mean()),
        rank=spearman(measured, np.array(predicted_s)),
        regret=float(np.mean(list(regrets.values()))) if regrets else None,
        worst_regret=max(regrets.values()) if regrets else None,
        regret_groups=len(regrets),
    )


def regret(cases: Sequence[Case], predicted_s: Sequence[float]) -> Mapping[object, float]:
    """For each group of at least three configurations, measured time of the one ranked first over the best, less one.
    Repeats of one configuration count as their mean."""
    found: dict[object, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for case, time_s in zip(cases, predicted_s, strict=True):
        if case.group and case.measured_s:
            found[case.table, case.group][case.configuration].append((time_s, case.measured_s))
    out = {}
    for group, configurations in found.items():
        if len(configurations) < 3:
            continue
        rows = [(np.mean([p for p, _ in r]), np.mean([m for _, m in r])) for r in configurations.values()]
        chosen = min(rows)[1]
        out[group] = float(chosen / min(m for _, m in rows) - 1.0)
    return out


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Rank correlation; ties share their mean rank."""
    if len(one) < 2:
        return 1.0
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2.0)[inverse]

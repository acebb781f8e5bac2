"""How regular measured pipelines are in themselves, whatever predicts them.

    python -m benchmarks.accuracy.regularity FOLDER

Runs of one model under one degree of tensor parallelism differ in microbatch, stages and replicas. With nothing else at
work, their times are

    (m + p - 1) (a · microbatch · layers of a stage + c) + d · parameters of a device        1F1B, m microbatches

Three constants, none negative, are fitted to each such set of vTrain's runs alone; what then is left of a run is in no
model of the step. A set of three rows says nothing.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from benchmarks.accuracy.cases import Case
from benchmarks.accuracy.tables.megatron_a100 import vtrain

LEAST_ROWS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    sets: dict[tuple[int, int, int], list[Case]] = defaultdict(list)
    for case in vtrain(parser.parse_args().folder):
        dims = dict(case.model[1])
        sets[dims["hidden"], dims["layers"], case.strategy["tp"]].append(case)
    for (hidden, layers, tp), cases in sorted(sets.items()):
        if len(cases) < LEAST_ROWS:
            continue
        (a, c, d), errors = fit(cases, layers)
        mean, worst = 100 * np.abs(errors).mean(), 100 * errors[np.abs(errors).argmax()]
        print(
            f"{layers} layers of {hidden}, tp {tp:2}: {len(cases)} rows, mean error {mean:.1f}%, worst {worst:+.1f}%; "
            f"a {1e3 * a:.2f} ms, c {1e3 * c:.0f} ms, d {d:.3f} s"
        )
    return 0


def fit(cases: list[Case], layers: int) -> tuple[tuple[float, float, float], np.ndarray]:
    """The constants, `d` for all layers on one device of a tensor-parallel group, and each run's relative error."""
    rows, times = [], []
    for case in cases:
        dp, pp, size = (case.strategy[name] for name in ("dp", "pp", "microbatch"))
        slots = case.global_batch // dp // size + pp - 1
        rows.append((slots * size * layers / pp, slots, 1.0 / pp))
        assert case.measured_s is not None
        times.append(case.measured_s)
    measured = np.array(times)
    matrix = np.array(rows) / measured[:, None]
    constants, _ = nnls(matrix, np.ones(len(times)))
    return tuple(constants), matrix @ constants - 1.0


if __name__ == "__main__":
    sys.exit(main())

"""How many strategies a second are estimated one by one, once the layouts that they share are captured.

    make bench                                          this and the other benchmarks, installed
    python benchmarks/estimate_speed.py                 every case three times, where meshplan is installed
    python benchmarks/estimate_speed.py --case pipelines --runs 1

No strategy of a case is asked for twice; a layout is the degrees of tensor, context and expert parallelism. Limits are
those that the project promises: the exit code is 1 if the best run of a case misses one. Seconds are the processor's,
so that what else a machine does costs little. Full garbage collections, which Python makes now and then of all that a
process holds, JAX's own above all, count in the rate and are left out of the slowest estimate.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import product
from typing import Any

import planner
from costmodel.cluster import parse_cluster
from profiles.catalogue import load_catalogue

GROUP = {"name": "a100", "nodes": 64, "device": "A100-SXM4-80GB", "devices_per_node": 8}
CLUSTER = parse_cluster({"name": "a100x512", "group": [GROUP]}, load_catalogue())
BATCH = 1024
LEAST_PER_S = 1500.0
MOST_S = 0.010
LAYOUT = ("tp", "cp", "ep", "sp")

Sweep = dict[str, Any]


def one_stage() -> list[Sweep]:
    """Degrees, microbatches, ZeRO and remat of strategies whose step is one program."""
    names = ("dp", "tp", "microbatch", "zero", "remat")
    values = ((1, 2, 4, 8, 16, 32), (1, 2, 4, 8), (1, 2, 4, 8), (0, 1, 2, 3), ("none", "full"))
    return [dict(zip(names, picked, strict=True)) for picked in product(*values)]


def pipelines() -> list[Sweep]:
    """Stages, parts of them and schedules."""
    names = ("dp", "tp", "pp", "microbatch", "remat", "schedule")
    values = ((1, 2, 4), (1, 2, 4, 8), (2, 4, 8), (1, 2, 4), ("none", "selective", "full"), ("1f1b", "gpipe"))
    plain = [dict(zip(names, picked, strict=True)) for picked in product(*values)]
    return plain + [one | {"interleave": 2} for one in plain if one["schedule"] == "1f1b"]


def experts() -> list[Sweep]:
    """Experts shared out over part of the replicas."""
    names = ("dp", "ep", "tp", "microbatch", "zero", "remat")
    values = ((8, 16, 32), (1, 2, 4, 8), (1, 2), (1, 2, 4, 8), (0, 1, 2, 3), ("none", "full"))
    return [dict(zip(names, picked, strict=True)) for picked in product(*values)]


CASES = {
    "one-stage": ("gpt3-6.7b", one_stage),
    "pipelines": ("gpt3-6.7b", pipelines),
    "llama": ("llama3-8b", one_stage),
    "experts": ("mixtral-8x7b", experts),
    "encoder-decoder": ("t5-base", one_stage),
}


class Collections:
    """Seconds of full garbage collections so far."""

    def __init__(self) -> None:
        self.seconds, self._began_s = 0.0, 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2 and phase == "start":
            self._began_s = time.process_time()
        elif info["generation"] == 2:
            self.seconds += time.process_time() - self._began_s


def layouts(sweep: list[Sweep]) -> Iterator[Sweep]:
    """One strategy of each layout, of a microbatch that no case has."""
    found = {tuple(one.get(name) for name in LAYOUT): one for one in sweep}
    for one in found.values():
        yield {name: value for name, value in one.items() if name in LAYOUT} | {
            "dp": one.get("ep", 1),
            "microbatch": 16,
        }


def run(model: str, sweep: list[Sweep], collections: Collections) -> tuple[float, float, float]:
    """Strategies a second, seconds of the median one and of the slowest."""
    estimator = planner.Estimator(model=model, cluster=CLUSTER)
    for one in layouts(sweep):
        estimator(one, BATCH)
    took_s = []
    begin_s = time.process_time()
    for strategy in sweep:
        start_s, collected_s = time.process_time(), collections.seconds
        estimator(strategy, BATCH)
        took_s.append(time.process_time() - start_s - (collections.seconds - collected_s))
    return len(sweep) / (time.process_time() - begin_s), statistics.median(took_s), max(took_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--case", choices=CASES, action="append", help="repeatable; default: all")
    parser.add_argument("--runs", type=int, default=3, help="of each case, each with nothing known")
    arguments = parser.parse_args()
    collections = Collections()
    gc.callbacks.append(collections)
    missed = []
    for case in arguments.case or CASES:
        model, make = CASES[case]
        sweep = make()
        rows = [run(model, sweep, collections) for _ in range(arguments.runs)]
        rates = ", ".join(f"{rate:,.0f}" for rate, _, _ in rows)
        print(f"{case}: {len(sweep)} strategies of {model}")
        print(f"  strategies/s      {rates} (at least {LEAST_PER_S:,.0f})")
        print(f"  median            {', '.join(f'{1e3 * median_s:.2f}' for _, median_s, _ in rows)} ms")
        slowest = ", ".join(f"{1e3 * most_s:.1f}" for _, _, most_s in rows)
        print(f"  slowest           {slowest} ms (at most {1e3 * MOST_S:.0f})")
        if max(rate for rate, _, _ in rows) < LEAST_PER_S:
            missed.append(f"{case}: fewer than {LEAST_PER_S:,.0f} strategies a second")
        if min(most_s for _, _, most_s in rows) > MOST_S:
            missed.append(f"{case}: a strategy took more than {1e3 * MOST_S:.0f} ms")
    print("\n".join(f"MISSED {line}" for line in missed) or "all limits are kept")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

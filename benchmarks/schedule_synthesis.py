"""How good synthesized schedules are, and how long they take.

    python benchmarks/schedule_synthesis.py [--cases 1000] [--profiled FILE]

Prints, for random heterogeneous pipelines, the gap to the lower bound and to the best fixed schedule; the times
for large pipelines; and each row of a table of profiled times, if one is given (zero_bubble_profiled_times.csv).
"""

import argparse
import csv
import random
import time
from collections import Counter

from costmodel.schedule.portfolio import fixed_candidates
from costmodel.schedule.straight import StraightCosts
from costmodel.schedule.synthesize import synthesize
from planner.search.schedule_solver import solve_words


def random_costs(rng: random.Random, stages: int, *, spread: float = 4.0) -> StraightCosts:
    """Stage times that differ up to `spread`-fold, W of 0.3 to 2 times B, links of 0 to T/2, caps of 1 to 2 times p."""
    forward_s = tuple(rng.uniform(1.0, spread) for _ in range(stages))
    backward_s = tuple(t * rng.uniform(0.8, 1.2) for t in forward_s)
    weight_s = tuple(t * rng.uniform(0.3, 2.0) for t in backward_s)
    slowest_s = max(map(sum, zip(forward_s, backward_s, weight_s)))
    return StraightCosts(
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=weight_s,
        send_s=tuple(rng.uniform(0.0, slowest_s / 2.0) for _ in range(stages - 1)),
        memory_cap=tuple(stages * rng.uniform(1.0, 2.0) for _ in range(stages)),
        memory_delta=rng.choice([(1.0, 0.0, -1.0), (1.0, -0.5, -0.5)]),
    )


def random_cases(cases: int, spread: float) -> None:
    rng = random.Random(4)
    gaps, over_fixed, took_s, methods = [], [], [], Counter()
    for _ in range(cases):
        stages = rng.randint(2, 12)
        microbatches = rng.randint(stages, 4 * stages)
        costs = random_costs(rng, stages, spread=spread)
        begin = time.perf_counter()
        made = synthesize(costs, microbatches, solver=solve_words)
        took_s.append(time.perf_counter() - begin)
        fixed_s = min(times.makespan_s for _, _, times in fixed_candidates(costs, microbatches))
        gaps.append(made.gap)
        over_fixed.append(made.makespan_s / fixed_s)
        methods[made.method] += 1
    gaps.sort()
    over_fixed.sort()
    print(f"{cases} random pipelines of 2 to 12 stages, times spread {spread:g}-fold:")
    print(f"  gap: median {_at(gaps, 0.5):.3%}, p95 {_at(gaps, 0.95):.3%}, largest {gaps[-1]:.3%}")
    print(f"  time against the best fixed schedule: median {_at(over_fixed, 0.5):.4f}, largest {over_fixed[-1]:.4f}")
    print(
        f"  seconds each: mean {sum(took_s) / cases:.2f}, longest {max(took_s):.2f}; from {dict(methods.most_common())}"
    )


def large() -> None:
    for stages, microbatches, limit_s in ((16, 64, 2.0), (64, 512, 10.0)):
        for spread in (1.0, 4.0):
            costs = random_costs(random.Random(3), stages, spread=spread)
            begin, begin_cpu = time.perf_counter(), time.process_time()
            made = synthesize(costs, microbatches, solver=solve_words)
            took_s, cpu_s = time.perf_counter() - begin, time.process_time() - begin_cpu
            print(
                f"p={stages} m={microbatches} spread {spread:g}: {took_s:.2f} s (limit {limit_s:g} s), "
                f"{cpu_s:.2f} s of CPU, gap {made.gap:.3%} from {made.method}"
            )


def profiled(path: str) -> None:
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if not row["stage"]]
    for row in rows:
        chunks = 2 if row["set"].endswith("zbv") else 1  # times of half a stage
        stages, microbatches = int(row["pipeline_stages"]), int(row["microbatches"])
        forward_s, backward_s, weight_s = (chunks * float(row[f"T_{kind}_us"]) * 1e-6 for kind in "FBW")
        for memory in (1, 2):
            costs = StraightCosts(
                forward_s=(forward_s,) * stages,
                backward_s=(backward_s,) * stages,
                weight_s=(weight_s,) * stages,
                send_s=(float(row["T_comm_us"]) * 1e-6,) * (stages - 1),
                memory_cap=(float(memory * stages),) * stages,
                memory_delta=(1.0, -0.5, -0.5),
            )
            made = synthesize(costs, microbatches, solver=solve_words)
            print(
                f"{row['model']:>6} p={stages} m={microbatches} {memory}x: makespan {made.makespan_s:.6f} s, "
                f"gap {made.gap:.4%}, longest span {made.longest_stage_span_s:.6f} s, from {made.method}"
            )


def _at(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--profiled", help="table of profiled times")
    options = parser.parse_args()
    large()
    if options.profiled:
        profiled(options.profiled)
    for spread in (4.0, 1.0):
        random_cases(options.cases, spread)


if __name__ == "__main__":
    main()

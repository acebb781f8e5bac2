"""How many actions a second the simulator runs: 1F1B with links, whole calls from the schedule's action lists.

    python benchmarks/simulator_speed.py [--repeat 5] [--least 1e6]

Processor time is counted, the best of some repetitions, because other programs may run on the machine. With numba (the
extra `meshplan[fast]`) contention is simulated by the compiled loop, which is loaded before, as in a process that has
simulated a million actions already. The exit code is 1 if any simulation of a large schedule is slower than `--least`
actions a second; without numba, of those without contention.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

from costmodel.schedule.actions import Actor, Schedule
from costmodel.schedule.generate import one_f_one_b
from costmodel.simulate import Contention, SendTimes, StageTimes, flatten, simulate
from costmodel.simulation import compiled
from costmodel.simulation.events import run_events

SIZES = ((4, 64), (4, 8192), (16, 1024), (64, 512), (64, 4096))
LARGE = 50_000  # actions
SHARED = {
    (Actor(i, 0), Actor(i + way, 0)): (f"{i} out", f"{i + way} in") for i in range(64) for way in (-1, 1)
}  # each stage has a network card
CONTENDED = {
    "shared links": Contention(shared=SHARED),
    "slowed down": Contention(compute_slowdown=1.1),
    "both": Contention(shared=SHARED, compute_slowdown=1.1, early_reduction=0.5),
}


def measure(call: Callable[[], object], count: int, repeat: int) -> float:
    """Actions a second of processor time."""
    best_s = float("inf")
    for _ in range(repeat):
        begin_s = time.process_time()
        call()
        best_s = min(best_s, time.process_time() - begin_s)
    return count / max(best_s, 1e-9)


def problem(stages: int, microbatches: int) -> tuple[Schedule, dict, dict]:
    """Stages of unequal times, and links."""
    times = {Actor(i, 0): StageTimes(forward_s=1 + 0.01 * i, backward_s=2.0, reduce_s=1.0) for i in range(stages)}
    send = SendTimes(activation_s=0.1, gradient_s=0.1, latency_s=0.01)
    sends = {(Actor(i, 0), Actor(i + 1, 0)): send for i in range(stages - 1)}
    return one_f_one_b(stages, microbatches), times, sends


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--least", type=float, default=1e6)
    arguments = parser.parse_args()
    forms: dict[str, Callable[..., object]] = {
        "simulate": lambda schedule, program, *rest: simulate(schedule, *rest, keep_timeline=False),
        "with timeline": lambda schedule, program, *rest: simulate(schedule, *rest),
        "again": lambda schedule, program, *rest: simulate(program, *rest, keep_timeline=False),
    }
    for name, contention in CONTENDED.items():
        forms[name] = lambda schedule, program, *rest, contention=contention: simulate(
            schedule, *rest, contention=contention, keep_timeline=False
        )
    begin_s = time.perf_counter()
    interpreted = compiled.load() is run_events
    took_s = time.perf_counter() - begin_s
    print("contention: interpreted" if interpreted else f"contention: compiled, loaded in {took_s:.1f} s")
    print(f"{'stages':>6} {'microbatches':>12} {'actions':>8}  " + "  ".join(f"{name:>14}" for name in forms))
    slow = False
    for stages, microbatches in SIZES:
        schedule, times, sends = problem(stages, microbatches)
        program, count = flatten(schedule), 2 * stages * microbatches
        rates = {
            name: measure(partial(form, schedule, program, times, sends), count, arguments.repeat)
            for name, form in forms.items()
        }
        cells = "  ".join(f"{rate / 1e6:>10.2f} M/s" for rate in rates.values())
        print(f"{stages:>6} {microbatches:>12} {count:>8}  {cells}")
        counted = [rate for name, rate in rates.items() if not interpreted or name not in CONTENDED]
        slow = slow or (count >= LARGE and min(counted) < arguments.least)
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())

"""This machine's devices, end to end: profile two CPU devices, plan, run, compare predicted with measured step times.

    python benchmarks/cpu_end_to_end.py [--budget 40s] [--steps 8] [--tries 4]

Each device is one thread of this machine. Every model is profiled once (its ops and blocks included), every plan of it
is pinned: microbatch size and number of stages, so that plans differ in what they exercise. The machine should be idle:
what else runs is measured too, and a profile from a quiet minute predicts no busy one. So a run counts only if the
profiler's reference product, right before and after it, takes as long as it did in the profile, within `STEADY`; else
it is repeated, and of `--tries` runs the one in the steadiest minute counts. The steps' own times choose nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

CLUSTER = """name = "two"
[[group]]
name = "cpu"
nodes = 1
device = "cpu"
devices_per_node = 2
"""
MODELS = {
    "gpt": "gpt(hidden=384,layers=6,heads=6,vocab=4096,seq=128,dtype=float32)",
    "llama": "llama(hidden=320,layers=6,heads=5,kv_heads=5,vocab=8192,seq=192,ffn=896,dtype=float32)",
    "bert": "bert(hidden=256,layers=8,heads=4,vocab=8192,seq=128,dtype=float32)",
}
CASES = [(microbatch, stages) for microbatch in (2, 4, 8) for stages in (1, 2)]
GLOBAL_BATCH = 16
STEADY = 0.05  # of the reference product's time
FLAGS = "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--budget", default="40s", help="of each model's profile")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tries", type=int, default=4, help="runs of a plan until one is in a steady minute")
    given = parser.parse_args()
    rows: list[tuple[str, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "two.toml").write_text(CLUSTER)
        for name, model in MODELS.items():
            profile = place / f"{name}.profile.json"
            profiled = meshplan(
                "profile", "--fake-devices", "2", "--budget", given.budget, "--model", model, "--microbatch", "4",
                "--blocks", "-o", str(profile),
            )  # fmt: skip
            if profiled.returncode:
                print(f"{name}: not profiled: {profiled.stderr.strip().splitlines()[-1]}")
                return 1
            for microbatch, stages in CASES:
                label = f"{name}, microbatch {microbatch}, {stages} stage{'s' if stages > 1 else ''}"
                found = one_case(place, model, profile, microbatch, stages, given.steps, given.tries)
                if isinstance(found, str):
                    print(f"{label}: {found}")
                    continue
                predicted_s, measured_s, away = found
                rows.append((label, predicted_s, measured_s))
                error = 100 * (predicted_s / measured_s - 1)
                print(
                    f"{label}: predicted {predicted_s:.4f} s, measured {measured_s:.4f} s, {error:+.1f}% "
                    f"(machine {100 * away:+.1f}%)",
                    flush=True,
                )
    if len(rows) < 2:
        return 1
    predicted, measured = (np.array([row[i] for row in rows]) for i in (1, 2))
    errors = predicted / measured - 1
    ranks = (np.argsort(np.argsort(x)) for x in (predicted, measured))
    print(
        f"{len(rows)} plans: mean error {100 * np.abs(errors).mean():.1f}%, worst "
        f"{100 * errors[np.abs(errors).argmax()]:+.1f}%, rank correlation {np.corrcoef(*ranks)[0, 1]:.3f}"
    )
    return 0


def one_case(
    place: Path, model: str, profile: Path, microbatch: int, stages: int, steps: int, tries: int
) -> tuple[float, float, float] | str:
    """Predicted and measured seconds of a step, and how far the machine was from its pace in the profile; or why there
    are none."""
    plan = place / "case.plan.json"
    planned = meshplan(
        "plan", "--model", model, "--cluster", str(place / "two.toml"), "--global-batch", str(GLOBAL_BATCH),
        "--profile", str(profile), "--microbatch", str(microbatch), "--stages", str(stages), "--no-baselines",
        "-o", str(plan),
    )  # fmt: skip
    if planned.returncode not in (0, 1):
        return f"not planned: {planned.stderr.strip().splitlines()[-2:]}"
    usual_s = reference_s(profile)
    best: tuple[float, float, float] | None = None
    before = pace(place) / usual_s - 1
    for _ in range(tries):
        ran = meshplan("run", str(plan), "--steps", str(steps), "--no-verify", "--json")
        if ran.returncode:
            return f"did not run: {ran.stderr.strip().splitlines()[-2:]}"
        document = json.loads(ran.stdout)
        after = pace(place) / usual_s - 1
        away = max(before, after, key=abs)
        if best is None or abs(away) < abs(best[2]):
            best = document["predicted_step_time_s"], document["measured_step_time_s"], away
        if abs(away) <= STEADY:
            break
        before = after
    assert best is not None
    return best


def pace(place: Path) -> float:
    """Seconds that the profiler's reference product takes now."""
    profile = place / "pace.profile.json"
    profile.unlink(missing_ok=True)
    made = meshplan("profile", "--fake-devices", "2", "--budget", "4s", "-o", str(profile))
    if made.returncode:
        raise RuntimeError(made.stderr)
    return reference_s(profile)


def reference_s(profile: Path) -> float:
    """Median seconds of the reference product in a profile."""
    return float(np.median([pulse["time_s"] for pulse in json.loads(profile.read_text())["pulses"]]))


def meshplan(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """One command in a process of its own, on two devices of one thread each."""
    environment = {
        **os.environ,
        "XLA_FLAGS": FLAGS,
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
    code = "from cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=False
    )


if __name__ == "__main__":
    sys.exit(main())

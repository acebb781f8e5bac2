"""How long planning takes, how much memory, and how the plan compares with hand-written configurations.

    make bench                                              this and the other benchmarks, installed
    python benchmarks/planning_time.py                      both cases, where meshplan is installed (`pip install .`)
    python benchmarks/planning_time.py --case llama3-70b    one of them

Each case runs in a process of its own, so that its peak memory is its own. Limits are those that the project promises:
the exit code is 1 if one is missed.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GIB = 1 << 30
CLUSTERS = Path(__file__).parents[1] / "examples" / "clusters"
CASES: dict[str, dict[str, Any]] = {
    "llama3-70b": {"cluster": "h100x64.toml", "global_batch": 512, "seq": 4096, "limit_s": 20.0},
    "gpt3-175b": {"cluster": "a100x128_h100x64.toml", "global_batch": 1536, "seq": 2048, "limit_s": None},
}
MOST_BYTES = 4 * GIB


def plan_case(model: str) -> dict[str, Any]:
    """Plans one case in this process."""
    import planner

    case = CASES[model]
    start_s = time.perf_counter()
    plan = planner.plan(
        model, cluster=CLUSTERS / case["cluster"], global_batch=case["global_batch"], sequence=case["seq"]
    )
    took_s = time.perf_counter() - start_s
    kinds: dict[str, int] = {}
    for group in (group for stage in plan.stages for group in stage.groups):
        kinds[group.kind] = kinds.get(group.kind, 0) + len(group.devices)
    step_s = plan.prediction.step_time_s
    return {
        "model": model,
        "took_s": took_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "step_s": step_s,
        "mfu": plan.prediction.mfu,
        "gap": plan.certificate.gap,
        "stages": len(plan.stages),
        "used": kinds,
        "cluster": plan.cluster.kinds,
        "ratios": {b.name: b.step_time_s / step_s if b.step_time_s else None for b in plan.baselines},
    }


def run_case(model: str) -> dict[str, Any] | str:
    """Plans one case in a process of its own; what went wrong, in a line, if that fails."""
    command = [sys.executable, __file__, "--in-this-process", "--case", model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stderr)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    ended = f"was ended by signal {-done.returncode}" if done.returncode < 0 else f"exited with {done.returncode}"
    return f"planning {ended}: {last}"


def show(result: dict[str, Any]) -> list[str]:
    """Prints a case and returns what it misses."""
    case = CASES[result["model"]]
    used = ", ".join(f"{count} of {result['cluster'][kind]} {kind}" for kind, count in result["used"].items())
    limit = f" (limit {case['limit_s']:.0f} s)" if case["limit_s"] else ""
    print(f"{result['model']} on {case['cluster']}, global batch {case['global_batch']}, sequence {case['seq']}")
    print(f"  planned in        {result['took_s']:.1f} s{limit}")
    print(f"  peak memory       {result['peak_bytes'] / GIB:.2f} GiB (limit {MOST_BYTES / GIB:.0f} GiB)")
    print(f"  step time         {result['step_s']:.2f} s predicted, MFU {result['mfu']:.1%}, gap {result['gap']:.1%}")
    print(f"  uses              {used}, {result['stages']} stages")
    for name, ratio in result["ratios"].items():
        print(f"  {name:17} {f'takes {ratio:.2f} times as long' if ratio else 'does not fit'}")
    missed = [
        f"slower than {name}" for name, ratio in result["ratios"].items() if ratio is not None and ratio < 1 - 1e-9
    ]
    if case["limit_s"] and result["took_s"] > case["limit_s"]:
        missed.append(f"took more than {case['limit_s']:.0f} s")
    if result["peak_bytes"] > MOST_BYTES:
        missed.append("took more memory than the limit")
    if set(result["used"]) != set(result["cluster"]):
        missed.append("leaves a kind of device unused")
    return [f"{result['model']}: {what}" for what in missed]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--case", choices=CASES, action="append", help="repeatable; default: all")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = arguments.case or list(CASES)
    if arguments.in_this_process:
        print(json.dumps(plan_case(cases[0])))
        return 0
    missed = []
    for model in cases:
        found = run_case(model)
        missed += [f"{model}: {found}"] if isinstance(found, str) else show(found)
    print("\n".join(f"MISSED {line}" for line in missed) or "all limits are kept")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

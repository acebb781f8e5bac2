"""Does the plan follow the profile? One op of a measured profile is made ten times slower, and the plan must change.

    python benchmarks/profile_changes_plan.py [--profile .demo/cpu.profile.json] [--op dot_general] [--times 10]

meshplan must be installed (`pip install .`); `make bench` sees to that, and runs the other benchmarks too.

The model is GPT-2 (float32, sequence 128) in two pipeline stages on the eight CPU devices of the example cluster; the
op is the slowest of the profile whose name contains --op. A stage that holds it should lose blocks to the other one.
`make demo` writes the profile; without one there is nothing to measure and the benchmark says so.
"""

import argparse
import sys
from pathlib import Path

import msgspec

import planner
from costmodel.units import format_seconds
from planner.planfile.schema import Plan
from profiles.schema import Profile
from profiles.store import read_profile

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "examples" / "clusters" / "cpu8.toml"


def slowed(profile: Profile, key: str, times: float) -> Profile:
    """The profile with one op made `times` slower."""
    op = profile.ops[key]
    slow = msgspec.structs.replace(op, forward_s=op.forward_s * times, backward_s=op.backward_s * times)
    return msgspec.structs.replace(profile, ops={**profile.ops, key: slow})


def describe(plan: Plan) -> str:
    """Blocks and mesh of every stage."""
    stages = []
    for stage in plan.stages:
        meshes = ["x".join(str(axis.size) for axis in group.mesh) for group in stage.groups]
        stages.append(f"{', '.join(stage.blocks)} on {len(stage.groups[0].devices)} ({' and '.join(meshes)})")
    return " | ".join(stages)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--profile", type=Path, default=ROOT / ".demo" / "cpu.profile.json")
    parser.add_argument("--model", default="gpt2(dtype=float32,seq=128)")
    parser.add_argument("--microbatch", type=int, default=1, help="the one at which the profile has the model's ops")
    parser.add_argument("--op", default="dot_general", help="part of the op's name")
    parser.add_argument("--times", type=float, default=10.0, help="how much slower")
    arguments = parser.parse_args()
    if not arguments.profile.is_file():
        print(f"skipped: there is no profile {arguments.profile}; `make demo` writes one, or give --profile")
        return 0
    profile = read_profile(arguments.profile)
    found = sorted((op.forward_s, key) for key, op in profile.ops.items() if arguments.op in key)
    if not found:
        print(f"skipped: none of the profile's {len(profile.ops)} ops has {arguments.op!r} in its name")
        return 0
    key = found[-1][1]
    task = planner.load_task(arguments.model)
    plans = [
        planner.plan(
            task,
            cluster=CLUSTER,
            global_batch=8,
            microbatch=arguments.microbatch,
            stages=2,
            profile=one,
            baselines=False,
        )
        for one in (profile, slowed(profile, key, arguments.times))
    ]
    print(f"op: {key}, made {arguments.times:g} times slower")
    for label, plan in zip(("as measured", "slowed"), plans, strict=True):
        print(f"{label:12} {format_seconds(plan.prediction.step_time_s):>8}  {describe(plan)}")
    changed = describe(plans[0]) != describe(plans[1])
    print("the plan changed" if changed else "MISSED: the plan is the same")
    return 0 if changed else 1


if __name__ == "__main__":
    sys.exit(main())

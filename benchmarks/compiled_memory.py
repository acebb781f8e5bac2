"""Planned memory and collectives against XLA's compilers for GPUs that are not attached.

    python benchmarks/compiled_memory.py [--points 84] [--half tuning|held-out|both] [--results FILE.jsonl]

meshplan must be installed with its extra cuda-check (`pip install '.[cuda-check]'`).

Points are drawn by a fixed seed: a model family, its sizes, a device kind, a mesh of up to eight devices, a ZeRO stage,
full remat or none, sequence parallelism or none on the second mesh axis, microbatches. The planner makes a plan within
these restrictions, without compiling anything; its memory (without the reserve) is compared with arguments +
temporaries + results that are no arguments, as the compiler assigns them to the plan's step. Devices count as having
room for anything, so that the planner's memory does not choose the points. Those whose temporaries are less than 30% of
the total are left out: arguments are exact.

Collectives are compared by kind and mesh axis, in tensors and bytes, with XLA's joining of them off.

Half of the points, by the hash of what they are, was never looked at while the memory model was made (`held-out`). It
was made with the other half and with points of other seeds (`--seed`).
"""

import argparse
import hashlib
import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from costmodel.cluster import Cluster, parse_cluster
from costmodel.errors import PlanError
from costmodel.sharding import Spec
from planner.assemble import assemble_plan, model_record
from planner.compile_check import compile_groups
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.frontend.task import TrainingTask
from planner.models import bert, gpt, llama, moe, t5, vit, wide_resnet
from planner.planfile.schema import Certificate, Plan
from planner.search.candidates import Candidates
from planner.search.facts import Facts
from planner.search.pinned import GroupPin, StagePin, pinned_layout
from planner.search.problem import IntraOpProblem
from planner.search.score import Score
from planner.space.decision import Decision
from planner.space.model_space import ModelSpace
from planner.space.nodes import BatchNode, ParameterNode, PortNode
from planner.space.parameters import Storage
from planner.space.setting import Remat, Setting
from profiles.catalogue import load_catalogue
from profiles.compiled.oracle import default_oracle
from profiles.compiled.records import CompiledProgram

SEED = 20260
LEAST_TEMPORARY = 0.3
KINDS = ("A100-SXM4-80GB", "H100-SXM5-80GB", "H200-SXM-141GB", "V100-SXM2-32GB")
MESHES = ((1,), (2,), (4,), (8,), (2, 2), (4, 2), (2, 4))
ROOM_BYTES = 1 << 45
SEPARATE = {f"xla_gpu_{kind}_combine_threshold_bytes": 0 for kind in ("all_reduce", "all_gather", "reduce_scatter")}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One case. `each` is the examples of a microbatch on one place of the first mesh axis."""

    family: str
    sizes: tuple[tuple[str, Any], ...]
    kind: str
    mesh: tuple[int, ...]
    zero: int
    remat: Remat
    sequence_parallel: bool
    each: int
    microbatches: int

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def held_out(self) -> bool:
        return int(self.key, 16) % 2 == 1

    @property
    def text(self) -> str:
        sizes = ",".join(f"{n}={v}" for n, v in self.sizes)
        mesh = "x".join(map(str, self.mesh))
        sp = " sp" if self.sequence_parallel else ""
        runs = f"{self.microbatches}x{self.each}"
        return f"{self.family}({sizes}) {self.kind.split('-')[0]} {mesh} zero{self.zero} {self.remat}{sp} {runs}"


FAMILIES = {"gpt": gpt, "llama": llama, "bert": bert, "t5": t5, "vit": vit, "moe": moe, "wide_resnet": wide_resnet}


def draw(random_: random.Random) -> Point:
    """One random case."""
    family = random_.choice(sorted(FAMILIES))
    kind, mesh = random_.choice(KINDS), random_.choice(MESHES)
    dtype = random_.choice(("float32", "float16")) if kind.startswith("V100") else "bfloat16"
    wide = random_.choice((512, 768, 1024, 1536, 2048, 3072, 4096))
    layers = random_.choice((2, 4, 6, 12, 24))
    seq = random_.choice((256, 512, 1024, 2048))
    sizes: dict[str, Any] = {"hidden": wide, "layers": layers, "heads": wide // 64, "dtype": dtype}
    if family in ("gpt", "llama", "bert", "t5", "moe"):
        sizes |= {"seq": seq, "vocab": random_.choice((8192, 32000, 50304))}
    if family == "llama":
        sizes |= {"ffn": wide * 8 // 3 // 64 * 64, "kv_heads": wide // 64 // random_.choice((1, 2))}
    if family == "t5":
        sizes |= {"ffn": 4 * wide, "layers": max(2, layers // 2)}
    if family == "moe":
        sizes |= {"ffn": 2 * wide, "experts": 8, "layers": min(layers, 6)}
    if family == "vit":
        sizes |= {"patch": 16, "image": random_.choice((224, 384))}
    if family == "wide_resnet":
        sizes = {"depth": 50, "wide": random_.choice((1, 2)), "norm": "group", "dtype": dtype}
    each = random_.choice((1, 2, 4, 8) if family != "wide_resnet" else (8, 16, 32))
    return Point(
        family=family,
        sizes=tuple(sizes.items()),
        kind=kind,
        mesh=mesh,
        zero=random_.choice((0, 1, 2, 3)) if math.prod(mesh) > 1 else 0,
        remat=random_.choice(("none", "full")),
        sequence_parallel=len(mesh) == 2 and random_.random() < 0.5,
        each=each,
        microbatches=random_.choice((1, 2, 4)),
    )


def points(seed: int = SEED) -> Iterator[Point]:
    """Cases in the order of the seed, without end."""
    random_ = random.Random(seed)
    while True:
        yield draw(random_)


# a plan within a point's restrictions


def _stored(zero: int, storage: Storage) -> bool:
    """Whether a parameter is stored as a ZeRO stage on the first axis says; one that its ops split there is free."""
    value, gradient, optimizer = storage.value[0] >= 0, storage.gradient[0] >= 0, storage.optimizer[0] >= 0
    return (value, gradient, optimizer) == {
        0: (False, False, False), 1: (False, False, True), 2: (False, True, True), 3: (True, True, True),
    }[zero]  # fmt: skip


def _batch_on_first_axis(spec: Spec, of_batch: bool) -> bool:
    return spec[0] >= 0 and all(code < 0 for code in spec[1:]) if of_batch else True


def restriction(point: Point) -> Any:
    """Narrows a problem to a point's ZeRO stage, batch split and sequence parallelism; what that leaves no option for
    stays free."""

    def keep(space: ModelSpace, node: object, option: Any) -> bool:
        if isinstance(node, ParameterNode):
            return not space.graph.params[node.names[0]].trained or _stored(point.zero, option)
        if isinstance(node, BatchNode):
            return _batch_on_first_axis(option, len(space.graph.values[node.name].shape) > 0)
        if isinstance(node, PortNode) and len(space.mesh) > 1:
            tensor = space.graph.classes[node.class_key].tensors[node.tensor]
            if tensor.role == "activation" and len(tensor.shape) == 3:
                return (option[1] == 1) == point.sequence_parallel
        return True

    def restrict(space: ModelSpace, problem: IntraOpProblem) -> IntraOpProblem:
        nodes = []
        for node, priced in zip(space.nodes, problem.nodes, strict=True):
            kept = np.array([keep(space, node, option) for option in node.options])
            if kept.any() and not kept.all():
                priced = replace(priced, time_s=np.where(kept, priced.time_s, np.inf))
            nodes.append(priced)
        return replace(problem, nodes=tuple(nodes))

    return restrict if point.mesh != (1,) else None


class _OneRemat(Candidates):
    """Candidates with a fixed remat."""

    remat: Remat = "none"

    def both(self, pool: Any, mesh: Any, microbatch: int, **more: Any) -> tuple[Decision, ...]:
        setting = Setting(
            microbatches=more["microbatches"], stages=more["stages"], in_flight=more["in_flight"], remat=self.remat
        )
        decision = self.decide(pool, mesh, microbatch, setting)
        return () if decision is None else (decision,)


def cluster_of(point: Point) -> Cluster:
    """One node of the point's devices, with room for anything."""
    devices = math.prod(point.mesh)
    kind = msgspec.structs.replace(load_catalogue()[point.kind], memory_bytes=ROOM_BYTES)
    tier = {"span": devices, "bandwidth_bytes_per_s": 300e9, "latency_s": 3e-6}
    group = {"name": "g", "nodes": 1, "device": point.kind, "devices_per_node": devices, "intra": [tier]}
    return parse_cluster({"name": "node", "group": [group]}, {point.kind: kind})


def planned(point: Point) -> tuple[TrainingTask, Score, Plan]:
    """The plan of a point.

    Raises:
        PlanError: its restrictions cannot be met.
    """
    task = FAMILIES[point.family](**dict(point.sizes))
    cluster, microbatch = cluster_of(point), point.each * point.mesh[0]
    graph = model_graph(capture(task, microbatch))
    facts = {group.device.name: Facts(group.device) for group in cluster.groups}
    candidates = _OneRemat(cluster=cluster, graph_of=lambda size: graph, facts=facts, restrict=restriction(point))
    candidates.remat = point.remat
    mesh = point.mesh if point.mesh != (1,) else ()
    pin = StagePin(groups=(GroupPin(pool="g", devices=math.prod(point.mesh), mesh=mesh),))
    score = pinned_layout(candidates, (pin,), microbatch=microbatch, microbatches=point.microbatches, schedule="1f1b")
    certificate = Certificate(
        lower_bound_s=0.0, gap=1.0, hardware_bound_s=0.0, hardware_gap=1.0, space=(), status="", limit_fired=False
    )
    plan = assemble_plan(
        score, name=point.key, model=model_record(graph, reduction=task.reduction), certificate=certificate,
        baselines=(), findings=(), versions={}, tokens_per_example=None, provenance={},
    )  # fmt: skip
    return task, score, plan


# a point's figures


def measure(point: Point, *, counted: bool) -> dict[str, Any]:
    """Planned and compiled figures of a point.

    Args:
        counted: also compile it with collectives kept apart, and compare these.

    Raises:
        PlanError: it has no plan.
    """
    task, _, plan = planned(point)
    kinds = {point.kind: load_catalogue()[point.kind]}
    (group,) = compile_groups(plan, task, kinds=kinds, oracle=default_oracle())
    outcome = group.phases[0].outcome
    row: dict[str, Any] = {"key": point.key, "point": point.text, "held_out": point.held_out}
    if group.substitute or not isinstance(outcome, CompiledProgram) or outcome.memory is None:
        return row | {"failed": group.substitute or getattr(outcome, "message", "no memory figures")}
    memory = outcome.memory
    row |= {
        "planned_bytes": group.planned_bytes,
        "compiled_bytes": memory.total_bytes,
        "argument_bytes": memory.argument_bytes,
        "temporary_bytes": memory.temporary_bytes,
        "compile_s": round(outcome.compile_s, 2),
        "items": msgspec.to_builtins(plan.stages[0].groups[0].memory),
    }
    if counted:
        (apart,) = compile_groups(plan, task, kinds=kinds, oracle=default_oracle(), options=SEPARATE)
        found = apart.compiled_collectives
        row["collectives"] = None if found is None else {
            name: [list(astuple(apart.planned_collectives.get(name))), list(astuple(found.get(name)))]
            for name in sorted({*apart.planned_collectives, *found})
        }  # fmt: skip
    return row


def astuple(moved: Any) -> tuple[int, int]:
    """Tensors and bytes; none."""
    return (0, 0) if moved is None else (moved.tensors, moved.bytes)


def equal(collectives: dict[str, list[list[int]]]) -> bool:
    """Whether planned and compiled collectives are the same, kind, axis, tensors and bytes."""
    return all(a == b for a, b in collectives.values())


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Errors of some points, as lines."""
    if not rows:
        return ["no points"]
    total = [r["planned_bytes"] / r["compiled_bytes"] - 1 for r in rows]
    temporary = [(r["planned_bytes"] - r["compiled_bytes"]) / r["temporary_bytes"] for r in rows]
    sizes = sorted(map(abs, total))
    counted = [r["collectives"] for r in rows if r.get("collectives") is not None]
    lines = [
        f"{len(rows)} points: mean error {np.mean(sizes):.1%} of the total, "
        f"{np.mean(np.abs(temporary)):.1%} of temporaries",
        f"  p95 {sizes[math.ceil(0.95 * len(sizes)) - 1]:.1%}, worst over {max(total):+.1%}, under {min(total):+.1%}",
    ]
    if counted:
        same = sum(map(equal, counted))
        lines.append(f"  collectives equal for {same} of {len(counted)} points ({same / len(counted):.0%})")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--points", type=int, default=84)
    parser.add_argument("--seed", type=int, default=SEED, help="draw other points than those of docs/compiled.md")
    parser.add_argument("--half", choices=("tuning", "held-out", "both"), default="both")
    parser.add_argument("--results", type=Path, help="write each point's figures here, a line of JSON each")
    parser.add_argument("--no-collectives", action="store_true", help="compile once a point instead of twice")
    arguments = parser.parse_args()
    if missing := default_oracle().missing("cuda"):
        print(f"skipped: {missing}")
        return 0
    rows: list[dict[str, Any]] = []
    wanted = {"tuning": (False,), "held-out": (True,), "both": (False, True)}[arguments.half]
    left = {held: (arguments.points + held) // 2 if held in wanted else 0 for held in (False, True)}
    for point in points(arguments.seed):
        if not any(left.values()):
            break
        if not left[point.held_out]:
            continue
        try:
            row = measure(point, counted=not arguments.no_collectives)
        except PlanError as error:
            print(f"{point.text}: {error.message}", file=sys.stderr)
            continue
        if "failed" in row:
            print(f"{point.text}: {row['failed']}", file=sys.stderr)
            continue
        if row["temporary_bytes"] < LEAST_TEMPORARY * row["compiled_bytes"]:
            continue
        rows.append(row)
        left[point.held_out] -= 1
        error, share = row["planned_bytes"] / row["compiled_bytes"] - 1, row["temporary_bytes"] / row["compiled_bytes"]
        same = "" if row.get("collectives") is None else " ok" if equal(row["collectives"]) else " differ"
        print(
            f"{'h' if point.held_out else 't'} {error:+7.1%} of {row['compiled_bytes'] / 2**30:7.2f} GiB, "
            f"{share:4.0%} temporary{same}  {point.text}",
            flush=True,
        )
        if arguments.results:
            with arguments.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    for name, held in (("tuning", False), ("held-out", True)):
        if held in wanted:
            print(f"{name}: " + "\n".join(summary([r for r in rows if r["held_out"] == held])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

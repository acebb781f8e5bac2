"""Plans compiled for their own device kinds, none of which is attached: figures of each group, and what is found."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import jax
import msgspec
import pytest

import planner
from costmodel.cluster import Cluster, parse_cluster
from planner import validate
from planner.compile_check import CompiledGroup, Moved, compile_groups
from planner.compile_findings import added, findings_of
from planner.lowering.compile import abstract_trainer, compile_plan
from planner.lowering.exported import exported_programs
from planner.models import gpt
from planner.planfile.schema import Plan
from profiles.catalogue import load_catalogue
from profiles.compiled.installed import Installed, installed
from profiles.compiled.oracle import Oracle, default_oracle
from profiles.compiled.records import CompiledProgram
from tests.lowering.execution import executed_plan, gentle, pins
from tests.lowering.layouts import on

TASK = gentle(gpt(hidden=256, layers=2, heads=4, vocab=512, seq=64, dtype="bfloat16"))


def cluster(*kinds: str, devices: int = 2) -> Cluster:
    groups = [
        {"name": f"g{i}", "nodes": 1, "device": kind, "devices_per_node": devices} for i, kind in enumerate(kinds)
    ]
    link = {"bandwidth_bytes_per_s": 25e9, "latency_s": 1e-5}
    links = [{"between": [f"g{i}", f"g{j}"], **link} for j in range(len(kinds)) for i in range(j)]
    return parse_cluster({"name": "c", "group": groups, "link": links}, load_catalogue())


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return default_oracle(cache=tmp_path_factory.mktemp("compiled"))


def compiled(plan: Plan, target: Cluster, oracle: Oracle) -> tuple[CompiledGroup, ...]:
    return compile_groups(plan, TASK, kinds={g.device.name: g.device for g in target.groups}, oracle=oracle)


def require(*platforms: str) -> None:
    for platform in platforms:
        found = installed(platform, os.environ.get("PATH", ""))  # type: ignore[arg-type]
        if not isinstance(found, Installed):
            pytest.skip(f"{found}: pip install 'meshplan[{platform}-check]'")


@pytest.fixture(scope="module")
def data_parallel() -> tuple[Cluster, Plan]:
    target = cluster("A100-SXM4-80GB")
    plan = executed_plan(TASK, pins((on("g0", 2, mesh=(2,)),)), target, microbatch=64, microbatches=2)
    return target, plan


def test_a_step_is_compiled_for_the_kind_of_its_group(data_parallel: tuple[Cluster, Plan], oracle: Oracle) -> None:
    require("cuda")
    (group,) = compiled(data_parallel[1], data_parallel[0], oracle)
    outcome = group.phases[0].outcome
    assert isinstance(outcome, CompiledProgram) and (outcome.kind, outcome.platform) == ("A100-SXM4-80GB", "cuda")
    assert group.substitute == "" and group.failures == () and [p.phase for p in group.phases] == ["step"]
    memory = data_parallel[1].stages[0].groups[0].memory
    assert group.planned_bytes + group.outside_bytes == memory.total_bytes
    assert group.memory_bytes is not None and outcome.memory is not None
    arguments = memory.parameters_bytes + memory.optimizer_bytes + memory.inputs_bytes
    assert outcome.memory.argument_bytes == pytest.approx(arguments, abs=4096)
    assert set(group.planned_collectives) == set(group.compiled_collectives or {}) == {"all_reduce data"}
    assert added(group.planned_collectives, group.compiled_collectives or {}) == {}
    assert {f.code for f in findings_of(data_parallel[1], [group])} <= {"MP651", "MP655"}


def test_every_kind_of_a_mixed_pipeline_has_its_own_compiler(oracle: Oracle) -> None:
    require("cuda", "tpu")
    target = cluster("V100-SXM2-32GB", "TPU-v5e")
    plan = executed_plan(TASK, pins((on("g0", 2),), (on("g1", 2),)), target, microbatch=8, microbatches=2)
    first, second = compiled(plan, target, oracle)
    assert [p.phase for p in first.phases] == ["forward", "backward", "reduce", *["update"] * (len(first.phases) - 3)]
    for group, platform in ((first, "cuda"), (second, "tpu")):
        for phase in group.phases:
            assert isinstance(phase.outcome, CompiledProgram) and phase.outcome.platform == platform, phase.outcome
        worst = group.worst
        assert worst is not None and group.memory_bytes == worst.total_bytes
        assert group.memory_bytes == max(p.total_bytes or 0 for p in group.phases)
        backward = group.phases[1]
        assert backward.beside_bytes >= plan.stages[group.stage].groups[0].memory.optimizer_bytes


def test_programs_are_the_same_with_devices_and_without(data_parallel: tuple[Cluster, Plan]) -> None:
    plan = data_parallel[1]
    jax.clear_caches()  # what JAX has traced before decides which inner functions are shared
    (abstract,) = exported_programs(abstract_trainer(plan, TASK), lambda kind: "cpu")
    jax.clear_caches()
    (real,) = exported_programs(compile_plan(plan, TASK), lambda kind: "cpu")
    assert (abstract.donated, abstract.sizes, abstract.written) == (real.donated, real.sizes, real.written)
    assert abstract.donated and abstract.identity == real.identity


def test_a_kind_that_no_compiler_knows_is_compiled_for_the_cpu(oracle: Oracle) -> None:
    target = cluster("MI300X")
    plan = executed_plan(TASK, pins((on("g0", 2, mesh=(2,)),)), target, microbatch=8, microbatches=1)
    (group,) = compiled(plan, target, oracle)
    outcome = group.phases[0].outcome
    assert "MI300X" in group.substitute and isinstance(outcome, CompiledProgram) and outcome.kind == "cpu"
    found = findings_of(plan, [group])
    assert [f.code for f in found] == ["MP654", "MP655"] and "CPU" in found[0].message


@pytest.fixture(scope="module")
def on_cpus(oracle: Oracle) -> tuple[Cluster, Plan, CompiledGroup]:
    target = cluster("cpu")
    plan = executed_plan(TASK, pins((on("g0", 2, mesh=(2,)),)), target, microbatch=8, microbatches=1)
    return target, plan, compiled(plan, target, oracle)[0]


def test_gradients_that_xla_joins_with_the_loss_are_counted(oracle: Oracle) -> None:
    target = cluster("cpu")
    task = planner.load_task("gpt(hidden=64,layers=2,heads=4,vocab=128,seq=32,dtype=float32)")
    plan = planner.plan(task, cluster=target, global_batch=8, strategy="dp=2,microbatch=2", baselines=False)
    (group,) = compile_groups(plan, task, kinds={"cpu": target.groups[0].device}, oracle=oracle)
    (one,) = getattr(group.phases[0].outcome, "collectives", ())
    assert "reduce_gradients" in one.op_name and "sum_losses" in one.op_name
    planned, moved = group.planned_collectives["all_reduce data"], (group.compiled_collectives or {})["all_reduce data"]
    assert moved.bytes == pytest.approx(planned.bytes, abs=8)  # and the loss, a float32


def test_memory_beyond_the_device_is_an_error(on_cpus: tuple[Cluster, Plan, CompiledGroup]) -> None:
    _, plan, group = on_cpus
    assert group.memory_bytes is not None
    fits = replace(group, limit_bytes=group.memory_bytes + group.outside_bytes, planned_bytes=group.memory_bytes)
    assert [f.code for f in findings_of(plan, [fits])] == ["MP655"]
    (error, _) = findings_of(plan, [replace(fits, limit_bytes=fits.limit_bytes - 1)])
    assert (error.code, error.severity) == ("MP650", "error") and "1 B too much" in error.hint


@pytest.mark.parametrize(("share", "found"), [(1.0, False), (1.14, False), (1.16, True), (0.84, True)])
def test_memory_far_from_the_plan_is_a_warning(
    on_cpus: tuple[Cluster, Plan, CompiledGroup], share: float, found: bool
) -> None:
    _, plan, group = on_cpus
    assert group.memory_bytes is not None
    planned = replace(group, planned_bytes=int(group.memory_bytes * share))
    assert ("MP651" in {f.code for f in findings_of(plan, [planned])}) == found


def test_bytes_that_were_not_planned_are_a_warning(on_cpus: tuple[Cluster, Plan, CompiledGroup]) -> None:
    _, plan, group = on_cpus
    moved = dict(group.compiled_collectives or {})
    assert moved and "MP652" not in {f.code for f in findings_of(plan, [group])}
    more = {**moved, "permute data": Moved(2, 1 << 18, 1 << 20)}
    (warning,) = [f for f in findings_of(plan, [replace(group, compiled_collectives=more)]) if f.code == "MP652"]
    assert "permute data 0 B and 1.00 MiB" in warning.message


def test_programs_that_do_not_compile_leave_the_others(oracle: Oracle, tmp_path: Path) -> None:
    """The worker of this test refuses what has no donated argument: the forward programs of a pipeline."""
    target = cluster("cpu", "cpu", devices=1)
    plan = executed_plan(TASK, pins((on("g0", 1),), (on("g1", 1),)), target, microbatch=4, microbatches=2)
    code = (
        "import sys, json, pathlib\n"
        "from profiles.compiled.worker import main\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "assert json.loads((folder / 'job.json').read_text())['donated'], 'nothing is donated'\n"
        "main(folder)\n"
    )
    picky = replace(oracle, cache=tmp_path, worker=(sys.executable, "-c", code))
    groups = compiled(plan, target, picky)
    for group in groups:
        assert group.memory_bytes is None and [f.reason for f in group.failures] == ["crashed"]
        left = {p.phase for p in group.phases if isinstance(p.outcome, CompiledProgram)}
        assert {"backward", "reduce"} <= left and "forward" not in left
    errors = [f for f in findings_of(plan, groups) if f.severity == "error"]
    assert [f.code for f in errors] == ["MP653", "MP653"] and "nothing is donated" in errors[0].message


def test_the_api_compiles_where_it_is_asked_to(on_cpus: tuple[Cluster, Plan, CompiledGroup], oracle: Oracle) -> None:
    target, plan, _ = on_cpus
    assert "MP655" in {f.code for f in validate(plan, target, TASK, compiler=oracle)}
    assert "MP655" not in {f.code for f in validate(plan, target, TASK)}
    other = msgspec.structs.replace(plan, microbatches=3)  # an error: nothing is compiled
    assert "MP655" not in {f.code for f in validate(other, target, TASK, compiler=oracle)}


def test_a_compiler_without_a_task_is_refused(on_cpus: tuple[Cluster, Plan, CompiledGroup], oracle: Oracle) -> None:
    with pytest.raises(ValueError, match="no task"):
        validate(on_cpus[1], on_cpus[0], compiler=oracle)


GPU_CASES = {
    "large vocabulary, remat": (gpt(hidden=512, layers=4, heads=8, vocab=32000, seq=512), "full", 4),
    "attention kept": (gpt(hidden=512, layers=4, heads=8, vocab=4096, seq=512), "none", 4),
}


@pytest.mark.parametrize("case", GPU_CASES)
def test_planned_memory_is_what_the_gpu_compiler_allocates(case: str, oracle: Oracle) -> None:
    require("cuda")
    task, remat, microbatch = GPU_CASES[case]
    target = cluster("A100-SXM4-80GB")
    layout = pins((on("g0", 2, mesh=(2,)),))
    plan = executed_plan(task, layout, target, microbatch=microbatch, microbatches=2, remat=remat)  # type: ignore[arg-type]
    kinds = {g.device.name: g.device for g in target.groups}
    (group,) = compile_groups(plan, task, kinds=kinds, oracle=oracle)
    assert group.deviation is not None and abs(group.deviation) < 0.1, f"{case}: {group.deviation:+.1%}"

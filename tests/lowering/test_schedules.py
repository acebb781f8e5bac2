"""Plans under every kind of schedule, executed: one device's numbers, the planned collectives and kept bytes, and as
many activations in flight as the simulator counts."""

import math
from dataclasses import replace

import jax
import msgspec
import pytest

from costmodel.errors import InputError
from costmodel.schedule.actions import format_actions
from costmodel.schedule.early_backward import hetero_1f1b
from costmodel.schedule.validate import in_flight
from costmodel.simulate import StageTimes, simulate
from planner.check.device_memory import device_bytes
from planner.check.rules import check_plan
from planner.frontend import jax_compat as jc
from planner.lowering.compile import compile_plan
from planner.lowering.pipeline import PipelineTrainer
from planner.lowering.pipeline_step import PipelineStep
from planner.lowering.split_programs import SplitPrograms
from planner.models import example_batch, init_params
from planner.planfile.schema import Plan
from planner.report.timeline import run_schedule
from planner.simulation import simulate as simulate_plan
from tests.lowering.execution import assert_equals_one_device, executed_plan, gentle, pins, slow_cluster
from tests.lowering.layouts import LAYOUTS, on
from tests.lowering.schedules import scheduled_plan
from tests.models.tiny import TINY

STRAIGHT, LOOPED = (1, 2, 4), (2, 4)  # devices of each actor
SCHEDULES = {
    "gpipe": STRAIGHT,
    "1f1b": STRAIGHT,
    "dapple-pa": STRAIGHT,
    "dapple-pb": STRAIGHT,
    "zb-h1": STRAIGHT,
    "zb-h2": STRAIGHT,
    "interleaved": LOOPED,
    "breadth-first": LOOPED,
    "zb-v": LOOPED,
    "v-half": LOOPED,
    "v-min": LOOPED,
}
FAMILIES = ("gpt", "t5", "llama-qwen", "moe", "gpt-dropout")  # gpt, t5 and llama-qwen tie embeddings across stages
QUICK = [("gpt", "zb-h2"), ("gpt", "interleaved"), ("gpt", "zb-v"), ("t5", "zb-h1")]
REST = [(f, s) for f in FAMILIES for s in SCHEDULES if (f, s) not in QUICK]


def local_bytes(arrays) -> int:
    """Bytes on one device."""
    leaves = jax.tree.leaves(arrays)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * jc.itemsize(x.dtype) for x in leaves)


def assert_peaks(trainer: PipelineTrainer, plan: Plan) -> None:
    """The executed peak of every actor is the validator's and the simulator's; what is held takes the bytes it should
    and is let go of."""
    task = trainer.feed.capture.task
    extra = {"rng": jax.random.key(3)} if task.rng else {}
    leaves = trainer.feed.leaves(example_batch(task, plan.global_batch), **extra)
    run = PipelineStep(trainer, trainer.init(init_params(task)), leaves)
    for actor, action in trainer.order:
        run.run(actor, action)
        programs, key = trainer.programs[actor], (actor, action.microbatch)
        if action.kind == "F":
            assert local_bytes(run.residuals[key]) == programs.residual_bytes
        elif isinstance(programs, SplitPrograms):
            assert key not in run.residuals
            assert local_bytes(run.kept.get(key)) == (programs.kept_bytes if action.kind == "B" else 0)
    schedule = trainer.schedule
    times = {actor: StageTimes(forward_s=1.0, backward_s=1.0, weight_s=1.0) for actor in trainer.programs}
    simulated = {use.actor: use.peak_in_flight for use in simulate(schedule, times).actors}  # type: ignore[arg-type]
    assert run.peak_in_flight == simulated == in_flight(schedule)
    assert not run.residuals and not run.kept and not run.values and not run.cotangents


def check(family: str, schedule: str) -> None:
    task = gentle(TINY[family](dtype="float32"))
    plan = scheduled_plan(task, schedule, SCHEDULES[schedule])
    assert check_plan(plan, slow_cluster(sum(SCHEDULES[schedule]))) == ()
    trainer = assert_equals_one_device(task, plan)
    assert isinstance(trainer, PipelineTrainer)
    assert_peaks(trainer, plan)


@pytest.mark.parametrize(("family", "schedule"), QUICK)
def test_schedules(family: str, schedule: str) -> None:
    check(family, schedule)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "schedule"), REST)
def test_every_schedule(family: str, schedule: str) -> None:
    check(family, schedule)


def test_virtual_stages_share_the_devices_of_their_actor_only() -> None:
    task = gentle(TINY["gpt"](dtype="float32"))
    plan, cluster = scheduled_plan(task, "zb-v", LOOPED), slow_cluster(sum(LOOPED))
    devices = [stage.groups[0].devices for stage in plan.stages]
    assert devices[0] == devices[3] and devices[1] == devices[2]
    apart = msgspec.structs.replace(plan, schedule=scheduled_plan(task, "interleaved", LOOPED).schedule)
    assert {finding.code for finding in check_plan(apart, cluster)} >= {"MP602"}
    worst = max(device_bytes(plan).values())
    assert plan.prediction.peak_memory_bytes == worst > max(s.groups[0].memory.total_bytes for s in plan.stages)


def test_split_schedules_are_priced_with_weight_gradients_apart() -> None:
    task = gentle(TINY["gpt"](dtype="float32"))
    fused, parted = (scheduled_plan(task, name, STRAIGHT) for name in ("1f1b", "zb-h1"))
    for a, b in zip(fused.stages, parted.stages, strict=True):
        assert a.groups[0].time == b.groups[0].time
        assert 0.0 < b.groups[0].time.weight_s < b.groups[0].time.backward_s
    assert parted.prediction.step_time_s < fused.prediction.step_time_s
    assert run_schedule(parted).makespan_s == pytest.approx(parted.prediction.step_time_s, rel=1e-9)


def test_a_stage_of_several_groups_needs_a_schedule_with_shares() -> None:
    stages = pins((on("g0", 2), on("g1", 2)), (on("g2", 4),))
    with pytest.raises(InputError, match="MP146: schedule hetero-1f1b runs one group a stage, stage 0 has 2"):
        executed_plan(
            gentle(TINY["gpt"](dtype="float32")), stages, slow_cluster(2, 2, 4), microbatch=4, microbatches=4,
            schedule="hetero-1f1b",
        )  # fmt: skip


def test_early_forwards_that_hide_slow_links() -> None:
    """1F1B with warm-ups of its own, put into the plan of plain 1F1B."""
    task = gentle(TINY["gpt"](dtype="float32"))
    plan = scheduled_plan(task, "1f1b", STRAIGHT)
    early = hetero_1f1b(3, plan.microbatches, delays_s=[1.0, 0.5], stage_times_s=1.0)
    actors = tuple(
        msgspec.structs.replace(actor, actions=format_actions(own.actions), warm_up=own.warm_up)
        for actor, own in zip(plan.schedule.actors, early.actions, strict=True)
    )
    assert actors != plan.schedule.actors
    plan = msgspec.structs.replace(plan, schedule=msgspec.structs.replace(plan.schedule, actors=actors))
    trainer = assert_equals_one_device(task, plan)
    assert isinstance(trainer, PipelineTrainer)
    assert_peaks(trainer, plan)


@pytest.mark.parametrize(
    "schedule", ["interleaved", *(pytest.param(s, marks=pytest.mark.slow) for s in ("zb-v", "breadth-first", "v-min"))]
)
def test_stages_of_several_groups_run_looped_schedules(schedule: str) -> None:
    """Four virtual stages on two sets of devices, of which the first is two groups that share the microbatches."""
    task = gentle(TINY["gpt"](dtype="float32"))
    stages = pins((on("g0", 2), replace(on("g1", 1), share=2)), (on("g2", 2),))
    plan = executed_plan(task, stages, slow_cluster(2, 1, 2), microbatch=4, microbatches=6, schedule=schedule)
    assert [[len(group.microbatches) for group in stage.groups] for stage in plan.stages].count([2, 4]) == 2
    assert len(plan.stages) == 4 and check_plan(plan, slow_cluster(2, 1, 2)) == ()
    trainer = assert_equals_one_device(task, plan)
    assert isinstance(trainer, PipelineTrainer)
    assert_peaks(trainer, plan)
    step = simulate_plan(plan)
    assert step.makespan_s == pytest.approx(plan.prediction.step_time_s, rel=1e-12)
    first = 2 if schedule in ("interleaved", "breadth-first") else 3
    assert [row.label for row in step.groups] == [f"stage 0+{first} g0", f"stage 0+{first} g1", f"stage 1+{5 - first}"]
    alone = simulate_plan(plan, fail=[f"stage{first}/g1"])
    assert [row.microbatches for row in alone.groups] == [6, 6] and alone.makespan_s > 0


def test_unequal_groups_split_their_backwards_too() -> None:
    task = gentle(TINY["gpt"](dtype="float32"))
    layout = replace(LAYOUTS["unequal groups"], schedule="zb-h1")
    plan = layout.plan(task)
    assert [len(group.microbatches) for group in plan.stages[0].groups] == [3, 1]
    assert check_plan(plan, layout.cluster) == ()
    trainer = assert_equals_one_device(task, plan)
    assert isinstance(trainer, PipelineTrainer)
    assert_peaks(trainer, plan)


@pytest.mark.slow
def test_compiled_programs_of_split_backwards_have_the_planned_collectives() -> None:
    task = gentle(TINY["gpt"](dtype="float32"))
    report = compile_plan(scheduled_plan(task, "zb-v", LOOPED), task).verify()
    for group in report.groups:
        assert group.differences == group.added == {}
        assert group.until_weights_bytes is not None

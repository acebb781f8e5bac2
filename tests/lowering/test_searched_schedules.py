"""Plans as the search makes them, under schedules that it chose or made, executed: one device's numbers, and as many
activations in flight as the plan says."""

import pytest

import planner
from planner.check.rules import check_plan
from planner.lowering.pipeline import PipelineTrainer
from tests.lowering.execution import assert_equals_one_device, gentle, slow_cluster
from tests.lowering.test_schedules import assert_peaks
from tests.models.tiny import TINY
from tests.search.test_schedule_choice import far_apart

MEMORY = {"auto": 260_000}  # tight enough that a schedule made for the stages is faster than any other


def check(asked: str | None, stages: int, chosen: str, latency_s: float = 1e-5) -> None:
    task = gentle(TINY["gpt"](dtype="float32"))
    cluster = far_apart(MEMORY.get(chosen, 1_000_000_000), latency_s)
    plan = planner.plan(
        task, cluster=cluster, global_batch=16, microbatch=2, schedule=asked, stages=stages, baselines=False
    )
    assert (plan.schedule.name, plan.microbatches) == (chosen, 8)
    assert check_plan(plan, cluster) == ()
    trainer = assert_equals_one_device(task, plan)
    assert isinstance(trainer, PipelineTrainer)
    assert_peaks(trainer, plan)


def test_a_schedule_made_for_the_stages() -> None:
    check("auto", 3, "auto")


@pytest.mark.slow
def test_the_usual_one_that_hides_slow_links() -> None:
    check(None, 3, "hetero-1f1b", latency_s=6e-4)


@pytest.mark.slow
def test_the_usual_one_that_splits_backwards() -> None:
    check(None, 2, "zb-h1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages"),
    [("dapple-pa", 2), ("dapple-pb", 2), ("hetero-1f1b", 2), ("layer-major", 2), ("interleaved", 2), ("v-min", 2)],
)
def test_by_name(name: str, stages: int) -> None:
    check(name, stages, name)


@pytest.mark.slow
def test_three_parts_a_stage_run() -> None:
    task = gentle(planner.load_task("gpt(hidden=64,layers=6,heads=4,vocab=64,seq=16,dtype=float32)"))
    strategy = "pp=2,dp=2,microbatch=1,interleave=3"
    plan = planner.plan(task, cluster=slow_cluster(4), global_batch=16, strategy=strategy, baselines=False)
    assert len(plan.stages) == 6
    assert_equals_one_device(task, plan)

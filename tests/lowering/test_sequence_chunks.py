"""Plans whose sequences run in chunks, executed: one device's numbers, and as many units in flight as simulated."""

import dataclasses

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from costmodel.cluster import Cluster
from costmodel.errors import InfeasibleError, InputError
from costmodel.schedule.actions import Actor, format_actions
from costmodel.schedule.sequence import sequence_chunks
from costmodel.schedule.validate import in_flight
from costmodel.simulate import StageTimes, simulate
from planner.check.rules import check_plan
from planner.frontend.task import TrainingTask
from planner.lowering.chunk_pipeline import ChunkedStep, ChunkedTrainer
from planner.lowering.compile import abstract_trainer, compile_plan
from planner.models import example_batch, gpt, init_params
from planner.planfile.schema import Plan
from planner.report.timeline import run_schedule
from planner.simulation import simulate as simulate_plan
from planner.space.setting import Remat
from tests.frontend.test_causal_chunks import ATTENTIONS, FAMILIES, SIZES, written
from tests.lowering.execution import assert_equals_one_device, gentle, pins, slow_cluster
from tests.lowering.layouts import on, stored, zero_3
from tests.lowering.schedules import chunked_plan
from tests.lowering.test_schedules import local_bytes

replace = msgspec.structs.replace


def assert_peaks(trainer: ChunkedTrainer, plan: Plan) -> None:
    """The executed peak of every actor is the validator's and the simulator's; what is held takes the bytes that it
    should, and nothing is left when the step is over."""
    task = trainer.feed.capture.task
    extra = {"rng": jax.random.key(3)} if task.rng else {}
    leaves = trainer.feed.leaves(example_batch(task, plan.global_batch), **extra)
    run = trainer.begin(trainer.init(init_params(task)), leaves)
    assert isinstance(run, ChunkedStep)
    for actor, action in trainer.order:
        run.run(actor, action)
        if action.kind == "F":
            programs = trainer.of_chunk[actor, action.microbatch % trainer.chunks]
            assert local_bytes(run.residuals[actor, action.microbatch]) == programs.residual_bytes
            assert all((name, action.microbatch // trainer.chunks) in run.slices for name in programs.own)
    schedule = trainer.schedule
    times = {Actor(*actor): StageTimes(forward_s=1.0, backward_s=1.0) for actor in trainer.programs}
    simulated = {use.actor: use.peak_in_flight for use in simulate(schedule, times).actors}
    shares = [[group.microbatches for group in stage.groups] for stage in plan.stages]
    expected = in_flight(sequence_chunks(len(plan.stages), plan.microbatches, plan.schedule.chunks, shares))
    assert run.peak_in_flight == simulated == expected
    assert not run.residuals and not run.slices and not run.values and not run.cotangents


def check(
    task: TrainingTask,
    chunks: int,
    devices: tuple[int, ...],
    remat: Remat | None = None,
    cluster: Cluster | None = None,
    **more,
) -> Plan:
    plan = chunked_plan(task, chunks, devices, remat=remat, cluster=cluster, **more)
    assert check_plan(plan, cluster or slow_cluster(sum(devices))) == ()
    assert plan.schedule.chunks == chunks and plan.schedule.microbatches == plan.microbatches * chunks
    trainer = assert_equals_one_device(task, plan)
    if chunks > 1:
        assert isinstance(trainer, ChunkedTrainer)
        assert_peaks(trainer, plan)
    assert run_schedule(plan).makespan_s == pytest.approx(plan.prediction.step_time_s, rel=1e-9)
    return plan


@pytest.mark.parametrize(
    ("family", "seq", "chunks", "devices"),
    [
        ("gpt", 9, 3, (1, 1)),
        ("llama", 8, 2, (1, 2)),
        *(
            pytest.param(family, seq, chunks, devices, marks=pytest.mark.slow)
            for family, seq, chunks, devices in (
                ("gpt", 8, 1, (1, 1)),
                ("gpt", 12, 4, (1, 1)),
                ("gpt", 12, 3, (2, 4)),  # a chunk is too short for some splits over four devices
                ("gpt", 7, 7, (1, 1)),
                ("llama", 12, 4, (1, 1, 1, 1)),
                ("llama", 15, 3, (2, 2)),
                ("moe", 12, 2, (1, 1)),
                ("gpt-dropout", 12, 4, (1, 1)),
                ("gpt-neox", 10, 2, (2, 1, 1)),
            )
        ),
    ],
)
def test_chunks_equal_one_device(family: str, seq: int, chunks: int, devices: tuple[int, ...]) -> None:
    sizes = {**SIZES, "layers": max(2, len(devices)), "batch": 4}
    check(gentle(FAMILIES[family](**{k: sizes[k] for k in ("layers", "batch")}, seq=seq)), chunks, devices)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "none"])
def test_remat(remat: Remat) -> None:
    check(gentle(FAMILIES["llama"](seq=9)), 3, (1, 1), remat=remat, microbatch=2)


@pytest.mark.slow
def test_one_stage_runs_chunks_one_after_the_other() -> None:
    plan = check(gentle(FAMILIES["gpt"](seq=8)), 4, (2,), microbatch=2)
    assert plan.stages[0].groups[0].memory.in_flight == 4


@pytest.mark.slow
def test_groups_of_a_stage_share_the_sequences() -> None:
    """Two groups of unlike size, the larger with twice the sequences; each runs all chunks of its own."""
    stages = pins((dataclasses.replace(on("g0", 2), share=2), on("g1", 1)), (on("g2", 2),))
    plan = check(
        gentle(FAMILIES["gpt"](seq=6)),
        3,
        (),
        cluster=slow_cluster(2, 1, 2),
        stages=stages,
        microbatch=2,
        microbatches=3,
    )
    assert [[len(group.microbatches) for group in stage.groups] for stage in plan.stages] == [[2, 1], [3]]


@pytest.mark.slow
def test_parameters_stored_in_parts() -> None:
    check(gentle(FAMILIES["gpt"](seq=8)), 2, (2, 2), microbatch=2, restrict=stored(zero_3))


@pytest.mark.slow
def test_models_that_users_wrote() -> None:
    check(written(9, ATTENTIONS["library"]), 3, (1, 1), microbatch=2)


@pytest.mark.slow
def test_aux_outputs_are_joined() -> None:
    """Of every token, of all of them, and of none."""

    def loss(scores, batch, params):
        return -jnp.mean(scores), {"each": scores, "sum": jnp.sum(scores), "scale": jnp.sum(params["table"])}

    task = dataclasses.replace(written(6, ATTENTIONS["select"], loss=loss), has_aux=True)
    check(task, 3, (1, 1), microbatch=2)


@pytest.mark.slow
def test_compiled_programs_have_the_planned_collectives() -> None:
    task = gentle(FAMILIES["gpt"](seq=8))
    report = compile_plan(chunked_plan(task, 2, (2, 2), microbatch=2), task).verify()
    assert any(group.planned for group in report.groups)
    assert all(group.differences == group.added == {} for group in report.groups)


def test_earlier_keys_and_values_are_kept_once() -> None:
    """Their bytes do not grow with the chunks that read them: backward is given them again."""
    plan = chunked_plan(gentle(gpt(**{**SIZES, "heads": 1}, seq=64)), 4, (1, 1), microbatch=2, remat="full")
    trainer = abstract_trainer(plan, gentle(gpt(**{**SIZES, "heads": 1}, seq=64)))
    assert isinstance(trainer, ChunkedTrainer)
    for actor in trainer.programs:
        each = [trainer.of_chunk[actor, j] for j in range(4)]
        assert [len(p.lent) for p in each] == [0, *(2 * j for j in range(1, 4))]
        assert len({p.residual_bytes for p in each[:3]}) == 1


def test_later_chunks_take_longer() -> None:
    """Their attention reads more keys; together they do less than the whole, which computes hidden scores too."""
    task = gentle(gpt(**{**SIZES, "hidden": 8, "heads": 2}, seq=64))
    plan, whole = (chunked_plan(task, chunks, (1, 1), microbatch=2) for chunks in (4, 1))
    for stage, other in zip(plan.stages, whole.stages, strict=True):
        time = stage.groups[0].time
        assert list(time.chunk_forward) == sorted(time.chunk_forward) and time.chunk_forward[0] < time.chunk_forward[-1]
        assert np.mean(time.chunk_forward) == pytest.approx(1.0) == np.mean(time.chunk_backward)
        assert 4 * time.forward_s < other.groups[0].time.forward_s
    assert plan.prediction.bubble_s < whole.prediction.bubble_s
    assert plan.transfers[0].bytes * 4 == whole.transfers[0].bytes
    durations = {
        (e.action.kind, e.action.microbatch % 4): e.end_s - e.start_s
        for e in run_schedule(plan).timeline
        if not e.actor.stage
    }
    assert durations["F", 0] < durations["F", 1] < durations["F", 2] < durations["F", 3]
    assert simulate_plan(plan).makespan_s == pytest.approx(plan.prediction.step_time_s, rel=1e-12)
    with pytest.raises(InputError, match=r"MP195.*4 chunks"):
        simulate_plan(plan, schedule="1f1b")


def swapped(plan: Plan) -> Plan:
    """The last stage runs the first two chunks in the other order."""
    made = sequence_chunks(len(plan.stages), plan.microbatches, plan.schedule.chunks).actions
    rows = [*(row.actions for row in made[:-1]), (*reversed(made[-1].actions[:2]), *made[-1].actions[2:])]
    actors = tuple(
        replace(actor, actions=format_actions(row)) for actor, row in zip(plan.schedule.actors, rows, strict=True)
    )
    return replace(plan, schedule=replace(plan.schedule, actors=actors))


def test_chunks_out_of_order_are_refused() -> None:
    task = gentle(FAMILIES["gpt"](seq=8))
    plan = chunked_plan(task, 2, (1, 1), microbatch=2)
    cluster, wrong = slow_cluster(2), swapped(plan)
    assert check_plan(plan, cluster) == ()
    assert "MP612" in {finding.code for finding in check_plan(wrong, cluster)}
    with pytest.raises(InputError, match="MP168"):
        compile_plan(wrong, task)
    for chunks, code in ((0, "MP615"), (3, "MP615"), (4, "MP615")):
        miscounted = replace(plan, schedule=replace(plan.schedule, chunks=chunks))
        assert code in {finding.code for finding in check_plan(miscounted, cluster)}


def test_plans_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkedTrainer, "held_bytes", lambda self, actor: 1 << 34)
    with pytest.raises(InfeasibleError, match=r"MP201.*stage 0 needs 48.* 3 chunks in flight"):
        chunked_plan(gentle(FAMILIES["gpt"](seq=8)), 2, (1, 1), microbatch=2)

"""The wait of updates for other stages' gradients: in the score of a layout and in its plan."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from planner.frontend.task import TrainingTask
from planner.planfile.schema import Plan
from planner.report.timeline import render_timeline, run_schedule
from planner.search.pinned import GroupPin, StagePin
from tests.lowering.execution import executed_plan
from tests.lowering.test_collectives import node_of_h100

WIDTH, LAYERS, LATENCY_S = 256, 6, 5e-6


def planned(*steps: optax.GradientTransformation, blocks: tuple[int, ...] = (2, 6)) -> Plan:
    """Two stages of unequal length, and a first stage with a table whose gradient takes long to reduce."""
    params = {
        "embed": jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32),
        "layers": jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32),
    }

    def loss(params, batch):
        start = params["embed"][batch]
        end, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), start, params["layers"])
        return jnp.mean(end**2)

    batch = jax.ShapeDtypeStruct((8,), jnp.int32)
    task = TrainingTask(loss_fn=loss, params=params, batch=batch, optimizer=optax.chain(*steps))
    cluster = node_of_h100(*([4] * len(blocks)))
    stages = tuple(
        StagePin(groups=(GroupPin(pool=f"g{i}", devices=4, mesh=(4,)),), blocks=n) for i, n in enumerate(blocks)
    )
    return executed_plan(task, stages, cluster, microbatch=8, microbatches=4)


@pytest.fixture(scope="module")
def plain() -> Plan:
    return planned(optax.sgd(0.1))


@pytest.fixture(scope="module")
def clipped() -> Plan:
    return planned(optax.clip_by_global_norm(1.0), optax.sgd(0.1))


def test_clipping_makes_every_stage_wait_for_all(plain: Plan, clipped: Plan) -> None:
    assert plain.update_joins == ()
    assert [(j.stage, j.waits_for) for j in clipped.update_joins] == [(0, (0, 1)), (1, (0, 1))]
    assert all(2 * LATENCY_S < j.time_s < 3 * LATENCY_S for j in clipped.update_joins)


def test_the_step_takes_the_wait_longer(plain: Plan, clipped: Plan) -> None:
    """The strategies are the same, so the step is longer by what the slowest stage's values take to come together."""
    assert clipped.stages[0].groups[0].strategies == plain.stages[0].groups[0].strategies
    free, tied = run_schedule(plain), run_schedule(clipped)
    ready = [use.step_end_s - p.groups[0].time.optimizer_s for use, p in zip(free.actors, plain.stages, strict=True)]
    update = [p.groups[0].time.optimizer_s for p in plain.stages]
    expected = max(ready) + clipped.update_joins[0].time_s
    assert ready[0] != pytest.approx(ready[1], rel=1e-3)
    assert [use.step_end_s for use in tied.actors] == pytest.approx([expected + u for u in update])
    assert clipped.prediction.step_time_s > plain.prediction.step_time_s + 2 * LATENCY_S
    assert clipped.prediction.step_time_s == tied.makespan_s
    assert plain.prediction.step_time_s == free.makespan_s


def test_the_wait_is_shown(plain: Plan, clipped: Plan) -> None:
    assert "update_join" not in plain.prediction.exposed_communication_s
    assert clipped.prediction.exposed_communication_s["update_join"] in {j.time_s for j in clipped.update_joins}
    parts = clipped.prediction
    total = parts.compute_s + sum(parts.exposed_communication_s.values()) + parts.bubble_s + parts.optimizer_s
    assert total == pytest.approx(parts.step_time_s)
    assert "updates wait" in render_timeline(clipped) and "updates wait" not in render_timeline(plain)


def test_a_norm_of_a_stack_ties_the_stages_that_cut_it() -> None:
    joins = {j.stage: j.waits_for for j in planned(optax.lamb(1e-3), blocks=(1, 3, 4)).update_joins}
    assert joins == {1: (1, 2), 2: (1, 2)}
    assert planned(optax.lamb(1e-3), blocks=(1, 7)).update_joins == ()

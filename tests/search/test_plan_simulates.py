"""A plan file holds all that its step time is made of: simulated from the file alone it takes as long as predicted."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

import planner
from planner.frontend.task import TrainingTask
from planner.planfile.codec import decode, encode
from planner.search.pinned import GroupPin, StagePin
from tests.lowering.execution import executed_plan
from tests.lowering.test_collectives import node_of_h100


def test_groups_tied_parameters_and_joined_updates() -> None:
    table = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    params = {"embed": table, "layers": jax.ShapeDtypeStruct((6, 64, 64), jnp.float32)}

    def loss(params, batch):
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), params["embed"][batch], params["layers"])
        return jnp.mean((h @ params["embed"].T) ** 2)

    batch = jax.ShapeDtypeStruct((8,), jnp.int32)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    task = TrainingTask(loss_fn=loss, params=params, batch=batch, optimizer=optimizer)
    stages = (
        StagePin(
            groups=(GroupPin(pool="g0", devices=2, mesh=(2,)), GroupPin(pool="g1", devices=4, mesh=(4,), share=2))
        ),
        StagePin(groups=(GroupPin(pool="g2", devices=4, mesh=(4,)),)),
    )
    plan = decode(encode(executed_plan(task, stages, node_of_h100(2, 4, 4), microbatch=8, microbatches=6)))
    assert plan.tied and plan.update_joins and plan.stages[0].groups[0].time.exchange_s > 0
    assert len({(link.from_group, link.to_group) for link in plan.transfers[0].links}) == 2
    step = planner.simulate(plan)
    assert step.makespan_s == plan.prediction.step_time_s
    assert [row.peak_bytes for row in step.groups] == [
        group.memory.total_bytes for stage in plan.stages for group in stage.groups
    ]
    alone = planner.simulate(plan, fail=["stage0/g0"])
    assert [row.microbatches for row in alone.groups] == [6, 6] and alone.makespan_s > step.makespan_s

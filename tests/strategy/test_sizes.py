"""Models that run other ops when they get more examples."""

import jax
import jax.numpy as jnp
import optax
import pytest

import planner
from costmodel.cluster import parse_cluster
from planner.frontend.task import TrainingTask
from profiles.catalogue import load_catalogue

GROUP = {"name": "a", "nodes": 1, "device": "A100-SXM4-80GB", "devices_per_node": 4}
CLUSTER = parse_cluster({"name": "c", "group": [GROUP]}, load_catalogue())


def loss(params, batch):
    h = batch["x"]
    for weight in params["layers"]:
        h = h + jnp.tanh(h @ weight)
        if h.shape[0] > 8:
            h = h + jnp.sin(h @ weight.T)
    return jnp.mean((h - batch["y"]) ** 2)


@pytest.mark.parametrize(
    "text", ["dp=4,microbatch=2", "dp=2,microbatch=16", "tp=2,microbatch=3", "dp=2,tp=2,microbatch=12"]
)
def test_a_function_that_looks_at_its_number_of_examples_is_estimated_at_the_size_asked_for(text: str) -> None:
    rows = jax.ShapeDtypeStruct((16, 256), jnp.float32)
    layers = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 4
    task = TrainingTask(
        loss_fn=loss, params={"layers": layers}, batch={"x": rows, "y": rows}, optimizer=optax.sgd(0.1), name="sized"
    )
    estimate = planner.estimate(task, CLUSTER, text, global_batch=96)
    plan = planner.plan(task, cluster=CLUSTER, strategy=text, global_batch=96, baselines=False)
    assert estimate.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=0.1)
    assert estimate.memory.peak_bytes == pytest.approx(plan.prediction.peak_memory_bytes, rel=0.1)

"""Replicas that compute on their examples together: layers that sort all examples' tokens by their expert."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import planner

WIDTH, EXPERTS, LAYERS = 512, 8, 4


def leaf(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32)


def sorting_layers(penalty: float = 0.0) -> planner.TrainingTask:
    """Args: penalty: of the squares of some of the experts' weights, which the loss then reads too."""
    layers = {
        "first": leaf(WIDTH, 4 * WIDTH),
        "second": leaf(4 * WIDTH, WIDTH),
        "router": leaf(WIDTH, EXPERTS),
        "experts": {"up": leaf(EXPERTS, WIDTH, 4 * WIDTH), "down": leaf(EXPERTS, 4 * WIDTH, WIDTH)},
    }

    def loss(params: Any, batch: Any) -> Any:
        def layer(h: Any, own: Any) -> tuple[Any, None]:
            x = h + jnp.tanh(h @ own["first"]) @ own["second"]
            tokens = x.reshape(-1, WIDTH)
            choice = jnp.argmax(tokens @ own["router"], axis=-1)
            order, sizes = jnp.argsort(choice), jnp.bincount(choice, length=EXPERTS).astype(jnp.int32)
            y = jax.nn.gelu(jax.lax.ragged_dot(tokens[order], own["experts"]["up"], sizes))
            y = jax.lax.ragged_dot(y, own["experts"]["down"], sizes)
            return x + y[jnp.argsort(order)].reshape(x.shape), None

        h, _ = jax.lax.scan(layer, batch["x"], params["layers"])
        fit = jnp.mean(h**2)
        return fit + penalty * jnp.sum(params["layers"]["experts"]["up"] ** 2) if penalty else fit

    return planner.TrainingTask(
        loss_fn=loss,
        params={"layers": layers},
        batch={"x": jax.ShapeDtypeStruct((1, 512, WIDTH), jnp.float32)},
        optimizer=optax.adam(1e-3),
        independent_microbatches=True,
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = Path(tmp_path_factory.mktemp("cluster")) / "eight.toml"
    path.write_text('name = "c"\n[[group]]\nname = "a"\nnodes = 1\ndevice = "A100-SXM4-80GB"\ndevices_per_node = 8\n')
    return str(path)


@pytest.fixture(scope="module")
def estimator(cluster: str) -> planner.Estimator:
    return planner.Estimator(model=sorting_layers(), cluster=cluster)


def parameters_of(plan: planner.Plan) -> list[int]:
    return [group.memory.parameters_bytes for stage in plan.stages for group in stage.groups]


@pytest.mark.parametrize(
    "text",
    [
        "dp=4,pp=2,microbatch=4,zero=3",
        "dp=2,cp=2,pp=2,microbatch=4,zero=3",  # what ops use split along positions is not split by ZeRO again
        "dp=4,ep=2,pp=2,microbatch=4,zero=3",
        "dp=4,cp=2,microbatch=4,zero=3",
        "dp=8,ep=4,microbatch=4,zero=3",
        "dp=8,ep=4,microbatch=4,zero=2",
    ],
)
def test_parameters_lie_and_move_as_in_the_plan(estimator: planner.Estimator, cluster: str, text: str) -> None:
    plan = planner.plan(sorting_layers(), cluster=cluster, global_batch=64, strategy=text, baselines=False)
    found = estimator(text, 64)
    assert found.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=0.05)
    assert found.memory.peak_bytes == pytest.approx(plan.prediction.peak_memory_bytes, rel=0.08)
    assert [stage.parameters_bytes for stage in found.memory] == pytest.approx(parameters_of(plan), rel=1e-3)


def test_estimates_do_not_depend_on_what_was_asked_before(cluster: str) -> None:
    texts = [f"dp=4,tp=2,microbatch=4,zero={zero}" for zero in (2, 3)]
    alone = [planner.estimate(sorting_layers(), cluster, text, global_batch=64).step_time_s for text in texts]
    for order in (texts, texts[::-1]):
        one = planner.Estimator(model=sorting_layers(), cluster=cluster)
        found = {text: one(text, 64).step_time_s for text in order}
        assert [found[text] for text in texts] == alone


def test_a_second_reader_of_experts_does_not_have_all_of_them_gathered(cluster: str) -> None:
    text = "dp=8,microbatch=4,zero=3"
    task = sorting_layers(penalty=0.01)
    plan = planner.plan(task, cluster=cluster, global_batch=64, strategy=text, baselines=False)
    found = planner.estimate(task, cluster, text, global_batch=64)
    assert found.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=0.05)

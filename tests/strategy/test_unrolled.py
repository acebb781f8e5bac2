"""A model written out layer by layer is estimated as the same model in a scan."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import planner
from costmodel.errors import InputError

LAYERS, WIDTH, VOCAB, POSITIONS = 6, 64, 512, 16


def leaf(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def layer(x: Any, weights: Any) -> Any:
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


def unrolled(params: Any, batch: Any) -> Any:
    x = params["embedding"][batch["tokens"]]
    for weights in params["layers"]:
        x = layer(x, weights)
    return _loss(x, params["head"], batch["labels"])


def scanned(params: Any, batch: Any) -> Any:
    x = params["embedding"][batch["tokens"]]
    x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, params["layers"])
    return _loss(x, params["head"], batch["labels"])


def _loss(x: Any, head: Any, labels: Any) -> Any:
    scores = jax.nn.log_softmax(x @ head)
    return -jnp.mean(jnp.take_along_axis(scores, labels[..., None], axis=-1))


def task(function: Any, layers: Any) -> planner.TrainingTask:
    tokens = jax.ShapeDtypeStruct((1, POSITIONS), jnp.int32)
    params = {"embedding": leaf(VOCAB, WIDTH), "layers": layers, "head": leaf(WIDTH, VOCAB)}
    batch = {"tokens": tokens, "labels": tokens}
    return planner.TrainingTask(loss_fn=function, params=params, batch=batch, optimizer=optax.adam(1e-3))


WRITTEN_OUT = task(unrolled, [{"up": leaf(WIDTH, 256), "down": leaf(256, WIDTH)} for _ in range(LAYERS)])
STACKED = task(scanned, {"up": leaf(LAYERS, WIDTH, 256), "down": leaf(LAYERS, 256, WIDTH)})


@pytest.fixture(scope="module")
def estimators(tmp_path_factory: pytest.TempPathFactory) -> tuple[planner.Estimator, planner.Estimator]:
    path = Path(tmp_path_factory.mktemp("cluster")) / "twelve.toml"
    path.write_text('name = "c"\n[[group]]\nname = "a"\nnodes = 2\ndevice = "A100-SXM4-80GB"\ndevices_per_node = 6\n')
    return planner.Estimator(model=WRITTEN_OUT, cluster=str(path)), planner.Estimator(model=STACKED, cluster=str(path))


@pytest.mark.parametrize(
    "strategy",
    [
        "dp=2",
        "pp=2",
        "pp=3,dp=2",
        "pp=2,partition=2+4",
        "pp=3,interleave=2",
        "pp=2,schedule=zb-h1",
        "pp=2,remat=full,dp=2,zero=1",
        "dp=4,zero=3,remat=full",
        "tp=2,pp=2,sp=on",
        "cp=2,pp=2",
    ],
)
def test_unrolled_layers_cost_and_hold_what_scanned_ones_do(
    estimators: tuple[planner.Estimator, planner.Estimator], strategy: str
) -> None:
    written, stacked = (one(f"{strategy},microbatch=3", 24) for one in estimators)
    for part in (
        "compute_s",
        "sends_s",
        "bubble_s",
        "optimizer_s",
    ):  # collectives start once a parameter, or once a stack
        assert getattr(written.breakdown, part) == pytest.approx(getattr(stacked.breakdown, part), rel=0.05)
    for own, other in zip(written.memory, stacked.memory, strict=True):
        assert own.parameters_bytes == pytest.approx(other.parameters_bytes)
        assert own.gradients_bytes == pytest.approx(other.gradients_bytes)
        assert own.optimizer_bytes == pytest.approx(other.optimizer_bytes)
        assert own.buffers_bytes == pytest.approx(other.buffers_bytes)
        if "remat=full" not in strategy:  # the head and the loss are two blocks where there is no scan before them
            assert own.saved_bytes == pytest.approx(other.saved_bytes, rel=0.1)


def test_sends_between_unrolled_layers_are_charged(estimators: tuple[planner.Estimator, planner.Estimator]) -> None:
    written, stacked = (one("pp=2,dp=6,microbatch=1,rank_order=dp-tp-cp-pp", 24) for one in estimators)
    assert written.breakdown.sends_s == pytest.approx(stacked.breakdown.sends_s) and written.breakdown.sends_s > 0.0


def test_layers_that_are_not_there_are_refused(estimators: tuple[planner.Estimator, planner.Estimator]) -> None:
    with pytest.raises(InputError, match="the partition has 7 layers, the model 6") as found:
        estimators[0]("pp=2,partition=3+4,microbatch=1", 24)
    assert found.value.code == "MP184"

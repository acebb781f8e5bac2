"""A model written out layer by layer is estimated as the same model in a scan."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import planner
from costmodel.errors import InputError
from costmodel.graph import ModelGraph, UpdateJoins
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.strategy.layers import layer_classes, streams

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
        if "remat=full" in strategy:  # the head and the loss are two blocks where there is no scan before them
            continue
        if len(written.memory) == 1:  # one program: its compiler sees into layers that are no scan
            assert own.saved_bytes < other.saved_bytes
        else:
            assert own.saved_bytes == pytest.approx(other.saved_bytes, rel=0.1)


def test_sends_between_unrolled_layers_are_charged(estimators: tuple[planner.Estimator, planner.Estimator]) -> None:
    written, stacked = (one("pp=2,dp=6,microbatch=1,rank_order=dp-tp-cp-pp", 24) for one in estimators)
    assert written.breakdown.sends_s == pytest.approx(stacked.breakdown.sends_s) and written.breakdown.sends_s > 0.0


def test_layers_that_are_not_there_are_refused(estimators: tuple[planner.Estimator, planner.Estimator]) -> None:
    with pytest.raises(InputError, match="the partition has 7 layers, the model 6") as found:
        estimators[0]("pp=2,partition=3+4,microbatch=1", 24)
    assert found.value.code == "MP184"


def plain_layer(x: Any, weights: Any) -> Any:
    return jnp.tanh(x @ weights["up"]) @ weights["down"]


def headless(one: Any, count: int = 8) -> planner.TrainingTask:
    """`count` equal layers that begin at the batch, and the loss."""

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for weights in params["layers"]:
            x = one(x, weights)
        return jnp.mean((x - batch["y"]) ** 2)

    params = {"layers": [{"up": leaf(WIDTH, 256), "down": leaf(256, WIDTH)} for _ in range(count)]}
    values = leaf(1, POSITIONS, WIDTH)
    return planner.TrainingTask(
        loss_fn=loss, params=params, batch={"x": values, "y": values}, optimizer=optax.adam(1e-3)
    )


def graph_of(own: planner.TrainingTask) -> ModelGraph:
    return model_graph(capture(own, 3), UpdateJoins())


@pytest.mark.parametrize("one", [layer, plain_layer])
def test_a_first_layer_that_reads_the_batch_is_a_layer(one: Any, tmp_path: Path) -> None:
    """No gradient crosses its input: its class is another, and it could be cut in more places than the others."""
    own = headless(one)
    graph, layers = graph_of(own), layer_classes(graph_of(own))
    assert [block.class_key in layers for block in graph.blocks] == [True] * 8 + [False] and len(layers) == 2
    handed = streams(graph)
    assert handed[graph.blocks[0].class_key] == frozenset()
    (name,) = handed[graph.blocks[1].class_key]
    cls = graph.classes[graph.blocks[1].class_key]
    assert [b.inputs[cls.inputs.index(name)] for b in graph.blocks[1:8]] == [b.outputs[0] for b in graph.blocks[:7]]
    two = graph_of(headless(one, 2))
    assert [len(streams(two)[block.class_key]) for block in two.blocks[:2]] == [0, 1]
    path = tmp_path / "eight.toml"
    path.write_text('name = "c"\n[[group]]\nname = "a"\nnodes = 1\ndevice = "A100-SXM4-80GB"\ndevices_per_node = 8\n')
    found = planner.estimate(own, str(path), "pp=8,microbatch=3", global_batch=24)
    assert [stage.parameters_bytes for stage in found.memory] == [pytest.approx(2 * 4 * WIDTH * 256)] * 8
    with pytest.raises(InputError, match="the partition has 9 layers, the model 8"):
        planner.estimate(own, str(path), "pp=2,partition=4+5,microbatch=3", global_batch=24)


def test_what_is_made_before_the_layers_is_no_stream() -> None:
    """The first layer has the stream and a mask from the block before it, the others the mask from afar."""

    def loss(params: Any, batch: Any) -> Any:
        x = params["embedding"][batch["tokens"]]
        mask = jnp.where(batch["tokens"] > 0, 1.0, 0.0)[..., None]
        for weights in params["layers"]:
            x = layer(x, weights) * mask
        return _loss(x, params["head"], batch["labels"])

    graph = graph_of(task(loss, WRITTEN_OUT.params["layers"]))
    ((key, names),) = streams(graph).items()
    blocks = [block for block in graph.blocks if block.class_key == key]
    before = graph.blocks[graph.blocks.index(blocks[0]) - 1]
    assert len(blocks) == LAYERS and len([source for source in blocks[0].inputs if source in before.outputs]) == 2
    (name,) = names
    at = graph.classes[key].inputs.index(name)
    assert [block.inputs[at] for block in blocks[1:]] == [block.outputs[0] for block in blocks[:-1]]

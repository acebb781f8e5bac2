"""Written-out layers that all read a value made before them: the layers stay blocks of one class, as in a scan, and the
value crosses the borders between stages. Executed in stages, equal to one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from costmodel.graph import ModelGraph
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.frontend.task import TrainingTask
from planner.search.layout import crossing_values
from tests.lowering.execution import assert_equals_one_device, executed_plan, gentle, pins, slow_cluster
from tests.lowering.layouts import on

WIDTH, LAYERS, POSITIONS, HEADS = 8, 6, 4, 2
THREE = pins((on("g0", 2),), (on("g1", 4),), (on("g2", 2),))
Values = dict[str, Any]


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


LAYER = {
    "scale": shape(WIDTH),
    "qkv": shape(WIDTH, 3 * WIDTH),
    "out": shape(WIDTH, WIDTH),
    "up": shape(WIDTH, 4 * WIDTH),
    "down": shape(4 * WIDTH, WIDTH),
}
PARAMS = {
    "embed": shape(WIDTH, WIDTH),
    "layers": [LAYER] * LAYERS,
    "table": shape(2 * POSITIONS, HEADS),
    "matrix": shape(WIDTH, WIDTH),
    "gain": shape(WIDTH),
    "head": shape(WIDTH, 2),
}
BATCH = {"x": shape(6, POSITIONS, WIDTH), "y": shape(6, POSITIONS, 2)}


def layer(x: Any, w: Any, shared: Values) -> Any:
    h = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3) * w["scale"]
    q, k, v = jnp.split((h @ w["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
    shares = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + shared.get("bias", 0.0))
    x = x + jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(x.shape) @ w["out"]
    inner = jnp.tanh(x @ w["up"]) @ w["down"] * shared.get("gain", 1.0)
    return x + inner @ shared["matrix"] if "matrix" in shared else x + inner + shared.get("first", 0.0)


def learned_bias(params: Any, x: Any) -> Values:
    """Of relative positions, made once from parameters."""
    apart = jnp.arange(POSITIONS)[:, None] - jnp.arange(POSITIONS)[None, :] + POSITIONS
    return {"bias": jnp.transpose(params["table"][apart], (2, 0, 1))}


def shared_matrix(params: Any, x: Any) -> Values:
    return {"matrix": jnp.tanh(params["matrix"]) @ params["matrix"]}


def shared_gain(params: Any, x: Any) -> Values:
    return {"gain": jax.nn.softplus(params["gain"])}


def skip(params: Any, x: Any) -> Values:
    """The first layer's input goes to all layers: an activation."""
    return {"first": 0.1 * x}


def several(params: Any, x: Any) -> Values:
    return {**learned_bias(params, x), **shared_gain(params, x), **skip(params, x)}


def nothing(params: Any, x: Any) -> Values:
    return {}


def task(shared: Callable[[Any, Any], Values], *, scanned: bool = False) -> TrainingTask:
    def loss(params: Any, batch: Any) -> Any:
        x = jnp.tanh(batch["x"] @ params["embed"])
        values = shared(params, x)
        if scanned:
            x, _ = lax.scan(lambda x, w: (layer(x, w, values), None), x, params["layers"])
        else:
            for w in params["layers"]:
                x = layer(x, w, values)
        return jnp.mean((x @ params["head"] - batch["y"]) ** 2)

    stacked = jax.tree.map(lambda one: shape(LAYERS, *one.shape), LAYER)
    params = PARAMS | ({"layers": stacked} if scanned else {})
    return gentle(TrainingTask(loss_fn=loss, params=params, batch=BATCH, optimizer=optax.identity()))


ZEROS = jax.tree.map(lambda one: jnp.zeros(one.shape), (PARAMS, BATCH["x"]))


def graph_of(one: TrainingTask) -> ModelGraph:
    return model_graph(capture(one, 2))


SHARED = [learned_bias, shared_matrix, shared_gain, skip, several]


@pytest.mark.parametrize("shared", SHARED)
def test_layers_are_blocks_of_one_class_that_hand_on_what_those_of_a_scan_do(shared: Any) -> None:
    written, stacked = graph_of(task(shared)), graph_of(task(shared, scanned=True))
    runs = [[b for b in g.blocks if b.name.startswith("layers[")] for g in (written, stacked)]
    assert [len(run) for run in runs] == [LAYERS, LAYERS] and [len({b.class_key for b in run}) for run in runs] == [
        1,
        1,
    ]
    borders = [[g.blocks.index(run[at]) for at in range(1, LAYERS)] for g, run in zip((written, stacked), runs)]
    crossing = [
        [sorted(g.values[v].shape for v in crossing_values(g, border)) for border in own]
        for g, own in zip((written, stacked), borders, strict=True)
    ]
    assert crossing[0] == crossing[1] and len(crossing[0][0]) == 1 + len(shared(*ZEROS))


def test_what_stands_before_the_layers_may_be_read_behind_them() -> None:
    """It crosses the borders between them; the first layer alone has it as its own input."""

    def loss(params: Any, batch: Any) -> Any:
        x = first = jnp.tanh(batch["x"] @ params["embed"])
        for w in params["layers"]:
            x = layer(x, w, {})
        return jnp.mean(((x * first) @ params["head"] - batch["y"]) ** 2)

    graph = graph_of(TrainingTask(loss, params=PARAMS, batch=BATCH, optimizer=optax.identity()))
    own = [b for b in graph.blocks if b.name.startswith("layers[")]
    assert len(own) >= LAYERS - 1 and len({b.class_key for b in own}) == 1
    assert {len(crossing_values(graph, graph.blocks.index(block))) for block in own[1:]} == {2}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("shared", SHARED)
def test_stages_equal_one_device(shared: Any, schedule: str) -> None:
    one = task(shared)
    plan = executed_plan(one, THREE, slow_cluster(2, 4, 2), microbatch=4, microbatches=3, schedule=schedule)
    ranges = [stage.blocks for stage in plan.stages]
    assert all(any(name.startswith("layers[") for name in own) for own in ranges), ranges
    assert_equals_one_device(one, plan)

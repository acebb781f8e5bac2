"""What an optimizer's update joins: read off its own program, for leaves and for layers of stacks."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.frontend.task import TrainingTask
from planner.search.cuts import uncut_borders

PARAMS = {
    "embed": jax.ShapeDtypeStruct((6, 8), jnp.float32),
    "layers": jax.ShapeDtypeStruct((4, 8, 8), jnp.float32),
    "table": jax.ShapeDtypeStruct((3,), jnp.float32),
}
EVERY = frozenset({"embed", "layers"})


def loss(params: Any, batch: Any) -> jax.Array:
    start = batch["x"] @ params["embed"]
    end, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), start, params["layers"])
    return jnp.mean(end**2) + jnp.sum(params["table"])


def graph_of(*steps: optax.GradientTransformation) -> Any:
    task = TrainingTask(
        loss_fn=loss, params=PARAMS, batch={"x": jax.ShapeDtypeStruct((4, 6), jnp.float32)},
        optimizer=optax.chain(*steps), frozen=lambda path: path == "table",
    )  # fmt: skip
    return model_graph(capture(task, 4))


@pytest.mark.parametrize("steps", [(optax.adamw(1e-3),), (optax.sgd(0.1, momentum=0.9),), (optax.lion(1e-3),)])
def test_elementwise_updates_join_nothing(steps: Any) -> None:
    joins = graph_of(*steps).joins
    assert (dict(joins.reads), joins.rounds, dict(joins.uncut)) == ({}, 0, {})


def test_a_global_norm_joins_all_trained_leaves_and_layers() -> None:
    joins = graph_of(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).joins
    assert joins.reads == {"embed": frozenset({"layers"}), "layers": EVERY}
    assert joins.rounds == 1


def test_a_norm_of_many_leaves_is_one_round() -> None:
    """However many leaves are added up one after the other."""
    params = {f"w{i}": jax.ShapeDtypeStruct((8, 8), jnp.float32) for i in range(5)}
    steps = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    task = TrainingTask(
        loss_fn=lambda p, b: sum(jnp.mean((b @ w) ** 2) for w in p.values()),
        params=params, batch=jax.ShapeDtypeStruct((4, 8), jnp.float32), optimizer=steps,
    )  # fmt: skip
    joins = model_graph(capture(task, 4)).joins
    assert joins.rounds == 1
    assert joins.reads == {name: frozenset(params) - {name} for name in params}


def test_each_norm_of_clipped_gradients_is_a_round_of_its_own() -> None:
    joins = graph_of(optax.clip_by_global_norm(1.0), optax.scale(2.0), optax.clip_by_global_norm(1.0)).joins
    assert joins.rounds == 2


def test_the_norm_of_a_leaf_joins_its_layers_only() -> None:
    joins = graph_of(optax.lamb(1e-3)).joins
    assert joins.reads == {"layers": frozenset({"layers"})}
    assert joins.rounds == 2  # optax's safe norm takes a norm of what a first norm selects


def test_layers_that_cannot_be_updated_apart_are_not_cut_apart() -> None:
    first = optax.stateless(lambda g, _: jax.tree.map(lambda x: x - jnp.sort(x, 0)[:1], g))
    graph = graph_of(first, optax.sgd(0.1))
    assert "sort" in graph.joins.uncut["layers"]
    names = [b.name for b in graph.blocks]
    assert {names[i] for i in uncut_borders(graph)} == {"layers[1]", "layers[2]", "layers[3]"}

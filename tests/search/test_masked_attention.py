"""Attention whose scores are divided, masked and biased by constants of the program splits as any other."""

from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import planner
from costmodel.cluster import parse_cluster
from costmodel.sharding import Spec
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.frontend.task import TrainingTask
from planner.space.groups import group_ops, group_strategies
from profiles.catalogue import load_catalogue

LAYERS, BATCH, SEQ, HEADS, WIDTH = 3, 16, 128, 8, 32
HIDDEN = HEADS * WIDTH
GROUP = {"name": "a", "nodes": 1, "device": "A100-SXM4-80GB", "devices_per_node": 8}
CLUSTER = parse_cluster({"name": "c", "group": [GROUP]}, load_catalogue())


def masked(scores: jax.Array) -> jax.Array:
    return jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), scores, -1e9)


def biased(scores: jax.Array) -> jax.Array:
    """A bias for each head that grows with the distance (ALiBi's)."""
    at = jnp.arange(SEQ)
    slopes = 2.0 ** -jnp.arange(1.0, HEADS + 1)
    return scores - slopes[:, None, None] * jnp.abs(at[:, None] - at[None, :])


MASKS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "where": masked,
    "bias": biased,
    "both": lambda scores: masked(biased(scores)),
}


def task(mask: str, *, scanned: bool, scores_divided: bool = True) -> TrainingTask:
    """A stack of attention layers.

    Args:
        scores_divided: scale scores by ``/ sqrt(d)``, else queries by ``* d**-0.5``.
    """

    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        batch, seq, hidden = x.shape
        heads = (x @ weights["qkv"]).reshape(batch, seq, HEADS, 3, WIDTH)
        q, k, v = heads[..., 0, :], heads[..., 1, :], heads[..., 2, :]
        if scores_divided:
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(WIDTH)
        else:
            scores = jnp.einsum("bqhd,bkhd->bhqk", q * WIDTH**-0.5, k)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(MASKS[mask](scores)), v)
        return x + mixed.reshape(batch, seq, hidden) @ weights["out"]

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        x = batch["x"]
        if scanned:
            x = jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, params)[0]
        else:
            for weights in params:
                x = layer(x, weights)
        return jnp.mean(x**2)

    def weights(*stack: int) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = {"qkv": (HIDDEN, 3 * HIDDEN), "out": (HIDDEN, HIDDEN)}
        return {name: jax.ShapeDtypeStruct((*stack, *shape), jnp.float32) for name, shape in shapes.items()}

    return TrainingTask(
        loss_fn=loss,
        params=weights(LAYERS) if scanned else [weights() for _ in range(LAYERS)],
        batch={"x": jax.ShapeDtypeStruct((BATCH, SEQ, HIDDEN), jnp.float32)},
        optimizer=optax.adam(1e-3),
        name="attention",
    )


CASES = pytest.mark.parametrize(("mask", "scanned"), [*product(MASKS, (True, False))])


@CASES
@pytest.mark.parametrize("mesh", [(8,), (2, 4)])
def test_scores_split_along_batch_and_heads_on_every_axis(mask: str, scanned: bool, mesh: tuple[int, ...]) -> None:
    graph = model_graph(capture(task(mask, scanned=scanned), BATCH))
    found = 0
    for cls in graph.classes.values():
        for group in group_ops(cls.ops, cls.tensors, frozenset(n for n in cls.outputs if n)):
            if not any(op.primitive == "exp" for op in group.ops):
                continue
            found += 1
            scores = [n for n in group.reads if cls.tensors[n].shape == (BATCH, HEADS, SEQ, SEQ)]
            assert scores
            splits: set[Spec] = set()
            for option in group_strategies(group, mesh, cls.tensors):
                specs = {*(option.needs[group.reads.index(n)] for n in scores), *option.gives}
                if len(specs) == 1:  # read and left alike
                    splits |= specs
            assert set(product((0, 1, 2), repeat=len(mesh))) <= splits, (group.name, splits)
    assert found


@CASES
def test_a_data_parallel_plan_gathers_no_activations(mask: str, scanned: bool) -> None:
    plans = [
        planner.plan(
            task(mask, scanned=scanned, scores_divided=divided),
            cluster=CLUSTER,
            global_batch=8 * BATCH,
            strategy=f"dp=8,microbatch={BATCH}",
            baselines=False,
        )
        for divided in (True, False)
    ]
    for plan in plans:
        (group,) = plan.stages[0].groups
        assert not [name for name in group.time.collectives if "all_gather" in name or "all_to_all" in name]
    times = [plan.prediction.step_time_s for plan in plans]
    assert times[0] == pytest.approx(times[1], rel=0.05)

"""What a task may contain besides a plain loss: executed on one stage and on two, equal to one device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from costmodel.errors import InputError
from planner.frontend.task import TrainingTask
from tests.lowering.execution import assert_equals_one_device, gentle, slow_cluster
from tests.lowering.layouts import ONE, TWO, PinnedLayout

WIDTH, LAYERS = 8, 4
ONE_STAGE, TWO_STAGES = PinnedLayout(slow_cluster(8), ONE), PinnedLayout(slow_cluster(4, 4), TWO)
both = pytest.mark.parametrize("layout", [ONE_STAGE, TWO_STAGES], ids=["one stage", "two stages"])


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


PARAMS = {
    "embed": shape(6, WIDTH),
    "layers": {"w": shape(LAYERS, WIDTH, WIDTH), "bias": shape(LAYERS, WIDTH)},
    "head": shape(WIDTH, 2),
}
BATCH = {"x": shape(4, 6), "y": shape(4, 2)}


def hidden(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The value behind all layers, and the one before them."""
    start = jnp.tanh(x @ params["embed"])
    end, _ = lax.scan(lambda h, p: (jnp.tanh(h @ p["w"] + p["bias"]), None), start, params["layers"])
    return end, start


def error(params: Any, batch: Any) -> jax.Array:
    """[b]"""
    return jnp.sum((hidden(params, batch["x"])[0] @ params["head"] - batch["y"]) ** 2, -1)


def mean(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(error(params, batch))


def task(loss: Any = mean, *, params: Any = PARAMS, batch: Any = BATCH, **more: Any) -> TrainingTask:
    return gentle(TrainingTask(loss_fn=loss, params=params, batch=batch, optimizer=optax.identity(), **more))


def check(one: TrainingTask, layout: PinnedLayout) -> Any:
    return assert_equals_one_device(one, layout.plan(one))


@both
def test_aux_outputs(layout: PinnedLayout) -> None:
    """The loss itself, an input, a constant, a split array, an early stage's value that later stages read."""

    def loss(params: Any, batch: Any) -> Any:
        end, start = hidden(params, batch["x"])
        value = jnp.mean((end @ params["head"] + start[:, :2] - batch["y"]) ** 2)
        aux = {
            "loss": value,
            "x": batch["x"],
            "three": 3,
            "table": jnp.arange(5),
            "end": end,
            "start": start,
            "norm": jnp.sum(params["head"] ** 2),
        }
        return value, aux

    check(task(loss, has_aux=True), layout)


@both
def test_frozen_and_unused_parameters_keep_their_values(layout: PinnedLayout) -> None:
    params = {**PARAMS, "unused": shape(3), "table": shape(4, dtype=jnp.int32)}

    def loss(params: Any, batch: Any) -> Any:
        turned = batch["x"][:, jnp.argsort(params["table"])[0] % 6][:, None] * batch["x"]
        return mean(params, {**batch, "x": batch["x"] + turned})

    check(task(loss, params=params, frozen=lambda path: path in ("layers/bias", "embed")), layout)


@both
def test_batch_leaves_of_every_kind(layout: PinnedLayout) -> None:
    """Unused, scalar, seen whole by every microbatch, and with the batch along dim 1."""
    batch = {
        "x": shape(6, 4),
        "y": shape(4, 2),
        "unused": shape(4, 3),
        "scale": shape(),
        "weights": shape(2),
        "ids": shape(4, dtype=jnp.int32),
    }

    def loss(params: Any, batch: Any) -> Any:
        apart = (hidden(params, batch["x"].T)[0] @ params["head"] - batch["y"]) * batch["weights"]
        return jnp.mean(jnp.sum(apart**2, -1) * (1.0 + batch["ids"])) * batch["scale"]

    dims = {"x": 1, "y": 0, "unused": 0, "scale": None, "weights": None, "ids": 0}
    check(task(loss, batch=batch, batch_dims=dims), layout)


@both
@pytest.mark.parametrize("reduction", ["sum", "weighted", "constant weight"])
def test_reductions(layout: PinnedLayout, reduction: str) -> None:
    def loss(params: Any, batch: Any) -> Any:
        errors, mask = error(params, batch), batch["x"][:, 0] > -1.0
        if reduction == "sum":
            return jnp.sum(errors)
        return (
            (jnp.sum(errors * mask), jnp.sum(mask.astype(jnp.float32)))
            if reduction == "weighted"
            else (jnp.sum(errors), 4.0)
        )

    check(task(loss, reduction="sum" if reduction == "sum" else "weighted"), layout)


@both
def test_a_penalty_on_stacked_parameters(layout: PinnedLayout) -> None:
    """Layers read slices of a leaf and the loss reads it whole: refused by name, until such leaves can be planned."""

    def loss(params: Any, batch: Any) -> Any:
        return mean(params, batch) + 0.1 * jnp.sum(params["layers"]["w"] ** 2)

    with pytest.raises(InputError, match="layers/w is read layer by layer and also whole"):
        check(task(loss), layout)


@both
def test_state_of_several_stages(layout: PinnedLayout) -> None:
    """Made by an early and by a late stage, read by both, replaced by another leaf, by a constant, or kept."""
    state = {"early": shape(), "late": shape(WIDTH), "was": shape(), "kept": shape(3), "reset": shape()}

    def loss(params: Any, batch: Any, state: Any) -> Any:
        end, start = hidden(params, batch["x"] + 0.1 * state["early"])
        value = jnp.mean(
            (end @ params["head"] - batch["y"] + 0.1 * state["early"] + 0.1 * jnp.mean(state["late"])) ** 2
        )
        new = {
            "early": 0.5 * state["early"] + jnp.mean(lax.stop_gradient(start)),
            "late": state["late"] + jnp.mean(lax.stop_gradient(end), 0) * (1 + state["reset"]),
            "was": state["early"],
            "kept": state["kept"],
            "reset": jnp.zeros(()),
        }
        return value, new

    check(task(loss, state=state, independent_microbatches=True), layout)


def test_state_that_would_hold_up_the_next_microbatch() -> None:
    """What a late block makes and an early one reads for the next microbatch stays on one stage."""

    def loss(params: Any, batch: Any, state: Any) -> Any:
        end, _ = hidden(params, batch["x"] + state)
        return jnp.mean((end @ params["head"] - batch["y"]) ** 2), jnp.mean(lax.stop_gradient(end))

    serial = task(loss, state=shape(), independent_microbatches=True)
    check(serial, ONE_STAGE)
    with pytest.raises(InputError, match="MP160"):
        TWO_STAGES.plan(serial)


@both
def test_values_that_skip_stages_and_user_remat(layout: PinnedLayout) -> None:
    def loss(params: Any, batch: Any) -> Any:
        block = jax.checkpoint(lambda h, p: (h + jnp.tanh(jnp.sin(h) @ p["w"] + p["bias"]), None))
        start = jnp.tanh(batch["x"] @ params["embed"])
        end, _ = lax.scan(block, start, params["layers"])
        return jnp.mean(
            (end @ params["head"] - start @ params["head"] - batch["x"] @ params["embed"][:, :2] - batch["y"]) ** 2
        )

    check(task(loss), layout)


@both
def test_unrolled_layers(layout: PinnedLayout) -> None:
    layers = {f"layer{i}": {"w": shape(WIDTH, WIDTH), "bias": shape(WIDTH)} for i in range(LAYERS)}

    def loss(params: Any, batch: Any) -> Any:
        h = jnp.tanh(batch["x"] @ params["embed"])
        for i in range(LAYERS):
            h = jnp.tanh(h @ params[f"layer{i}"]["w"] + params[f"layer{i}"]["bias"])
        return jnp.mean((h @ params["head"] - batch["y"]) ** 2)

    check(task(loss, params={"embed": PARAMS["embed"], **layers, "head": PARAMS["head"]}), layout)


OPTIMIZERS = {
    "adamw with a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 100), eps=1e-2, weight_decay=0.1),
    "two norms": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.scale(2.0), optax.clip_by_global_norm(0.7), optax.sgd(0.1)
    ),
    "state that starts as the parameters": lambda: optax.contrib.schedule_free_sgd(0.1),
    "multi_transform": lambda: optax.partition(
        {"a": optax.sgd(0.1), "b": optax.sgd(0.2, momentum=0.5)},
        lambda params: {k: "a" if k.startswith("layers") else "b" for k in params},
    ),
}


@both
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(layout: PinnedLayout, name: str) -> None:
    check(dataclasses.replace(task(), optimizer=OPTIMIZERS[name]()), layout)


@pytest.mark.parametrize("name", ["lamb", "adafactor"])
def test_optimizers_that_work_on_whole_leaves(name: str) -> None:
    """Norms and factors of a leaf are those of the whole leaf, also where it is split over devices."""
    optimizer = optax.lamb(1e-2, eps=1e-2) if name == "lamb" else optax.adafactor(1e-2, min_dim_size_to_factor=4)
    check(dataclasses.replace(task(), optimizer=optimizer), ONE_STAGE)

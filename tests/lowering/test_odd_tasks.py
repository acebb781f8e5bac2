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
from planner.lowering.compile import compile_plan
from planner.models import example_batch, gpt, init_params
from tests.lowering.execution import assert_equals_one_device, gentle, slow_cluster
from tests.lowering.layouts import ONE, TWO, PinnedLayout, zero_0, zero_1, zero_2, zero_3

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


def penalised(params: Any, batch: Any) -> Any:
    """L2 regularisation in the loss: layers read slices of leaves that the loss reads whole."""
    return mean(params, batch) + 0.1 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params["layers"]))


STORED = {
    "as searched": ONE_STAGE,
    "zero-3": dataclasses.replace(ONE_STAGE, microbatch=8, allowed=zero_3),
    "zero-2": dataclasses.replace(ONE_STAGE, allowed=zero_2),
    "zero-1": dataclasses.replace(ONE_STAGE, allowed=zero_1),
    "data": dataclasses.replace(ONE_STAGE, microbatch=8, allowed=zero_0),
    "remat": dataclasses.replace(ONE_STAGE, remat="full"),
    "zero-3 remat": dataclasses.replace(ONE_STAGE, microbatch=8, allowed=zero_3, remat="full"),
    "two stages": TWO_STAGES,
}


@pytest.mark.parametrize("name", STORED)
def test_a_penalty_on_stacked_parameters(name: str) -> None:
    check(task(penalised), STORED[name])


@pytest.mark.parametrize("name", ["as searched", "zero-3", "remat"])
def test_whole_reads_that_are_no_sum_over_layers(name: str) -> None:
    """Layers that should resemble each other, an item of the stack, and the stack inside the layers' own loop."""

    def loss(params: Any, batch: Any) -> Any:
        w = params["layers"]["w"]
        start = jnp.tanh(batch["x"] @ params["embed"]) @ w[1]
        end, _ = lax.scan(
            lambda h, p: (jnp.tanh(h @ p["w"] + p["bias"] + jnp.mean(w, (0, 1))), None), start, params["layers"]
        )
        alike = jnp.sum((w[1:] - w[:-1]) ** 2) + jnp.einsum("lij,kij->", w, w)
        return jnp.mean((end @ params["head"] - batch["y"]) ** 2) + 0.1 * alike

    check(task(loss), STORED[name])


@both
def test_a_stack_that_two_loops_read(layout: PinnedLayout) -> None:
    """Layers that run twice have one home: no stage ends between them."""

    def loss(params: Any, batch: Any) -> Any:
        both = [hidden(params, x)[0] for x in (batch["x"], batch["x"][:, ::-1])]
        return jnp.mean(((both[0] - both[1]) @ params["head"] - batch["y"]) ** 2)

    check(task(loss), layout)


def test_stages_that_would_cut_a_stack_that_is_read_whole() -> None:
    layout = dataclasses.replace(TWO_STAGES, stages=tuple(dataclasses.replace(s, blocks=3) for s in TWO))
    with pytest.raises(InputError, match=r"MP160.*blocks on both sides read the same layers of layers/w"):
        layout.plan(task(penalised))


@both
def test_a_penalty_on_unrolled_layers(layout: PinnedLayout) -> None:
    layers = [{"w": shape(WIDTH, WIDTH), "bias": shape(WIDTH)} for _ in range(LAYERS)]

    def loss(params: Any, batch: Any) -> Any:
        h = jnp.tanh(batch["x"] @ params["embed"])
        for p in params["layers"]:
            h = jnp.tanh(h @ p["w"] + p["bias"])
        penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(params["layers"]))
        return jnp.mean((h @ params["head"] - batch["y"]) ** 2) + 0.1 * penalty

    check(task(loss, params={**PARAMS, "layers": layers}), layout)


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
    "branches": lambda: optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3),
    "several steps in one": lambda: optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2).gradient_transformation(),
    "multi_transform": lambda: optax.partition(
        {"a": optax.sgd(0.1), "b": optax.sgd(0.2, momentum=0.5)},
        lambda params: {k: "a" if k.startswith("layers") else "b" for k in params},
    ),
}


@both
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(layout: PinnedLayout, name: str) -> None:
    check(dataclasses.replace(task(), optimizer=OPTIMIZERS[name]()), layout)


WHOLE_LEAVES = {
    "lamb": lambda: optax.lamb(1e-2, eps=1e-2),
    "lamb with clipping": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(1e-2, eps=1e-2)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lars": lambda: optax.lars(1e-2, weight_decay=0.1),
    "novograd": lambda: optax.novograd(1e-2, eps=1e-2),
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "largest gradient": lambda: optax.chain(
        optax.stateless(lambda g, _: jax.tree.map(lambda x: x / (0.1 + jnp.max(jnp.abs(x))), g)), optax.sgd(0.1)
    ),
    "centred": lambda: optax.chain(
        optax.stateless(lambda g, _: jax.tree.map(lambda x: x - jnp.mean(x, 0, keepdims=True), g)), optax.sgd(0.1)
    ),
}


@both
@pytest.mark.parametrize("name", WHOLE_LEAVES)
def test_optimizers_that_work_on_whole_leaves(layout: PinnedLayout, name: str) -> None:
    """Norms, factors and means of a leaf are those of the whole leaf, also where devices or stages split it."""
    check(dataclasses.replace(task(), optimizer=WHOLE_LEAVES[name]()), layout)


@pytest.mark.parametrize("name", ["lamb with clipping", "adafactor"])
def test_whole_leaves_of_a_transformer_in_two_stages(name: str) -> None:
    small = gpt(hidden=16, layers=4, heads=2, vocab=32, seq=8, dtype="float32")
    layout = dataclasses.replace(TWO_STAGES, stages=tuple(dataclasses.replace(s, blocks=3) for s in TWO))
    # A key bias before a softmax has no gradient but rounding, which these would scale up.
    trained = dataclasses.replace(small, optimizer=WHOLE_LEAVES[name](), frozen=lambda path: path.endswith("k_bias"))
    trainer = check(trained, layout)
    assert {part.stage for part in trainer.updater.parts.values() if part.held.items == (0, 2)} == {0}


def test_an_optimizer_that_stages_cannot_do() -> None:
    """Sorted over the layers of a stack, which no stages cut then; a plan that was made to is refused."""

    def lowest(gradients: Any, _: Any) -> Any:
        return jax.tree.map(lambda x: x - jnp.sort(x, 0)[:1], gradients)

    one = dataclasses.replace(task(), optimizer=optax.chain(optax.stateless(lowest), optax.sgd(0.1)))
    check(one, TWO_STAGES)
    three_each = dataclasses.replace(TWO_STAGES, stages=tuple(dataclasses.replace(s, blocks=3) for s in TWO))
    with pytest.raises(InputError, match=r"MP160.*sort\.\d+ \(test_odd_tasks\.py:.*: every element is compared"):
        three_each.plan(one)
    with pytest.raises(InputError, match=r"MP116.*sort\.\d+ \(test_odd_tasks\.py:.*: every element is compared"):
        compile_plan(three_each.plan(task()), one)


def test_an_optimizer_that_loops() -> None:
    """A loop is not cut, but every layer's update is its own: parts are leaves to the optimizer."""

    def looped(gradients: Any, _: Any) -> Any:
        return jax.tree.map(lambda x: lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y) + i, x), gradients)

    check(dataclasses.replace(task(), optimizer=optax.chain(optax.stateless(looped), optax.sgd(0.1))), TWO_STAGES)


def test_a_state_that_a_step_consumed() -> None:
    one = task()
    trainer = compile_plan(ONE_STAGE.plan(one), one)
    state, batch = trainer.init(init_params(one)), example_batch(one, 16)
    trainer.step(state, batch)
    with pytest.raises(InputError, match="MP119: this state was given to a step before"):
        trainer.step(state, batch)

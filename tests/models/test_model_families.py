"""Every family at a tiny size: it runs, learns, and keeps the shape of a stack of equal layers."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.frontend.task import TrainingTask
from planner.models import bert, example_batch, gpt, init_params, init_state, llama, moe, t5, vit, wide_resnet

TINY: dict[str, Callable[..., TrainingTask]] = {
    "gpt": partial(gpt, hidden=16, layers=3, heads=4, vocab=32, seq=8, batch=4),
    "gpt-neox": partial(
        gpt, hidden=16, layers=3, heads=2, vocab=32, seq=8, batch=4, rotary_fraction=0.5, parallel=True, tied=False
    ),
    "gpt-dropout": partial(gpt, hidden=16, layers=3, heads=4, vocab=32, seq=8, batch=4, dropout=0.1),
    "llama": partial(llama, hidden=16, layers=3, heads=4, kv_heads=2, ffn=32, vocab=32, seq=8, batch=4),
    "llama-qwen": partial(
        llama, hidden=16, layers=3, heads=4, head_dim=6, ffn=32, vocab=32, seq=8, batch=4, qkv_bias=True, tied=True
    ),
    "bert": partial(bert, hidden=16, layers=3, heads=4, vocab=32, seq=8, batch=4),
    "t5": partial(t5, hidden=16, layers=3, heads=4, ffn=32, vocab=32, seq=8, target_seq=6, batch=4),
    "t5-gated": partial(
        t5, hidden=16, layers=3, decoder_layers=2, heads=4, ffn=32, vocab=32, seq=8, batch=4, gated=True, tied=False
    ),
    "moe": partial(moe, hidden=16, layers=3, heads=4, kv_heads=2, ffn=32, experts=4, vocab=32, seq=8, batch=4),
    "moe-capacity": partial(
        moe,
        hidden=16,
        layers=3,
        heads=4,
        ffn=32,
        experts=4,
        vocab=32,
        seq=8,
        batch=4,
        capacity_factor=1.0,
        balance_weight=0.01,
    ),
    "vit": partial(vit, hidden=16, layers=3, heads=4, patch=4, image=8, classes=8, batch=4),
    "vit-mean": partial(vit, hidden=16, layers=3, heads=4, patch=4, image=8, classes=8, batch=4, pool="mean"),
    "wide_resnet": partial(wide_resnet, blocks=(3, 2), wide=2, width=8, image=32, classes=8, batch=4),
    "wide_resnet-group": partial(
        wide_resnet, blocks=(3, 1), wide=1, width=32, image=32, classes=8, batch=4, norm="group"
    ),
}
every_family = pytest.mark.parametrize("name", TINY)


def scalar_loss(task: TrainingTask) -> Callable[..., jax.Array]:
    """The loss of one microbatch as a scalar function of params and batch, whatever else the task takes or returns."""
    extra = {}
    if task.state is not None:
        extra["state"] = init_state(task)
    if task.rng:
        extra["rng"] = jax.random.key(7)

    def loss(params, batch):
        out = task.loss_fn(params, batch, **extra)
        if task.reduction == "weighted":
            return out[0] / out[1]
        return out if task.state is None else out[0]

    return loss


@every_family
def test_a_gradient_step_lowers_the_loss(name):
    task = TINY[name](dtype="float32")
    params, batch = init_params(task), example_batch(task)
    loss = jax.value_and_grad(scalar_loss(task))

    @jax.jit
    def step(params, batch):
        value, gradient = loss(params, batch)
        return value, gradient, jax.tree.map(lambda p, g: p - 1e-2 * g, params, gradient)

    before, gradient, params = step(params, batch)
    classes = 8 if "labels" in batch else 32
    assert abs(float(before) - math.log(classes)) < 2.0
    assert jax.tree.map(lambda g: (g.shape, g.dtype), gradient) == jax.tree.map(lambda p: (p.shape, p.dtype), params)
    assert all(np.isfinite(g).all() and g.any() for g in map(np.asarray, jax.tree.leaves(unused_removed(name, gradient))))
    after, _, _ = step(params, batch)
    assert float(after) < float(before)


def unused_removed(name, gradient):
    """Leaves whose gradient is zero by mathematics: softmax does not see a shift that is the same for every key."""
    if "attention" in (layers := gradient.get("layers", {})) and "k_bias" in layers["attention"]:
        if name in ("gpt-neox", "llama-qwen"):  # rotation makes the key bias differ from key to key
            return gradient
        attention = {key: leaf for key, leaf in layers["attention"].items() if key != "k_bias"}
        return gradient | {"layers": layers | {"attention": attention}}
    return gradient


@every_family
def test_bfloat16_computes_in_bfloat16_and_trains_in_float32(name):
    task = TINY[name]()
    loss = scalar_loss(task)
    jaxpr = jax.make_jaxpr(loss)(task.params, task.batch)
    products = [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name in ("dot_general", "conv_general_dilated")]
    wide = [eqn for eqn in products if eqn.outvars[0].aval.dtype != jnp.bfloat16]
    # Only Mixtral's router is in float32.
    assert len(wide) == (1 if name.startswith("moe") else 0)
    value, gradient = jax.eval_shape(jax.value_and_grad(loss), task.params, task.batch)
    assert value.dtype == jnp.float32 and value.shape == ()
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", ["gpt", "moe"])
def test_bfloat16_is_near_float32(name):
    exact, rounded = TINY[name](dtype="float32"), TINY[name]()
    params, batch = init_params(exact), example_batch(exact)
    near, value = (float(jax.jit(scalar_loss(task))(params, batch)) for task in (rounded, exact))
    assert near == pytest.approx(value, rel=0.02)


@every_family
def test_layers_are_scanned(name):
    task = TINY[name]()
    jaxpr = jax.make_jaxpr(scalar_loss(task))(task.params, task.batch)
    lengths = [eqn.params["length"] for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "scan"]
    expected = {"t5": [3, 3], "t5-gated": [3, 2], "wide_resnet": [2, 1], "wide_resnet-group": [2]}
    assert lengths == expected.get(name, [3])


@every_family
def test_jaxprs_hold_no_arrays_and_no_transposes_of_activations(name):
    task = TINY[name]()
    jaxpr = jax.make_jaxpr(scalar_loss(task))(task.params, task.batch)
    captured = [const for const in jaxpr.consts if np.ndim(const)]
    # The fixed key (of the test, not of the model) and the fixed state may be captured here.
    assert not captured or task.state is not None
    assert not [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "transpose"]


@every_family
def test_any_microbatch_size_traces(name):
    task = TINY[name]()
    for size in (1, 6):
        assert jax.eval_shape(scalar_loss(task), task.params, task.with_batch_size(size)).shape == ()


def equations(jaxpr):
    """All equations of a jaxpr and of the jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "jaxpr"):
                yield from equations(inner.jaxpr)
            elif hasattr(inner, "eqns"):
                yield from equations(inner)

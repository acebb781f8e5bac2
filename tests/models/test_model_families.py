"""Every family at a tiny size: it runs, learns, and keeps the shape of a stack of equal layers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.models import example_batch, init_params
from tests.models.tiny import TINY, quick_jit, scalar_loss

every_family = pytest.mark.parametrize("name", TINY)


@every_family
def test_a_gradient_step_lowers_the_loss(name):
    task = TINY[name](dtype="float32")
    params, batch = init_params(task), example_batch(task)
    loss = jax.value_and_grad(scalar_loss(task))

    @quick_jit
    def step(params, batch):
        value, gradient = loss(params, batch)
        return value, gradient, jax.tree.map(lambda p, g: p - 1e-2 * g, params, gradient)

    before, gradient, params = step(params, batch)
    classes = 8 if "labels" in batch else 32
    assert abs(float(before) - math.log(classes)) < 2.0
    assert jax.tree.map(lambda g: (g.shape, g.dtype), gradient) == jax.tree.map(lambda p: (p.shape, p.dtype), params)
    assert all(
        np.isfinite(g).all() and g.any() for g in map(np.asarray, jax.tree.leaves(unused_removed(name, gradient)))
    )
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
    near, value = (float(quick_jit(scalar_loss(task))(params, batch)) for task in (rounded, exact))
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
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if hasattr(inner, "jaxpr"):
                yield from equations(inner.jaxpr)
            elif hasattr(inner, "eqns"):
                yield from equations(inner)

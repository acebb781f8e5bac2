"""Equinox modules, and packages built on it: equimo, diffrax, flowjax, optimistix."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.published.functions import Published, classes, cross_entropy, make, normal, published, tokens


def _module(build: Callable[[Any], Any]) -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    """(rebuild a module from its parameters, make the parameters) of an Equinox module made from a key."""
    import equinox as eqx

    params, static = eqx.partition(build(jax.random.key(0)), eqx.is_inexact_array)
    return lambda params: eqx.combine(params, static), lambda: params


@published("equinox")
def eqx_mlp() -> Published:
    import equinox as eqx

    rebuild, init = _module(lambda key: eqx.nn.MLP(12, 8, 64, 3, key=key))

    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(jax.vmap(rebuild(params))(batch["x"]), batch["label"])

    return make(loss, init, {"x": normal(12), "label": classes(8)})


@published("equinox")
def eqx_attention() -> Published:
    """Multi-head attention with dropout, a key for each example."""
    import equinox as eqx

    def build(key: Any) -> Any:
        a, b, c, d = jax.random.split(key, 4)
        return (
            eqx.nn.Embedding(64, 32, key=a),
            eqx.nn.MultiheadAttention(4, 32, dropout_p=0.1, key=b),
            eqx.nn.LayerNorm(32),
            eqx.nn.MLP(32, 64, 64, 1, key=c),
            eqx.nn.RotaryPositionalEmbedding(32),
            d,
        )

    rebuild, init = _module(lambda key: build(key)[:5])

    def one(model: Any, ids: Any, key: Any) -> Any:
        embed, attention, norm, head, rotary = model
        x = jax.vmap(embed)(ids)
        h = rotary(jax.vmap(norm)(x))
        mask = jnp.tril(jnp.ones((len(ids), len(ids)), bool))
        return jax.vmap(head)(x + attention(h, h, h, mask=mask, key=key))

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        keys = jax.random.split(rng, batch.shape[0])
        logits = jax.vmap(one, (None, 0, 0))(rebuild(params), batch[:, :-1], keys)
        return cross_entropy(logits, batch[:, 1:])

    return make(loss, init, tokens(16, 64), rng=True)


@published("equinox")
def eqx_gru() -> Published:
    """A recurrent net as in Equinox's own example: a scan over time under vmap."""
    import equinox as eqx

    def build(key: Any) -> Any:
        return eqx.nn.GRUCell(8, 32, key=key), eqx.nn.Linear(32, 8, key=key)

    rebuild, init = _module(build)

    def one(model: Any, xs: Any) -> Any:
        cell, head = model
        final, _ = jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(32), xs)
        return head(final)

    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(jax.vmap(one, (None, 0))(rebuild(params), batch["x"]), batch["label"])

    return make(loss, init, {"x": normal(12, 8), "label": classes(8)})


@published("equinox")
def eqx_convnet() -> Published:
    import equinox as eqx

    def build(key: Any) -> Any:
        a, b, c = jax.random.split(key, 3)
        return eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(3, 16, 4, key=a),
                eqx.nn.MaxPool2d(2, 2),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.GroupNorm(4, 16),
                eqx.nn.Conv2d(16, 32, 3, padding=1, key=b),
                eqx.nn.Lambda(jax.nn.leaky_relu),
                eqx.nn.AdaptiveAvgPool2d(2),
                eqx.nn.Lambda(jnp.ravel),
                eqx.nn.Linear(128, 8, key=c),
            ]
        )

    rebuild, init = _module(build)

    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(jax.vmap(rebuild(params))(batch["image"]), batch["label"])

    return make(loss, init, {"image": normal(3, 16, 16), "label": classes(8)})


@published("equinox", "equimo")
def equimo_vit() -> Published:
    import equimo.models as models

    def build(key: Any) -> Any:
        return models.VisionTransformer(
            img_size=16, in_channels=3, dim=32, patch_size=4, num_heads=[4], depths=[3], num_classes=8, key=key
        )

    rebuild, init = _module(build)

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        keys = jax.random.split(rng, batch["label"].shape[0])
        model = rebuild(params)
        return cross_entropy(jax.vmap(lambda x, k: model(x, key=k))(batch["image"], keys), batch["label"])

    return make(loss, init, {"image": normal(3, 16, 16), "label": classes(8)}, rng=True)


@published("equinox", "diffrax")
def diffrax_neural_ode() -> Published:
    """A neural ODE with adaptive steps, differentiated through a checkpointed loop, which asks whether any example
    failed."""
    import diffrax
    import equinox as eqx

    rebuild, init = _module(lambda key: eqx.nn.MLP(4, 4, 32, 2, activation=jax.nn.softplus, key=key))
    times = jnp.linspace(0.0, 1.0, 6)

    def one(model: Any, y: Any) -> Any:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: model(y)),
            diffrax.Tsit5(),
            t0=0.0,
            t1=1.0,
            dt0=0.1,
            y0=y[0],
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
            saveat=diffrax.SaveAt(ts=times),
            max_steps=64,
        )
        return ((solution.ys - y) ** 2).mean()

    def loss(params: Any, batch: Any) -> Any:
        return jax.vmap(one, (None, 0))(rebuild(params), batch).mean()

    return make(loss, init, normal(6, 4), independent_microbatches=True)


@published("equinox", "flowjax")
def flowjax_coupling_flow() -> Published:
    """A normalising flow of rational splines, by maximum likelihood."""
    from flowjax.bijections import RationalQuadraticSpline
    from flowjax.distributions import Normal
    from flowjax.flows import coupling_flow
    from paramax import unwrap

    def build(key: Any) -> Any:
        return coupling_flow(
            key,
            base_dist=Normal(jnp.zeros(4)),
            transformer=RationalQuadraticSpline(knots=5, interval=4),
            flow_layers=4,
            nn_width=32,
        )

    rebuild, init = _module(build)

    def loss(params: Any, batch: Any) -> Any:
        return -unwrap(rebuild(params)).log_prob(batch).mean()

    return make(loss, init, normal(4))


@published("equinox", "optimistix")
def optimistix_equilibrium() -> Published:
    """A layer whose output is a fixed point, differentiated implicitly. The solver asks whether any example failed."""
    import equinox as eqx
    import optimistix

    def build(key: Any) -> Any:
        a, b = jax.random.split(key)
        return eqx.nn.MLP(32, 16, 32, 1, activation=jax.nn.tanh, key=a), eqx.nn.Linear(16, 8, key=b)

    rebuild, init = _module(build)

    def one(model: Any, x: Any) -> Any:
        net, head = model
        solver = optimistix.FixedPointIteration(rtol=1e-5, atol=1e-5)
        found = optimistix.fixed_point(
            lambda z, x: 0.3 * net(jnp.concatenate([z, x])), solver, jnp.zeros(16), x, max_steps=32
        )
        return head(found.value)

    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(jax.vmap(one, (None, 0))(rebuild(params), batch["x"]), batch["label"])

    return make(loss, init, {"x": normal(16), "label": classes(8)}, independent_microbatches=True)

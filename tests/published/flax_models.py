"""Flax: linen and nnx modules."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.published.functions import Published, classes, cross_entropy, make, normal, published, tokens


@published("flax")
def linen_rnn() -> Published:
    """A bidirectional recurrent classifier; sequences end where the mask says."""
    from flax import linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any, lengths: Any) -> Any:
            both = nn.Bidirectional(nn.RNN(nn.OptimizedLSTMCell(32)), nn.RNN(nn.GRUCell(32)))
            return nn.Dense(8)(both(x, seq_lengths=lengths)[:, 0])

    model = Model()
    batch = {"x": normal(12, 8), "lengths": classes(12) + 1, "label": classes(8, 7)}

    def init() -> Any:
        return model.init(jax.random.key(0), batch["x"][:2], batch["lengths"][:2])["params"]

    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(model.apply({"params": params}, batch["x"], batch["lengths"]), batch["label"])

    return make(loss, init, batch)


@published("flax")
def linen_scanned_transformer() -> Published:
    """Layers by ``nn.scan`` around ``nn.remat``, with dropout."""
    from flax import linen as nn

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: None) -> Any:
            mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
            h = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4, dropout_rate=0.1, deterministic=False)(h, h, mask=mask)
            h = nn.Dense(64)(nn.LayerNorm()(x))
            return x + nn.Dropout(0.1, deterministic=False)(nn.Dense(32)(nn.gelu(h))), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids: Any) -> Any:
            x = nn.Embed(64, 32)(ids)
            layers = nn.scan(
                nn.remat(Layer, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=4,
            )
            x, _ = layers()(x, None)
            return nn.Dense(64)(nn.LayerNorm()(x))

    model, ids = Model(), tokens(16, 64)

    def init() -> Any:
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        return model.init(keys, jnp.zeros((2, 16), jnp.int32))["params"]

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        logits = model.apply({"params": params}, batch[:, :-1], rngs={"dropout": rng})
        return cross_entropy(logits, batch[:, 1:])

    return make(loss, init, ids, rng=True)


@published("flax")
def linen_convnet() -> Published:
    """Convolutions, batch normalisation, pooling, spectral and weight norms."""
    from flax import linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.BatchNorm(use_running_average=False)(nn.Conv(16, (3, 3))(x))
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
            x = nn.GroupNorm(4)(nn.WeightNorm(nn.Conv(32, (3, 3)))(x))
            x = nn.avg_pool(nn.swish(x), (2, 2), (2, 2)).reshape(x.shape[0], -1)
            return nn.Dense(8)(nn.relu(nn.Dense(32)(x)))

    model = Model()
    batch = {"image": normal(16, 16, 3), "label": classes(8)}

    def variables() -> Any:
        return model.init(jax.random.key(0), batch["image"][:2])

    def loss(params: Any, batch: Any, state: Any) -> Any:
        logits, new = model.apply({"params": params, "batch_stats": state}, batch["image"], mutable=["batch_stats"])
        return cross_entropy(logits, batch["label"]), new["batch_stats"]

    return make(
        loss,
        lambda: variables()["params"],
        batch,
        state=lambda: variables()["batch_stats"],
        independent_microbatches=True,
    )


def _nnx(model: Any) -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    """(rebuild a module from a plain dict of its parameters, make that dict)."""
    from flax import nnx

    graph, template = nnx.split(nnx.eval_shape(lambda: model(nnx.Rngs(0))))

    def rebuild(params: Any) -> Any:
        state = jax.tree.map(lambda x: x, template)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)

    return rebuild, lambda: nnx.to_pure_dict(nnx.state(model(nnx.Rngs(0))))


@published("flax")
def nnx_transformer() -> Published:
    from flax import nnx

    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
            self.first, self.second = nnx.RMSNorm(32, rngs=rngs), nnx.RMSNorm(32, rngs=rngs)
            self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
            x = x + self.attention(self.first(x), mask=mask)
            return x + self.down(nnx.silu(self.up(self.second(x))))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Embed(64, 32, rngs=rngs)
            self.layers = nnx.List([Layer(rngs) for _ in range(3)])
            self.norm, self.head = nnx.LayerNorm(32, rngs=rngs), nnx.Linear(32, 64, rngs=rngs)

        def __call__(self, ids: Any) -> Any:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x))

    rebuild, init = _nnx(Model)

    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(rebuild(params)(batch[:, :-1]), batch[:, 1:])

    return make(loss, init, tokens(16, 64))


@published("flax")
def nnx_vae() -> Published:
    """A variational autoencoder: random normals inside the loss."""
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.encode = nnx.Sequential(nnx.Linear(16, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 16, rngs=rngs))
            self.decode = nnx.Sequential(nnx.Linear(8, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 16, rngs=rngs))

    rebuild, init = _nnx(Model)

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        model = rebuild(params)
        mean, log_variance = jnp.split(model.encode(batch), 2, -1)
        z = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(rng, mean.shape)
        divergence = 0.5 * (mean**2 + jnp.exp(log_variance) - 1 - log_variance).sum(-1)
        return (((model.decode(z) - batch) ** 2).sum(-1) + divergence).mean()

    return make(loss, init, normal(16), rng=True)

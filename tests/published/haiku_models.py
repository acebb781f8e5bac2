"""DeepMind's haiku: its own networks and modules."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.published.functions import Published, classes, cross_entropy, make, normal, published, tokens


def _forward(build: Callable[..., Any], *inputs: Any) -> tuple[Any, Callable[[], Any]]:
    """A transformed function and what makes its parameters."""
    import haiku as hk

    net = hk.transform(build)
    return net, lambda: net.init(jax.random.key(0), *(jnp.zeros((2, *x.shape[1:]), x.dtype) for x in inputs))


@published("haiku")
def hk_mlp() -> Published:
    import haiku as hk

    x, label = normal(12), classes(8)
    net, init = _forward(lambda x, rate=None: hk.nets.MLP([64, 64, 8])(x, rate, hk.next_rng_key() if rate else None), x)

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        return cross_entropy(net.apply(params, rng, batch["x"], 0.1), batch["label"])

    return make(loss, init, {"x": x, "label": label}, rng=True)


def _stateful(net: Callable[..., Any], image: Any) -> Published:
    """An image classifier with batch normalisation."""
    import haiku as hk

    model = hk.transform_with_state(lambda x: net(x, True))
    sample = jnp.zeros((2, *image.shape[1:]))

    def loss(params: Any, batch: Any, state: Any) -> Any:
        logits, new = model.apply(params, state, None, batch["image"])
        return cross_entropy(logits, batch["label"]), new

    return make(
        loss,
        lambda: model.init(jax.random.key(0), sample)[0],
        {"image": image, "label": classes(8)},
        state=lambda: model.init(jax.random.key(0), sample)[1],
        independent_microbatches=True,
    )


@published("haiku")
def hk_resnet() -> Published:
    import haiku as hk

    def net(x: Any, training: bool) -> Any:
        return hk.nets.ResNet(
            (1, 1, 1, 1),
            8,
            bottleneck=False,
            channels_per_group=(64, 16, 16, 32),
            use_projection=(False, True, True, True),
        )(x, training)

    return _stateful(net, normal(32, 32, 3))


@published("haiku")
def hk_mobilenet() -> Published:
    import haiku as hk

    return _stateful(
        lambda x, training: hk.nets.MobileNetV1((1, 2, 1), (16, 32, 32), num_classes=8)(x, training), normal(16, 16, 3)
    )


@published("haiku")
def hk_lstm() -> Published:
    """A recurrent language model, unrolled by a loop over time."""
    import haiku as hk

    ids = tokens(12, 64)

    def model(ids: Any) -> Any:
        x = hk.Embed(64, 32)(ids)
        core = hk.DeepRNN([hk.LSTM(32), hk.LSTM(32)])
        out, _ = hk.dynamic_unroll(core, x, core.initial_state(ids.shape[0]), time_major=False)
        return hk.Linear(64)(out)

    net, init = _forward(model, ids)

    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(net.apply(params, None, batch[:, :-1]), batch[:, 1:])

    return make(loss, init, ids)


@published("haiku")
def hk_gru_unrolled() -> Published:
    """The same step written out for every moment."""
    import haiku as hk

    x, label = normal(10, 8), classes(8)

    def model(x: Any) -> Any:
        core = hk.GRU(32)
        out, _ = hk.static_unroll(core, x, core.initial_state(x.shape[0]), time_major=False)
        return hk.Linear(8)(out[:, -1])

    net, init = _forward(model, x)

    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(net.apply(params, None, batch["x"]), batch["label"])

    return make(loss, init, {"x": x, "label": label})


def _block(x: Any, rate: float = 0.0) -> Any:
    import haiku as hk

    def norm(x: Any) -> Any:
        return hk.LayerNorm(-1, True, True)(x)

    init = hk.initializers.VarianceScaling(0.5)
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1])))[None, None]
    h = norm(x)
    h = hk.MultiHeadAttention(4, 8, w_init=init)(h, h, h, mask=mask)
    x = x + (hk.dropout(hk.next_rng_key(), rate, h) if rate else h)
    h = hk.Linear(32)(jax.nn.gelu(hk.Linear(64)(norm(x))))
    return x + (hk.dropout(hk.next_rng_key(), rate, h) if rate else h)


@published("haiku")
def hk_transformer() -> Published:
    """A decoder with dropout, its layers one after the other."""
    import haiku as hk

    ids = tokens(16, 64)

    def model(ids: Any, rate: float = 0.0) -> Any:
        x = hk.Embed(64, 32)(ids)
        for _ in range(3):
            x = _block(x, rate)
        return hk.Linear(64)(hk.LayerNorm(-1, True, True)(x))

    net, init = _forward(model, ids)

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        return cross_entropy(net.apply(params, rng, batch[:, :-1], 0.1), batch[:, 1:])

    return make(loss, init, ids, rng=True)


@published("haiku")
def hk_layer_stack() -> Published:
    """The same decoder by ``hk.layer_stack``: a scan over stacked parameters."""
    import haiku as hk

    ids = tokens(16, 64)

    def model(ids: Any) -> Any:
        x = hk.layer_stack(4)(_block)(hk.Embed(64, 32)(ids))
        return hk.Linear(64)(hk.LayerNorm(-1, True, True)(x))

    net, init = _forward(model, ids)

    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(net.apply(params, None, batch[:, :-1]), batch[:, 1:])

    return make(loss, init, ids)


@published("haiku")
def hk_vq_vae() -> Published:
    """A vector-quantised autoencoder of images; the quantiser uses ``stop_gradient`` and an argmin."""
    import haiku as hk

    image = normal(16, 16, 3)

    def model(x: Any) -> Any:
        z = jax.nn.relu(hk.Conv2D(16, 4, 2)(x))
        z = hk.Conv2D(8, 4, 2)(z)
        found = hk.nets.VectorQuantizer(8, 16, 0.25)(z, is_training=True)
        y = jax.nn.relu(hk.Conv2DTranspose(16, 4, 2)(found["quantize"]))
        return ((hk.Conv2DTranspose(3, 4, 2)(y) - x) ** 2).mean() + found["loss"]

    net, init = _forward(model, image)
    return make(lambda params, batch: net.apply(params, None, batch), init, image)

"""Keras 3 with the JAX backend, by ``stateless_call``. Seed generators and batch statistics are carried state."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tests.published.functions import Published, classes, cross_entropy, make, normal, published, tokens

os.environ.setdefault("KERAS_BACKEND", "jax")


def _model(build: Callable[[Any], Any], batch: Any, loss: Callable[[Any, Any], Any], **options: Any) -> Published:
    """A training function of a Keras model: `loss` of its output and the batch, plus its own regularisation losses."""
    import keras

    keras.utils.set_random_seed(0)
    model = build(keras)

    def run(params: Any, batch: Any, state: Any) -> Any:
        out, new = model.stateless_call(params, state, batch["x"], training=True)
        return loss(out, batch), new

    def values(variables: Any) -> Any:
        return [np.asarray(v.value) for v in variables]

    return make(
        run,
        lambda: values(model.trainable_variables),
        batch,
        state=lambda: values(model.non_trainable_variables),
        **options,
    )


def _images(build: Callable[[Any], Any], size: int, *, batch_norm: bool = True, **closeness: Any) -> Published:
    """An image classifier. Batch normalisation is over each microbatch."""
    batch = {"x": normal(size, size, 3), "label": classes(8)}
    loss = lambda logits, batch: cross_entropy(logits, batch["label"])  # noqa: E731
    return replace(_model(build, batch, loss, independent_microbatches=batch_norm), **closeness)


@published("keras")
def keras_mobilenet_v2() -> Published:
    return _images(
        lambda keras: keras.applications.MobileNetV2(
            (32, 32, 3), alpha=0.35, weights=None, classes=8, classifier_activation=None
        ),
        32,
        steps=1,
        rtol=5e-3,
    )


@published("keras")
def keras_efficientnet() -> Published:
    def build(keras: Any) -> Any:
        from keras.src.applications.efficientnet import DEFAULT_BLOCKS_ARGS, EfficientNet

        return EfficientNet(
            0.3,
            0.3,
            32,
            blocks_args=DEFAULT_BLOCKS_ARGS[:4],
            input_shape=(32, 32, 3),
            weights=None,
            classes=8,
            classifier_activation=None,
            name="tiny",
            weights_name="",
        )

    return _images(build, 32)


@published("keras")
def keras_convnext() -> Published:
    def build(keras: Any) -> Any:
        from keras.src.applications.convnext import ConvNeXt

        return ConvNeXt(
            depths=[1, 1, 3, 1],
            projection_dims=[16, 16, 32, 32],
            input_shape=(32, 32, 3),
            weights=None,
            classes=8,
            classifier_activation=None,
            name="tiny",
            weights_name="",
        )

    return _images(build, 32, batch_norm=False)


@published("keras")
def keras_densenet() -> Published:
    def build(keras: Any) -> Any:
        from keras.src.applications.densenet import DenseNet

        return DenseNet([2, 2, 2, 2], input_shape=(32, 32, 3), weights=None, classes=8, classifier_activation=None)

    return _images(build, 32, steps=1, rtol=5e-3)


@published("keras")
def keras_transformer() -> Published:
    def build(keras: Any) -> Any:
        layers = keras.layers
        ids = layers.Input((16,), dtype="int32")
        x = layers.Embedding(64, 32)(ids)
        for _ in range(3):
            h = layers.LayerNormalization()(x)
            x = x + layers.MultiHeadAttention(4, 8, dropout=0.1)(h, h, use_causal_mask=True)
            h = layers.Dense(64, activation="gelu")(layers.LayerNormalization()(x))
            x = x + layers.Dropout(0.1)(layers.Dense(32)(h))
        return keras.Model(ids, layers.Dense(64)(layers.LayerNormalization()(x)))

    ids = tokens(17, 64)
    return _model(build, {"x": ids[:, :-1], "y": ids[:, 1:]}, lambda logits, batch: cross_entropy(logits, batch["y"]))


@published("keras")
def keras_bidirectional_lstm() -> Published:
    def build(keras: Any) -> Any:
        layers = keras.layers
        return keras.Sequential(
            [
                layers.Input((12,), dtype="int32"),
                layers.Embedding(64, 16, mask_zero=True),
                layers.Bidirectional(layers.LSTM(16, return_sequences=True)),
                layers.GRU(16),
                layers.Dense(8),
            ]
        )

    batch = {"x": tokens(12, 64), "label": classes(8)}
    return _model(build, batch, lambda logits, batch: cross_entropy(logits, batch["label"]))

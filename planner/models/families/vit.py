"""ViT: an image classifier, a pre-norm transformer over patches."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from planner.frontend.task import TrainingTask
from planner.models import checks
from planner.models.attention import attention, attention_shapes
from planner.models.layers import (
    ACTIVATIONS,
    Params,
    cross_entropy,
    dense,
    layer_norm,
    mlp,
    mlp_shapes,
    norm_shapes,
    weight,
)


def vit(
    *,
    hidden: int,
    layers: int,
    heads: int,
    patch: int,
    image: int = 224,
    channels: int = 3,
    classes: int = 1000,
    batch: int = 8,
    ffn: int | None = None,
    pool: str = "class_token",
    activation: str = "gelu",
    norm_eps: float = 1e-6,
    dtype: str = "bfloat16",
    optimizer: optax.GradientTransformation | None = None,
    name: str | None = None,
) -> TrainingTask:
    """Classification training of a ViT. Loss: mean over all images.

    Args:
        patch: side of a square patch; must divide `image`.
        image: side of the square image.
        ffn: MLP width; default ``4 * hidden``.
        pool: what the classifier reads: ``class_token`` (one more, learned, position) or ``mean`` over patches.

    Batch: ``images`` float32 ``[b, image, image, channels]``, ``labels`` int32 ``[b]``.
    """
    checks.positive_integers("vit", hidden=hidden)
    ffn = 4 * hidden if ffn is None else ffn
    checks.positive_integers("vit", layers=layers, heads=heads, ffn=ffn, batch=batch)
    checks.positive_integers("vit", patch=patch, image=image, channels=channels, classes=classes)
    checks.divides("vit", "heads", heads, "hidden", hidden)
    checks.divides("vit", "patch", patch, "image", image)
    checks.one_of("vit", "pool", pool, ("class_token", "mean"))
    checks.positive_numbers("vit", norm_eps=norm_eps)
    checks.one_of("vit", "activation", activation, tuple(ACTIVATIONS))

    positions = (image // patch) ** 2 + (pool == "class_token")
    params: dict[str, Any] = {
        "patch_embedding": {"kernel": weight(patch, patch, channels, hidden), "bias": weight(hidden)},
        "position_embedding": weight(positions, hidden),
        "layers": {
            "attention_norm": norm_shapes(layers, hidden, bias=True),
            "attention": attention_shapes(
                layers, hidden=hidden, heads=heads, head_dim=hidden // heads, qkv_bias=True, out_bias=True
            ),
            "mlp_norm": norm_shapes(layers, hidden, bias=True),
            "mlp": mlp_shapes(layers, hidden=hidden, ffn=ffn, bias=True, gated=False),
        },
        "final_norm": norm_shapes(hidden, bias=True),
        "head": {"kernel": weight(hidden, classes), "bias": weight(classes)},
    }
    if pool == "class_token":
        params["class_embedding"] = weight(1, hidden)
    return TrainingTask(
        loss_fn=partial(loss, dtype=checks.compute_dtype("vit", dtype), activation=activation, eps=norm_eps),
        params=params,
        batch={
            "images": jax.ShapeDtypeStruct((batch, image, image, channels), jnp.float32),
            "labels": jax.ShapeDtypeStruct((batch,), jnp.int32),
        },
        optimizer=checks.optimizer_or_default(optimizer),
        name=name or f"vit(hidden={hidden},layers={layers},heads={heads},patch={patch},image={image})",
    )


def loss(params: Params, batch: Params, **settings: Any) -> jax.Array:
    """Mean cross entropy over ``[b]`` images, a float32 scalar."""
    return jnp.mean(cross_entropy(logits(params, batch["images"], **settings), batch["labels"]))


def logits(params: Params, images: jax.Array, *, dtype: jnp.dtype, activation: str, eps: float) -> jax.Array:
    """Images ``[b, side, side, channels]`` to ``[b, classes]`` logits in the compute dtype."""
    patches = params["patch_embedding"]
    side = patches["kernel"].shape[0]
    grid = lax.conv_general_dilated(
        images.astype(dtype),
        patches["kernel"].astype(dtype),
        window_strides=(side, side),
        padding="VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    batch, rows, columns, hidden = grid.shape
    x = grid.reshape(batch, rows * columns, hidden) + patches["bias"].astype(dtype)
    if "class_embedding" in params:
        first = jnp.broadcast_to(params["class_embedding"].astype(dtype), (batch, 1, hidden))
        x = jnp.concatenate([first, x], axis=1)
    x = x + params["position_embedding"].astype(dtype)

    def block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        x = x + attention(layer_norm(x, layer["attention_norm"], eps=eps), layer["attention"], bias=None)
        return x + mlp(layer_norm(x, layer["mlp_norm"], eps=eps), layer["mlp"], activation), None

    x, _ = lax.scan(block, x, params["layers"])
    if "class_embedding" in params:
        return dense(layer_norm(x[:, 0], params["final_norm"], eps=eps), params["head"])
    return dense(jnp.mean(layer_norm(x, params["final_norm"], eps=eps), axis=1), params["head"])

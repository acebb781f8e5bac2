"""Building blocks that every model family shares: norms, activations, embedding, dense layers, losses.

All are pure functions. Weights are float32 masters, cast to the compute dtype where they are used; norms, softmax and
losses run in float32. Shapes in docstrings: b batch, s sequence, h hidden, f feed-forward, v vocabulary.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Params = Mapping[str, Any]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


def weight(*shape: int) -> jax.ShapeDtypeStruct:
    """An abstract float32 master weight; nothing is allocated."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tokens(batch: int, seq: int) -> jax.ShapeDtypeStruct:
    """Abstract int32 ids ``[b, s]``."""
    return jax.ShapeDtypeStruct((batch, seq), jnp.int32)


def norm_shapes(*shape: int, bias: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """Gain (and shift) of a norm; `shape` is ``(h,)`` or, for stacked layers, ``(layers, h)``."""
    return {"scale": weight(*shape)} | ({"bias": weight(*shape)} if bias else {})


def layer_norm(x: jax.Array, norm: Params, *, eps: float) -> jax.Array:
    """``(x - mean) / sqrt(var + eps) * scale + bias`` over the last dim, in float32; keeps the dtype of `x`."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, -1, keepdims=True)
    # A product of a value with itself: `jnp.square` would keep twice the value as one more float32 residual.
    variance = jnp.mean(centred * centred, -1, keepdims=True)
    return (centred * lax.rsqrt(variance + eps) * norm["scale"] + norm["bias"]).astype(x.dtype)


def rms_norm(x: jax.Array, norm: Params, *, eps: float) -> jax.Array:
    """``x / sqrt(mean(x^2) + eps) * scale`` over the last dim, in float32; keeps the dtype of `x`."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, -1, keepdims=True)
    return (wide * lax.rsqrt(mean_square + eps) * norm["scale"]).astype(x.dtype)


def softmax(scores: jax.Array) -> jax.Array:
    """Softmax over the last dim. The maximum carries no gradient, as it cancels."""
    exponentials = jnp.exp(scores - lax.stop_gradient(jnp.max(scores, -1, keepdims=True)))
    return exponentials / jnp.sum(exponentials, -1, keepdims=True)


def embed(table: jax.Array, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of `table` ``[v, h]`` at `ids` ``[b, s]``, cast after the lookup: no cast copy of the table is made."""
    # Plain indexing would add a comparison, an addition and a select for negative ids, which no batch of ours has.
    return table.at[ids].get(mode="clip", wrap_negative_indices=False).astype(dtype)


def dense(x: jax.Array, params: Params) -> jax.Array:
    """``x @ kernel (+ bias)``: ``[..., h] -> [..., f]`` in the dtype of `x`."""
    y = jnp.einsum("...h,hf->...f", x, params["kernel"].astype(x.dtype))
    return y + params["bias"].astype(x.dtype) if "bias" in params else y


def mlp_shapes(*lead: int, hidden: int, ffn: int, bias: bool, gated: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """Weights of `mlp`; `lead` is ``(layers,)`` for stacked layers."""
    shapes = {"up": weight(*lead, hidden, ffn), "down": weight(*lead, ffn, hidden)}
    if bias:
        shapes |= {"up_bias": weight(*lead, ffn), "down_bias": weight(*lead, hidden)}
    return shapes | ({"gate": weight(*lead, hidden, ffn)} if gated else {})


def mlp(x: jax.Array, params: Params, activation: str) -> jax.Array:
    """``down(act(up x))``, or ``down(act(gate x) * up x)`` if the weights have a gate: ``[b, s, h] -> [b, s, h]``."""
    act = ACTIVATIONS[activation]
    inner = jnp.einsum("bsh,hf->bsf", x, params["up"].astype(x.dtype))
    if "up_bias" in params:
        inner = inner + params["up_bias"].astype(x.dtype)
    if "gate" in params:
        inner = act(jnp.einsum("bsh,hf->bsf", x, params["gate"].astype(x.dtype))) * inner
    else:
        inner = act(inner)
    y = jnp.einsum("bsf,fh->bsh", inner, params["down"].astype(x.dtype))
    return y + params["down_bias"].astype(x.dtype) if "down_bias" in params else y


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero elements with probability `rate` and rescale the others; the identity without a key."""
    if key is None:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))


def vocabulary_logits(x: jax.Array, params: Params) -> jax.Array:
    """``[b, s, h] -> [b, s, v]`` by ``params["head"]["kernel"]`` ``[h, v]``, or the tied embedding ``[v, h]``."""
    if "head" in params:
        return jnp.einsum("bsh,hv->bsv", x, params["head"]["kernel"].astype(x.dtype))
    return jnp.einsum("bsh,vh->bsv", x, params["token_embedding"].astype(x.dtype))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """``logsumexp(logits) - logits[label]`` in float32: ``[..., v], [...] -> [...]``; labels must be in ``[0, v)``."""
    wide = logits.astype(jnp.float32)
    shifted = wide - lax.stop_gradient(jnp.max(wide, -1, keepdims=True))
    log_normaliser = jnp.log(jnp.sum(jnp.exp(shifted), -1))
    picked = jnp.take_along_axis(shifted, labels[..., None], axis=-1, mode="promise_in_bounds")
    return log_normaliser - jnp.squeeze(picked, -1)

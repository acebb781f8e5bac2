"""T5: encoder and decoder with relative positions; the encoder's output is read by every layer of the decoder."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from costmodel.errors import InputError
from planner.frontend.task import TrainingTask
from planner.models import checks
from planner.models.attention import attention, attention_shapes, causal_bias
from planner.models.layers import (
    ACTIVATIONS,
    Params,
    cross_entropy,
    embed,
    mlp,
    mlp_shapes,
    norm_shapes,
    rms_norm,
    tokens,
    vocabulary_logits,
    weight,
)


def t5(
    *,
    hidden: int,
    layers: int,
    heads: int,
    vocab: int,
    seq: int,
    ffn: int,
    batch: int = 8,
    decoder_layers: int | None = None,
    target_seq: int | None = None,
    head_dim: int | None = None,
    activation: str = "relu",
    gated: bool = False,
    tied: bool = True,
    buckets: int = 32,
    max_distance: int = 128,
    norm_eps: float = 1e-6,
    dtype: str = "bfloat16",
    optimizer: optax.GradientTransformation | None = None,
    name: str | None = None,
) -> TrainingTask:
    """Sequence-to-sequence training of a T5. Loss: mean over all target tokens.

    Args:
        layers: encoder layers.
        decoder_layers: default `layers`.
        seq: encoder sequence length.
        target_seq: decoder sequence length; default `seq`.
        head_dim: default ``hidden / heads``; T5's largest models have more.
        gated: a gated MLP (T5 v1.1).
        tied: whether the output layer is the embedding (its input is then scaled by ``hidden ** -0.5``).
        buckets: relative distances that are told apart.
        max_distance: distance from which all share a bucket.

    Batch: ``inputs`` int32 ``[b, seq]``, ``decoder_inputs`` and ``targets`` int32 ``[b, target_seq]``.
    """
    decoder_layers = layers if decoder_layers is None else decoder_layers
    target_seq = seq if target_seq is None else target_seq
    checks.positive_integers("t5", hidden=hidden, heads=heads, vocab=vocab, seq=seq, target_seq=target_seq, batch=batch)
    checks.positive_integers("t5", layers=layers, decoder_layers=decoder_layers, ffn=ffn, max_distance=max_distance)
    checks.positive_integers("t5", buckets=buckets)
    if buckets % 4:
        raise InputError(
            "MP122",
            f"t5: buckets={buckets} is not a multiple of 4: each direction has half, half of those are near",
            "the published value is buckets=32",
        )
    if max_distance <= buckets // 2:
        raise InputError(
            "MP122",
            f"t5: max_distance={max_distance} must exceed buckets/2={buckets // 2}, the distances told apart exactly",
            "the published values are buckets=32, max_distance=128",
        )
    checks.booleans("t5", gated=gated, tied=tied)
    checks.positive_numbers("t5", norm_eps=norm_eps)
    checks.one_of("t5", "activation", activation, tuple(ACTIVATIONS))
    if head_dim is None:
        checks.divides("t5", "heads", heads, "hidden", hidden)
        head_dim = hidden // heads
    checks.positive_integers("t5", head_dim=head_dim)

    def stack(depth: int, *, cross: bool) -> dict[str, Any]:
        shapes = partial(
            attention_shapes, depth, hidden=hidden, heads=heads, head_dim=head_dim, qkv_bias=False, out_bias=False
        )
        norm = norm_shapes(depth, hidden, bias=False)
        blocks: dict[str, Any] = {"attention_norm": norm, "attention": shapes()}
        if cross:
            blocks |= {"cross_norm": norm, "cross_attention": shapes()}
        blocks |= {"mlp_norm": norm, "mlp": mlp_shapes(depth, hidden=hidden, ffn=ffn, bias=False, gated=gated)}
        return {
            "relative_embedding": weight(heads, buckets),
            "layers": blocks,
            "final_norm": norm_shapes(hidden, bias=False),
        }

    params: dict[str, Any] = {
        "token_embedding": weight(vocab, hidden),
        "encoder": stack(layers, cross=False),
        "decoder": stack(decoder_layers, cross=True),
    }
    if not tied:
        params["head"] = {"kernel": weight(hidden, vocab)}
    settings = {
        "dtype": checks.compute_dtype("t5", dtype),
        "activation": activation,
        "max_distance": max_distance,
        "eps": norm_eps,
    }
    target = tokens(batch, target_seq)
    return TrainingTask(
        loss_fn=partial(loss, **settings),
        params=params,
        batch={"inputs": tokens(batch, seq), "decoder_inputs": target, "targets": target},
        optimizer=checks.optimizer_or_default(optimizer),
        name=name or f"t5(hidden={hidden},layers={layers},heads={heads},ffn={ffn},vocab={vocab},seq={seq})",
        tokens_per_example=seq + target_seq,
    )


def loss(params: Params, batch: Params, **settings: Any) -> jax.Array:
    """Mean cross entropy over ``[b, target_seq]`` tokens, a float32 scalar."""
    scores = logits(params, batch["inputs"], batch["decoder_inputs"], **settings)
    return jnp.mean(cross_entropy(scores, batch["targets"]))


def logits(
    params: Params,
    inputs: jax.Array,
    decoder_inputs: jax.Array,
    *,
    dtype: jnp.dtype,
    activation: str,
    max_distance: int,
    eps: float,
) -> jax.Array:
    """Encoder ids ``[b, t]`` and decoder ids ``[b, s]`` to ``[b, s, v]`` logits in the compute dtype."""
    encoder, decoder = params["encoder"], params["decoder"]

    # The position bias [n, s, t] is looked up in every layer: its table is tiny, the bias is not, and a value made once
    # would have to follow the layers from one pipeline stage to the next.
    def encoder_block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        bias = relative_bias(encoder["relative_embedding"], x.shape[1], max_distance, causal=False)
        read = rms_norm(x, layer["attention_norm"], eps=eps)
        x = x + attention(read, layer["attention"], bias=bias, scaled=False)
        return x + mlp(rms_norm(x, layer["mlp_norm"], eps=eps), layer["mlp"], activation), None

    x, _ = lax.scan(encoder_block, embed(params["token_embedding"], inputs, dtype), encoder["layers"])
    encoded = rms_norm(x, encoder["final_norm"], eps=eps)

    def decoder_block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        bias = relative_bias(decoder["relative_embedding"], x.shape[1], max_distance, causal=True)
        read = rms_norm(x, layer["attention_norm"], eps=eps)
        x = x + attention(read, layer["attention"], bias=bias, scaled=False)
        read = rms_norm(x, layer["cross_norm"], eps=eps)
        x = x + attention(read, layer["cross_attention"], bias=None, context=encoded, scaled=False)
        return x + mlp(rms_norm(x, layer["mlp_norm"], eps=eps), layer["mlp"], activation), None

    y, _ = lax.scan(decoder_block, embed(params["token_embedding"], decoder_inputs, dtype), decoder["layers"])
    y = rms_norm(y, decoder["final_norm"], eps=eps)
    return vocabulary_logits(y if "head" in params else y * y.shape[-1] ** -0.5, params)


def relative_bias(table: jax.Array, seq: int, max_distance: int, *, causal: bool) -> jax.Array:
    """Float32 ``[n, s, t]`` looked up in `table` ``[n, buckets]`` by the bucket of ``t - s``, plus the causal mask."""
    ids = relative_buckets(seq, table.shape[1], max_distance, causal=causal)
    bias = table.at[:, ids].get(mode="clip", wrap_negative_indices=False)
    return bias + causal_bias(seq) if causal else bias


def relative_buckets(seq: int, buckets: int, max_distance: int, *, causal: bool) -> jax.Array:
    """Bucket of each (query, key) pair, int32 ``[s, t]``.

    Near distances have a bucket each, far ones share buckets of geometric width up to `max_distance`. When not causal,
    half of the buckets are for keys ahead of the query.
    """
    position = jnp.arange(seq, dtype=jnp.int32)
    ahead = position[None, :] - position[:, None]
    if causal:
        offset, distance = 0, jnp.maximum(-ahead, 0)
    else:
        buckets //= 2
        offset, distance = (ahead > 0).astype(jnp.int32) * buckets, jnp.abs(ahead)
    exact = buckets // 2
    scale = (buckets - exact) / float(np.log(max_distance / exact))
    # Distance 0 is always exact; 1 stands in for it so that the logarithm stays finite.
    geometric = exact + (jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) * scale).astype(jnp.int32)
    return offset + jnp.where(distance < exact, distance, jnp.minimum(geometric, buckets - 1))

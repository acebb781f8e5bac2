"""GPT: a causal transformer with LayerNorm and a plain MLP (GPT-2, GPT-3; with rotary positions GPT-NeoX)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from planner.frontend.task import TrainingTask
from planner.models import checks
from planner.models.attention import Rotation, attention, attention_shapes, causal_bias, rotary_angles
from planner.models.layers import (
    ACTIVATIONS,
    Params,
    cross_entropy,
    dropout,
    embed,
    layer_norm,
    mlp,
    mlp_shapes,
    norm_shapes,
    tokens,
    vocabulary_logits,
    weight,
)


def gpt(
    *,
    hidden: int,
    layers: int,
    heads: int,
    vocab: int,
    seq: int,
    batch: int = 8,
    ffn: int | None = None,
    positions: int | None = None,
    rotary_fraction: float = 0.0,
    rope_base: float = 10000.0,
    parallel: bool = False,
    tied: bool = True,
    activation: str = "gelu_tanh",
    dropout: float = 0.0,
    norm_eps: float = 1e-5,
    dtype: str = "bfloat16",
    optimizer: optax.GradientTransformation | None = None,
    name: str | None = None,
) -> TrainingTask:
    """Next-token training of a GPT. Loss: mean over all tokens.

    Args:
        ffn: MLP width; default ``4 * hidden``.
        positions: rows of the learned position table; default `seq`. Unused with rotary positions.
        rotary_fraction: share of each head's dims that is rotated; 0 means learned positions.
        parallel: attention and MLP both read the block's input (GPT-NeoX) instead of one after the other.
        tied: whether the output layer is the embedding.
        activation: one of gelu, gelu_tanh, relu, silu.
        dropout: rate after the embedding, each attention and each MLP (attention weights are not dropped); above 0
            the task takes an rng.

    Batch: ``tokens`` and ``targets``, int32 ``[b, s]``.
    """
    checks.positive_integers("gpt", hidden=hidden)
    ffn = 4 * hidden if ffn is None else ffn
    checks.positive_integers("gpt", layers=layers, heads=heads, vocab=vocab, seq=seq, batch=batch, ffn=ffn)
    positions = seq if positions is None else positions
    checks.positive_integers("gpt", positions=positions)
    checks.divides("gpt", "heads", heads, "hidden", hidden)
    checks.one_of("gpt", "activation", activation, tuple(ACTIVATIONS))
    checks.booleans("gpt", parallel=parallel, tied=tied)
    checks.positive_numbers("gpt", rope_base=rope_base, norm_eps=norm_eps)
    checks.fraction("gpt", "dropout", dropout)
    checks.fraction("gpt", "rotary_fraction", rotary_fraction, whole=True)
    head_dim = hidden // heads
    rotary_dim = int(head_dim * rotary_fraction)
    if rotary_dim:
        checks.even("gpt", "head_dim * rotary_fraction", rotary_dim, "rotary positions turn dims in pairs")
    else:
        checks.within("gpt", "seq", seq, "positions", positions)

    params: dict[str, Any] = {
        "token_embedding": weight(vocab, hidden),
        "layers": {
            "attention_norm": norm_shapes(layers, hidden, bias=True),
            "attention": attention_shapes(
                layers, hidden=hidden, heads=heads, head_dim=head_dim, qkv_bias=True, out_bias=True
            ),
            "mlp_norm": norm_shapes(layers, hidden, bias=True),
            "mlp": mlp_shapes(layers, hidden=hidden, ffn=ffn, bias=True, gated=False),
        },
        "final_norm": norm_shapes(hidden, bias=True),
    }
    if not rotary_dim:
        params["position_embedding"] = weight(positions, hidden)
    if not tied:
        params["head"] = {"kernel": weight(hidden, vocab)}
    settings = {
        "dtype": checks.compute_dtype("gpt", dtype),
        "activation": activation,
        "rotary_dim": rotary_dim,
        "rope_base": rope_base,
        "parallel": parallel,
        "eps": norm_eps,
    }
    return TrainingTask(
        loss_fn=partial(loss, rate=dropout, **settings),
        params=params,
        batch={"tokens": tokens(batch, seq), "targets": tokens(batch, seq)},
        optimizer=checks.optimizer_or_default(optimizer),
        rng=dropout > 0,
        name=name or f"gpt(hidden={hidden},layers={layers},heads={heads},vocab={vocab},seq={seq})",
        tokens_per_example=seq,
    )


def loss(
    params: Params, batch: Params, rng: jax.Array | None = None, *, rate: float = 0.0, **settings: Any
) -> jax.Array:
    """Mean cross entropy over ``[b, s]`` tokens, a float32 scalar."""
    return jnp.mean(cross_entropy(logits(params, batch["tokens"], rng, rate=rate, **settings), batch["targets"]))


def logits(
    params: Params,
    ids: jax.Array,
    rng: jax.Array | None = None,
    *,
    dtype: jnp.dtype,
    activation: str,
    rotary_dim: int,
    rope_base: float,
    parallel: bool,
    eps: float,
    rate: float = 0.0,
) -> jax.Array:
    """``[b, s]`` token ids to ``[b, s, v]`` logits in the compute dtype."""
    seq, layers = ids.shape[1], params["layers"]["mlp"]["up"].shape[0]
    embed_key, layer_keys = (None, None) if rng is None else jax.random.split(rng)
    if layer_keys is not None:
        layer_keys = jax.random.split(layer_keys, (layers, 2))
    rotation: Rotation | None = None
    if rotary_dim:
        rotation = rotary_angles(seq, rotary_dim, base=rope_base, scaling=None, dtype=dtype)
    x = embed(params["token_embedding"], ids, dtype)
    if "position_embedding" in params:
        x = x + params["position_embedding"][:seq].astype(dtype)
    x = dropout(x, rate, embed_key)

    def block(x: jax.Array, xs: tuple[Params, jax.Array | None]) -> tuple[jax.Array, None]:
        layer, keys = xs
        attention_key, mlp_key = (None, None) if keys is None else keys
        mixed = attention(
            layer_norm(x, layer["attention_norm"], eps=eps),
            layer["attention"],
            bias=causal_bias(seq),
            rotation=rotation,
        )
        after = x + dropout(mixed, rate, attention_key)
        read = layer_norm(x if parallel else after, layer["mlp_norm"], eps=eps)
        return after + dropout(mlp(read, layer["mlp"], activation), rate, mlp_key), None

    x, _ = lax.scan(block, x, (params["layers"], layer_keys))
    return vocabulary_logits(layer_norm(x, params["final_norm"], eps=eps), params)

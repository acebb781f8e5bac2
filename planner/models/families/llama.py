"""Llama: a causal transformer with RMSNorm, rotary positions, grouped queries and SwiGLU (also Mistral, Qwen2)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from planner.frontend.task import TrainingTask
from planner.models import checks
from planner.models.attention import RopeScaling, attention, attention_shapes, causal_bias, rotary_angles
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


def llama(
    *,
    hidden: int,
    layers: int,
    heads: int,
    vocab: int,
    seq: int,
    ffn: int,
    batch: int = 8,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    tied: bool = False,
    activation: str = "silu",
    rope_base: float = 10000.0,
    rope_scaling: RopeScaling | None = None,
    sliding_window: int | None = None,
    norm_eps: float = 1e-5,
    dtype: str = "bfloat16",
    optimizer: optax.GradientTransformation | None = None,
    name: str | None = None,
) -> TrainingTask:
    """Next-token training of a Llama. Loss: mean over all tokens.

    Args:
        kv_heads: key and value heads; default `heads`.
        head_dim: default ``hidden / heads``.
        qkv_bias: biases on queries, keys and values (Qwen2).
        sliding_window: accepted where it has no effect, that is where ``seq <= sliding_window``.

    Batch: ``tokens`` and ``targets``, int32 ``[b, s]``.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    head_dim = attention_dims("llama", hidden, heads, kv_heads, head_dim)
    checks.positive_integers("llama", layers=layers, vocab=vocab, seq=seq, ffn=ffn, batch=batch)
    checks.booleans("llama", qkv_bias=qkv_bias, tied=tied)
    checks.positive_numbers("llama", rope_base=rope_base, norm_eps=norm_eps)
    checks.one_of("llama", "activation", activation, tuple(ACTIVATIONS))
    if sliding_window is not None:
        checks.positive_integers("llama", sliding_window=sliding_window)
        checks.within("llama", "seq", seq, "sliding_window", sliding_window)

    params: dict[str, Any] = {
        "token_embedding": weight(vocab, hidden),
        "layers": {
            "attention_norm": norm_shapes(layers, hidden, bias=False),
            "attention": attention_shapes(
                layers,
                hidden=hidden,
                heads=heads,
                head_dim=head_dim,
                kv_heads=kv_heads,
                qkv_bias=qkv_bias,
                out_bias=False,
            ),
            "mlp_norm": norm_shapes(layers, hidden, bias=False),
            "mlp": mlp_shapes(layers, hidden=hidden, ffn=ffn, bias=False, gated=True),
        },
        "final_norm": norm_shapes(hidden, bias=False),
    }
    if not tied:
        params["head"] = {"kernel": weight(hidden, vocab)}
    settings = {
        "dtype": checks.compute_dtype("llama", dtype),
        "activation": activation,
        "head_dim": head_dim,
        "rope_base": rope_base,
        "rope_scaling": rope_scaling,
        "eps": norm_eps,
    }
    return TrainingTask(
        loss_fn=partial(loss, **settings),
        params=params,
        batch={"tokens": tokens(batch, seq), "targets": tokens(batch, seq)},
        optimizer=checks.optimizer_or_default(optimizer),
        name=name or f"llama(hidden={hidden},layers={layers},heads={heads},ffn={ffn},vocab={vocab},seq={seq})",
        tokens_per_example=seq,
    )


def attention_dims(family: str, hidden: int, heads: int, kv_heads: int, head_dim: int | None) -> int:
    """The head dim, after checking that the attention dims fit together and that heads can be rotated."""
    checks.positive_integers(family, hidden=hidden, heads=heads, kv_heads=kv_heads)
    checks.divides(family, "kv_heads", kv_heads, "heads", heads)
    if head_dim is None:
        checks.divides(family, "heads", heads, "hidden", hidden)
        head_dim = hidden // heads
    checks.positive_integers(family, head_dim=head_dim)
    checks.even(family, "head_dim", head_dim, "rotary positions turn dims in pairs")
    return head_dim


def loss(params: Params, batch: Params, **settings: Any) -> jax.Array:
    """Mean cross entropy over ``[b, s]`` tokens, a float32 scalar."""
    return jnp.mean(cross_entropy(logits(params, batch["tokens"], **settings), batch["targets"]))


def logits(
    params: Params,
    ids: jax.Array,
    *,
    dtype: jnp.dtype,
    activation: str,
    head_dim: int,
    rope_base: float,
    rope_scaling: RopeScaling | None,
    eps: float,
) -> jax.Array:
    """``[b, s]`` token ids to ``[b, s, v]`` logits in the compute dtype."""
    seq = ids.shape[1]
    rotation = rotary_angles(seq, head_dim, base=rope_base, scaling=rope_scaling, dtype=dtype)

    def block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        read = rms_norm(x, layer["attention_norm"], eps=eps)
        x = x + attention(read, layer["attention"], bias=causal_bias(seq), rotation=rotation)
        return x + mlp(rms_norm(x, layer["mlp_norm"], eps=eps), layer["mlp"], activation), None

    x, _ = lax.scan(block, embed(params["token_embedding"], ids, dtype), params["layers"])
    return vocabulary_logits(rms_norm(x, params["final_norm"], eps=eps), params)

"""Mixtral: the attention of Llama with a top-k mixture of gated experts in place of the MLP.

Two ways to run the experts, neither of which lets one example's result depend on the others in its microbatch:

dense (default)     every expert runs on every token and the gate is zero where it was not chosen. Nothing is dropped,
                    as published, at ``experts / top_k`` times the expert FLOPs of a sparse run (4x for the top 2 of 8).
capacity_factor=c   each expert has ``ceil(c * top_k * s / experts)`` slots in each sequence, tokens past them lose that
                    expert. FLOPs are about c times those of a sparse run, plus dispatch and combine products. Slots are
                    per sequence, not per batch, so splitting the batch changes nothing.

Shapes: b batch, s sequence, h hidden, e experts, c slots, f feed-forward.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from planner.frontend.task import TrainingTask
from planner.models import checks
from planner.models.attention import RopeScaling, attention, attention_shapes, causal_bias, rotary_angles
from planner.models.families.llama import attention_dims
from planner.models.layers import (
    ACTIVATIONS,
    Params,
    cross_entropy,
    embed,
    norm_shapes,
    rms_norm,
    softmax,
    tokens,
    vocabulary_logits,
    weight,
)


def moe(
    *,
    hidden: int,
    layers: int,
    heads: int,
    vocab: int,
    seq: int,
    ffn: int,
    experts: int,
    top_k: int = 2,
    batch: int = 8,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    capacity_factor: float | None = None,
    balance_weight: float = 0.0,
    tied: bool = False,
    activation: str = "silu",
    rope_base: float = 1e6,
    rope_scaling: RopeScaling | None = None,
    sliding_window: int | None = None,
    norm_eps: float = 1e-5,
    dtype: str = "bfloat16",
    optimizer: optax.GradientTransformation | None = None,
    name: str | None = None,
) -> TrainingTask:
    """Next-token training of a Mixtral. Loss: mean over all tokens, plus the balance loss if asked for.

    Args:
        experts: experts in each layer.
        top_k: experts that each token uses.
        capacity_factor: see the module's docstring; None runs every expert on every token.
        balance_weight: weight of the load-balance loss, computed within each sequence and averaged over them.
        kv_heads: key and value heads; default `heads`.
        head_dim: default ``hidden / heads``.
        sliding_window: accepted where it has no effect, that is where ``seq <= sliding_window``.

    Batch: ``tokens`` and ``targets``, int32 ``[b, s]``.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    head_dim = attention_dims("moe", hidden, heads, kv_heads, head_dim)
    checks.positive_integers("moe", layers=layers, vocab=vocab, seq=seq, ffn=ffn, batch=batch)
    checks.positive_integers("moe", experts=experts, top_k=top_k)
    checks.within("moe", "top_k", top_k, "experts", experts)
    checks.booleans("moe", tied=tied)
    checks.positive_numbers("moe", rope_base=rope_base, norm_eps=norm_eps)
    checks.fraction("moe", "balance_weight", balance_weight)
    checks.one_of("moe", "activation", activation, tuple(ACTIVATIONS))
    if capacity_factor is not None:
        checks.positive_numbers("moe", capacity_factor=capacity_factor)
    if sliding_window is not None:
        checks.positive_integers("moe", sliding_window=sliding_window)
        checks.within("moe", "seq", seq, "sliding_window", sliding_window)

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
                qkv_bias=False,
                out_bias=False,
            ),
            "experts_norm": norm_shapes(layers, hidden, bias=False),
            "router": {"kernel": weight(layers, hidden, experts)},
            "experts": {
                "gate": weight(layers, experts, hidden, ffn),
                "up": weight(layers, experts, hidden, ffn),
                "down": weight(layers, experts, ffn, hidden),
            },
        },
        "final_norm": norm_shapes(hidden, bias=False),
    }
    if not tied:
        params["head"] = {"kernel": weight(hidden, vocab)}
    settings = {
        "dtype": checks.compute_dtype("moe", dtype),
        "activation": activation,
        "head_dim": head_dim,
        "top_k": top_k,
        "capacity_factor": capacity_factor,
        "rope_base": rope_base,
        "rope_scaling": rope_scaling,
        "eps": norm_eps,
    }
    return TrainingTask(
        loss_fn=partial(loss, balance_weight=balance_weight, **settings),
        params=params,
        batch={"tokens": tokens(batch, seq), "targets": tokens(batch, seq)},
        optimizer=checks.optimizer_or_default(optimizer),
        name=name or f"moe(hidden={hidden},layers={layers},experts={experts},ffn={ffn},vocab={vocab},seq={seq})",
        tokens_per_example=seq,
    )


def loss(params: Params, batch: Params, *, balance_weight: float, **settings: Any) -> jax.Array:
    """Mean cross entropy over ``[b, s]`` tokens plus the weighted balance loss, a float32 scalar."""
    scores, balance = logits(params, batch["tokens"], balance=balance_weight > 0, **settings)
    mean = jnp.mean(cross_entropy(scores, batch["targets"]))
    return mean if balance is None else mean + balance_weight * jnp.mean(balance)


def logits(
    params: Params,
    ids: jax.Array,
    *,
    dtype: jnp.dtype,
    activation: str,
    head_dim: int,
    top_k: int,
    capacity_factor: float | None,
    rope_base: float,
    rope_scaling: RopeScaling | None,
    eps: float,
    balance: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """``[b, s]`` token ids to ``[b, s, v]`` logits and, if asked for, the balance loss of each layer ``[layers]``."""
    seq = ids.shape[1]
    rotation = rotary_angles(seq, head_dim, base=rope_base, scaling=rope_scaling, dtype=dtype)

    def block(x: jax.Array, layer: Params) -> tuple[jax.Array, jax.Array | None]:
        read = rms_norm(x, layer["attention_norm"], eps=eps)
        x = x + attention(read, layer["attention"], bias=causal_bias(seq), rotation=rotation)
        read = rms_norm(x, layer["experts_norm"], eps=eps)
        scores = jnp.einsum("bsh,he->bse", read.astype(jnp.float32), layer["router"]["kernel"])
        gates, chosen = route(scores, top_k)
        if capacity_factor is None:
            y = dense_experts(read, layer["experts"], gates, activation)
        else:
            slots = math.ceil(capacity_factor * top_k * seq / scores.shape[-1])
            y = slotted_experts(read, layer["experts"], gates, chosen, slots, activation)
        return x + y, balance_loss(scores, chosen) if balance else None

    x, per_layer = lax.scan(block, embed(params["token_embedding"], ids, dtype), params["layers"])
    return vocabulary_logits(rms_norm(x, params["final_norm"], eps=eps), params), per_layer


def route(scores: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """Gates and choices from router scores ``[b, s, e]``, both float32 ``[b, s, e]``.

    The gates of a token are the softmax over its `top_k` best scores, zero for the other experts; choices are 0 or 1.
    """
    best, index = lax.top_k(scores, top_k)
    one_hot = (index[..., None] == jnp.arange(scores.shape[-1], dtype=index.dtype)).astype(jnp.float32)
    return jnp.sum(softmax(best)[..., None] * one_hot, axis=2), jnp.sum(one_hot, axis=2)


def dense_experts(x: jax.Array, experts: Params, gates: jax.Array, activation: str) -> jax.Array:
    """All experts on all tokens, ``[b, s, h] -> [b, s, h]``; the last product both sums over f and combines experts."""
    gate = jnp.einsum("bsh,ehf->bsef", x, experts["gate"].astype(x.dtype))
    up = jnp.einsum("bsh,ehf->bsef", x, experts["up"].astype(x.dtype))
    inner = ACTIVATIONS[activation](gate) * up * gates.astype(x.dtype)[..., None]
    return jnp.einsum("bsef,efh->bsh", inner, experts["down"].astype(x.dtype))


def slotted_experts(
    x: jax.Array, experts: Params, gates: jax.Array, chosen: jax.Array, slots: int, activation: str
) -> jax.Array:
    """Each expert on its first `slots` tokens of each sequence, ``[b, s, h] -> [b, s, h]``."""
    # Slot of each token at each expert, counted along the sequence; a token not sent there, or past the last slot,
    # matches no slot.
    slot = jnp.where(chosen > 0, jnp.cumsum(chosen, axis=1) - 1, -1).astype(jnp.int32)
    dispatch = (slot[..., None] == jnp.arange(slots, dtype=jnp.int32)).astype(x.dtype)
    sent = jnp.einsum("bsec,bsh->bech", dispatch, x)
    gate = jnp.einsum("bech,ehf->ebcf", sent, experts["gate"].astype(x.dtype))
    up = jnp.einsum("bech,ehf->ebcf", sent, experts["up"].astype(x.dtype))
    out = jnp.einsum("ebcf,efh->ebch", ACTIVATIONS[activation](gate) * up, experts["down"].astype(x.dtype))
    return jnp.einsum("bsec,ebch->bsh", dispatch * gates.astype(x.dtype)[..., None], out)


def balance_loss(scores: jax.Array, chosen: jax.Array) -> jax.Array:
    """``e * sum_e share_e * probability_e`` within each sequence, averaged over the batch; a float32 scalar."""
    share, probability = jnp.mean(chosen, axis=1), jnp.mean(softmax(scores), axis=1)
    return scores.shape[-1] * jnp.mean(jnp.sum(share * probability, axis=-1))

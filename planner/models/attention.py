"""Attention with batch, sequence, heads and head dim as separate dims, so that a planner can split any of them.

Multi-head weights are ``wq, wk, wv [h, n, d]`` and ``wo [n, d, h]``. With grouped queries (g query heads for each of k
key heads) they are ``wq [h, k, g, d]``, ``wk, wv [h, k, d]``, ``wo [k, g, d, h]``: no reshape ties the two head dims
together. Einsum outputs are in the order in which a dot product yields them, so no transposes appear.

Shapes: b batch, s query positions, t key positions, h hidden, n heads, k key heads, g queries a key head, d head dim.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from planner.models.layers import Params, softmax, weight

# Far below any score, and finite: a row that is masked out whole still gives a finite softmax.
MASKED = -1e30

Rotation = tuple[jax.Array, jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched to longer sequences.

    Args:
        kind: ``linear`` divides every frequency by `factor`; ``llama3`` only those of long wavelength.
        factor: the stretch.
        low_frequency_factor: `original_seq` / this is the wavelength from which the stretch is full (llama3).
        high_frequency_factor: `original_seq` / this is the wavelength below which there is none (llama3).
        original_seq: sequence length of pre-training (llama3).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_seq: int = 8192


def attention_shapes(
    *lead: int, hidden: int, heads: int, head_dim: int, kv_heads: int | None = None, qkv_bias: bool, out_bias: bool
) -> dict[str, jax.ShapeDtypeStruct]:
    """Weights of one attention; `lead` is ``(layers,)`` for stacked layers."""
    kv_heads = kv_heads or heads
    query = (heads, head_dim) if kv_heads == heads else (kv_heads, heads // kv_heads, head_dim)
    shapes = {
        "wq": weight(*lead, hidden, *query),
        "wk": weight(*lead, hidden, kv_heads, head_dim),
        "wv": weight(*lead, hidden, kv_heads, head_dim),
        "wo": weight(*lead, *query, hidden),
    }
    if qkv_bias:
        shapes |= {"q_bias": weight(*lead, *query)}
        shapes |= {name: weight(*lead, kv_heads, head_dim) for name in ("k_bias", "v_bias")}
    return shapes | ({"o_bias": weight(*lead, hidden)} if out_bias else {})


def attention(
    x: jax.Array,
    params: Params,
    *,
    bias: jax.Array | None,
    context: jax.Array | None = None,
    rotation: Rotation | None = None,
    scaled: bool = True,
) -> jax.Array:
    """Softmax attention of `x` over `context`.

    Args:
        x: ``[b, s, h]``, where the queries come from.
        params: weights as in `attention_shapes`.
        bias: added to the float32 scores: ``[s, t]`` (a mask) or ``[n, s, t]`` (relative positions).
        context: ``[b, t, h]``, where keys and values come from; None means `x`.
        rotation: cosine and sine of `rotary_angles`.
        scaled: whether queries are divided by ``sqrt(d)`` (T5 does not).

    Returns:
        ``[b, s, h]``.
    """
    context = x if context is None else context
    grouped = params["wq"].ndim == 4
    query = _project(x, params, "q", "bsh,hkgd->bskgd" if grouped else "bsh,hnd->bsnd")
    key = _project(context, params, "k", "bth,hkd->btkd")
    value = _project(context, params, "v", "bth,hkd->btkd")
    if rotation is not None:
        query, key = rotate(query, rotation), rotate(key, rotation)
    if scaled:
        query = query * query.shape[-1] ** -0.5
    scores = jnp.einsum("bskgd,btkd->bksgt" if grouped else "bsnd,btnd->bnst", query, key).astype(jnp.float32)
    if bias is not None:
        scores = scores + (bias[:, None, :] if grouped else bias)
    shares = softmax(scores).astype(x.dtype)
    mixed = jnp.einsum("bksgt,btkd->bksgd" if grouped else "bnst,btnd->bnsd", shares, value)
    out = jnp.einsum("bksgd,kgdh->bsh" if grouped else "bnsd,ndh->bsh", mixed, params["wo"].astype(x.dtype))
    return out + params["o_bias"].astype(x.dtype) if "o_bias" in params else out


def _project(x: jax.Array, params: Params, which: str, subscripts: str) -> jax.Array:
    y = jnp.einsum(subscripts, x, params[f"w{which}"].astype(x.dtype))
    bias = f"{which}_bias"
    return y + params[bias].astype(x.dtype) if bias in params else y


def causal_bias(seq: int) -> jax.Array:
    """``[s, t]``: 0 where query s may see key t, else `MASKED`.

    Added, not selected: a select would keep its mask, broadcast over batch and heads, for the backward pass.
    """
    rows = lax.broadcasted_iota(jnp.int32, (seq, seq), 0)
    columns = lax.broadcasted_iota(jnp.int32, (seq, seq), 1)
    return (columns > rows).astype(jnp.float32) * MASKED


def rotary_angles(seq: int, rotary_dim: int, *, base: float, scaling: RopeScaling | None, dtype: jnp.dtype) -> Rotation:
    """Cosine and sine, each ``[s, rotary_dim / 2]``, from iotas: no table is a parameter or a captured constant."""
    half = rotary_dim // 2
    frequency = jnp.exp(jnp.arange(half, dtype=jnp.float32) * (-2.0 * float(np.log(base)) / rotary_dim))
    if scaling is not None:
        stretched = frequency / scaling.factor
        if scaling.kind == "linear":
            frequency = stretched
        else:
            # Turns within the original sequence: few turns (long wavelength) stretch fully, many turns not at all.
            turns = scaling.original_seq * frequency / (2 * np.pi)
            low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
            kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
            frequency = stretched + kept * (frequency - stretched)
    angle = jnp.arange(seq, dtype=jnp.float32)[:, None] * frequency
    return jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate the first dims of each head of `x` ``[b, s, heads..., d]``; dims past the rotation pass through."""
    head_dims = tuple(range(1, x.ndim - 2))
    cos, sin = (jnp.expand_dims(table, head_dims) for table in rotation)
    half = cos.shape[-1]
    first, second, *rest = jnp.split(x, [half, 2 * half] if 2 * half < x.shape[-1] else [half], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, *rest], axis=-1)

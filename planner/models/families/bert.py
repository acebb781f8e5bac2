"""BERT: a bidirectional post-norm transformer with a masked-token loss."""

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
    embed,
    layer_norm,
    mlp,
    mlp_shapes,
    norm_shapes,
    tokens,
    vocabulary_logits,
    weight,
)


def bert(
    *,
    hidden: int,
    layers: int,
    heads: int,
    vocab: int,
    seq: int,
    batch: int = 8,
    ffn: int | None = None,
    positions: int | None = None,
    types: int = 2,
    activation: str = "gelu",
    norm_eps: float = 1e-12,
    dtype: str = "bfloat16",
    optimizer: optax.GradientTransformation | None = None,
    name: str | None = None,
) -> TrainingTask:
    """Masked-token training of a BERT encoder with a tied output layer; no pooler, no next-sentence loss.

    The loss is a mean over the masked positions, whose count differs from microbatch to microbatch: so the task is of
    ``reduction="weighted"`` and the function returns ``(sum of losses, number of masked positions)``.

    Args:
        ffn: MLP width; default ``4 * hidden``.
        positions: rows of the learned position table; default `seq`.
        types: rows of the token-type table.

    Batch: ``tokens``, ``token_types``, ``targets`` int32 and ``mask`` float32 (1 at predicted positions), ``[b, s]``.
    """
    checks.positive_integers("bert", hidden=hidden)
    ffn = 4 * hidden if ffn is None else ffn
    positions = seq if positions is None else positions
    checks.positive_integers("bert", layers=layers, heads=heads, vocab=vocab, seq=seq, batch=batch)
    checks.positive_integers("bert", ffn=ffn, positions=positions, types=types)
    checks.divides("bert", "heads", heads, "hidden", hidden)
    checks.within("bert", "seq", seq, "positions", positions)
    checks.positive_numbers("bert", norm_eps=norm_eps)
    checks.one_of("bert", "activation", activation, tuple(ACTIVATIONS))

    params = {
        "token_embedding": weight(vocab, hidden),
        "position_embedding": weight(positions, hidden),
        "type_embedding": weight(types, hidden),
        "embedding_norm": norm_shapes(hidden, bias=True),
        "layers": {
            "attention": attention_shapes(
                layers, hidden=hidden, heads=heads, head_dim=hidden // heads, qkv_bias=True, out_bias=True
            ),
            "attention_norm": norm_shapes(layers, hidden, bias=True),
            "mlp": mlp_shapes(layers, hidden=hidden, ffn=ffn, bias=True, gated=False),
            "mlp_norm": norm_shapes(layers, hidden, bias=True),
        },
        "prediction": {
            "kernel": weight(hidden, hidden),
            "bias": weight(hidden),
            "norm": norm_shapes(hidden, bias=True),
        },
        "vocabulary_bias": weight(vocab),
    }
    ids = tokens(batch, seq)
    return TrainingTask(
        loss_fn=partial(loss, dtype=checks.compute_dtype("bert", dtype), activation=activation, eps=norm_eps),
        params=params,
        batch={
            "tokens": ids,
            "token_types": ids,
            "targets": ids,
            "mask": jax.ShapeDtypeStruct((batch, seq), jnp.float32),
        },
        optimizer=checks.optimizer_or_default(optimizer),
        reduction="weighted",
        name=name or f"bert(hidden={hidden},layers={layers},heads={heads},vocab={vocab},seq={seq})",
        tokens_per_example=seq,
    )


def loss(params: Params, batch: Params, **settings: Any) -> tuple[jax.Array, jax.Array]:
    """Sum of the masked positions' cross entropies and their number, two float32 scalars."""
    scores = logits(params, batch["tokens"], batch["token_types"], **settings)
    return jnp.sum(cross_entropy(scores, batch["targets"]) * batch["mask"]), jnp.sum(batch["mask"])


def logits(
    params: Params, ids: jax.Array, types: jax.Array, *, dtype: jnp.dtype, activation: str, eps: float
) -> jax.Array:
    """``[b, s]`` token and type ids to ``[b, s, v]`` logits in the compute dtype."""
    x = embed(params["token_embedding"], ids, dtype) + embed(params["type_embedding"], types, dtype)
    x = x + params["position_embedding"][: ids.shape[1]].astype(dtype)
    x = layer_norm(x, params["embedding_norm"], eps=eps)

    def block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        x = layer_norm(x + attention(x, layer["attention"], bias=None), layer["attention_norm"], eps=eps)
        return layer_norm(x + mlp(x, layer["mlp"], activation), layer["mlp_norm"], eps=eps), None

    x, _ = lax.scan(block, x, params["layers"])
    prediction = params["prediction"]
    x = layer_norm(ACTIVATIONS[activation](dense(x, prediction)), prediction["norm"], eps=eps)
    return vocabulary_logits(x, params) + params["vocabulary_bias"].astype(dtype)

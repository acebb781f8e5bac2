"""A training step of a Flax NNX model: split into graph and parameters, merged again inside the loss.

meshplan plan --model examples/flax_nnx_step.py:task --cluster CLUSTER
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from planner import TrainingTask

VOCAB, SEQ, HIDDEN, HEADS, LAYERS = 8192, 128, 256, 8, 4


class Block(nnx.Module):
    """One pre-norm transformer block, ``[batch, seq, hidden]`` in and out."""

    def __init__(self, hidden: int, heads: int, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(hidden, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=heads, in_features=hidden, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(hidden, rngs=rngs)
        self.up = nnx.Linear(hidden, 4 * hidden, rngs=rngs)
        self.down = nnx.Linear(4 * hidden, hidden, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Model(nnx.Module):
    """A causal language model, token ids ``[batch, seq]`` to logits ``[batch, seq, vocab]``."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.positions = nnx.Embed(SEQ, HIDDEN, rngs=rngs)
        self.blocks = nnx.List([Block(HIDDEN, HEADS, rngs=rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(HIDDEN, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.embedding.attend(self.norm(x))


def task() -> TrainingTask:
    """What meshplan plans; `nnx.eval_shape` makes the model without allocating it."""
    graph, params = nnx.split(nnx.eval_shape(lambda: Model(rngs=nnx.Rngs(0))), nnx.Param)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = nnx.merge(graph, params)(batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    ids = jax.ShapeDtypeStruct((8, SEQ), jnp.int32)
    return TrainingTask(
        loss_fn=loss,
        params=params,
        batch={"tokens": ids, "targets": ids},
        optimizer=optax.adamw(3e-4),
        name="flax_nnx_step",
        tokens_per_example=SEQ,
    )

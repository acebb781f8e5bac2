"""A training step of an Equinox model: arrays and the rest are partitioned, and combined again inside the loss.

meshplan plan --model examples/equinox_step.py:task --cluster CLUSTER
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from planner import TrainingTask

VOCAB, SEQ, HIDDEN, HEADS, LAYERS = 8192, 128, 256, 8, 4


class Block(eqx.Module):
    """One pre-norm transformer block of a single sequence, ``[seq, hidden]`` in and out."""

    attention_norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp_norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = eqx.nn.LayerNorm(HIDDEN)
        self.attention = eqx.nn.MultiheadAttention(HEADS, HIDDEN, key=attention_key)
        self.mlp_norm = eqx.nn.LayerNorm(HIDDEN)
        self.mlp = eqx.nn.MLP(HIDDEN, HIDDEN, 4 * HIDDEN, depth=1, activation=jax.nn.gelu, key=mlp_key)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(y, y, y, mask=jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool)))
        return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))


class Model(eqx.Module):
    """A causal language model of a single sequence, token ids ``[seq]`` to logits ``[seq, vocab]``."""

    embedding: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        embedding, positions, head, *blocks = jax.random.split(key, 3 + LAYERS)
        self.embedding = eqx.nn.Embedding(VOCAB, HIDDEN, key=embedding)
        self.positions = eqx.nn.Embedding(SEQ, HIDDEN, key=positions)
        self.blocks = [Block(k) for k in blocks]
        self.norm = eqx.nn.LayerNorm(HIDDEN)
        self.head = eqx.nn.Linear(HIDDEN, VOCAB, use_bias=False, key=head)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.vmap(self.embedding)(tokens) + jax.vmap(self.positions)(jnp.arange(tokens.shape[0]))
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def task() -> TrainingTask:
    """What meshplan plans; `eqx.filter_eval_shape` makes the model without allocating it."""
    model = eqx.filter_eval_shape(Model, jax.random.key(0))
    # Of an abstract model the trained leaves are ShapeDtypeStructs, where a concrete one has `eqx.is_inexact_array`.
    params, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = jax.vmap(eqx.combine(params, static))(batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    ids = jax.ShapeDtypeStruct((8, SEQ), jnp.int32)
    return TrainingTask(
        loss_fn=loss,
        params=params,
        batch={"tokens": ids, "targets": ids},
        optimizer=optax.adamw(3e-4),
        name="equinox_step",
        tokens_per_example=SEQ,
    )

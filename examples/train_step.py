"""A training step in plain JAX, as one might write it before thinking of parallelism: a small causal transformer.

meshplan plan --model examples/train_step.py:task --cluster CLUSTER

The layers are a Python loop over a list (no scan), heads come from a reshape, the optimizer clips by the global norm.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from planner import TrainingTask

VOCAB, SEQ, HIDDEN, HEADS, LAYERS = 8192, 256, 512, 8, 6


def init(key: jax.Array) -> dict[str, Any]:
    """Random parameters: an embedding, a list of layers, an output layer."""

    def dense(key: jax.Array, inputs: int, outputs: int) -> jax.Array:
        return jax.random.normal(key, (inputs, outputs)) * inputs**-0.5

    def layer(key: jax.Array) -> dict[str, jax.Array]:
        qkv, out, up, down = jax.random.split(key, 4)
        return {
            "norm1": jnp.ones(HIDDEN),
            "qkv": dense(qkv, HIDDEN, 3 * HIDDEN),
            "out": dense(out, HIDDEN, HIDDEN),
            "norm2": jnp.ones(HIDDEN),
            "up": dense(up, HIDDEN, 4 * HIDDEN),
            "down": dense(down, 4 * HIDDEN, HIDDEN),
        }

    embedding, head, *layers = jax.random.split(key, 2 + LAYERS)
    return {
        "embedding": jax.random.normal(embedding, (VOCAB, HIDDEN)) * 0.02,
        "layers": [layer(k) for k in layers],
        "norm": jnp.ones(HIDDEN),
        "head": dense(head, HIDDEN, VOCAB),
    }


def normalise(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Divide by the root mean square over the last dim."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain


def attention(x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
    """Causal self-attention, ``[batch, seq, hidden]``."""
    batch, seq, hidden = x.shape
    heads = (x @ layer["qkv"]).reshape(batch, seq, 3, HEADS, hidden // HEADS)
    q, k, v = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(hidden // HEADS)
    scores = jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return mixed.reshape(batch, seq, hidden) @ layer["out"]


def loss(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    """Mean next-token cross entropy."""
    x = params["embedding"][batch["tokens"]]
    for layer in params["layers"]:
        x = x + attention(normalise(x, layer["norm1"]), layer)
        x = x + jax.nn.gelu(normalise(x, layer["norm2"]) @ layer["up"]) @ layer["down"]
    logits = normalise(x, params["norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def task() -> TrainingTask:
    """What meshplan plans: the loss, abstract parameters and batch, and the optimizer."""
    ids = jax.ShapeDtypeStruct((8, SEQ), jnp.int32)
    return TrainingTask(
        loss_fn=loss,
        params=jax.eval_shape(init, jax.random.key(0)),
        batch={"tokens": ids, "targets": ids},
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4)),
        name="train_step",
        tokens_per_example=SEQ,
    )

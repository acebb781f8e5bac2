"""What the models compute: causality, microbatch meaning, and agreement with independent formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from planner.models import example_batch, init_params, init_state
from planner.models.attention import RopeScaling, attention, causal_bias, rotary_angles, rotate
from planner.models.families import bert, gpt, llama, moe, t5, wide_resnet
from planner.models.layers import cross_entropy, dropout
from tests.models.tiny import TINY, quick_jit, scalar_loss


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def changed_positions(logits, params, ids, position):
    """Which sequence positions' logits change when the id at `position` does."""
    run = quick_jit(logits)
    other = ids.at[:, position].set((ids[:, position] + 1) % 32)
    difference = jnp.max(jnp.abs(run(params, ids) - run(params, other)), axis=(0, 2))
    return [int(i) for i in np.flatnonzero(np.asarray(difference) > 1e-7)]


@pytest.mark.parametrize("name", ["gpt", "gpt-neox", "llama", "moe", "moe-capacity"])
def test_decoders_are_causal(name):
    task = TINY[name](dtype="float32")
    settings = {k: v for k, v in task.loss_fn.keywords.items() if k not in ("balance_weight", "rate")}
    module = {"gpt": gpt, "gpt-neox": gpt, "llama": llama, "moe": moe, "moe-capacity": moe}[name]

    def logits(params, ids):
        out = module.logits(params, ids, **settings)
        return out[0] if isinstance(out, tuple) else out

    ids = example_batch(task)["tokens"]
    assert changed_positions(logits, init_params(task), ids, 5) == [5, 6, 7]


def test_bert_sees_both_ways():
    task = TINY["bert"](dtype="float32")
    batch = example_batch(task)

    def logits(params, ids):
        return bert.logits(params, ids, batch["token_types"], **task.loss_fn.keywords)

    assert changed_positions(logits, init_params(task), batch["tokens"], 5) == list(range(8))


def test_t5_decoder_is_causal_and_reads_all_of_the_encoder():
    task = TINY["t5"](dtype="float32")
    params, batch = init_params(task), example_batch(task)

    def of_decoder(params, ids):
        return t5.logits(params, batch["inputs"], ids, **task.loss_fn.keywords)

    def of_encoder(params, ids):
        return t5.logits(params, ids, batch["decoder_inputs"], **task.loss_fn.keywords)

    assert changed_positions(of_decoder, params, batch["decoder_inputs"], 4) == [4, 5]
    assert changed_positions(of_encoder, params, batch["inputs"], 7) == list(range(6))


def microbatches(batch, count):
    return [jax.tree.map(lambda leaf: jnp.split(leaf, count)[i], batch) for i in range(count)]  # noqa: B023


@pytest.mark.parametrize("name", ["gpt", "moe", "moe-capacity", "wide_resnet-group"])
def test_mean_losses_split_over_microbatches(name):
    task = TINY[name](dtype="float32")
    params, batch, loss = init_params(task), example_batch(task), quick_jit(scalar_loss(task))
    parts = [float(loss(params, part)) for part in microbatches(batch, 2)]
    assert float(loss(params, batch)) == pytest.approx(sum(parts) / 2, rel=1e-5)


def test_weighted_loss_splits_as_sum_of_sums_over_sum_of_weights():
    task = TINY["bert"](dtype="float32")
    params, batch = init_params(task), example_batch(task)
    # One microbatch predicts 2 positions, the other 12.
    batch["mask"] = jnp.zeros((4, 8)).at[0, :2].set(1).at[2:, :6].set(1)
    assert task.reduction == "weighted"
    loss = quick_jit(task.loss_fn)
    total, weight = loss(params, batch)
    sums, weights = zip(*(loss(params, part) for part in microbatches(batch, 2)), strict=True)
    assert [float(w) for w in weights] == [2.0, 12.0] and float(weight) == 14.0
    assert float(total) == pytest.approx(float(sum(sums)), rel=1e-5)
    mean_of_means = sum(float(s / w) for s, w in zip(sums, weights, strict=True)) / 2
    assert abs(mean_of_means - float(total / weight)) > 1e-3


def test_batch_norm_does_not_split_over_microbatches():
    task = TINY["wide_resnet"](dtype="float32")
    params, batch, loss = init_params(task), example_batch(task), quick_jit(scalar_loss(task))
    parts = [float(loss(params, part)) for part in microbatches(batch, 2)]
    assert abs(float(loss(params, batch)) - sum(parts) / 2) > 1e-3


def test_running_statistics_move_by_a_tenth():
    x, state = draw(4, 3, 3, 2), {"mean": jnp.array([1.0, 2.0]), "variance": jnp.array([3.0, 4.0])}
    y, new = wide_resnet.batch_norm(x, {"scale": jnp.ones(2), "bias": jnp.zeros(2)}, state)
    mean, variance = np.mean(x, axis=(0, 1, 2)), np.var(x, axis=(0, 1, 2))
    np.testing.assert_allclose(new["mean"], 0.9 * state["mean"] + 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(new["variance"], 0.9 * state["variance"] + 0.1 * variance, rtol=1e-5)
    np.testing.assert_allclose(y, (x - mean) / np.sqrt(variance + 1e-5), rtol=1e-4, atol=1e-5)


def test_state_keeps_its_structure():
    task = TINY["wide_resnet"]()
    out = jax.eval_shape(lambda p, b, s: task.loss_fn(p, b, state=s), task.params, task.batch, init_state(task))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), out[1]) == jax.tree.map(lambda x: (x.shape, x.dtype), task.state)


def test_group_norm_is_of_each_example_alone():
    x = draw(2, 3, 3, 64)
    y = wide_resnet.group_norm(x, {"scale": jnp.ones(64), "bias": jnp.zeros(64)})
    grouped = np.asarray(y).reshape(2, 9, 32, 2)
    np.testing.assert_allclose(grouped.mean(axis=(1, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(grouped.var(axis=(1, 3)), 1, rtol=1e-3)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_jax_attention(kv_heads):
    x = draw(2, 8, 16)
    weights = {"wk": draw(16, kv_heads, 6, seed=2), "wv": draw(16, kv_heads, 6, seed=3)}
    query, out = draw(16, 4, 6, seed=1), draw(4, 6, 16, seed=4)
    grouped = kv_heads != 4
    weights["wq"] = query.reshape(16, kv_heads, 4 // kv_heads, 6) if grouped else query
    weights["wo"] = out.reshape(kv_heads, 4 // kv_heads, 6, 16) if grouped else out
    ours = attention(x, weights, bias=causal_bias(8))
    projected = [jnp.einsum("bsh,hnd->bsnd", x, w) for w in (query, weights["wk"], weights["wv"])]
    theirs = jnp.einsum("bsnd,ndh->bsh", jax.nn.dot_product_attention(*projected, is_causal=True), out)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_rotation_depends_on_distance_only():
    rotation = rotary_angles(12, 8, base=100.0, scaling=None, dtype=jnp.float32)
    same = jnp.broadcast_to(draw(8), (1, 12, 1, 8))
    other = jnp.broadcast_to(draw(8, seed=1), (1, 12, 1, 8))
    scores = np.asarray(jnp.einsum("bsnd,btnd->st", rotate(same, rotation), rotate(other, rotation)))
    for offset in range(-11, 12):
        diagonal = np.diagonal(scores, offset)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rotate(same, rotation)[:, 0], same[:, 0])


def test_partial_rotation_leaves_the_rest():
    x = draw(1, 5, 2, 10)
    y = rotate(x, rotary_angles(5, 4, base=100.0, scaling=None, dtype=jnp.float32))
    np.testing.assert_array_equal(x[..., 4:], y[..., 4:])
    assert not np.allclose(x[:, 1:, :, :4], y[:, 1:, :, :4])


def test_llama3_scaling_stretches_long_wavelengths_only():
    scaling = RopeScaling(kind="llama3", factor=8.0, original_seq=8192)
    # The angle at position 1 is the frequency; the sine of a small angle keeps its precision.
    frequency, scaled = (
        np.arctan2(np.asarray(sin[1]), np.asarray(cos[1]))
        for cos, sin in (rotary_angles(2, 128, base=5e5, scaling=s, dtype=jnp.float32) for s in (None, scaling))
    )
    for old, new in zip(frequency, scaled, strict=True):
        wavelength = 2 * math.pi / old
        if wavelength < 8192 / 4:
            expected = old
        elif wavelength > 8192 / 1:
            expected = old / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * old / 8 + smooth * old
        assert new == pytest.approx(expected, rel=1e-4)
    assert scaled[0] == frequency[0] and scaled[-1] < frequency[-1] / 7.9


def reference_bucket(ahead, causal, buckets=32, longest=128):
    """T5's bucket of one pair, from its description: exact when near, geometric when far."""
    offset, distance = 0, max(-ahead, 0)
    if not causal:
        buckets //= 2
        offset, distance = (buckets if ahead > 0 else 0), abs(ahead)
    exact = buckets // 2
    if distance < exact:
        return offset + distance
    far = exact + int(math.log(distance / exact) / math.log(longest / exact) * (buckets - exact) + 1e-5)
    return offset + min(far, buckets - 1)


@pytest.mark.parametrize("causal", [True, False])
def test_relative_buckets(causal):
    ours = np.asarray(t5.relative_buckets(200, 32, 128, causal=causal))
    theirs = [[reference_bucket(key - query, causal) for key in range(200)] for query in range(200)]
    # Where the logarithm falls on a bucket's edge, float32 may round to either side.
    assert np.abs(ours - theirs).max() <= 1 and (ours != theirs).mean() < 0.01
    # "Ahead by nothing" has a bucket, as published, that no pair falls into.
    assert set(ours.ravel()) == set(range(32)) - (set() if causal else {16})


def expert_inputs(experts=4):
    x, scores = draw(2, 8, 6), draw(2, 8, experts, seed=1)
    weights = {
        "gate": draw(experts, 6, 5, seed=2),
        "up": draw(experts, 6, 5, seed=3),
        "down": draw(experts, 5, 6, seed=4),
    }
    return x, scores, weights


def test_dense_experts_equal_a_loop_over_tokens():
    x, scores, weights = expert_inputs()
    gates, chosen = moe.route(scores, 2)
    ours = moe.dense_experts(x, weights, gates, "silu")
    for b, s in np.ndindex(2, 8):
        best = np.argsort(scores[b, s])[-2:]
        share = jax.nn.softmax(scores[b, s][best])
        expected = sum(
            share[i] * (jax.nn.silu(x[b, s] @ weights["gate"][e]) * (x[b, s] @ weights["up"][e])) @ weights["down"][e]
            for i, e in enumerate(best)
        )
        np.testing.assert_allclose(ours[b, s], expected, rtol=1e-4, atol=1e-4)
    assert np.asarray(chosen).sum(-1).tolist() == [[2.0] * 8] * 2


def test_slots_for_all_equal_dense_experts():
    x, scores, weights = expert_inputs()
    gates, chosen = moe.route(scores, 2)
    dense = moe.dense_experts(x, weights, gates, "silu")
    np.testing.assert_allclose(moe.slotted_experts(x, weights, gates, chosen, 8, "silu"), dense, rtol=1e-4, atol=1e-4)


def test_tokens_past_the_last_slot_are_dropped_in_order():
    x, _, weights = expert_inputs()
    scores = jnp.zeros((2, 8, 4)).at[..., 1].set(5.0)
    gates, chosen = moe.route(scores, 1)
    y = moe.slotted_experts(x, weights, gates, chosen, 3, "silu")
    dense = moe.dense_experts(x, weights, gates, "silu")
    np.testing.assert_allclose(y[:, :3], dense[:, :3], rtol=1e-4, atol=1e-4)
    assert not np.asarray(y[:, 3:]).any()


def test_balance_loss_is_one_when_even_and_grows_when_not():
    even = jnp.tile(10 * jnp.eye(4), (2, 2, 1))
    skewed = jnp.zeros((2, 8, 4)).at[..., 0].set(10.0)
    values = [float(moe.balance_loss(scores, moe.route(scores, 1)[1])) for scores in (even, skewed)]
    assert values[0] == pytest.approx(1.0, rel=1e-3) and values[1] > 3.9


def test_cross_entropy_equals_optax():
    logits, labels = 30 * draw(3, 5, 7), jnp.asarray(np.random.default_rng(1).integers(0, 7, (3, 5)))
    theirs = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    np.testing.assert_allclose(cross_entropy(logits, labels), theirs, rtol=1e-5, atol=1e-5)


def test_dropout_depends_on_the_key_and_keeps_the_mean():
    task = TINY["gpt-dropout"](dtype="float32")
    assert task.rng and not TINY["gpt"]().rng
    params, batch = init_params(task), example_batch(task)
    loss = quick_jit(lambda params, batch, rng: task.loss_fn(params, batch, rng=rng))
    values = [float(loss(params, batch, jax.random.key(seed))) for seed in (0, 0, 1)]
    assert values[0] == values[1] != values[2]
    kept = dropout(jnp.ones((100, 100)), 0.1, jax.random.key(0))
    assert set(np.unique(np.asarray(kept)).round(4)) == {0.0, np.float32(1 / 0.9).round(4)}
    assert float(jnp.mean(kept)) == pytest.approx(1.0, abs=0.02)


def test_masked_scores_are_exactly_zero_after_softmax():
    x = draw(1, 4, 8)
    weights = {name: draw(8, 1, 8, seed=i) for i, name in enumerate(("wq", "wk", "wv"))} | {"wo": draw(1, 8, 8, seed=9)}
    poisoned = x.at[0, 3].set(1e4)
    clean, dirty = (attention(value, weights, bias=causal_bias(4)) for value in (x, poisoned))
    np.testing.assert_array_equal(clean[:, :3], dirty[:, :3])

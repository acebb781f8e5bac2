"""Sequence chunks: loss and gradients of a model in chunks are those of the model; what is not causal is refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from costmodel.errors import InputError
from planner.frontend.capture import capture
from planner.frontend.chunks.bounds import HIDES
from planner.frontend.chunks.walk import chunked_model
from planner.frontend.task import TrainingTask
from planner.models import bert, example_batch, gpt, init_params, llama, moe, t5, vit, wide_resnet
from tests.frontend.chunked import loss_in_chunks

SIZES: dict[str, Any] = {"hidden": 16, "layers": 2, "heads": 4, "vocab": 32, "batch": 2, "dtype": "float32"}
FAMILIES: dict[str, Callable[..., TrainingTask]] = {
    "gpt": partial(gpt, **SIZES),
    "gpt-neox": partial(gpt, **SIZES, rotary_fraction=0.5, parallel=True, tied=False),
    "gpt-dropout": partial(gpt, **SIZES, dropout=0.1),
    "llama": partial(llama, **SIZES, kv_heads=2, ffn=32),
    "llama-qwen": partial(llama, **SIZES, head_dim=6, ffn=32, qkv_bias=True, tied=True),
    "moe": partial(moe, **SIZES, kv_heads=2, ffn=32, experts=4),
}


def written(
    seq: int,
    attend: Callable[..., Any],
    *,
    loss: Callable[..., Any] | None = None,
    reduction: str = "mean",
    layers: int = 2,
    activation: Callable[..., Any] = jax.nn.gelu,
) -> TrainingTask:
    """An unrolled causal model as users write them: `attend` takes queries, keys and values ``[b, s, n, d]``. Inputs
    and targets are two windows of one leaf, whose length is no multiple of the sequence's."""

    def run(params: Any, batch: Any) -> Any:
        x = params["table"][batch["tokens"][:, :-1]] + params["positions"][None]
        for layer in params["layers"]:
            q, k, v = (jnp.einsum("bsh,hnd->bsnd", jax.nn.standardize(x), layer[name]) for name in "qkv")
            x = x + jnp.einsum("bsnd,ndh->bsh", attend(q, k, v), layer["o"])
            x = x + activation(jax.nn.standardize(x) @ layer["up"]) @ layer["down"]
        logits = jax.nn.log_softmax(0.1 * jax.nn.standardize(x) @ params["table"].T)
        scores = jnp.take_along_axis(logits, batch["tokens"][:, 1:, None], -1)[..., 0]
        return loss(scores, batch, params) if loss else -jnp.mean(scores)

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    layer = {**{n: shape(16, 2, 8) for n in "qkv"}, "o": shape(2, 8, 16), "up": shape(16, 32), "down": shape(32, 16)}
    params = {"table": shape(32, 16), "positions": shape(seq, 16), "layers": [layer] * layers}
    batch = {"tokens": jax.ShapeDtypeStruct((2, seq + 1), jnp.int32)}
    return TrainingTask(run, params=params, batch=batch, optimizer=optax.sgd(0.1), reduction=reduction)


def selected(fill: float, q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bsnd,btnd->bnst", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, fill)
    return jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores), v)


def table_masked(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bsnd,btnd->bnst", q, k)
    mask = np.triu(np.full(scores.shape[-2:], -np.inf, np.float32), 1)
    return jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores + mask), v)


def windowed(q: Any, k: Any, v: Any) -> Any:
    """Each token sees itself and the two before it; scores are transposed."""
    scores = jnp.einsum("btnd,bsnd->bnts", k, q)
    at = jnp.arange(q.shape[1])
    seen = (at[:, None] <= at) & (at[:, None] > at - 3)
    scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bnts,btnd->bsnd", jax.nn.softmax(scores, axis=-2), v)


def multiplied(q: Any, k: Any, v: Any) -> Any:
    """A mask that multiplies, as GPT-2's own."""
    scores = jnp.einsum("bsnd,btnd->bnst", q, k)
    mask = jnp.tril(jnp.ones(scores.shape[-2:], scores.dtype))
    return jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores * mask - 1e10 * (1 - mask)), v)


def without_maximum(q: Any, k: Any, v: Any) -> Any:
    """Shares of the scores themselves: zeros behind the mask, no softmax."""
    scores = jax.nn.relu(jnp.einsum("bsnd,btnd->bnst", q, k)) * jnp.tril(jnp.ones((q.shape[1],) * 2))
    return jnp.einsum("bnst,btnd->bsnd", scores / (1.0 + jnp.sum(scores, -1, keepdims=True)), v)


def library(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def none(q: Any, k: Any, v: Any) -> Any:
    """No token sees another."""
    return jax.nn.tanh(q * k) * v


def whole(q: Any, k: Any, v: Any) -> Any:
    return jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(jnp.einsum("bsnd,btnd->bnst", q, k)), v)


ATTENTIONS = {
    "select": partial(selected, -np.inf),
    "select a number": partial(selected, -1e9),
    "table": table_masked,
    "window, transposed": windowed,
    "multiplied": multiplied,
    "without maximum": without_maximum,
    "library": library,
    "none": none,
}


def assert_equal(task: TrainingTask, chunks: int) -> None:
    """Loss parts and gradients of the first part, in chunks and whole."""
    params, batch = init_params(task, seed=0), example_batch(task, 2, seed=1)
    extra = (jax.random.key(3),) if task.rng else ()

    def parts(params: Any) -> list[Any]:
        found = task.loss_fn(params, batch, *extra)
        return list(found) if task.reduction == "weighted" else [found]

    def run(of: Callable[[Any], list[Any]]) -> Any:
        def first(params: Any) -> Any:
            found = of(params)
            return found[0], found

        return jax.jit(jax.value_and_grad(first, has_aux=True))(params)

    (_, expected), wanted = run(parts)
    in_chunks = loss_in_chunks(task, 2, chunks)
    (_, found), got = run(lambda params: in_chunks(params, batch, *extra))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(wanted))
    assert np.isfinite(largest) and largest > 1e-5
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(got), strict=True):
        tolerance = 1e-4 * float(jnp.abs(a).max()) + 1e-6 * largest
        np.testing.assert_allclose(b, a, rtol=0, atol=tolerance, err_msg=jax.tree_util.keystr(path))


QUICK = [("gpt", 9, 3), ("llama", 8, 2)]


@pytest.mark.parametrize(
    ("family", "seq", "chunks"),
    [
        *QUICK,
        *(
            pytest.param(family, seq, chunks, marks=pytest.mark.slow)
            for family in FAMILIES
            for seq, chunks in ((6, 1), (10, 2), (9, 3), (12, 4), (7, 7))
            if (family, seq, chunks) not in QUICK
        ),
    ],
)
def test_families_in_chunks_are_themselves(family: str, seq: int, chunks: int) -> None:
    assert_equal(FAMILIES[family](seq=seq), chunks)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attentions_in_chunks_are_themselves(name: str) -> None:
    assert_equal(written(9, ATTENTIONS[name]), 3)


def wavy(x: Any) -> Any:
    """A custom derivative with a captured array inside."""
    scale = np.linspace(0.5, 1.5, 32, dtype=np.float32)

    @jax.custom_vjp
    def function(x: Any) -> Any:
        return jnp.sin(x * scale)

    function.defvjp(lambda x: (function(x), x), lambda x, ct: (2.0 * ct * jnp.cos(x * scale),))
    return function(x)


@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.silu, wavy])
def test_functions_with_derivatives_of_their_own_keep_them(activation: Callable[..., Any]) -> None:
    assert_equal(written(8, ATTENTIONS["select"], activation=activation), 2)


def weighted(scores: Any, batch: Any, params: Any) -> Any:
    kept = ((batch["tokens"][:, 1:] + jnp.arange(scores.shape[1])) % 3 > 0).astype(scores.dtype)
    return -jnp.sum(scores * kept), jnp.sum(kept)


def regularised(scores: Any, batch: Any, params: Any) -> Any:
    return -jnp.mean(scores) + 0.1 * jnp.sum(params["positions"] ** 2)


@pytest.mark.parametrize(("loss", "reduction"), [(weighted, "weighted"), (regularised, "mean")])
def test_what_every_chunk_knows_counts_once(loss: Callable[..., Any], reduction: str) -> None:
    """A sum of weights, a penalty of parameters."""
    assert_equal(written(8, ATTENTIONS["select"], loss=loss, reduction=reduction), 4)


def test_keys_and_values_are_what_chunks_hand_on() -> None:
    model = chunked_model(capture(written(6, ATTENTIONS["select"], layers=3), 2), 3)
    assert model.tokens == 6
    gathered = [tuple(cuts.cls.program.outputs) and [dim for _, dim in cuts.gathers] for cuts in model.blocks.values()]
    assert sum(len(dims) for dims in gathered) == 6 and all(dim == 1 for dims in gathered for dim in dims)


def test_rows_in_which_everything_is_masked_are_no_number() -> None:
    """Such a row would see every token alike, later ones too. In the last chunk it may."""

    def attend(first: bool, q: Any, k: Any, v: Any) -> Any:
        at = jnp.arange(q.shape[1])
        row = 0 if first else q.shape[1] - 1
        seen = (at[:, None] >= at) & (at[:, None] != row)
        scores = jnp.where(seen, jnp.einsum("bsnd,btnd->bnst", q, k), -1e9)
        return jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores), v)

    task = written(8, partial(attend, True))
    found = loss_in_chunks(task, 2, 2)(init_params(task, seed=0), example_batch(task, 2, seed=1))
    assert np.isnan(found[0])
    assert_equal(written(8, partial(attend, False)), 2)


# What is refused


def shifted_mask(q: Any, k: Any, v: Any) -> Any:
    """One token ahead is seen too."""
    scores = jnp.einsum("bsnd,btnd->bnst", q, k)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool), 1), scores, -jnp.inf)
    return jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores), v)


def weak_mask(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bsnd,btnd->bnst", q, k)
    scores = scores + jnp.triu(jnp.full(scores.shape[-2:], -10.0), 1)
    return jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores), v)


def rounded_mask(q: Any, k: Any, v: Any) -> Any:
    """Counts in bfloat16: from 256 on neighbours are one number, so that a token sees the next."""
    at = jnp.arange(q.shape[1], dtype=jnp.int32).astype(jnp.bfloat16)
    scores = jnp.where(at[:, None] >= at, jnp.einsum("bsnd,btnd->bnst", q, k), -jnp.inf)
    return jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores), v)


def averaged(q: Any, k: Any, v: Any) -> Any:
    return v - jnp.mean(v, axis=1, keepdims=True)


def summed_before(q: Any, k: Any, v: Any) -> Any:
    return jnp.cumsum(v, axis=1)


def turned(q: Any, k: Any, v: Any) -> Any:
    return v[:, ::-1]


def mixed_values(q: Any, k: Any, v: Any) -> Any:
    """The scores are masked, but the values are mixed over all tokens before."""
    return ATTENTIONS["select"](q, k, jax.nn.softmax(v, axis=1))


def convolved(q: Any, k: Any, v: Any) -> Any:
    x, kernel = v.reshape(*v.shape[:2], -1), jnp.ones((3, 16, 16))
    out = jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return out.reshape(v.shape)


@pytest.mark.parametrize(
    ("attend", "op"),
    [
        (whole, "reduce_max"),
        (shifted_mask, "reduce_max"),
        (weak_mask, "reduce_max"),
        (averaged, "sub"),
        (summed_before, "cumsum"),
        (turned, "rev"),
        (mixed_values, "reduce_max"),
        (convolved, "conv_general_dilated"),
    ],
)
def test_later_tokens_are_refused(attend: Callable[..., Any], op: str) -> None:
    line = attend.__code__.co_firstlineno
    with pytest.raises(InputError) as error:
        chunked_model(capture(written(8, attend), 2), 2)
    assert error.value.code == "MP166"
    message = error.value.message
    assert f"{op}." in message and "test_causal_chunks.py:" in message
    at = int(message.split("test_causal_chunks.py:")[1].split()[0])
    assert line < at <= line + 7 or "beside it" in message  # JAX does not know the line of every op


def test_masks_are_bounded_as_their_types_round() -> None:
    chunked_model(capture(written(256, rounded_mask), 2), 2)
    with pytest.raises(InputError, match=r"MP166.*reduce_max"):
        chunked_model(capture(written(514, rounded_mask), 2), 2)


@pytest.mark.parametrize("family", [bert, partial(t5, ffn=32, target_seq=8)])
def test_bidirectional_models_are_refused(family: Callable[..., TrainingTask]) -> None:
    with pytest.raises(InputError, match=r"MP166.*reduce_max.*later tokens"):
        chunked_model(capture(family(**SIZES, seq=8), 2), 2)


def test_losses_that_are_no_sums_are_refused() -> None:
    def loss(scores: Any, batch: Any, params: Any) -> Any:
        return jnp.exp(-jnp.mean(scores))

    with pytest.raises(InputError, match=r"MP166.*exp\..*sum over all tokens"):
        chunked_model(capture(written(8, ATTENTIONS["select"], loss=loss), 2), 2)


def test_lengths_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InputError, match=r"MP167.*3 chunks"):
        chunked_model(capture(FAMILIES["gpt"](seq=8), 2), 3)
    with pytest.raises(InputError, match=r"MP16[67]"):
        chunked_model(capture(vit(hidden=16, layers=2, heads=4, patch=4, image=8, classes=8, batch=2), 2), 2)


def test_carried_state_is_refused() -> None:
    task = wide_resnet(blocks=(1, 1), wide=1, width=8, image=32, classes=8, batch=2)
    with pytest.raises(InputError, match=r"MP167.*state"):
        chunked_model(capture(task, 2), 2)


def test_a_mask_hides_what_it_says() -> None:
    """The smallest addend that counts as a mask hides scores of its own size only."""
    assert np.exp(np.float32(HIDES + 0.25 * abs(HIDES)) - np.float32(HIDES * 0.375)) == 0.0

"""What of a block is in memory (L1 to L7) and when it is live (T1 to T5), by hand, on whole tensors."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from costmodel.graph import ModelGraph, derived_from_parameters
from costmodel.sharding import REPLICATED
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.frontend.task import TrainingTask
from planner.space.kernels import kernels_of
from planner.space.live_spans import BlockSpans
from planner.space.liveness import BlockLiveness

ROWS, LONG, WIDE = 32, 64, 16
FLOAT32 = 4


def graph_of(loss: Callable, params: dict, batch: dict, rows: int) -> ModelGraph:
    shapes = jax.eval_shape(lambda: (params, batch))
    return model_graph(capture(TrainingTask(loss, params=shapes[0], batch=shapes[1], optimizer=optax.sgd(0.1)), rows))


def blocks(
    graph: ModelGraph, *, triton: bool = False, devices: int = 1, whole: bool = False, fast: bool = False
) -> list[BlockLiveness]:
    """Every block class, nothing of it split."""
    mesh, spec = ((), ()) if devices == 1 else ((devices,), (REPLICATED,))
    found = []
    for cls in graph.classes.values():
        inputs = dict.fromkeys(cls.inputs, spec)
        spans = BlockSpans(
            cls,
            kernels_of(cls, mesh, {op.name: spec for op in cls.ops}, inputs),
            inputs,
            derived_from_parameters(cls.ops, cls.tensors),
            triton=triton,
            whole=whole,
            fast=fast,
        )
        found.append(BlockLiveness.of(spans, cls, mesh))
    return found


def made_by(found: list[BlockLiveness], primitive: str) -> set[str]:
    return {n for one in found for op in one.spans.cls.ops if op.primitive == primitive for n in op.outputs}


def in_memory(found: list[BlockLiveness]) -> set[str]:
    return {name for one in found for name, _ in one.spans.in_memory}


def layered(layer: Callable, params: dict[str, tuple[int, ...]], rows: int, dtype: type = jnp.float32) -> ModelGraph:
    """Two equal layers in a scan, which are one block class, of parameters of these shapes."""

    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), batch["x"].astype(dtype), params)
        return jnp.mean(x.astype(jnp.float32))

    stacks = {name: np.zeros((2, *shape), np.float32) for name, shape in params.items()}
    return graph_of(loss, stacks, {"x": np.zeros((rows, WIDE), np.float32)}, rows)


def attention(keys: int) -> ModelGraph:
    """A product, a softmax over `keys` values, a product."""

    def layer(x, w):
        scores = x @ w["keys"]
        exponentials = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
        return exponentials / jnp.sum(exponentials, axis=-1, keepdims=True) @ w["values"]

    return layered(layer, {"keys": (WIDE, keys), "values": (keys, WIDE)}, ROWS)


@pytest.mark.parametrize(("keys", "triton", "expected"), [(64, True, True), (64, False, False), (2048, True, False)])
def test_exponentials_that_the_backward_pass_reads_are_in_memory(keys: int, triton: bool, expected: bool) -> None:
    """L4: of short rows, where XLA makes Triton kernels."""
    found = blocks(attention(keys), triton=triton)
    assert made_by(found, "exp") and bool(made_by(found, "exp") & in_memory(found)) == expected


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("keys", [64, 2048])
def test_exponentials_are_computed_again_outside_of_scans(fast: bool, keys: int) -> None:
    """L4: from the scores, which lie there in their place; on fast memory they lie there themselves."""
    (found,) = [one for one in blocks(attention(keys), triton=True, whole=True, fast=fast) if made_by([one], "exp")]
    lying = {name for name, _ in found.lying()}
    assert "div.0" in lying and lying & {"dot_general.0", "exp.0"} == {"exp.0" if fast else "dot_general.0"}


@pytest.mark.parametrize(
    ("function", "costly"),
    [
        (lambda x: x * jnp.tanh(x), "tanh"),
        (lambda x: x * jax.lax.erfc(x), "erfc"),
        (lambda x: x * jnp.abs(x) ** 0.3, "pow"),
        (lambda x: x * jax.nn.sigmoid(x), None),
        (lambda x: x * jnp.sin(x), None),
    ],
)
def test_costly_ops_are_not_computed_again(function: Callable, costly: str | None) -> None:
    """L7: their results lie there in float32, beside the product's and what the next product takes."""

    def layer(x, w):
        return function(x @ w["first"].astype(x.dtype)) @ w["second"].astype(x.dtype)

    graph = layered(layer, {"first": (WIDE, LONG), "second": (LONG, WIDE)}, ROWS, jnp.bfloat16)
    (found,) = [one for one in blocks(graph, whole=True) if made_by([one], "dot_general")]
    lying = {name: size for (name, _), size in found.lying().items()}
    wide = {name for name in lying if found.spans.cls.tensors[name].shape == (ROWS, LONG)}
    assert lying["dot_general.0"] == 2 * ROWS * LONG and len(wide) == (2 if costly is None else 3)
    if costly is not None:
        assert lying[f"{costly}.0"] == FLOAT32 * ROWS * LONG
    (inside,) = [one for one in blocks(graph) if made_by([one], "dot_general")]
    assert {name for name, _ in inside.lying()}.isdisjoint({f"{costly}.0"})  # in a scan JAX says what is kept


def test_what_is_made_of_constants_alone_is_not_kept() -> None:
    """L6: a causal mask is made again, like what is made of two things that lie there anyway."""

    def layer(x, w):
        scores = jnp.where(jnp.tril(jnp.ones((ROWS, ROWS), bool)), (x @ w["keys"]) @ x.T, -1.0)
        return (x + scores @ x).astype(jnp.float32) ** 3 @ w["values"]

    graph = layered(layer, {"keys": (WIDE, WIDE), "values": (WIDE, WIDE)}, ROWS, jnp.float32)
    (found,) = [one for one in blocks(graph, whole=True) if made_by([one], "dot_general")]
    lying = {name for name, _ in found.lying()}
    assert not {n for n in lying if found.spans.cls.tensors[n].dtype == "bool"}
    assert not lying & made_by([found], "add")


def test_exponentials_that_only_their_sum_reads_are_computed_again() -> None:
    """L4: those of a log-sum-exp, such as a loss over a vocabulary."""

    def layer(x, w):
        total = jnp.log(jnp.sum(jnp.exp(x @ w["first"]), axis=-1, keepdims=True))
        return jnp.broadcast_to(total, x.shape) @ w["second"]

    graph = layered(layer, {"first": (WIDE, LONG), "second": (WIDE, WIDE)}, ROWS)
    found = blocks(graph, triton=True)
    assert made_by(found, "exp") and not made_by(found, "exp") & in_memory(found)


def norm(rows: int, axis: int = -1) -> ModelGraph:
    """A product, a norm of its rows' groups along one of the last two dims, each of 4, a product."""

    def layer(x, w):
        x = (x @ w["first"]).reshape(-1, 4, 4)
        centred = x - jnp.mean(x, axis=axis, keepdims=True)
        variance = jnp.mean(centred * centred, axis=axis, keepdims=True)
        return (centred * jax.lax.rsqrt(variance + 1e-6)).reshape(-1, WIDE) * w["scale"] @ w["second"]

    return layered(layer, {"first": (WIDE, WIDE), "second": (WIDE, WIDE), "scale": (WIDE,)}, rows)


def test_the_cotangent_of_what_a_norm_makes_is_in_memory() -> None:
    """L5: once a norm, before its scale; none in a softmax."""
    (value,) = {name for one in blocks(norm(ROWS)) for name, _ in one.spans.normalised}
    (maker,) = {op for one in blocks(norm(ROWS)) for op in one.spans.cls.ops if value in op.outputs}
    assert maker.primitive == "mul" and any(
        value in name for one in blocks(norm(ROWS)) for name, _ in one.spans.cotangents
    )
    assert not any(one.spans.normalised for one in blocks(attention(LONG)))


def test_norms_that_divide_one_sum_get_their_cotangents_at_once() -> None:
    """T5: of two branches, both are live with the cotangent of the sum."""

    def layer(x, w):
        total = 0.0
        for name in ("a", "b"):
            y = x @ w[name]
            total += y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
        return jax.nn.relu(total) @ w["out"]

    found = blocks(layered(layer, dict.fromkeys(("a", "b", "out"), (WIDE, WIDE)), ROWS))
    spans = [
        span
        for one in found
        for value, span in one.spans.cotangent_spans(several=False).items()
        if value in one.spans.normalised
    ]
    assert len(spans) == 2 and len({begin for begin, _ in spans}) == 1


@pytest.mark.parametrize(
    ("rows", "axis", "triton", "kept"),
    [
        (256, -2, True, {"sub.0", "reshape.1"}),
        (512, -2, True, {"reshape.1"}),
        (1024, -2, True, set()),
        (256, -2, False, set()),
        (256, -1, True, set()),
    ],
)
def test_what_a_norm_made_is_kept_where_its_rows_are_few(rows: int, axis: int, triton: bool, kept: set[str]) -> None:
    """L6: outside of scans and unless it reduces the last dim, else it is computed again from the product."""
    (found,) = [one for one in blocks(norm(rows // 4, axis), triton=triton) if made_by([one], "dot_general")]
    lying = {name for name, _ in found.lying()}
    assert lying & {"sub.0", "reshape.1"} == kept  # what is centred, and what is divided, in rows again
    assert ("dot_general.0" in lying) == (kept != {"sub.0", "reshape.1"})


def layers(dtype: type) -> ModelGraph:
    """A product, an activation, a product."""

    def layer(x, w):
        first, second = w["first"].astype(x.dtype), w["second"].astype(x.dtype)
        return jnp.tanh(x @ first) @ second

    return layered(layer, {"first": (WIDE, LONG), "second": (LONG, WIDE)}, ROWS, dtype)


def layer_of(graph: ModelGraph, devices: int = 1) -> BlockLiveness:
    (found,) = [one for one in blocks(graph, devices=devices) if made_by([one], "dot_general")]
    return found


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_layer_of_a_scan_takes_slices(dtype: type) -> None:
    """T1: of weights, cast or not, and of what was kept. The second product runs backward beside them, its result's
    cotangent and its operand's."""
    layer, wide = layer_of(layers(dtype)), jnp.dtype(dtype).itemsize
    kept = {name for name, _ in layer.lying()} | set(layer.spans.cls.inputs)
    weight = WIDE * LONG * (FLOAT32 if wide == FLOAT32 else FLOAT32 + wide)
    sliced = layer.peak_bytes(rerun=False, kept=kept, sliced=True)
    assert sliced == wide * ROWS * (WIDE + LONG) + wide * ROWS * LONG + weight
    assert layer.peak_bytes(rerun=False, kept=kept) < sliced


def test_weight_gradients_of_several_devices_come_last() -> None:
    """T2: the cotangent of the second product is there until the first's is made; on one device it is not."""
    one, two = layer_of(layers(jnp.float32)), layer_of(layers(jnp.float32), devices=2)
    assert two.peak_bytes(rerun=True) >= one.peak_bytes(rerun=True) + FLOAT32 * ROWS * WIDE


def test_a_layers_residuals_lie_there_until_its_forward_pass_ends() -> None:
    """T4: the activation and the first product's result are the fullest moment, beside them the layer's input if it is
    kept."""
    layer = layer_of(layers(jnp.float32))
    activation = made_by([layer], "tanh")
    assert layer.forward_bytes(activation) == 2 * FLOAT32 * ROWS * LONG
    assert layer.forward_bytes(activation | {"in.0"}) == FLOAT32 * ROWS * (2 * LONG + WIDE)


def test_a_products_weight_gradient_waits_as_what_it_is_made_of() -> None:
    """T3: cotangent and operand, unless the gradient is smaller."""

    def loss(params, batch):
        return jnp.mean(jnp.square(batch["x"] @ params["w"]))

    graph = graph_of(loss, {"w": np.zeros((WIDE, LONG), np.float32)}, {"x": np.zeros((ROWS, WIDE), np.float32)}, ROWS)
    (found,) = [one for one in blocks(graph) if made_by([one], "dot_general")]
    sources = FLOAT32 * ROWS * (WIDE + LONG)
    assert found.waiting.after_bytes(1e9) == sources and found.waiting.after_bytes(100.0) == 100.0
    assert found.waiting.during_bytes(1e9) == 0.0 and not found.waiting.scattered

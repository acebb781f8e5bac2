"""Experts are found by what a model computes, and nothing else is taken for them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import planner
from costmodel.graph import Block, BlockClass, Factor, ModelGraph, Op, Source, Tensor, UpdateJoins
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.strategy import experts
from planner.strategy.experts import expert_counts, expert_dims

LAYERS, EXPERTS, WIDTH, FFN, POSITIONS = 3, 8, 16, 32, 12
Layer = Callable[[Any, Any], Any]  # x [b, s, h] and a layer's parameters -> [b, s, h]


def leaf(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def scanned(layer: Layer, shapes: dict[str, Any], width: int = WIDTH) -> ModelGraph:
    """A scan over `LAYERS` layers of parameters of these shapes."""

    def loss(params: Any, batch: Any) -> Any:
        x, _ = lax.scan(lambda x, weights: (layer(x, weights), None), batch["x"] @ params["first"], params["layers"])
        return jnp.mean(x**2)

    stacked = jax.tree.map(lambda one: leaf(LAYERS, *one.shape), shapes)
    return captured(loss, {"first": leaf(width, width), "layers": stacked}, width)


def captured(loss: Any, params: Any, width: int = WIDTH) -> ModelGraph:
    task = planner.TrainingTask(
        loss_fn=loss, params=params, batch={"x": leaf(1, POSITIONS, width)}, optimizer=optax.sgd(1e-3)
    )
    return model_graph(capture(task, 3), UpdateJoins())


ROUTERS = {
    "argmax": lambda scores: jnp.argmax(scores, axis=-1),
    "top_k": lambda scores: lax.top_k(scores, 1)[1][..., 0],
    "approx_top_k": lambda scores: lax.approx_max_k(scores, 1)[1][..., 0],
    "sort": lambda scores: jnp.argsort(-scores, axis=-1)[..., 0],
}


def gates(x: Any, router: Any, choose: Callable[[Any], Any] = ROUTERS["argmax"]) -> Any:
    """[b, s, e]: the score of the chosen expert, zero for the others."""
    scores = jax.nn.softmax(x @ router)
    return scores * jax.nn.one_hot(choose(scores), scores.shape[-1])


def mixture(x: Any, gate: Any, w_in: Any, w_out: Any) -> Any:
    """Each expert on tokens of its own."""
    sent = jnp.einsum("bse,bsh->besh", gate, x)
    return jnp.einsum("besf,efh->bsh", jax.nn.relu(jnp.einsum("besh,ehf->besf", sent, w_in)), w_out)


STACKED = {"w_in": leaf(EXPERTS, WIDTH, FFN), "w_out": leaf(EXPERTS, FFN, WIDTH)}


@pytest.mark.parametrize("router", ROUTERS)
def test_experts_of_another_name_are_found_by_their_products(router: str) -> None:
    def layer(x: Any, weights: Any) -> Any:
        own = weights["ffn"]
        gate = gates(x, weights["router"], ROUTERS[router])
        sent = jnp.einsum("bse,bsh->besh", gate, x)
        out = jnp.einsum("besf,efh->besh", jax.nn.relu(jnp.einsum("besh,ehf->besf", sent, own["w_in"])), own["w_out"])
        return x + out.sum(axis=1)

    graph = scanned(layer, {"router": leaf(WIDTH, EXPERTS), "ffn": STACKED})
    assert any(op.primitive == router for cls in graph.classes.values() for op in cls.ops)
    assert expert_counts(graph) == {EXPERTS: 2}
    ((key, dims),) = expert_dims(graph).items()
    tensors = graph.classes[key].tensors
    assert sorted(tensors[n].shape for n in dims if tensors[n].role == "param") == [
        (EXPERTS, WIDTH, FFN),
        (EXPERTS, FFN, WIDTH),
    ]
    assert all(tensors[name].shape[d] == EXPERTS for name, own in dims.items() for d in own)


@pytest.mark.parametrize(("name", "count"), [("experts", {EXPERTS: 2}), ("ffn", {})])
def test_a_router_before_all_layers_serves_parameters_that_are_named_experts(name: str, count: dict[int, int]) -> None:
    def loss(params: Any, batch: Any) -> Any:
        gate = gates(batch["x"], params["router"])

        def layer(x: Any, weights: Any) -> Any:
            return x + mixture(x, gate, weights[name]["w_in"], weights[name]["w_out"]), None

        x, _ = lax.scan(layer, batch["x"] @ params["first"], params["layers"])
        return jnp.mean(x**2)

    layers = {name: {key: leaf(LAYERS, *one.shape) for key, one in STACKED.items()}}
    params = {"first": leaf(WIDTH, WIDTH), "router": leaf(WIDTH, EXPERTS), "layers": layers}
    assert expert_counts(captured(loss, params)) == count


@pytest.mark.parametrize(
    ("equation", "shape"),
    [
        ("bsh,hf->bsf", (EXPERTS, FFN)),  # the first dim is summed over
        ("bsh,fh->bsf", (FFN, EXPERTS)),
        ("bsh,hgf->bsgf", (EXPERTS, 2, FFN)),
        ("bsh,fh->bsf", (EXPERTS, EXPERTS)),  # two dims, the first not summed over
        ("bsh,fgh->bsfg", (FFN, 2, EXPERTS)),  # three dims, the first not summed over: not as many as are chosen among
    ],
)
def test_a_list_of_experts_has_one_in_each_matrix(equation: str, shape: tuple[int, ...]) -> None:
    """As wide as there are experts, so that sizes tell nothing."""

    def layer(x: Any, weights: Any) -> Any:
        gate = gates(x, weights["router"])
        for i in range(EXPERTS):
            y = jnp.einsum(equation, x, weights["experts"][str(i)]["w1"])
            x = x + gate[..., i, None] * jnp.sum(y, axis=tuple(range(2, y.ndim)))[..., None]
        return x

    own = {str(i): {"w1": leaf(*shape)} for i in range(EXPERTS)}
    graph = scanned(layer, {"router": leaf(EXPERTS, EXPERTS), "experts": own}, EXPERTS)
    assert not expert_counts(graph) and not expert_dims(graph)


@pytest.mark.parametrize(("name", "routed"), [("experts", 0), ("mix", 0), ("mix", 4)])
def test_products_of_heads_are_no_experts(name: str, routed: int) -> None:
    """Without a router whatever their name; with one that chooses among another number, by that number."""

    def layer(x: Any, weights: Any) -> Any:
        heads = x.reshape(*x.shape[:2], EXPERTS, WIDTH // EXPERTS)
        y = jnp.einsum("bshk,hkj->bshj", heads, weights[name]["w"]).reshape(x.shape)
        return y + gates(x, weights["router"]).sum(axis=-1, keepdims=True) if routed else y

    router = {"router": leaf(WIDTH, routed)} if routed else {}
    graph = scanned(layer, {name: {"w": leaf(EXPERTS, WIDTH // EXPERTS, WIDTH // EXPERTS)}, **router})
    assert not expert_counts(graph) and not expert_dims(graph)


@pytest.mark.parametrize("name", ["experts", "mix"])
@pytest.mark.parametrize("groups", [4, EXPERTS])
def test_grouped_convolutions_are_no_experts(name: str, groups: int) -> None:
    """Though the layer has a router that chooses among as many; eight groups of one channel are depthwise."""

    def layer(x: Any, weights: Any) -> Any:
        y = lax.conv_general_dilated(
            x,
            weights[name]["kernel"],
            (1,),
            "SAME",
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=groups,
        )
        return y + gates(x, weights["router"]).sum(axis=-1, keepdims=True)

    kernel = leaf(groups, EXPERTS // groups, EXPERTS)  # as many taps as groups
    graph = scanned(layer, {name: {"kernel": kernel}, "router": leaf(EXPERTS, groups)}, EXPERTS)
    assert any(op.work == "conv" for cls in graph.classes.values() for op in cls.ops)
    assert not expert_counts(graph) and not expert_dims(graph)


def chain(length: int) -> ModelGraph:
    """A router, `length` elementwise ops one after the other, and a product of experts with the last one's result: what
    is found at the end goes back all the way."""
    factors = (Factor("e", EXPERTS), Factor("s", 5), Factor("h", 7, "sum"), Factor("f", 6))
    tokens, dims = (EXPERTS, 5, 7), ((0,), (1,), (2,))
    shapes = {"scores": (5, EXPERTS), "x0": tokens, "w": (EXPERTS, 7, 6), "y": (EXPERTS, 5, 6), "best": (5,)}
    shapes |= {f"x{i + 1}": tokens for i in range(length)}
    ops = [Op(name="argmax.0", primitive="argmax", inputs=("scores",), outputs=("best",), factors=factors[:2],
              in_dims=(((1,), (0,)),), out_dims=(((1,),),), work="reduce")]  # fmt: skip
    ops += [
        Op(name=f"tanh.{i}", primitive="tanh", inputs=(f"x{i}",), outputs=(f"x{i + 1}",), factors=factors[:3],
           in_dims=(dims,), out_dims=(dims,))
        for i in range(length)
    ]  # fmt: skip
    ops.append(Op(name="dot_general.0", primitive="dot_general", inputs=(f"x{length}", "w"), outputs=("y",),
                  factors=factors, in_dims=(dims, ((0,), (2,), (3,))), out_dims=(((0,), (1,), (3,)),),
                  work="matmul"))  # fmt: skip
    tensors = {n: Tensor(n, s, "float32", 4, "param" if n == "w" else "activation") for n, s in shapes.items()}
    inputs = ("scores", "x0", "w")
    cls = BlockClass(key="k", ops=tuple(ops), tensors=tensors, inputs=inputs, outputs=("y",))
    block = Block(
        name="layer", class_key="k", inputs=tuple(Source(n) for n in inputs), outputs=(Source("y"),)
    )  # fmt: skip
    return ModelGraph(
        name="chain", microbatch=1, classes={"k": cls}, blocks=(block,), values={n: tensors[n] for n in (*inputs, "y")},
        batch_dims={}, params={}, loss=("y",), results=(),
    )  # fmt: skip


def test_work_grows_with_the_number_of_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """What experts reach is found in a few looks at each dim of each op, however long the way."""
    length, looks = 2000, 0
    graph, look = chain(length), experts.major_factor

    def counted(*args: Any) -> int:
        nonlocal looks
        looks += 1
        assert looks <= 20 * length, "more looks than a few for each op"
        return look(*args)

    monkeypatch.setattr(experts, "major_factor", counted)
    dims = expert_dims(graph)["k"]
    assert dims == {**{f"x{i}": frozenset({0}) for i in range(length + 1)}, "w": frozenset({0}), "y": frozenset({0})}

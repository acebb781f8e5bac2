"""Expert parallelism: experts on devices of data parallelism, tokens sent to them and back."""

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import planner
from costmodel.errors import InputError
from costmodel.graph import UpdateJoins
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.models.families.gpt import gpt
from planner.models.families.moe import moe
from planner.strategy.experts import expert_counts, expert_dims

DIMS = {"hidden": 256, "layers": 4, "heads": 8, "vocab": 1024, "seq": 64, "experts": 8, "ffn": 512}
SLOTTED, DENSE = moe(**DIMS, capacity_factor=1.25), moe(**DIMS)
EXPERTS = 4 * 8 * 3 * 256 * 512  # elements of all experts
SLOTS = math.ceil(1.25 * 2 * 64 / 8)
SENT = 8 * SLOTS * 256 * 2  # bytes of one sequence's tokens at their experts, bfloat16


def leaf(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = Path(tmp_path_factory.mktemp("cluster")) / "eight.toml"
    path.write_text('name = "c"\n[[group]]\nname = "a"\nnodes = 1\ndevice = "A100-SXM4-80GB"\ndevices_per_node = 8\n')
    return str(path)


@lru_cache(maxsize=2)
def estimator(cluster: str, slotted: bool = True) -> planner.Estimator:
    return planner.Estimator(model=SLOTTED if slotted else DENSE, cluster=cluster)


@pytest.mark.parametrize("task", [SLOTTED, DENSE])
def test_experts_are_found_and_nothing_else(task: planner.TrainingTask) -> None:
    graph = model_graph(capture(task, 3), UpdateJoins())
    assert expert_counts(graph) == {8: 3}
    ((key, dims),) = expert_dims(graph).items()
    cls = graph.classes[key]
    assert all(cls.tensors[name].shape[d] == 8 for name, own in dims.items() for d in own)
    assert sum(cls.tensors[name].role == "param" for name in dims) == 3  # the router is everyone's


def test_a_model_without_experts_has_none() -> None:
    graph = model_graph(capture(gpt(hidden=32, layers=2, heads=2, vocab=64, seq=8), 3), UpdateJoins())
    assert not expert_counts(graph) and not expert_dims(graph)


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_devices_hold_their_experts_and_exchange_tokens_twice_each_way(cluster: str, ep: int) -> None:
    one = estimator(cluster)
    plain, shared = (one(f"dp=8,{text}microbatch=2", 64) for text in ("", f"ep={ep},"))
    less = EXPERTS * (1 - 1 / ep)
    assert plain.memory[0].parameters_bytes - shared.memory[0].parameters_bytes == pytest.approx(4 * less)
    assert plain.memory[0].optimizer_bytes - shared.memory[0].optimizer_bytes == pytest.approx(8 * less)
    assert plain.memory[0].saved_bytes == pytest.approx(shared.memory[0].saved_bytes, rel=0.02)
    assert plain.breakdown.communication_s == 0.0 < shared.breakdown.communication_s
    assert shared.breakdown.gradients_s < plain.breakdown.gradients_s
    (work,) = [work for (layout, size), work in one._captured._work.items() if layout[4] == ep and size == 2 * ep]
    moves = {key: tuple(row) for each in work.classes.values() for key, row in _moves(each).items()}
    assert moves == {
        (phase, "all_to_all"): (pytest.approx(2 * 2 * SENT), pytest.approx(2)) for phase in ("forward", "backward")
    }


def _moves(work: object) -> dict[tuple[str, str], list[float]]:
    moves = work.moves["none"]  # type: ignore[attr-defined]
    return {(phase, kind): list(row) for (phase, kind, _), row in zip(moves.keys, moves.amounts, strict=True)}


def test_the_plan_of_the_same_strategy_holds_and_moves_the_same(cluster: str) -> None:
    text = "dp=8,ep=8,microbatch=2"
    plan = planner.plan(SLOTTED, cluster=cluster, global_batch=64, strategy=text, baselines=False)
    found = estimator(cluster)(text, 64)
    own = plan.stages[0].groups[0]
    assert own.memory.parameters_bytes == pytest.approx(found.memory[0].parameters_bytes, rel=0.01)
    assert own.memory.optimizer_bytes == pytest.approx(found.memory[0].optimizer_bytes, rel=0.01)
    experts = [p for p in own.parameters if "/experts/" in p.path]
    assert len(experts) == 3 and all(p.value[1] == ("data",) for p in experts)
    assert own.time.collectives["forward all_to_all data"] == own.time.collectives["backward all_to_all data"] == 8
    assert plan.prediction.step_time_s == pytest.approx(found.step_time_s, rel=0.15)


def test_zero_splits_experts_over_the_devices_that_hold_the_same_ones(cluster: str) -> None:
    for text, ways in (("dp=8,ep=8", 1), ("dp=8,ep=4", 2), ("dp=8,ep=2", 4), ("dp=4,ep=4,cp=2", 2)):
        plain, split = (estimator(cluster)(f"{text},microbatch=2{zero}", 64).memory[0] for zero in ("", ",zero=1"))
        replicas = math.prod(int(part.split("=")[1]) for part in text.split(",") if "ep" not in part)
        ep = int(text.split("ep=")[1].split(",")[0])
        everyone = plain.optimizer_bytes - 8 * EXPERTS / ep
        assert split.optimizer_bytes == pytest.approx(everyone / replicas + 8 * EXPERTS / ep / ways, rel=0.01)


def test_experts_that_run_on_every_token_are_shared_out_too(cluster: str) -> None:
    plain, shared = (estimator(cluster, slotted=False)(f"dp=4,{text}microbatch=2", 64) for text in ("", "ep=4,"))
    assert plain.memory[0].parameters_bytes - shared.memory[0].parameters_bytes == pytest.approx(3 * EXPERTS)
    assert shared.breakdown.communication_s > 0.0


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("dp=8,ep=3", "MP180", "ep=3 does not divide dp=8"),
        ("ep=2", "MP180", "ep=2 does not divide dp=1"),
        ("dp=3,ep=3", "MP181", "3 devices cannot share out 8 experts"),
    ],
)
def test_degrees_that_share_out_nothing_are_refused(cluster: str, text: str, code: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as found:
        estimator(cluster)(f"{text},microbatch=2", 48)
    assert found.value.code == code


def test_a_model_without_experts_is_refused(cluster: str) -> None:
    task = gpt(hidden=32, layers=2, heads=2, vocab=64, seq=8)
    with pytest.raises(InputError, match="has no experts that are recognised") as found:
        planner.estimate(task, cluster, "dp=2,ep=2,microbatch=1", global_batch=4)
    assert found.value.code == "MP181" and "name the expert parameters `experts`" in found.value.hint


def test_experts_of_ragged_products_are_recognised_by_their_name() -> None:
    def task(name: str) -> planner.TrainingTask:
        params = {"router": leaf(16, 4), name: {"up": leaf(4, 16, 32), "down": leaf(4, 32, 16)}}

        def loss(params: Any, batch: Any) -> Any:
            x = batch["x"]
            choice = jnp.argmax(x @ params["router"], axis=-1)
            order, sizes = jnp.argsort(choice), jnp.bincount(choice, length=4).astype(jnp.int32)
            y = jax.lax.ragged_dot(x[order], params[name]["up"], sizes)
            return jnp.mean(jax.lax.ragged_dot(jax.nn.gelu(y), params[name]["down"], sizes) ** 2)

        batch = {"x": leaf(24, 16)}
        return planner.TrainingTask(loss_fn=loss, params=params, batch=batch, optimizer=optax.adam(1e-3))

    counts = [expert_counts(model_graph(capture(task(name), 24), UpdateJoins())) for name in ("experts", "mlp")]
    assert counts == [{4: 2}, {}]


def sorted_tokens(width: int = 256, experts: int = 8) -> planner.TrainingTask:
    """A layer whose tokens, of all examples together, are sorted by their expert, for products of ragged rows."""
    params = {
        "first": leaf(width, width),
        "router": leaf(width, experts),
        "experts": {"up": leaf(experts, width, 4 * width), "down": leaf(experts, 4 * width, width)},
    }

    def loss(params: Any, batch: Any) -> Any:
        x = jnp.tanh(batch["x"] @ params["first"])
        tokens = x.reshape(-1, width)
        choice = jnp.argmax(tokens @ params["router"], axis=-1)
        order, sizes = jnp.argsort(choice), jnp.bincount(choice, length=experts).astype(jnp.int32)
        y = jax.nn.gelu(jax.lax.ragged_dot(tokens[order], params["experts"]["up"], sizes))
        y = jax.lax.ragged_dot(y, params["experts"]["down"], sizes)
        return jnp.mean((x + y[jnp.argsort(order)].reshape(x.shape)) ** 2)

    batch = {"x": leaf(1, 512, width)}
    return planner.TrainingTask(
        loss_fn=loss, params=params, batch=batch, optimizer=optax.adam(1e-3), independent_microbatches=True
    )


@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("dp=8,microbatch=4", 256),
        ("dp=4,microbatch=4,zero=1", 256),
        ("dp=4,tp=2,microbatch=4", 256),
        ("dp=8,ep=4,microbatch=4", 256),
        ("dp=8,microbatch=4,zero=3", 1024),  # experts are used where replicas hold them: nothing gathers them
        ("dp=8,ep=4,microbatch=4,zero=3", 1024),
        ("dp=4,tp=2,microbatch=4,zero=3", 1024),
    ],
)
def test_replicas_that_sort_tokens_together_exchange_them_in_estimate_and_plan(
    cluster: str, text: str, width: int
) -> None:
    task = sorted_tokens(width)
    plan = planner.plan(task, cluster=cluster, global_batch=64, strategy=text, baselines=False)
    found = planner.estimate(task, cluster, text, global_batch=64)
    assert any(key.startswith("forward") for key in plan.stages[0].groups[0].time.collectives)
    assert found.breakdown.communication_s > 0.0
    assert found.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=0.05)
    assert found.memory.peak_bytes == pytest.approx(plan.prediction.peak_memory_bytes, rel=0.1)
    (said,) = [
        one
        for one in planner.estimate(task, cluster, text, global_batch=64, stack="selene").findings
        if one.code == "MP199"
    ]
    assert "examples of all replicas meet" in said.message and "test_experts.py:" in said.message
    assert not any(one.code == "MP199" for one in found.findings)

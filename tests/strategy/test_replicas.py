"""What strategies of one layout share is what each of them would work out alone."""

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import planner
from costmodel.collectives import AxisLink
from costmodel.estimator import Pricing
from costmodel.graph import ModelGraph
from costmodel.sharding import REPLICATED, Spec
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.models import gpt, t5
from planner.search.backward_peak import RunBytes
from planner.space.decision import Decision
from planner.space.model_space import ModelSpace
from planner.space.parameters import Storage, storages
from planner.space.setting import Remat, Setting
from planner.strategy.one_program import step_bytes, step_passes, step_state
from planner.strategy.replica import Replicas, _ways
from planner.strategy.restricted import Role, choose
from planner.strategy.sized import sized_graph
from profiles.catalogue import load_catalogue

SIZES = (7, 11)  # of the microbatches that graphs are captured at
WIDTH, VOCAB = 48, 384
SPLIT: tuple[tuple[Role, int], ...] = (("context", 2), ("model", 3))
CASES = 12  # strategies of each model on each mesh and kind


def leaf(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def written_out() -> planner.TrainingTask:
    """Two layers without a scan: a norm over positions, whose rows are few up to so many examples, and a costly op."""

    def layer(x: Any, w: Any) -> Any:
        wide = (x @ w["in"]).astype(jnp.float32)
        centred = wide - wide.mean(1, keepdims=True)
        normed = centred * jax.lax.rsqrt((centred**2).mean(1, keepdims=True) + 1e-5)
        return x + jnp.tanh(normed.astype(x.dtype) @ w["up"]) @ w["down"]

    def loss(params: Any, batch: Any) -> Any:
        x = params["embedding"][batch["tokens"]]
        for own in params["layers"]:
            x = layer(x, own)
        scores = jax.nn.log_softmax((x @ params["head"]).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(scores, batch["labels"][..., None], axis=-1))

    tokens = jax.ShapeDtypeStruct((1, 24), jnp.int32)
    weights = {"in": leaf(WIDTH, WIDTH), "up": leaf(WIDTH, 192), "down": leaf(192, WIDTH)}
    params = {"embedding": leaf(VOCAB, WIDTH), "layers": [weights] * 2, "head": leaf(WIDTH, VOCAB)}
    batch = {"tokens": tokens, "labels": tokens}
    return planner.TrainingTask(loss_fn=loss, params=params, batch=batch, optimizer=optax.adam(1e-3))


TASKS = {
    "written out": written_out(),
    "scan": gpt(hidden=192, layers=3, heads=12, vocab=VOCAB, seq=1024),  # softmaxes of many elements from 5 examples on
    "two scans": t5(hidden=96, layers=2, heads=6, vocab=VOCAB, seq=32, ffn=192),
}


@cache
def graph_of(model: str, size: int) -> ModelGraph:
    one, other = (model_graph(capture(TASKS[model], known)) for known in SIZES) if size not in SIZES else (None, None)
    return model_graph(capture(TASKS[model], size)) if one is None else sized_graph(one, other, size)


@cache
def one_replica(model: str, kind: str, degrees: tuple[tuple[Role, int], ...]) -> Decision:
    """The assignment of one replica's devices, at the first size."""
    roles, mesh = tuple(role for role, _ in degrees), tuple(size for _, size in degrees)
    links = tuple(AxisLink(size=n, bandwidth_bytes_per_s=2e11, latency_s=2e-6, start_s=2e-5) for n in mesh)
    pricing = Pricing(kind=load_catalogue()[kind], mesh=mesh, axis_names=roles, links=links)
    space = ModelSpace(graph=graph_of(model, SIZES[0]), pricing=pricing)
    setting = Setting(microbatches=1, stages=1, in_flight=1, remat="none")
    return Decision(space=space, setting=setting, choice=choose(space, roles, sp=False), time_s=0.0, bound_s=0.0)


def strategies(seed: str) -> Iterator[tuple[int, int, int, Remat, bool]]:
    """Examples, replicas, stage of ZeRO, remat and whether gradients add up."""
    draw = random.Random(seed)
    for _ in range(CASES):
        remat: Remat = draw.choice(("none", "full"))
        yield (
            draw.choice((1, 3, 4, 5, 7, 16)),
            draw.choice((1, 2, 3, 6, 8)),
            draw.choice(range(4)),
            remat,
            draw.random() < 0.5,
        )


@pytest.mark.parametrize("degrees", [(), SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("kind", ["cpu", "A100-SXM4-80GB", "H200-SXM-141GB", "TPU-v5e"])
@pytest.mark.parametrize("model", TASKS)
def test_what_is_shared_is_what_each_would_work_out_alone(
    model: str, kind: str, degrees: tuple[tuple[Role, int], ...]
) -> None:
    replicas = Replicas(one_replica(model, kind, degrees), [role for role, _ in degrees])
    for size, data, zero, remat, accumulates in strategies(f"{model} {kind} {degrees}"):
        graph = graph_of(model, size)
        state = replicas.state(data=data, zero=zero, accumulates=accumulates)
        shared = step_bytes(state, replicas.passes(graph, data=data, zero=zero, remat=remat))
        setting = Setting(microbatches=2 if accumulates else 1, stages=1, in_flight=1, remat=remat)
        like = replicas.decision(data, zero, setting)
        alone = Decision(
            space=like.space.with_graph(graph), setting=setting, choice=like.choice, time_s=0.0, bound_s=0.0
        )
        assert shared == step_bytes(step_state(alone), step_passes(alone)), (size, data, zero, remat, accumulates)


@pytest.mark.parametrize("kind", ["cpu", "A100-SXM4-80GB"])
@pytest.mark.parametrize("model", TASKS)
def test_one_replica_on_a_mesh_with_a_data_axis_takes_what_it_takes_without(model: str, kind: str) -> None:
    alone = one_replica(model, kind, (("model", 2),))
    replicas = Replicas(alone, ["model"])
    for zero in range(4):
        state = replicas.state(data=1, zero=zero, accumulates=False)
        passes = replicas.passes(alone.space.graph, data=1, zero=zero, remat="none")
        assert step_bytes(state, passes) == step_bytes(step_state(alone), step_passes(alone))


def test_strategies_differ_where_sizes_say_what_is_in_memory() -> None:
    """Exponentials lie there up to so many elements, and what a norm centres up to so many rows."""

    def runs(model: str, size: int, remat: Remat) -> tuple[RunBytes, ...]:
        replicas = Replicas(one_replica(model, "A100-SXM4-80GB", ()), [])
        return replicas.passes(graph_of(model, size), data=1, zero=0, remat=remat).passes.runs

    few, many = (max(run.live_bytes for run in runs("scan", size, "full")) / size for size in (5, 6))
    assert many < 0.9 * few
    few, many = (runs("written out", size, "none")[-1].kept_bytes / size for size in (2, 16))
    assert many < 0.95 * few


def test_kernels_are_worked_out_once_for_what_differs_in_sizes() -> None:
    decision = one_replica("scan", "A100-SXM4-80GB", ())
    replicas, setting = Replicas(decision, []), Setting(microbatches=1, stages=1, in_flight=1, remat="none")
    (key,) = decision.space.graph.layered
    plain, *others = (replicas.decision(data, zero, setting) for data, zero in ((1, 0), (2, 1), (8, 2), (2, 3), (4, 3)))
    assert [one._spans(key) is plain._spans(key) for one in others] == [True, True, False, False]
    assert others[2]._spans(key) is others[3]._spans(key)  # values are split in the same dims


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("value", [(REPLICATED, REPLICATED), (REPLICATED, 1), (0, REPLICATED)])
@pytest.mark.parametrize("shape", [(12, 8), (9, 8), (5, 7), (24,)])
def test_a_parameter_is_stored_as_conforms_best_of_all_ways(shape: tuple[int, ...], value: Spec, zero: int) -> None:
    """Axes of the model, and those that split the value, stay as they are; then as many others as possible are split as
    the stage of ZeRO says."""
    mesh, roles = (4, 3, 2), ("batch", "context", "model")
    if len(shape) == 1 and 1 in value:
        value = (REPLICATED, 0)
    if any(code >= 0 and shape[code] % size for code, size in zip(value, mesh[1:], strict=True)):
        value = (REPLICATED, REPLICATED)
    own = (REPLICATED, *value)
    wanted = tuple(zero >= stage for stage in (1, 2, 3))

    def conforming(storage: Storage) -> int:
        count = 0
        for role, code, *codes in zip(roles, own, storage.optimizer, storage.gradient, storage.value, strict=True):
            if role == "model" or code >= 0:
                count += len(mesh) * all(one == code for one in codes)
            else:
                count += tuple(one >= 0 for one in codes) == wanted
        return count

    found = _ways(shape, mesh, roles, value, True)[zero]
    assert found == max(storages(shape, mesh, True), key=conforming)


def test_what_was_worked_out_from_sizes_is_forgotten_with_another_graph() -> None:
    space = one_replica("scan", "A100-SXM4-80GB", ()).space

    def examples(of: ModelSpace) -> set[int]:
        return {leaf.shape[0] for inputs in of.first_inputs.values() for leaves in inputs.values() for leaf in leaves}

    assert examples(space) == {SIZES[0]} and examples(space.with_graph(graph_of("scan", 3))) == {3}

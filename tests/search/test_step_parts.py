"""What a step is made of, what microbatches cost, and where figures come from, in pinned plans."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import optax
import pytest
from jax import lax

from costmodel.collective_lines import CollectiveLines
from costmodel.compute import op_time_s
from costmodel.estimator import MeasuredOp
from costmodel.simulate import simulate
from planner.breakdown import breakdown
from planner.figure_sources import figure_sources
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.frontend.task import TrainingTask
from planner.models import gpt
from planner.op_findings import op_findings
from planner.search.candidates import Candidates
from planner.search.facts import Facts
from planner.search.pinned import GroupPin, StagePin, pinned_layout
from planner.search.problem import evaluate
from planner.search.score import Score
from planner.space.accumulation import accumulated_bytes
from planner.space.setting import Setting
from tests.lowering.test_collectives import node_of_h100

PRICED = ("matmul_efficiency", "bandwidth_efficiency", "launch_s")
TIED = gpt(hidden=64, layers=4, heads=4, vocab=8192, seq=16, dtype="bfloat16", tied=True)


def scored(task: TrainingTask, *stages: StagePin, pools: tuple[int, ...], kind: Any = None, **facts: Any) -> Score:
    cluster = node_of_h100(*pools)
    graph = model_graph(capture(task, 8))
    of = {g.device.name: Facts(kind or g.device, **facts) for g in cluster.groups}
    candidates = Candidates(cluster=cluster, graph_of=lambda size: graph, facts=of)
    return pinned_layout(candidates, stages, microbatch=8, microbatches=4, schedule="1f1b")


def stage(*pools: int, blocks: int | None = None, devices: int = 1) -> StagePin:
    groups = tuple(GroupPin(pool=f"g{i}", devices=devices, mesh=(devices,) if devices > 1 else ()) for i in pools)
    return StagePin(groups=groups, blocks=blocks)


@pytest.fixture(scope="module")
def tied() -> Score:
    return scored(TIED, stage(0, blocks=3), stage(1, blocks=3), pools=(1, 1))


def setting_of(microbatches: int, stages: int) -> Setting:
    return Setting(microbatches=microbatches, stages=stages, in_flight=1, remat="none")


def total_s(score: Score) -> float:
    parts = breakdown(score)
    return parts.compute_s + sum(parts.exposed_s.values()) + parts.bubble_s + parts.optimizer_s


def test_tied_weights_and_sends_are_no_bubble(tied: Score) -> None:
    parts, use = breakdown(tied), tied.simulation.last
    table = 8192 * 64 * 4
    assert parts.exposed_s["tied_weights"] == pytest.approx(2 * (5e-6 + table / 50e9), rel=0.5)
    assert parts.exposed_s["sends"] > 0 and "group_exchange" not in parts.exposed_s
    assert total_s(tied) == pytest.approx(tied.time_s)
    free = simulate(tied.schedule, tied.times, waits=tied.waits)
    waits_s = free.use(*use.actor).last_end_s - use.busy_s
    assert parts.bubble_s == pytest.approx(waits_s, abs=1e-9)  # nothing but waiting for the other stage to compute


def test_groups_of_a_stage_exchange_gradients() -> None:
    score = scored(TIED, stage(0, 1), pools=(1, 1))
    parts = breakdown(score)
    assert set(parts.exposed_s) == {"casts", "gradient_reduction", "group_exchange"}
    assert parts.exposed_s["group_exchange"] > 0.0 and parts.bubble_s == pytest.approx(0.0, abs=1e-9)
    assert total_s(score) == pytest.approx(score.time_s)


def test_each_microbatch_adds_its_gradient_in_the_accumulators_split() -> None:
    def cost(devices: int) -> Any:
        params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
        batch = jax.ShapeDtypeStruct((8, 4096), jnp.float32)
        task = TrainingTask(
            loss_fn=lambda p, b: jnp.mean(b @ p["w"]), params=params, batch=batch, optimizer=optax.sgd(0.1)
        )
        score = scored(task, stage(0, devices=devices), pools=(devices,))
        decision = score.layout.stages[0].groups[0].decision
        space = decision.space
        key = decision.parameter_nodes["w"].places[0][0]
        priced = sum(
            space.op_cost(key, op, decision.op_strategies[key][op.name]).backward_s
            for op in space.graph.classes[key].ops
        )
        moved = accumulated_bytes(space.graph.params["w"], 4096**2, decision.storage["w"], space.mesh)
        return decision, decision.costs[key].backward_s - priced, moved

    decision, added_s, moved = cost(1)
    assert moved == 3 * 4096**2 * 4
    kind = decision.space.pricing.kind
    assert added_s == pytest.approx(op_time_s(0.0, moved, "float32", kind, is_matmul=False))
    index = decision.space.index["param", "w"]
    assert decision.space.prices.nodes[index].adding_s == pytest.approx(added_s)
    once, twice, staged = (  # the search sees it too: of each microbatch, and of one that is added to nothing none
        decision.space.problem(setting, limit_bytes=math.inf).nodes[index]
        for setting in (setting_of(1, 1), setting_of(2, 1), setting_of(1, 2))
    )
    assert twice.time_s - once.time_s == pytest.approx(2 * added_s)
    assert staged.time_s - once.time_s == pytest.approx(added_s)
    decision, added_s, split = cost(4)
    parts = moved / split
    assert parts in (1.0, 4.0) and added_s == pytest.approx(
        op_time_s(0.0, split, "float32", decision.space.pricing.kind, is_matmul=False)
    )
    node = decision.space.prices.nodes[decision.space.index["param", "w"]]
    assert 0 < max(node.adding_s) == pytest.approx(4 * min(node.adding_s))  # replicated, and split over the axis


def test_a_bound_of_stages_that_accumulate_is_none_of_one_that_does_not() -> None:
    """Programs of several stages add gradients of one microbatch too, that of one stage does not."""
    cluster, graph = node_of_h100(2), model_graph(capture(TIED, 8))
    pool = cluster.groups[0]
    candidates = Candidates(cluster=cluster, graph_of=lambda size: graph, facts={pool.device.name: Facts(pool.device)})
    found = {}
    for stages in (2, 1):
        setting = setting_of(1, stages)
        found[stages] = decision = candidates.decide(pool, (2,), 8, setting)
        assert decision is not None
        problem = decision.space.problem(setting, limit_bytes=math.inf)
        assert decision.bound_s <= evaluate(problem, decision.choice).time_s * (1 + 1e-9)
    assert found[1].bound_s < found[2].bound_s


def task_of(loss: Callable[[Any, Any], Any]) -> TrainingTask:
    params = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    return TrainingTask(
        loss_fn=lambda p, b: jnp.mean(loss(p["w"], b)),
        params=params,
        batch=jax.ShapeDtypeStruct((8, 64), jnp.float32),
        optimizer=optax.sgd(0.1),
    )


def test_a_loop_of_unknown_length_is_reported_with_its_line() -> None:
    def loss(w, b):
        steps, _ = lax.while_loop(lambda c: jnp.sum(c[0]) < 5, lambda c: (c[0] + 1.0, c[1]), (b, b))
        return steps @ w

    (found,) = op_findings(scored(task_of(loss), stage(0), pools=(1,)))
    assert (found.code, found.severity) == ("MP174", "warning")
    assert found.where.startswith("test_step_parts.py:") and found.where in found.message and "%" in found.message
    assert op_findings(scored(task_of(lambda w, b: b @ w), stage(0), pools=(1,))) == ()


def test_an_op_that_jax_cannot_differentiate_alone_is_reported() -> None:
    def loss(w, b):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((8, 64), jnp.float32), b @ w)

    codes = {f.code: f for f in op_findings(scored(task_of(loss), stage(0), pools=(1,)))}
    assert set(codes) == {"MP171", "MP175"}
    assert "ValueError" in codes["MP175"].message and codes["MP175"].where.startswith("test_step_parts.py:")


def test_figures_are_as_good_as_the_weakest_that_was_used(tied: Score) -> None:
    """A profile that covers nothing makes nothing better."""
    assert figure_sources(tied) == dict.fromkeys(("compute", "communication", "memory", "step_time"), "assumed")
    device = node_of_h100(1).groups[0].device
    fields = ("peak_flops_per_s", "memory_bandwidth_bytes_per_s", *PRICED)
    task = task_of(lambda w, b: b @ w)
    key = next(op.key for cls in model_graph(capture(task, 8)).classes.values() for op in cls.ops if op.flops)

    def compute(source: str, **facts: Any) -> str:
        kind = msgspec.structs.replace(device, provenance=dict.fromkeys(fields, source))
        sources = figure_sources(scored(task, stage(0), pools=(1,), kind=kind, **facts))
        assert "communication" not in sources and sources["step_time"] == sources["compute"]
        return sources["compute"]

    assert compute("fitted") == "fitted"
    assert compute("fitted", op_times={"another op": MeasuredOp(1.0, 1.0, "interpolated")}) == "fitted"
    assert compute("measured", op_times={key: MeasuredOp(1e-3, 1e-3, "interpolated")}) == "interpolated"


def test_measured_collectives_and_each_kind_have_their_own_source() -> None:
    lines = CollectiveLines({("all_reduce", 2, 1): (1e-6, 1e-11)})
    score = scored(TIED, stage(0, devices=2), pools=(2,), collective_lines=lines)
    assert figure_sources(score)["communication"] in ("fitted", "interpolated")
    assert figure_sources(scored(TIED, stage(0, devices=2), pools=(2,)))["communication"] == "assumed"

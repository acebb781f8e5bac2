"""Collectives of compiled programs: where they are, how many, and how many bytes. Only compiled, never run."""

import math
from collections import Counter
from typing import Any

import pytest

from costmodel.cluster import Cluster, parse_cluster
from costmodel.sharding import cast
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.frontend.task import TrainingTask
from planner.lowering.compile import compile_plan
from planner.lowering.one_stage import OneStageTrainer
from planner.lowering.pipeline import PipelineTrainer
from planner.lowering.verify import compiled_collectives
from planner.lowering.written import GATHER, LOSS, REDUCE, UPDATE
from planner.models import gpt
from planner.planfile.schema import Plan
from planner.search.candidates import Candidates
from planner.search.facts import Facts
from planner.search.pinned import StagePin, pinned_layout
from planner.search.score import Score
from planner.space.decision import Decision
from profiles.catalogue import load_catalogue
from profiles.compiled.hlo import HloCollective, collectives
from tests.lowering.execution import assembled, gentle, pins
from tests.lowering.layouts import on

LAYERS = 3


def node_of_h100(*groups: int) -> Cluster:
    """The catalogue's H100, NVLink inside a group (450 GB/s a direction), InfiniBand between groups."""
    return parse_cluster(
        {
            "name": "h100",
            "group": [
                {
                    "name": f"g{i}",
                    "nodes": 1,
                    "device": "H100-SXM5-80GB",
                    "devices_per_node": n,
                    "intra": [{"span": n, "bandwidth_bytes_per_s": 450e9, "latency_s": 2e-6}],
                }
                for i, n in enumerate(groups)
            ],
            "link": [
                {"between": [f"g{i}", f"g{j}"], "bandwidth_bytes_per_s": 50e9, "latency_s": 5e-6}
                for j in range(len(groups))
                for i in range(j)
            ],
        },
        load_catalogue(),
    )


def planned(
    task: TrainingTask, cluster: Cluster, stages: tuple[StagePin, ...], microbatch: int, microbatches: int = 4
) -> tuple[Score, Plan]:
    """The plan that the ILP finds, without any restriction but the devices of the stages."""
    graph = model_graph(capture(task, microbatch))
    candidates = Candidates(
        cluster=cluster, graph_of=lambda size: graph, facts={g.device.name: Facts(g.device) for g in cluster.groups}
    )
    score = pinned_layout(candidates, stages, microbatch=microbatch, microbatches=microbatches, schedule="1f1b")
    return score, assembled(score, task, graph)


def leaf_bytes(task: TrainingTask) -> list[int]:
    return sorted(p.elements * p.itemsize for p in model_graph(capture(task, 8)).params.values())


def of_the_step(found: list[HloCollective]) -> list[HloCollective]:
    """Without what sums the loss and what the optimizer joins."""
    return [c for c in found if LOSS not in c.op_name and UPDATE not in c.op_name]


SMALL = {"hidden": 64, "layers": LAYERS, "heads": 4, "vocab": 256, "seq": 64, "dtype": "float32"}


@pytest.fixture(scope="module")
def data_parallel() -> tuple[TrainingTask, Plan]:
    """A small model and a large batch: the search chooses data parallelism by itself."""
    task = gentle(gpt(**SMALL))
    return task, planned(task, node_of_h100(8), pins((on("g0", 8, mesh=(8,)),)), microbatch=2048)[1]


def test_a_small_model_with_a_large_batch_is_data_parallel(data_parallel: tuple[TrainingTask, Plan]) -> None:
    _, plan = data_parallel
    group = plan.stages[0].groups[0]
    assert all(p.value == p.gradient == p.optimizer == ((),) * len(p.shape) for p in group.parameters)
    assert group.time.collectives == {"once all_reduce data": len(group.parameters)}


def test_microbatches_accumulate_without_a_collective(data_parallel: tuple[TrainingTask, Plan]) -> None:
    """One all-reduce for each parameter leaf, whole, after the loop over microbatches; nothing inside it."""
    task, plan = data_parallel
    trainer = compile_plan(plan, task)
    assert isinstance(trainer, OneStageTrainer)
    found = of_the_step(compiled_collectives(trainer.trace(), trainer.placement))
    assert {(c.kind, c.axes, c.loops, REDUCE in c.op_name) for c in found} == {("all_reduce", ("data",), (), True)}
    assert sorted(c.bytes for c in found) == leaf_bytes(task)


def test_xla_joins_the_gradients_into_one_reduction(data_parallel: tuple[TrainingTask, Plan]) -> None:
    task, plan = data_parallel
    trainer = compile_plan(plan, task)
    assert isinstance(trainer, OneStageTrainer)
    text = trainer.trace().lower().compile().as_text()
    reductions = [c for c in collectives(text, ("data",), (8,)) if REDUCE in c.op_name]
    assert len(reductions) == 1 and reductions[0].loops == ()
    assert reductions[0].bytes >= sum(leaf_bytes(task))  # and the loss, which is summed along


def test_the_backward_pass_of_a_pipeline_stage_has_no_collective() -> None:
    task = gentle(gpt(**SMALL))
    stages = pins((on("g0", 4, mesh=(4,)),), (on("g1", 4, mesh=(4,)),))
    _, plan = planned(task, node_of_h100(4, 4), stages, microbatch=2048)
    trainer = compile_plan(plan, task)
    assert isinstance(trainer, PipelineTrainer)
    reduced = []
    for programs in trainer.programs.values():
        found = {n: compiled_collectives(t, programs.placement) for n, t in programs.traces()}
        assert found["forward"] == found["backward"] == []
        assert all(c.kind == "all_reduce" and c.axes == ("data",) for c in found["once"])
        assert len(found["once"]) == len(programs.micro.trained)
        reduced += [c.bytes for c in found["once"]]
    table = SMALL["vocab"] * SMALL["hidden"] * 4  # the tied embedding is on both stages
    assert sum(reduced) == sum(leaf_bytes(task)) + table


HIDDEN, SEQ = 8192, 2048


@pytest.fixture(scope="module")
def megatron() -> tuple[TrainingTask, Score, Plan, list[HloCollective]]:
    task = gentle(gpt(hidden=HIDDEN, layers=LAYERS, heads=64, vocab=51200, seq=SEQ, dtype="float32"))
    score, plan = planned(task, node_of_h100(8), pins((on("g0", 8, mesh=(8,)),)), microbatch=1)
    trainer = compile_plan(plan, task)
    assert isinstance(trainer, OneStageTrainer)
    return task, score, plan, compiled_collectives(trainer.trace(), trainer.placement)


def test_a_wide_block_is_split_as_megatron_does(megatron: Any) -> None:
    """Shoeybi et al. 2019: columns of the first matrix and rows of the second; heads of attention."""
    _, _, plan, _ = megatron
    stored = {p.path: p.value for p in plan.stages[0].groups[0].parameters}
    rows, columns, heads = ((), ("data",), ()), ((), (), ("data",)), ((), (), ("data",), ())
    assert {stored[f"layers/attention/{w}"] for w in ("wq", "wk", "wv")} == {heads}
    assert stored["layers/attention/wo"] == ((), ("data",), (), ())
    assert (stored["layers/mlp/up"], stored["layers/mlp/down"]) == (columns, rows)


def test_a_megatron_layer_has_the_collectives_of_the_textbook(megatron: Any) -> None:
    """Korthikanti et al. 2022, section 4.2.2: with sequence parallelism each layer gathers the activation [s, h] twice
    and scatters it twice forward, and as often backward; q, k and v share one gather and, backward, one scatter."""
    _, _, _, found = megatron
    layer = [c for c in found if len(c.loops) == 2]
    assert {c.loops for c in layer} == {(4, LAYERS)}
    activation = SEQ * HIDDEN * 4
    counts = Counter(("backward" if c.backward else "forward", c.kind, c.bytes) for c in layer)
    assert counts == {
        ("forward", "all_gather", activation): 2,
        ("forward", "reduce_scatter", activation): 2,
        ("backward", "all_gather", activation): 2,
        ("backward", "reduce_scatter", activation): 2,
    }


def test_the_cost_model_predicts_the_collectives_of_a_megatron_layer(megatron: Any) -> None:
    _, score, _, found = megatron
    decision: Decision = score.layout.stages[0].groups[0].decision
    (key,) = [k for k, n in decision.space.counts.items() if n == LAYERS]
    layer = Counter(("backward" if c.backward else "forward", c.kind, c.bytes) for c in found if len(c.loops) == 2)
    assert predicted_steps(decision, key) == layer
    counts = Counter({(phase, kind): n for (phase, kind, _), n in decision.costs[key].collectives.items() if n})
    assert counts == Counter((phase, kind) for phase, kind, _ in layer.elements())


def predicted_steps(decision: Decision, key: str) -> Counter:
    """Phase, kind and bytes of every cast inside a block class. (No cast of this plan runs again for the backward.)"""
    space, cls = decision.space, decision.space.graph.classes[key]
    steps: Counter = Counter()
    for name in dict.fromkeys([*cls.inputs, *(n for g in space.groups[key] for n in g.exports)]):
        maker = space.maker(key, name)
        if ("place", key, name) in space.index or maker is None:
            continue
        source = maker[1][decision.choice[maker[0]]]
        for target in {specs[decision.choice[n]] for n, specs in space.consumers(key, name)} - {source}:
            tensor = cls.tensors[name]
            for step in cast(tensor.shape, tensor.itemsize, source, target, space.mesh) or ():
                if step.forward:
                    steps["forward", step.forward, step.full_bytes] += 1
                if step.backward and tensor.needs_grad:
                    steps["backward", step.backward, step.full_bytes] += 1
    return steps


def test_the_rest_of_a_megatron_step(megatron: Any) -> None:
    """Outside the layers: the sharded embedding and head, and one gradient reduction of each replicated leaf."""
    task, _, plan, found = megatron
    once = [c for c in of_the_step(found) if c.loops == ()]
    assert all(REDUCE in c.op_name and c.kind == "all_reduce" for c in once)
    replicated = [p for p in plan.stages[0].groups[0].parameters if p.reduced_over]
    assert sorted(c.bytes for c in once) == sorted(math.prod(p.shape) * 4 for p in replicated)
    assert not any(GATHER in c.op_name for c in found)
    assert compile_plan(plan, task).verify().groups[0].differences == {}

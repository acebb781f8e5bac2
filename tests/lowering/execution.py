"""Plans under pins on a slow-compute, fast-link cluster (so that the search splits whatever can be split), executed."""

import dataclasses

import jax
import numpy as np
import optax

from costmodel.cluster import Cluster, parse_cluster
from costmodel.graph import ModelGraph
from planner.assemble import assemble_plan, model_record
from planner.frontend.capture import Capture, capture
from planner.frontend.graph import model_graph
from planner.frontend.task import TrainingTask
from planner.lowering.compile import Trainer, compile_plan
from planner.lowering.reference import reference
from planner.models import example_batch, init_params, init_state
from planner.planfile.codec import decode, encode
from planner.planfile.schema import Certificate, Plan
from planner.search.candidates import Candidates
from planner.search.facts import Facts
from planner.search.pinned import GroupPin, StagePin, pinned_layout
from planner.search.score import Score
from planner.space.setting import Remat, Setting

SLOW = {
    "name": "Slow-CPU",
    "platform": "cpu",
    "peak_flops_per_s": {"float32": 1e6, "bfloat16": 1e6},
    "memory_bytes": 1 << 34,
    "memory_bandwidth_bytes_per_s": 1e6,
}


def slow_cluster(*groups: int) -> Cluster:
    """One group of slow devices for each count, joined by links that cost next to nothing."""
    names = [f"g{i}" for i in range(len(groups))]
    fast = {"bandwidth_bytes_per_s": 1e13, "latency_s": 0.0, "start_s": 0.0}
    return parse_cluster(
        {
            "name": "slow",
            "group": [
                {"name": n, "nodes": 1, "device": SLOW, "devices_per_node": k, "intra": [{"span": k, **fast}]}
                for n, k in zip(names, groups, strict=True)
            ],
            "link": [
                {"between": [a, b], "bandwidth_bytes_per_s": 1e13, "latency_s": 0.0}
                for i, a in enumerate(names)
                for b in names[i + 1 :]
            ],
        },
        {},
    )


def pins(*stages: tuple[GroupPin, ...]) -> tuple[StagePin, ...]:
    return tuple(StagePin(groups=groups) for groups in stages)


@dataclasses.dataclass(kw_only=True)
class ChosenRemat(Candidates):
    """Candidates whose remat a test fixes (None: as the search likes)."""

    remat: Remat | None = None

    def both(self, pool, mesh, microbatch, *, microbatches, stages, in_flight, **more):
        if self.remat is None:
            given = {"microbatches": microbatches, "stages": stages, "in_flight": in_flight, **more}
            return super().both(pool, mesh, microbatch, **given)
        setting = Setting(microbatches=microbatches, stages=stages, in_flight=in_flight, remat=self.remat)
        decision = self.decide(pool, mesh, microbatch, setting)
        return () if decision is None else (decision,)


def certificate() -> Certificate:
    return Certificate(
        lower_bound_s=0.0,
        gap=1.0,
        hardware_bound_s=0.0,
        hardware_gap=1.0,
        space=("pinned",),
        status="feasible",
        limit_fired=False,
    )


def executed_plan(task: TrainingTask, stages: tuple[StagePin, ...], cluster: Cluster, **asked) -> Plan:
    """The pinned plan, through the file format and back; arguments as of `pinned_score`."""
    _, score = pinned_score(task, stages, cluster, **asked)
    return decode(encode(assembled(score, task, score.layout.graph)))


def pinned_score(
    task: TrainingTask,
    stages: tuple[StagePin, ...],
    cluster: Cluster,
    *,
    microbatch: int,
    microbatches: int,
    schedule: str = "1f1b",
    restrict=None,
    remat: Remat | None = None,
) -> tuple[Capture, Score]:
    """The captured model and the pinned layout."""
    captured = capture(task, microbatch)
    graph = model_graph(captured)
    facts = {g.device.name: Facts(g.device) for g in cluster.groups}
    candidates = ChosenRemat(cluster=cluster, graph_of=lambda size: graph, facts=facts, restrict=restrict, remat=remat)
    score: Score = pinned_layout(
        candidates, stages, microbatch=microbatch, microbatches=microbatches, schedule=schedule
    )
    assert score.feasible
    return captured, score


def assembled(score: Score, task: TrainingTask, graph: ModelGraph) -> Plan:
    """The plan of a score, without what a search adds."""
    return assemble_plan(
        score,
        name="test",
        model=model_record(graph, reduction=task.reduction),
        certificate=certificate(),
        baselines=(),
        findings=(),
        versions={},
        tokens_per_example=None,
        provenance={},
    )


def gentle(task: TrainingTask, clip: bool = True) -> TrainingTask:
    """The task with an optimizer that does not blow rounding up (Adam divides noise by its own size)."""
    steps = [optax.clip_by_global_norm(0.5)] if clip else []
    return dataclasses.replace(task, optimizer=optax.chain(*steps, optax.sgd(0.1, momentum=0.9)))


def assert_equals_one_device(task: TrainingTask, plan: Plan, *, steps: int = 2, rtol: float = 1e-4) -> Trainer:
    """Loss, parameters, carried state and aux after some steps equal one device's with the same microbatches."""
    params, batch = init_params(task, seed=0), example_batch(task, plan.global_batch, seed=1)
    state = init_state(task) if task.state is not None else None
    extra = {"rng": jax.random.key(3)} if task.rng else {}
    one, many = reference(task, plan), compile_plan(plan, task)
    many.verify(compiled=False)  # collectives and kept bytes are the planned ones
    a, b = one.init(params, state), many.init(params, state)
    for _ in range(steps):
        a, expected = one.step(a, batch, **extra)
        b, got = many.step(b, batch, **extra)
        np.testing.assert_allclose(got["loss"], expected["loss"], rtol=rtol)
        if task.has_aux:
            compare(expected["aux"], got["aux"], rtol)
    compare_updates(params, one.params(a), many.params(b), rtol)
    if task.state is not None:
        compare(one.state(a), many.state(b), rtol)
    return many


def numbers(leaf) -> np.ndarray:
    return np.asarray(leaf, np.float64)


def compare(expected, got, rtol: float) -> None:
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(got), strict=True):
        x, y = numbers(x), numbers(y)
        np.testing.assert_allclose(
            y, x, rtol=rtol, atol=rtol * np.abs(x).max(initial=1e-2), err_msg=jax.tree_util.keystr(path)
        )


def compare_updates(start, expected, got, rtol: float) -> None:
    """Compares what training changed: an update is so much smaller than its parameter that a wrong one would pass.

    Relative to the largest change of the leaf. Some leaves have no gradient by mathematics (a key bias before a
    softmax) and hold rounding noise: a tenth of the tolerance is relative to the largest change of all.
    """
    leaves = [
        (p, numbers(s), numbers(x))
        for (p, s), x in zip(jax.tree_util.tree_leaves_with_path(start), jax.tree.leaves(expected), strict=True)
    ]
    largest = max(np.abs(x - s).max(initial=0.0) for _, s, x in leaves)
    assert largest > 1e-4, "nothing was trained"
    for (path, before, x), y in zip(leaves, jax.tree.leaves(got), strict=True):
        rounding = 4 * np.finfo(np.float32).eps * np.abs(x).max(initial=0.0)
        atol = rtol * (10 * np.abs(x - before).max(initial=0.0) + largest) + rounding
        np.testing.assert_allclose(
            numbers(y) - before, x - before, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path)
        )

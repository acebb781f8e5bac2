"""Estimates from a profile's measured products, ops and blocks, beside plans from the same profile."""

from itertools import product
from pathlib import Path

import msgspec
import pytest

import planner
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.models.families.gpt import gpt
from profiles.schema import OpTime, Profile
from tests.small_profiles import small_profile

TASK = gpt(hidden=64, layers=2, heads=2, vocab=256, seq=32, dtype="float32")
SIDES = (16, 64, 256)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = Path(tmp_path_factory.mktemp("cluster")) / "cpu.toml"
    path.write_text('name = "c"\n[[group]]\nname = "cpu"\nnodes = 1\ndevice = "cpu"\ndevices_per_node = 2\n')
    return str(path)


def gridded(factor: float = 1.0) -> Profile:
    """Products up to 256 long, which eight sequences of 32 positions are and eleven are not; small ones
    achieve less."""
    sample = small_profile(ops={}).matmuls[0]
    matmuls = [
        msgspec.structs.replace(sample, dtype="float32", shape=shape, time_s=factor * 1e-9 * (m * k * n) ** 0.8)
        for shape in product(SIDES, SIDES, SIDES)
        for m, k, n in (shape,)
    ]
    return small_profile(ops={}, matmuls=tuple(matmuls))


@pytest.mark.parametrize("microbatch", [1, 2, 8, 16])
def test_measured_products_give_estimates_what_they_give_plans(cluster: str, microbatch: int) -> None:
    text = f"microbatch={microbatch}"
    found = planner.estimate(TASK, cluster, text, global_batch=16, profile=gridded())
    plan = planner.plan(TASK, cluster=cluster, global_batch=16, strategy=text, profile=gridded(), baselines=False)
    assert found.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=0.03)
    slower = planner.estimate(TASK, cluster, text, global_batch=16, profile=gridded(10.0))
    inside = microbatch <= 8
    assert (slower.step_time_s > 2 * found.step_time_s) == inside


def test_measured_ops_give_estimates_what_they_give_plans(cluster: str) -> None:
    graph = model_graph(capture(TASK, 2))
    ops = [op for cls in graph.classes.values() for op in cls.ops if op.work == "matmul"]
    profile = small_profile(ops={op.key: OpTime(forward_s=1e-3, backward_s=3e-3) for op in ops}, microbatches=(2,))
    found = planner.estimate(TASK, cluster, "microbatch=2", global_batch=16, profile=profile)
    plan = planner.plan(
        TASK, cluster=cluster, global_batch=16, strategy="microbatch=2", profile=profile, baselines=False
    )
    assert found.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=0.03)
    assert found.step_time_s > 8 * 4e-3 * sum(
        len([op for op in graph.classes[block.class_key].ops if op.work == "matmul"]) for block in graph.blocks
    )

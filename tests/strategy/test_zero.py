"""ZeRO over degrees that some parameters' dims are multiples of and others' are not."""

from pathlib import Path

import pytest

import planner
from planner.models.families.gpt import gpt

TASK = gpt(hidden=64, layers=2, heads=4, vocab=129, seq=16)  # 3 divides the vocabulary alone
ELEMENTS, DIVISIBLE = 109_376, 129 * 64


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = Path(tmp_path_factory.mktemp("cluster")) / "three.toml"
    path.write_text(
        'name = "three"\n[[group]]\nname = "a"\nnodes = 1\ndevice = "A100-SXM4-80GB"\ndevices_per_node = 3\n'
    )
    return str(path)


@pytest.fixture(scope="module")
def estimator(cluster: str) -> planner.Estimator:
    return planner.Estimator(model=TASK, cluster=cluster)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_estimate_and_plan_agree_on_what_stays_whole(estimator: planner.Estimator, cluster: str, zero: int) -> None:
    strategy = f"dp=3,microbatch=2,zero={zero}"
    estimated = estimator(strategy, 18).memory[0]
    planned = planner.plan(TASK, cluster=cluster, global_batch=18, strategy=strategy, baselines=False)
    memory = planned.stages[0].groups[0].memory
    left = ELEMENTS - DIVISIBLE * 2 / 3
    assert estimated.optimizer_bytes == pytest.approx(8 * left)
    assert estimated.optimizer_bytes == pytest.approx(memory.optimizer_bytes, abs=8)  # and the step count
    assert estimated.gradients_bytes == pytest.approx(4 * (left if zero >= 2 else ELEMENTS))
    assert estimated.gradients_bytes == pytest.approx(memory.gradients_bytes)
    assert estimated.parameters_bytes == pytest.approx(4 * (left if zero == 3 else ELEMENTS))
    assert estimated.parameters_bytes == pytest.approx(memory.parameters_bytes)


def test_frameworks_that_keep_state_flat_split_all_of_it(estimator: planner.Estimator) -> None:
    memory = estimator("dp=3,microbatch=2,zero=3,flat_state=on", 18).memory[0]
    assert memory.optimizer_bytes == pytest.approx(8 * ELEMENTS / 3)
    assert memory.parameters_bytes == pytest.approx(4 * ELEMENTS / 3)


def test_gradients_that_stay_whole_are_reduced_once_a_step(estimator: planner.Estimator) -> None:
    """Six microbatches of ZeRO-3 pay for gathers of the embedding alone; all else is reduced as by data parallelism."""
    own, flat, plain = (
        estimator(one, 36).breakdown
        for one in ("dp=3,microbatch=2,zero=3", "dp=3,microbatch=2,zero=3,flat_state=on", "dp=3,microbatch=2")
    )
    assert plain.communication_s == 0.0 < own.communication_s < flat.communication_s / 10
    assert flat.gradients_s == 0.0 < own.gradients_s < plain.gradients_s

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
    assert estimated.optimizer_bytes == pytest.approx(8 * left + 4)  # and the step count
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


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[planner.Estimator, str]:
    path = Path(tmp_path_factory.mktemp("cluster")) / "eight.toml"
    path.write_text(
        'name = "eight"\n[[group]]\nname = "a"\nnodes = 1\ndevice = "A100-SXM4-80GB"\ndevices_per_node = 8\n'
    )
    return planner.Estimator(model=TASK, cluster=str(path)), str(path)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("degrees", ["dp=4,cp=2", "dp=2,cp=4", "cp=8"])
def test_devices_of_context_parallelism_split_state_too(
    pair: tuple[planner.Estimator, str], degrees: str, zero: int
) -> None:
    """8 divides all dims but the vocabulary, whose embedding's other dim is split."""
    estimator, cluster = pair
    strategy = f"{degrees},microbatch=2,zero={zero}"
    memory = estimator(strategy, 16).memory[0]
    assert memory.optimizer_bytes == pytest.approx(8 * ELEMENTS / 8, rel=0.01)
    planned = planner.plan(TASK, cluster=cluster, global_batch=16, strategy=strategy, baselines=False)
    own = planned.stages[0].groups[0].memory
    assert own.optimizer_bytes == pytest.approx(memory.optimizer_bytes, rel=0.01)  # tiny ones stay whole in plans
    assert own.parameters_bytes == pytest.approx(memory.parameters_bytes, rel=0.01)
    assert not [one for one in planned.findings if one.code == "MP177"]


def test_a_degree_that_does_not_divide_leaves_the_other_its_part(pair: tuple[planner.Estimator, str]) -> None:
    """Four of data parallelism divide every dim; three devices of context parallelism only that of the vocabulary."""
    task = gpt(hidden=64, layers=2, heads=4, vocab=129, seq=18)
    found = planner.estimate(task, pair[1], "dp=2,cp=3,microbatch=2,zero=1", global_batch=16)
    elements = ELEMENTS + 2 * 64  # two more positions
    # The 18 positions' embedding is split by both, as is that of the vocabulary; the rest by two.
    both = DIVISIBLE + 18 * 64
    assert found.memory[0].optimizer_bytes == pytest.approx(8 * (both / 6 + (elements - both) / 2), rel=0.01)
    assert [one.code for one in found.findings] == ["MP177"]

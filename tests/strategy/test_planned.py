"""The plan that a strategy names, beside the estimate of it."""

import re
from collections import Counter

import pytest

import planner
from costmodel.cluster import parse_cluster
from costmodel.errors import InfeasibleError, InputError
from planner.check.rules import check_plan
from profiles.catalogue import load_catalogue

GROUP = {"name": "a", "nodes": 1, "device": "A100-SXM4-80GB", "devices_per_node": 8}
CLUSTER = parse_cluster({"name": "c", "group": [GROUP]}, load_catalogue())
TASK = planner.load_task("gpt(hidden=1024,layers=4,heads=8,vocab=16384,seq=512)")


def planned(strategy: str, batch: int = 64) -> planner.Plan:
    return planner.plan(TASK, cluster=CLUSTER, global_batch=batch, strategy=strategy, baselines=False)


@pytest.mark.parametrize(
    "text",
    [
        "dp=8,microbatch=2",
        "dp=8,microbatch=2,zero=1",
        "dp=2,tp=4,microbatch=4,sp=on",
        "dp=4,tp=2,microbatch=2,remat=full",
    ],
)
def test_a_plan_of_one_stage_takes_what_the_estimate_says(text: str) -> None:
    plan, estimate = planned(text), planner.estimate(TASK, CLUSTER, text, global_batch=64)
    assert plan.prediction.step_time_s == pytest.approx(estimate.step_time_s, rel=0.06)
    assert plan.prediction.peak_memory_bytes == pytest.approx(estimate.memory.peak_bytes, rel=0.2)


def test_the_plan_has_the_strategy_s_devices_microbatches_and_schedule() -> None:
    plan = planned("dp=2,tp=2,pp=2,microbatch=2,schedule=gpipe")
    assert [[axis.size for axis in stage.groups[0].mesh] for stage in plan.stages] == [[2, 2], [2, 2]]
    assert plan.microbatch_size == 4 and plan.microbatches == 16 and plan.schedule.name == "gpipe"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("interleave=2,schedule=interleaved", 2),
        ("interleave=2", 2),
        ("interleave=3", 3),
        ("schedule=breadth-first", 2),
        ("interleave=3,schedule=breadth-first", 3),
        ("interleave=2,schedule=zb-v", 2),
    ],
)
def test_each_stage_s_devices_run_as_many_parts_as_the_strategy_interleaves(text: str, parts: int) -> None:
    """With as many layers that more parts, and so a smaller bubble, would be faster."""
    task = planner.load_task("gpt(hidden=1024,layers=12,heads=8,vocab=512,seq=512)")
    strategy = f"pp=3,dp=2,microbatch=2,{text}"
    plan = planner.plan(task, cluster=CLUSTER, global_batch=48, strategy=strategy, baselines=False)
    runs = Counter(stage.groups[0].devices for stage in plan.stages)
    assert list(runs.values()) == [parts] * 3 and check_plan(plan, CLUSTER) == ()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_state_lies_as_zero_says(zero: int) -> None:
    plan = planned(f"dp=8,microbatch=2,zero={zero}")
    whole = planned("dp=8,microbatch=2").stages[0].groups[0].memory
    memory = plan.stages[0].groups[0].memory
    shares = {"parameters_bytes": zero >= 3, "gradients_bytes": zero >= 2, "optimizer_bytes": zero >= 1}
    for name, split in shares.items():
        share = getattr(memory, name) / getattr(whole, name)
        assert share == pytest.approx(1 / 8 if split else 1.0, rel=0.05)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("dp=8,microbatch=1,attention=flash", "MP180"),
        ("dp=8,microbatch=1,remat=selective", "MP180"),
        ("dp=2,tp=2,cp=2,microbatch=1", "MP180"),
        ("dp=4,tp=4,microbatch=1", "MP183"),
        ("dp=8,microbatch=3", "MP185"),
        ("dp=8,microbatch=1,step_s=1", "MP180"),
        ("pp=2,dp=4,microbatch=1,interleave=2,schedule=zb-h1", "MP180"),
        ("pp=2,dp=4,microbatch=1,interleave=3,schedule=zb-v", "MP180"),
        ("pp=2,dp=4,microbatch=1,interleave=2,schedule=layer-major", "MP180"),
        ("pp=2,dp=4,microbatch=1,interleave=2,schedule=auto", "MP180"),
        ("pp=2,dp=4,microbatch=1,interleave=4", "MP164"),
    ],
)
def test_what_a_plan_does_not_decide_is_refused(text: str, code: str) -> None:
    with pytest.raises(InputError) as caught:
        planned(text)
    assert caught.value.code == code


def test_a_strategy_says_it_all() -> None:
    with pytest.raises(InputError) as caught:
        planner.plan(TASK, cluster=CLUSTER, global_batch=64, strategy="dp=8,microbatch=1", stages=2)
    assert caught.value.code == "MP163" and "stages" in caught.value.message


def test_the_batch_that_does_not_divide_is_told_in_the_strategy_s_own_microbatch() -> None:
    with pytest.raises(InputError) as caught:
        planned("dp=8,microbatch=3")
    assert caught.value.hint.startswith("with this batch, microbatch=1 or 2 or 4;")


def test_a_stage_that_no_group_has_room_for_is_told_so() -> None:
    with pytest.raises(InputError) as caught:
        planned("tp=16,microbatch=1")
    assert "1 stage of 16 devices does not fit" in caught.value.message
    assert caught.value.message.endswith("a plan's stage stays in one group")


def test_a_bound_on_the_microbatch_is_the_strategy_s_own() -> None:
    with pytest.raises(InputError, match="strategy and max_microbatch were both given"):
        planner.plan(TASK, cluster=CLUSTER, global_batch=64, strategy="dp=8,microbatch=4", max_microbatch=1)


@pytest.mark.parametrize("text", ["dp=8,microbatch=1", "dp=4,pp=2,microbatch=1", "dp=4,pp=2,microbatch=1,remat=full"])
def test_a_strategy_that_does_not_fit_is_told_what_each_device_needs_and_has(text: str) -> None:
    with pytest.raises(InfeasibleError) as caught:
        planner.plan("gpt3-13b", cluster=CLUSTER, global_batch=8, strategy=text, baselines=False)
    message = caught.value.message
    found = re.search(
        r"needs ([\d.]+ [GT]iB) on each of \d x A100-SXM4-80GB, ([\d.]+ GiB) more than its 79.35 GiB", message
    )
    assert caught.value.code == "MP201" and found is not None, message
    items = [float(size) for size in re.findall(r"(?:state|parameters|gradients|microbatches) ([\d.]+) GiB", message)]
    assert items == sorted(items, reverse=True) and "largest tensors: " in message
    assert ("remat=full" in caught.value.hint) == ("remat" not in text)

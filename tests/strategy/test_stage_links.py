"""What each stage of a strategy sees of a cluster of several kinds of nodes."""

import pytest

import planner
from costmodel.cluster import Cluster, parse_cluster
from planner.report.estimate import document, render_estimate
from planner.strategy.links import strategy_links
from planner.strategy.strategy import parse_strategy
from profiles.catalogue import load_catalogue
from profiles.constants import COMPILED

KIND = "A100-SXM4-80GB"
FAST, SLOW = 200e9, 5e9


def nodes(name: str, count: int, bandwidth: float) -> dict[str, object]:
    tier = {"span": 4, "bandwidth_bytes_per_s": bandwidth, "latency_s": 1e-6}
    return {"name": name, "nodes": count, "device": KIND, "devices_per_node": 4, "intra": [tier]}


def mixed() -> Cluster:
    between = {"between": ["fast", "slow"], "bandwidth_bytes_per_s": 1e10, "latency_s": 1e-5}
    return parse_cluster(
        {"name": "c", "group": [nodes("fast", 1, FAST), nodes("slow", 1, SLOW)], "link": [between]}, load_catalogue()
    )


def alone(bandwidth: float) -> Cluster:
    return parse_cluster({"name": "c", "group": [nodes("only", 1, bandwidth)]}, load_catalogue())


def test_a_stage_has_the_links_of_its_own_nodes() -> None:
    """Tensor parallelism in the fast node does not run at the pace of the slow one; what crosses them does."""
    fast, slow = strategy_links(mixed(), parse_strategy("tp=4,pp=2"), COMPILED)
    for stage, bandwidth in ((fast, FAST), (slow, SLOW)):
        (own,) = strategy_links(alone(bandwidth), parse_strategy("tp=4"), COMPILED)
        assert stage.by_axis["tp"] == own.by_axis["tp"]
    assert fast.by_axis["pp"] == slow.by_axis["pp"]
    assert [one.like for one in strategy_links(mixed(), parse_strategy("tp=2,pp=4"), COMPILED)] == [0, 0, 2, 2]
    (across,) = strategy_links(mixed(), parse_strategy("tp=4,dp=2"), COMPILED)
    assert across.by_axis["tp"] == slow.by_axis["tp"] and across.by_axis["dp"] == fast.by_axis["pp"]


def test_layers_that_are_shared_out_across_groups_are_said() -> None:
    """Threes do not divide nodes of four; replicas and stages in different groups are no matter."""
    task = planner.load_task("gpt(hidden=96,layers=4,heads=6,vocab=96,seq=24)")
    estimator = planner.Estimator(model=task, cluster=mixed())
    for text, said in (
        ("tp=3,pp=2,microbatch=1", ["tp=3: stage 1 shares out its layers among devices of fast and slow"]),
        ("tp=3,dp=2,microbatch=1", ["tp=3: stage 0 shares out its layers among devices of fast and slow"]),
        ("cp=2,tp=2,pp=2,microbatch=1", []),
        ("dp=8,microbatch=1", []),
    ):
        found = [one.message.split(":", 2) for one in estimator(text, 8).findings if one.code == "MP169"]
        assert [f"{axis}:{what}" for axis, what, _ in found] == said


def test_only_the_stage_behind_slow_links_takes_longer() -> None:
    task = planner.load_task("gpt(hidden=1024,layers=8,heads=8,vocab=1024,seq=512,dtype=bfloat16)")
    text = "tp=4,pp=2,microbatch=4"
    estimator = planner.Estimator(model=task, cluster=mixed())
    fast = planner.Estimator(model=task, cluster=alone(FAST))("tp=4,microbatch=4", 64)
    found = estimator(text, 64)
    slow = planner.Estimator(model=task, cluster=alone(SLOW))("tp=4,microbatch=4", 64)
    assert fast.breakdown.communication_s < slow.breakdown.communication_s / 10
    assert found.breakdown.communication_s == pytest.approx(slow.breakdown.communication_s / 2, rel=0.2)
    most = estimator(f"{text},partition=7+1", 64).breakdown
    assert most.communication_s < 0.5 * found.breakdown.communication_s


def test_estimates_say_on_which_kinds_of_devices_a_stage_stands() -> None:
    """Threes do not divide nodes of four: the second stage has one device of the large kind, and the memory of the
    other."""
    small = {**nodes("small", 1, FAST), "device": "V100-SXM2-32GB"}
    between = {"between": ["large", "small"], "bandwidth_bytes_per_s": 1e10, "latency_s": 1e-5}
    cluster = parse_cluster(
        {"name": "c", "group": [nodes("large", 1, FAST), small], "link": [between]}, load_catalogue()
    )
    task = planner.load_task("gpt(hidden=96,layers=4,heads=6,vocab=96,seq=24)")
    found = planner.estimate(task, cluster, "dp=3,pp=2,microbatch=1", global_batch=6)
    assert [stage.kinds for stage in found.memory] == [(KIND,), (KIND, "V100-SXM2-32GB")]
    limits = {name: cluster.group(name).device.memory_bytes for name in ("large", "small")}
    assert [stage.limit_bytes for stage in found.memory] == [limits["large"], limits["small"]]
    rows = render_estimate(found).split("device has")[1].splitlines()[2:4]
    assert rows[0].endswith(f"  {KIND}") and rows[1].endswith(f"  {KIND} and V100-SXM2-32GB")
    assert [stage["kinds"] for stage in document(found)["memory"]] == [stage.kinds for stage in found.memory]

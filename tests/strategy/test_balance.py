"""Pipelines whose equal parts leave stages waiting: the estimate says so, and which partition does not."""

import itertools
import re
from functools import lru_cache

import pytest

import planner
from costmodel.cluster import Cluster, parse_cluster
from planner.models.families.gpt import gpt
from planner.search.facts import Facts
from planner.strategy.balance import balanced_partition
from planner.strategy.captured import CapturedModel
from planner.strategy.pricing import ClassTimes
from planner.strategy.strategy import Strategy
from planner.strategy.work import Work
from profiles.catalogue import device_kind, load_catalogue

TASK = gpt(hidden=512, layers=8, heads=8, vocab=1024, seq=128)
WIDE = gpt(hidden=512, layers=8, heads=8, vocab=16384, seq=128)


@lru_cache(maxsize=2)
def cluster(*kinds: str) -> Cluster:
    groups = [{"name": f"g{at}", "nodes": 1, "device": kind, "devices_per_node": 4} for at, kind in enumerate(kinds)]
    links = [
        {"between": [f"g{a}", f"g{b}"], "bandwidth_bytes_per_s": 1e10, "latency_s": 1e-5}
        for a, b in itertools.combinations(range(len(kinds)), 2)
    ]
    return parse_cluster({"name": "c", "group": groups, "link": links}, load_catalogue())


def found(strategy: str, task: planner.TrainingTask = TASK, *kinds: str) -> planner.Estimate:
    return planner.estimate(task, cluster(*(kinds or ("A100-SXM4-80GB", "T4"))), strategy, global_batch=64)


@pytest.mark.parametrize("more", ["", ",schedule=gpipe", ",interleave=2", ",zero=1"])
def test_stages_of_unequal_devices_are_told_a_better_partition(more: str) -> None:
    strategy = f"dp=4,pp=2,microbatch=2{more}"
    even = found(strategy)
    said = next(one for one in even.findings if one.code == "MP198")
    slower = re.search(r"stage (\d) takes .* a microbatch, ([\d.]+) times their mean", said.message)
    assert said.severity == "warning" and slower is not None and slower[1] == "1" and 1.25 <= float(slower[2]) <= 2
    better = re.match(r"partition=([\d+]+) takes ([\d.]+ \w+) a step instead of ([\d.]+ \w+)", said.hint)
    assert better is not None
    other = found(f"{strategy},partition={better[1]}")
    assert other.step_time_s < 0.95 * even.step_time_s
    assert not [one for one in other.findings if one.code == "MP198"]


def test_equal_devices_and_small_ends_are_balanced() -> None:
    assert not found("dp=4,pp=2,microbatch=2", TASK, "A100-SXM4-80GB", "A100-SXM4-80GB").findings
    assert not found("dp=8,microbatch=2").findings


def test_a_large_head_unbalances_equal_devices() -> None:
    said = found("dp=2,pp=4,microbatch=2", WIDE, "A100-SXM4-80GB", "A100-SXM4-80GB").findings
    (one,) = [one for one in said if one.code == "MP198"]
    assert one.message.startswith("pp=4: equal parts (2+2+2+2 layers) leave") and "stage 3 takes" in one.message


def test_a_partition_that_does_not_fit_is_said() -> None:
    """The faster devices have less memory: balanced, they would hold more than they have."""
    task = gpt(hidden=4096, layers=28, heads=32, vocab=1024, seq=2048)
    strategy = "tp=4,pp=2,microbatch=1,remat=full"
    said = planner.estimate(task, cluster("V100-SXM2-16GB", "T4"), strategy, global_batch=8).findings
    (one,) = [one for one in said if one.code == "MP198"]
    assert re.search(r"instead of [\d.]+ \w+, and does not fit: [\d.]+ GiB of 15.78 GiB a device;", one.hint)


@lru_cache(maxsize=1)
def work() -> Work:
    return CapturedModel(gpt(hidden=64, layers=7, heads=4, vocab=128, seq=16)).work(
        Facts(device_kind("A100-SXM4-80GB")), Strategy(microbatch=3)
    )


def slowest_s(sizes: tuple[int, ...], times: list[dict[str, ClassTimes]]) -> float:
    """Of a partition, by adding up each part's blocks."""
    layers = [i for i, key in enumerate(work().order) if work().classes[key].layered]
    parts, at, done = [], 0, 0
    for k, size in enumerate(sizes):
        done += size
        end = len(work().order) if k == len(sizes) - 1 else layers[done - 1] + 1
        parts.append(sum(times[k][key].forward_s + times[k][key].backward_s for key in work().order[at:end]))
        at = end
    return max(parts)


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (1.0, 4.0, 2.0), (9.0, 1.0, 1.0), (1.0, 1.0, 30.0)])
@pytest.mark.parametrize("ends", [0.1, 3.0])
def test_b2_no_partition_is_faster(speeds: tuple[float, ...], ends: float) -> None:
    times = [
        {
            key: ClassTimes(speed * (1.0 if one.layered else ends), speed * (2.0 if one.layered else ends), 0.0, {})
            for key, one in work().classes.items()
        }
        for speed in speeds
    ]
    best = balanced_partition(work(), Strategy(pp=3, microbatch=3), times)
    every = [(a, b, 7 - a - b) for a in range(1, 6) for b in range(1, 7 - a)]
    assert best in every
    assert slowest_s(best, times) == pytest.approx(min(slowest_s(sizes, times) for sizes in every))

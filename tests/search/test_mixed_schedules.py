"""Schedules on clusters of two kinds of devices, where stages may have several groups."""

import functools

import pytest

import planner
from costmodel.cluster import Cluster, parse_cluster
from planner.check.rules import check_plan
from planner.models import gpt
from planner.planfile.schema import Plan
from planner.search.pinned import GroupPin, StagePin
from profiles.catalogue import load_catalogue


@functools.cache
def mixed() -> Cluster:
    fabric = {"intra": [{"span": 4, "bandwidth_bytes_per_s": 3e11, "latency_s": 3e-6}]}
    node = {"nodes": 1, "devices_per_node": 4, "inter": {"bandwidth_bytes_per_s": 12.5e9, "latency_s": 8e-6}, **fabric}
    document = {
        "name": "mixed",
        "group": [{"name": "a", "device": "A100-SXM4-80GB", **node}, {"name": "v", "device": "V100-SXM2-32GB", **node}],
        "link": [{"between": ["a", "v"], "bandwidth_bytes_per_s": 12.5e9, "latency_s": 3e-5}],
    }
    return parse_cluster(document, load_catalogue())


@functools.cache
def planned(schedule: str, pins: tuple[StagePin, ...] | None = None) -> Plan:
    return planner.plan(
        gpt(hidden=512, layers=8, heads=8, vocab=1024, seq=256),
        cluster=mixed(),
        global_batch=64,
        microbatch=4,
        schedule=schedule,
        stages=2 if pins is None else None,
        pins=pins,
        baselines=False,
    )


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "breadth-first", "zb-v", "v-half"])
def test_auto_is_no_slower_than_a_schedule_that_is_asked_for(name: str) -> None:
    asked = planned(name)
    assert asked.schedule.name == name and check_plan(asked, mixed()) == ()
    assert planned("auto").prediction.step_time_s <= asked.prediction.step_time_s * (1 + 1e-9)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_stages_of_one_group_are_tried_beside_those_of_several(name: str) -> None:
    """The closed form of the DP sees less of what stages of several groups hold up than the simulation does."""
    each = tuple(StagePin(groups=(GroupPin(pool=pool, devices=4),)) for pool in ("a", "v"))
    assert planned(name).prediction.step_time_s <= planned(name, each).prediction.step_time_s * (1 + 1e-9)

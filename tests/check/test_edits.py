"""Edits of a plan's numbers: one that changes what the plan takes is found, whichever number it is."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

import planner
from costmodel.cluster import Cluster, parse_cluster
from costmodel.errors import InputError, PlanError
from planner.check.rules import check_plan
from planner.planfile.codec import decode, encode
from planner.planfile.schema import Plan
from profiles.catalogue import load_catalogue

SPEC = "gpt(hidden=256,layers=4,heads=4,vocab=1024,seq=64)"
PLANS = {
    "two kinds": (("A100-SXM4-80GB", "T4"), {"strategy": "dp=4,pp=2,microbatch=4"}),
    "one program": (("A100-SXM4-80GB",), {"strategy": "dp=2,tp=2,zero=3,microbatch=4"}),
    "looped": (("A100-SXM4-80GB",), {"strategy": "dp=2,pp=2,schedule=zb-v,microbatch=4"}),
    "apart": (("A100-SXM4-80GB",), {"strategy": "pp=4,schedule=zb-h1,microbatch=8,remat=full"}),
}
EACH = 2
"""Places of one kind (all stages' forward times, say) that are edited."""


@cache
def planned(name: str) -> tuple[Plan, Cluster]:
    kinds, pins = PLANS[name]
    groups = [
        {"name": f"g{i}", "nodes": 1, "device": kind, "devices_per_node": 4, "price_per_device_hour": 1.0}
        for i, kind in enumerate(kinds)
    ]
    link = {"between": ["g0", "g1"], "bandwidth_bytes_per_s": 1e10, "latency_s": 1e-5}
    document = {"name": "c", "group": groups, "link": [link] * (len(kinds) - 1)}
    cluster = parse_cluster(document, load_catalogue())
    return planner.plan(SPEC, cluster=cluster, global_batch=32, baselines=False, **pins), cluster


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], float]]:
    if isinstance(value, dict | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(entry, (*path, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def edited(document: dict[str, Any], path: tuple[Any, ...], value: float) -> Plan | None:
    """The plan with another number; None where it cannot be read."""
    changed = json.loads(json.dumps(document))
    holder = changed
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    try:
        return decode(json.dumps(changed).encode())
    except InputError:
        return None


def differs(plan: Plan) -> bool:
    """Whether a plan takes other time or memory than it says, by over a hundredth."""
    try:
        step = planner.simulate(plan, most_what_ifs=0)
    except PlanError:
        return True
    said = plan.prediction
    times = step.makespan_s / said.step_time_s - 1.0 if said.step_time_s else 1.0
    sizes = max(row.peak_bytes for row in step.groups) / said.peak_memory_bytes - 1.0 if said.peak_memory_bytes else 1.0
    return max(abs(times), abs(sizes)) > 0.01


@pytest.mark.parametrize("name", PLANS)
def test_no_edit_changes_what_a_plan_takes_unseen(name: str) -> None:
    plan, cluster = planned(name)
    assert check_plan(plan, cluster) == () and not differs(plan)
    document, seen, found = json.loads(encode(plan)), dict[tuple[Any, ...], int](), 0
    for path, value in numbers(document):
        alike = tuple("" if isinstance(step, int) else step for step in path)
        seen[alike] = seen.get(alike, 0) + 1
        if seen[alike] > EACH:
            continue
        for other in (2 * value + (value == 0), value // 2 if isinstance(value, int) else value / 2):
            changed = edited(document, path, other) if other != value else None
            if changed is None or not differs(changed):
                continue
            found += 1
            assert check_plan(changed, cluster), (path, value, other)
    assert found > 10  # of edits that do change it

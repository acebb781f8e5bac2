"""The trace as viewers read it: a reader of the Trace Event format written from its description, strict about fields,
and the two ways in which viewers place complete events, by sums of doubles and by whole nanoseconds."""

import json
import math
from collections import defaultdict

import pytest

import planner
from tests.plans import looped_plan, plan_with_groups, tiny_plan

METADATA = {"process_name": str, "thread_name": str, "process_sort_index": int}


def read(text):
    """(complete events by (pid, tid), names of processes, names of threads, counters), or an error."""
    document = json.loads(text)
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"} and document["displayTimeUnit"] in (
        "ms",
        "ns",
    )
    slices, counters = defaultdict(list), defaultdict(list)
    processes, threads = {}, {}
    for event in document["traceEvents"]:
        assert {"name", "cat", "ph", "ts", "pid", "tid"} <= set(event), event
        assert isinstance(event["name"], str) and event["name"] and isinstance(event["cat"], str)
        pid, tid = event["pid"], event["tid"]
        assert type(pid) is type(tid) is int and pid > 0 and tid > 0  # 0 is the idle process of some viewers
        assert math.isfinite(event["ts"]) and event["ts"] >= 0
        if event["ph"] == "M":
            (value,) = event["args"].values()
            assert type(value) is METADATA[event["name"]]
            if event["name"] == "process_name":
                assert pid not in processes
                processes[pid] = value
            elif event["name"] == "thread_name":
                assert (pid, tid) not in threads
                threads[pid, tid] = value
        elif event["ph"] == "X":
            assert math.isfinite(event["dur"]) and event["dur"] >= 0 and isinstance(event.get("args", {}), dict)
            slices[pid, tid].append(event)
        else:
            assert event["ph"] == "C", "begin and end, flow and async events are not written"
            assert all(type(value) is int for value in event["args"].values())
            counters[pid, event["name"]].append(event)
    assert set(slices) <= set(threads) and {pid for pid, _ in threads} == set(processes)
    return slices, processes, threads, counters


def depth(spans):
    """How deep a viewer nests complete events of one thread: an event that begins before another ends is its child."""
    open_until, deepest = [], 0
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_until and open_until[-1] <= start:
            open_until.pop()
        open_until.append(end)
        deepest = max(deepest, len(open_until))
    return deepest


PLANS = {
    "straight": lambda: planner.simulate(tiny_plan(stages=3, devices=8, microbatches=12)),
    "groups": lambda: planner.simulate(plan_with_groups(stages=3, devices=8, microbatches=6), delay_s={"0-1": 1e-5}),
    "looped": lambda: planner.simulate(looped_plan("zb-v", homes=3, microbatches=9)),
    "odd times": lambda: planner.simulate(
        looped_plan("interleaved", homes=3, microbatches=30), jitter=0.3, seed=5, share_nics=True, compute_slowdown=1.1
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_reader_of_the_format_sees_the_simulated_step(name):
    step = PLANS[name]()
    slices, processes, threads, counters = read(step.trace)
    assert len(processes) == len({row.stages for row in step.groups}) and len(set(processes.values())) == len(processes)
    named = defaultdict(list)
    for key, own in slices.items():
        named[threads[key]] += own
        exact = [(event["ts"], event["ts"] + event["dur"]) for event in own if event["dur"]]
        cut = [(int(e["ts"] * 1000.0), int(e["ts"] * 1000.0) + int(e["dur"] * 1000.0)) for e in own if e["dur"]]
        assert depth(exact) <= 1 and depth(cut) <= 1, threads[key]
    compute = [e for thread, own in named.items() if thread.endswith(" compute") for e in own]
    assert len(compute) == sum(len(row.actions) for row in step.step.schedule.actions)
    busy_us = sum(e["dur"] for e in compute)
    assert busy_us == pytest.approx(1e6 * sum(row.busy_s for row in step.groups), abs=len(compute) / 64)
    sent = [e for own in named.values() for e in own if e["cat"] in ("activations", "gradient")]
    assert len(sent) == len(step.step.messages)
    for (_, _), own in counters.items():
        times = [event["ts"] for event in own]
        assert times == sorted(times)
    peaks = sorted(max(event["args"]["bytes"] for event in own) for own in counters.values())
    assert peaks == sorted(row.peak_bytes for row in step.groups)


def test_the_reader_sees_events_that_overlap():
    assert depth([(0, 2), (2, 3)]) == 1 and depth([(0, 2.0000000001), (2, 3)]) == 2

"""A simulated step in the Trace Event format, as ui.perfetto.dev and chrome://tracing read it.

Processes are stages, those on the same devices together. Their threads are the groups' compute, what they do once a
step, and the links that they send over. Every action, message and collective is a complete event (``"ph": "X"``),
memory of each group a counter (``"C"``). Times are in microseconds.
"""

import json
from typing import Any

from costmodel.schedule.actions import Actor
from planner.device_stages import actor_label, device_stages, stage_label
from planner.simulation import StepSimulation

_NAMES = {"F": "forward", "B": "backward", "W": "weight gradient"}


def render_trace(step: StepSimulation) -> str:
    """One JSON object with the events."""
    events: list[dict[str, Any]] = []
    parts = device_stages(step.plan)
    for stage in parts:
        events.append(_named("process_name", stage, 0, f"stage {stage_label(parts, stage)}"))
        events.append(_metadata("process_sort_index", stage, 0, {"sort_index": stage}))
    events += _compute(step)
    events += _endings(step)
    events += _messages(step)
    events += _memory(step)
    document = {
        "displayTimeUnit": "ms",
        "otherData": {"plan": step.plan.name, "schedule": step.step.schedule.name, "changes": list(step.changes)},
        "traceEvents": events,
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


def _compute(step: StepSimulation) -> list[dict[str, Any]]:
    events = [
        _named("thread_name", use.actor.stage, use.actor.group, f"{_group(step, use.actor)} compute")
        for use in step.step.actors
    ]
    for actor, action, start_s, end_s in step.step.timeline:
        event = _complete(actor.stage, actor.group, str(action), _NAMES[action.kind], start_s, end_s)
        event["args"] = {"microbatch": action.microbatch}
        if action.stage != actor.stage:
            event["args"]["virtual stage"] = action.stage
        events.append(event)
    return events


def _endings(step: StepSimulation) -> list[dict[str, Any]]:
    events = []
    for use, ending in zip(step.step.actors, step.step.endings, strict=True):
        stage, group = use.actor
        thread = _groups(step, stage) + group
        events.append(_named("thread_name", stage, thread, f"{_group(step, use.actor)} once a step"))
        spans = (
            ("reduce gradients", ending.reduce_start_s, ending.reduce_end_s),
            ("exchange gradients", ending.exchange_start_s, ending.exchange_end_s),
            ("update", ending.update_start_s, ending.update_end_s),
        )
        events += [_complete(stage, thread, name, "once", *span) for name, *span in spans if span[1] > span[0]]
    return events


def _messages(step: StepSimulation) -> list[dict[str, Any]]:
    events = []
    threads: dict[tuple[Actor, Actor], int] = {}
    used: dict[int, int] = {}
    for message in step.step.messages:
        stage, link = message.source.stage, (message.source, message.target)
        if link not in threads:
            first = 2 * _groups(step, stage)
            threads[link] = first + used.get(stage, 0)
            used[stage] = used.get(stage, 0) + 1
            name = f"{_group(step, message.source)} to {actor_label(step.plan, message.target)}"
            events.append(_named("thread_name", stage, threads[link], name))
        if message.end_s > message.start_s:
            kind = "activations" if message.action.kind == "F" else "gradient"
            event = _complete(stage, threads[link], str(message.action), kind, message.start_s, message.end_s)
            event["args"] = {
                "microbatch": message.action.microbatch,
                "waited for the link us": _us(message.start_s - message.ready_s),
                "arrives us": _us(message.arrival_s),
            }
            events.append(event)
    return events


def _memory(step: StepSimulation) -> list[dict[str, Any]]:
    events = []
    for curve in step.memory:
        name = f"{_group(step, curve.actor)} memory of a device"
        for time_s, size in zip(curve.times_s, curve.bytes, strict=True):
            stage, group = curve.actor
            event = {"name": name, "cat": "memory", "ph": "C", **_ids(stage, group), "ts": _us(time_s)}
            events.append(event | {"args": {"bytes": size}})
    return events


def _group(step: StepSimulation, actor: Actor) -> str:
    return step.plan.stages[device_stages(step.plan)[actor.stage][0]].groups[actor.group].name


def _groups(step: StepSimulation, stage: int) -> int:
    return len(step.plan.stages[device_stages(step.plan)[stage][0]].groups)


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return _metadata(what, process, thread, {"name": name})


def _metadata(what: str, process: int, thread: int, given: dict[str, Any]) -> dict[str, Any]:
    return {"name": what, "cat": "__metadata", "ph": "M", "ts": 0, **_ids(process, thread), "args": given}


def _complete(process: int, thread: int, name: str, category: str, start_s: float, end_s: float) -> dict[str, Any]:
    start_us = _us(start_s)
    length_us = max(_us(end_s) - start_us, 0.0)
    return {"name": name, "cat": category, "ph": "X", **_ids(process, thread), "ts": start_us, "dur": length_us}


def _ids(process: int, thread: int) -> dict[str, int]:
    """Counted from 1: to viewers 0 is the idle process, which some leave out."""
    return {"pid": process + 1, "tid": thread + 1}


def _us(time_s: float) -> float:
    """Microseconds in whole 64ths, whose sums are exact. Viewers add start and duration, some after cutting each to
    whole nanoseconds; of an event that ends the least bit after the next one begins they make a parent of that one."""
    time_us = time_s * 1e6
    return round(time_us * 64) / 64 if time_us < 2**46 else time_us  # floats above have no smaller parts

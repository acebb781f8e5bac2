"""Estimates as text: one in full, several side by side."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from costmodel.units import format_bytes, format_seconds
from planner.estimating import Estimate
from planner.report.table import format_table
from planner.strategy.memory import StageMemory
from planner.strategy.strategy import Strategy

HEADINGS = ("Step", "Memory of each device", "Strategies, fastest first")

_PARTS = {
    "compute_s": "compute of the slowest stage, what is recomputed included",
    "communication_s": "its collectives of tensor, context and parameter sharding that nothing hides",
    "sends_s": "sends between stages that are waited for",
    "bubble_s": "waiting for other stages",
    "gradients_s": "gradient reduction that nothing hides",
    "optimizer_s": "optimizer update",
    "overhead_s": "the software stack: per step, per microbatch, the slowest of many nodes",
}


def render_estimate(estimate: Estimate) -> str:
    """The whole estimate of one strategy."""
    parts = ["\n".join(_head(estimate)), f"Step\n{_breakdown(estimate)}", f"Memory of each device\n{_memory(estimate)}"]
    sources = ", ".join(f"{name} {source}" for name, source in estimate.provenance.items())
    return "\n\n".join([*parts, f"figures: {sources}; stack: {estimate.stack}"]) + "\n"


def render_comparison(estimates: Sequence[Estimate]) -> str:
    """Several strategies, the fastest that fits first."""
    rows = []
    for one in sorted(estimates, key=lambda e: (not e.fits, e.step_time_s)):
        rows.append(
            (
                strategy_words(one.strategy),
                format_seconds(one.step_time_s),
                f"{100 * one.mfu:.1f}%",
                _rate(one),
                format_bytes(one.memory.peak_bytes),
                "yes" if one.fits else "no",
            )
        )
    table = format_table(("strategy", "step", "MFU", "per device", "peak memory", "fits"), rows, right=(1, 2, 3, 4))
    return f"Strategies, fastest first\n{table}\n"


def strategy_words(strategy: Strategy) -> str:
    """What differs from the defaults, as text that `parse_strategy` reads."""
    words = []
    for field in dataclasses.fields(Strategy):
        value = getattr(strategy, field.name)
        if value != field.default or field.name in ("dp", "microbatch"):
            words.append(f"{field.name}={_word(value)}")
    return ",".join(words)


def document(estimate: Estimate) -> dict[str, Any]:
    """The estimate as one JSON document."""
    return {
        "strategy": dataclasses.asdict(estimate.strategy),
        "global_batch": estimate.global_batch,
        "microbatches": estimate.microbatches,
        "devices": estimate.devices,
        "step_time_s": estimate.step_time_s,
        "error_bar_s": list(estimate.error_bar),
        "breakdown": {name: getattr(estimate.breakdown, name) for name in _PARTS},
        "fits": estimate.fits,
        "peak_memory_bytes": estimate.memory.peak_bytes,
        "memory": [_stage_document(stage) for stage in estimate.memory],
        "examples_per_s": estimate.examples_per_s,
        "tokens_per_s_per_device": estimate.tokens_per_s_per_device,
        "mfu": estimate.mfu,
        "stack": estimate.stack,
        "provenance": estimate.provenance,
    }


def _stage_document(stage: StageMemory) -> dict[str, Any]:
    return {**dataclasses.asdict(stage), "peak_bytes": stage.peak_bytes, "fits": stage.fits}


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _head(estimate: Estimate) -> Iterator[str]:
    low, high = estimate.error_bar
    yield strategy_words(estimate.strategy)
    yield (
        f"step time {format_seconds(estimate.step_time_s)} ({format_seconds(low)} to {format_seconds(high)}), "
        f"{estimate.microbatches} x {estimate.strategy.microbatch} examples on each of {estimate.strategy.dp} "
        f"replicas, {estimate.devices} devices"
    )
    share = f"MFU {100 * estimate.mfu:.1f}%"
    yield f"throughput {estimate.examples_per_s:.3g} examples/s, {_rate(estimate)} a device, {share}"
    worst = estimate.memory.worst_stage
    stage = estimate.memory[worst]
    size = f"stage {worst} needs {format_bytes(stage.peak_bytes)} of {format_bytes(stage.limit_bytes)} a device"
    if estimate.fits:
        yield f"fits: {size}"
    else:
        yield f"does not fit: {size}, {format_bytes(stage.peak_bytes - stage.limit_bytes)} more than it has"


def _rate(estimate: Estimate) -> str:
    if estimate.tokens_per_s_per_device is None:
        return f"{estimate.examples_per_s / estimate.devices:.3g} examples/s"
    return f"{estimate.tokens_per_s_per_device:.0f} tokens/s"


def _breakdown(estimate: Estimate) -> str:
    rows = []
    for name, meaning in _PARTS.items():
        time_s = getattr(estimate.breakdown, name)
        if time_s > 0.0:
            rows.append((format_seconds(time_s), f"{100 * time_s / estimate.step_time_s:.1f}%", meaning))
    return format_table(("seconds", "share", "what"), rows, right=(0, 1))


def _memory(estimate: Estimate) -> str:
    columns = (
        ("parameters", "parameters_bytes"),
        ("gradients", "gradients_bytes"),
        ("optimizer", "optimizer_bytes"),
        ("saved", "saved_bytes"),
        ("transient", "transient_bytes"),
        ("buffers", "buffers_bytes"),
        ("fragmentation", "fragmentation_bytes"),
        ("reserve", "reserve_bytes"),
    )
    shown = [(title, name) for title, name in columns if any(getattr(s, name) for s in estimate.memory)]
    rows = [
        (
            str(at),
            *(format_bytes(getattr(stage, name)) for _, name in shown),
            f"{stage.in_flight:g}",
            format_bytes(stage.peak_bytes),
            format_bytes(stage.limit_bytes),
        )
        for at, stage in enumerate(estimate.memory)
    ]
    header = ("stage", *(title for title, _ in shown), "in flight", "peak", "device has")
    return format_table(header, rows, right=tuple(range(1, len(header))))

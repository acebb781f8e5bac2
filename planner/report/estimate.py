"""Estimates as text: one in full, several side by side."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from costmodel.units import format_bytes, format_seconds
from planner.compile_check import CompiledGroup
from planner.estimating import Estimate
from planner.planfile.schema import Finding
from planner.report.table import format_table
from planner.report.text import format_findings
from planner.strategy.memory import StageMemory
from planner.strategy.strategy import Strategy

_COMPARED = "Strategies, fastest first, those that do not fit last"
HEADINGS = ("Step", "Memory of each device", "Compiled", _COMPARED, "Findings")

_COUNTED = {
    "program": "memory as one program has it, whose compiler computes again what it need not keep",
    "blocks": "memory counted block by block, with all that each keeps",
}

_MARKS = {"program": " ", "blocks": "*"}
"""Of memory figures where both kinds stand in one table."""

_PARTS = {
    "compute_s": "compute of the slowest stage, what is recomputed included",
    "communication_s": "its collectives of tensor, context and parameter sharding that nothing hides",
    "sends_s": "sends between stages that are waited for",
    "bubble_s": "waiting for other stages",
    "gradients_s": "gradient reduction that nothing hides",
    "optimizer_s": "optimizer update",
    "overhead_s": "the software stack: per step, per microbatch, the slowest of many nodes",
}


def render_estimate(estimate: Estimate, compiled: Sequence[CompiledGroup] = (), said: Sequence[Finding] = ()) -> str:
    """The whole estimate of one strategy, and what compilers say of its plan where they were asked.

    Args:
        said: findings of what they say.
    """
    parts = ["\n".join(_head(estimate)), f"Step\n{_breakdown(estimate)}", f"Memory of each device\n{_memory(estimate)}"]
    if compiled:
        parts.append(f"Compiled\n{_compiled(compiled)}")
    sources = ", ".join(f"{name} {source}" for name, source in estimate.provenance.items())
    if findings := (*said, *estimate.findings):
        parts.append(f"Findings\n{format_findings(findings)}")
    counted = _COUNTED[estimate.memory_model]
    return "\n\n".join([*parts, f"figures: {sources}; {counted}; stack: {estimate.stack}"]) + "\n"


def render_comparison(
    estimates: Sequence[Estimate],
    compiled: Sequence[Sequence[CompiledGroup]] = (),
    said: Sequence[Sequence[Finding]] = (),
    constants: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Several strategies, the fastest that fits first; then what compilers say of each, in the order given.

    Args:
        said: findings of what they say, of each strategy.
        constants: of the software stack, that were given with each strategy.
    """
    names = [strategy_words(one.strategy) for one in estimates]
    for i, given in enumerate(constants):
        names[i] = ",".join([names[i], *(f"{key}={value}" for key, value in given.items())])
    rows = []
    mixed = len({one.memory_model for one in estimates}) > 1
    for name, one in sorted(
        zip(names, estimates, strict=True), key=lambda pair: (not pair[1].fits, pair[1].step_time_s)
    ):
        rows.append(
            (
                name,
                format_seconds(one.step_time_s),
                f"{100 * one.mfu:.1f}%",
                _rate(one),
                format_bytes(one.memory.peak_bytes) + (_MARKS[one.memory_model] if mixed else ""),
                "yes" if one.fits else "no",
            )
        )
    table = format_table(("strategy", "step", "MFU", "per device", "peak memory", "fits"), rows, right=(1, 2, 3, 4))
    if mixed:
        notes = [f"{_MARKS[model]} {words}".strip() for model, words in _COUNTED.items()]
        table += f"\n{notes[1]}; others: {notes[0]}"
    of_each = said or [()] * len(names)
    asked = "".join(
        f"\nCompiled: {name}\n{_compiled(groups)}\n{_lines(found)}"
        for name, groups, found in zip(names, compiled, of_each, strict=False)
        if groups
    )
    findings = tuple({finding: None for one in estimates for finding in one.findings})  # each once, in order
    listed = f"\nFindings\n{_lines(findings)}" if findings else ""
    return f"{_COMPARED}\n{table}\n{listed}{asked}"


def _lines(findings: Sequence[Finding]) -> str:
    return f"{format_findings(tuple(findings))}\n" if findings else ""


def strategy_words(strategy: Strategy) -> str:
    """What differs from the defaults, as text that `parse_strategy` reads."""
    words = []
    for field in dataclasses.fields(Strategy):
        value = getattr(strategy, field.name)
        if value != field.default or field.name in ("dp", "microbatch"):
            words.append(f"{field.name}={_word(value)}")
    return ",".join(words)


def document(
    estimate: Estimate, compiled: Sequence[CompiledGroup] = (), said: Sequence[Finding] = ()
) -> dict[str, Any]:
    """The estimate as one JSON document, with compilers' figures, and findings of these, where they were asked."""
    asked = {"compiled": [_compiled_document(group) for group in compiled]} if compiled else {}
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
        "memory_model": estimate.memory_model,
        "findings": [msgspec.to_builtins(finding) for finding in (*said, *estimate.findings)],
        **asked,
    }


def _compiled_document(group: CompiledGroup) -> dict[str, Any]:
    return {
        "stage": group.stage,
        "group": group.group,
        "kind": group.kind,
        "compiler": group.platform,
        "substitute": group.substitute,
        "planned_bytes": group.planned_bytes,
        "compiled_bytes": group.memory_bytes,
        "outside_bytes": group.outside_bytes,
        "limit_bytes": group.limit_bytes,
        "planned_collectives": {name: moved.bytes for name, moved in group.planned_collectives.items()},
        "compiled_collectives": None
        if group.compiled_collectives is None
        else {name: moved.bytes for name, moved in group.compiled_collectives.items()},
        "failures": [failure.message for failure in group.failures],
    }


def _compiled(groups: Sequence[CompiledGroup]) -> str:
    """What a device takes as planned and as compiled, and the bytes that collectives move in a step."""
    rows = []
    for group in groups:
        found, moved = group.memory_bytes, group.compiled_collectives
        planned = sum(one.bytes for one in group.planned_collectives.values())
        why = group.failures[0].message if group.failures else "unknown"
        rows.append(
            (
                str(group.stage),
                group.kind if not group.substitute else f"{group.kind} (by the CPU's compiler)",
                format_bytes(group.planned_bytes),
                format_bytes(found) if found is not None else why,
                f"{100 * group.deviation:+.1f}%" if group.deviation is not None else "",
                format_bytes(planned),
                format_bytes(sum(one.bytes for one in moved.values())) if moved is not None else "unknown",
            )
        )
    header = ("stage", "kind", "planned", "compiled", "off by", "moved, planned", "moved, compiled")
    return format_table(header, rows, right=(2, 3, 4, 5, 6))


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
            " and ".join(stage.kinds),
        )
        for at, stage in enumerate(estimate.memory)
    ]
    header = ("stage", *(title for title, _ in shown), "in flight", "peak", "device has", "kind")
    return format_table(header, rows, right=tuple(range(1, len(header) - 1)))

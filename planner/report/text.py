"""An explanation as plain text: no colour, no box characters, so that it reads the same in a file or a pipe."""

import textwrap
from collections.abc import Iterator

from costmodel.units import format_bytes, format_seconds
from planner.planfile.schema import Finding
from planner.report.explain import Explanation, StageRow
from planner.report.table import format_table
from planner.report.words import GLOSSARY

WIDTH = 112
MOST_MEMORY_ROWS = 8
MOST_COMMUNICATION_ROWS = 8
MOST_SLACK_ROWS = 16


def render_text(explanation: Explanation) -> str:
    """Every section, ending in a newline."""
    sections = (
        ("", "\n".join(_head(explanation))),
        ("Stages", _stages(explanation)),
        ("Schedule", "\n".join(_schedule(explanation))),
        ("Step time", _time(explanation)),
        ("Memory per device, worst first", _memory(explanation)),
        ("Communication in a step, longest first", _communication(explanation)),
        ("Baselines, by the same cost model", _baselines(explanation)),
        ("Certificate", "\n".join(_bullets(explanation.certificate))),
        ("Findings", format_findings(explanation.findings)),
        ("Where the figures come from", _provenance(explanation)),
        ("Words", "\n".join(_definitions(explanation.glossary))),
    )
    return "\n\n".join(f"{title}\n\n{body}" if title else body for title, body in sections if body) + "\n"


def render_summary(explanation: Explanation) -> str:
    """One screen: head line, stages, worst memory, certificate; no newline at the end."""
    worst = explanation.memory[0] if explanation.memory else None
    lines = [*_head(explanation), "", _stages(explanation), ""]
    if any(row.binds for row in explanation.stages):
        lines.append(f"* {GLOSSARY['binds'].replace(' (*)', '')}")
    if worst is not None:
        total, limit = format_bytes(worst.total_bytes), format_bytes(worst.limit_bytes)
        lines.append(f"worst memory: stage {worst.label}, {total} of {limit} a device")
    lines += [*_wrap(explanation.certificate[0]), *_baseline_line(explanation)]
    errors = sum(finding.severity != "note" for finding in explanation.findings)
    if errors:
        lines.append(f"{errors} finding{'s' if errors > 1 else ''}: meshplan explain shows them")
    return "\n".join(lines)


def format_findings(findings: tuple[Finding, ...]) -> str:
    """One paragraph a finding."""
    lines = []
    for finding in findings:
        lines += _wrap(f"{finding.severity} {finding.code}: {finding.message}", hang="  ")
        if finding.hint:
            lines += _wrap(f"hint: {finding.hint}", lead="  ", hang="  ")
    return "\n".join(lines)


def _head(explanation: Explanation) -> Iterator[str]:
    yield f"Plan {explanation.plan.name}"
    for line in explanation.headline:
        yield from _wrap(line, lead="  ", hang="    ")


def _stages(explanation: Explanation) -> str:
    header = ("stage", "blocks", "devices", "kind", "mesh", "degrees", "remat", "microbatches", "F", "B", "once")
    several = any(len(stage.groups) > 1 for stage in explanation.plan.stages)
    rows = [_stage_cells(row, several) for row in explanation.stages]
    table = format_table(header, rows, right=(7, 8, 9, 10))
    return f"{' '.join(explanation.degrees)}\n{table}" if explanation.degrees else table


def _stage_cells(row: StageRow, several: bool) -> tuple[str, ...]:
    return (
        f"{row.stage}{' ' + row.group if several else ''}{'*' if row.binds else ''}",
        _short(", ".join(row.blocks), 40),
        _short(" ".join(row.devices), 36),
        row.kind,
        " ".join(f"{name}={size}" for name, size in row.mesh if size > 1) or "-",
        " ".join(row.degrees) or "-",
        row.remat,
        str(row.microbatches),
        format_seconds(row.forward_s),
        format_seconds(row.backward_s),
        format_seconds(row.once_s),
    )


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


def _schedule(explanation: Explanation) -> Iterator[str]:
    """Warm-up counts in a line, and how much later messages may arrive."""
    if explanation.warm_ups:
        several = any(len(stage.groups) > 1 for stage in explanation.plan.stages)
        counts = [
            f"{row.warm_up} on stage {row.label}{' ' + row.group if several else ''}" for row in explanation.warm_ups
        ]
        yield from _wrap(f"forwards before the first backward: {', '.join(counts)}", hang="  ")
    if explanation.slack:
        header = ("between", "one way", "later without any cost", "without a longer period")
        rows = [
            (
                row.where,
                format_seconds(row.delay_s),
                format_seconds(row.free_s),
                "any delay" if row.absorbs_s is None else format_seconds(row.absorbs_s),
            )
            for row in explanation.slack[:MOST_SLACK_ROWS]
        ]
        yield format_table(header, rows, right=(1, 2, 3))
        rest = len(explanation.slack) - MOST_SLACK_ROWS
        if rest > 0:
            yield f"({rest} more)"


def _time(explanation: Explanation) -> str:
    rows = [(row.part, format_seconds(row.time_s), f"{row.share:.1%}") for row in explanation.time]
    step_s = explanation.plan.prediction.step_time_s
    rows.append(("step", format_seconds(step_s), "100.0%"))
    return format_table(("part", "time", "share"), rows, right=(1, 2))


def _memory(explanation: Explanation) -> str:
    if not explanation.memory:
        return ""
    items = [name for name in explanation.memory[0].items if any(row.items[name] for row in explanation.memory)]
    rows = []
    several = any(len(stage.groups) > 1 for stage in explanation.plan.stages)
    for row in explanation.memory[:MOST_MEMORY_ROWS]:
        label = f"{row.label}{' ' + row.group if several else ''}"
        counts = [format_bytes(row.items[name]) for name in items]
        total = [format_bytes(row.total_bytes), format_bytes(row.limit_bytes), format_bytes(row.headroom_bytes)]
        rows.append((label, *counts, *total, str(row.in_flight)))
    header = ("stage", *items, "total", "limit", "headroom", "in flight")
    table = format_table(header, rows, right=range(1, len(header)))
    rest = len(explanation.memory) - MOST_MEMORY_ROWS
    return table + (f"\n({rest} more groups with more headroom)" if rest > 0 else "")


def _communication(explanation: Explanation) -> str:
    rows = [
        (row.where, row.phase, format_seconds(row.time_s), row.what)
        for row in explanation.communication[:MOST_COMMUNICATION_ROWS]
    ]
    if not rows:
        return "none"
    table = format_table(("where", "phase", "time", "what"), rows, right=(2,))
    rest = explanation.communication[MOST_COMMUNICATION_ROWS:]
    return table + (f"\n({len(rest)} more, {format_seconds(sum(row.time_s for row in rest))} together)" if rest else "")


def _baselines(explanation: Explanation) -> str:
    if not explanation.baselines:
        return ""
    step_s = explanation.plan.prediction.step_time_s
    peak = explanation.plan.prediction.peak_memory_bytes
    rows = [("this plan", format_seconds(step_s), "1.00x", format_bytes(peak), "")]
    for row in explanation.baselines:
        memory = format_bytes(row.peak_memory_bytes) if row.peak_memory_bytes is not None else "-"
        time = format_seconds(row.step_time_s) if row.step_time_s is not None else "-"
        ratio = f"{row.ratio:.2f}x" if row.ratio is not None else "does not fit" if not row.feasible else "-"
        text = row.description + (f"; {row.reason}" if row.reason else "")
        rows.append((row.name, time, ratio, memory, text))
    return format_table(("configuration", "step time", "ratio", "peak memory", "what it is"), rows, right=(1, 2, 3))


def _baseline_line(explanation: Explanation) -> Iterator[str]:
    best = min(
        (row for row in explanation.baselines if row.ratio is not None), key=lambda row: row.ratio or 0, default=None
    )
    if best is not None:
        yield f"best baseline: {best.name} takes {best.ratio:.2f} times as long"
    elif explanation.baselines:
        yield f"none of the {len(explanation.baselines)} baselines fits"


def _provenance(explanation: Explanation) -> str:
    rows = [(figure, word, meaning) for figure, word, meaning in explanation.provenance]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(explanation.plan.versions.items()))
    table = format_table(("figure", "provenance", "meaning"), rows) if rows else ""
    return "\n".join(part for part in (table, f"made with {versions}" if versions else "") if part)


def _bullets(lines: tuple[str, ...]) -> Iterator[str]:
    for line in lines:
        yield from _wrap(line, lead="- ", hang="  ")


def _definitions(words: tuple[tuple[str, str], ...]) -> Iterator[str]:
    width = max((len(word) for word, _ in words), default=0)
    for word, meaning in words:
        yield from _wrap(f"{word:<{width}}  {meaning}", hang=" " * (width + 2))


def _wrap(text: str, lead: str = "", hang: str = "") -> list[str]:
    """Lines of at most WIDTH; line breaks of the text stay (a schedule's grid keeps its form)."""
    lines: list[str] = []
    for at, part in enumerate(text.split("\n")):
        if at:
            lines.append(hang + part)
        else:
            lines += textwrap.wrap(
                part, WIDTH, initial_indent=lead, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False
            )
    return lines

"""A simulated step as HTML: pictures and tables in one file, without scripts or outside resources.

Colours are chosen to be read on light and on dark ground; a page follows the reader's setting, a notebook's cell its
surroundings.
"""

from collections.abc import Sequence
from html import escape

from costmodel.units import format_bytes, format_seconds
from planner.device_stages import stages_words
from planner.report.gantt import draws_each, whole, windows
from planner.report.step_text import MOST_ROWS, misfit_words, step_time_words
from planner.simulation import StepSimulation, path_words

_STYLE = """
.meshplan-step { font: 13px/1.4 sans-serif; }
.meshplan-step h3 { font-size: 15px; margin: 16px 0 4px; }
.meshplan-step table { border-collapse: collapse; }
.meshplan-step th, .meshplan-step td { text-align: left; padding: 2px 14px 2px 0; white-space: nowrap; }
.meshplan-step th { border-bottom: 1px solid #8888; font-weight: 600; }
.meshplan-step .n { text-align: right; font-variant-numeric: tabular-nums; }
.meshplan-step .pic { overflow-x: auto; margin: 4px 0; }
.meshplan-step svg { display: block; }
.meshplan-step svg text { font: 11px sans-serif; fill: currentColor; }
.meshplan-step svg text.in { font-size: 10px; fill: #fff; pointer-events: none; }
.meshplan-step .f { fill: #3d6fc4; } .meshplan-step .b { fill: #2b8a57; } .meshplan-step .w { fill: #a8741a; }
.meshplan-step .o { fill: #8b5fb0; } .meshplan-step .u { fill: #777; }
.meshplan-step rect.f, .meshplan-step rect.b, .meshplan-step rect.w { stroke: #fff; stroke-width: 0.4; }
.meshplan-step rect.v { opacity: 0.72; }
.meshplan-step rect.c { stroke: #e8590c; stroke-width: 1.6; }
.meshplan-step rect.tip { fill: transparent; stroke: none; }
.meshplan-step rect:hover { opacity: 0.75; } .meshplan-step rect.tip:hover { fill: #8885; opacity: 1; }
.meshplan-step .mem { fill: #1098ad; opacity: 0.55; }
.meshplan-step .limit { stroke: #e03131; fill: none; }
.meshplan-step .m { stroke: currentColor; stroke-width: 0.6; opacity: 0.35; fill: none; }
.meshplan-step .path { stroke: #e8590c; stroke-width: 1.3; fill: none; }
.meshplan-step .grid { stroke: currentColor; opacity: 0.18; fill: none; }
.meshplan-step .rule { stroke: currentColor; opacity: 0.3; stroke-width: 0.5; fill: none; }
.meshplan-step .key { display: inline-block; width: 11px; height: 11px; margin: 0 4px 0 14px; }
.meshplan-step .over, .meshplan-step svg text.over { color: #e03131; fill: #e03131; font-weight: 600; }
.meshplan-step summary { cursor: pointer; margin: 4px 0; }
"""

_KEYS = (
    ("#3d6fc4", "forward"),
    ("#2b8a57", "backward"),
    ("#a8741a", "weight gradient"),
    ("#8b5fb0", "gradient reduction and exchange"),
    ("#777", "update"),
    ("#e8590c", "critical path"),
    ("#1098ad", "activations held; to the right the peak of all memory of a device"),
)


def render_page(step: StepSimulation) -> str:
    """A whole document."""
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
    )
    title = f"<title>{escape(f'meshplan simulate: {step.plan.name}')}</title>"
    style = "<style>body { background: Canvas; color: CanvasText; margin: 16px; }</style>"
    return f"{head}{title}{style}</head><body>{render_html(step)}</body></html>\n"


def render_html(step: StepSimulation) -> str:
    """A ``<div>`` that a notebook or a page can hold."""
    parts = [
        f"<h3>{escape(step.plan.name)}: simulated step</h3>",
        *(f"<div>{line}</div>" for line in _head(step)),
        _section("Timeline and memory", _timeline(step)),
        _section("Stages", _stages(step)),
        _section("What would shorten the step", _what_ifs(step)),
        _section("Critical path", _path(step)),
    ]
    return f'<div class="meshplan-step"><style>{_STYLE}</style>{"".join(parts)}</div>'


def _head(step: StepSimulation) -> list[str]:
    schedule = step.step.schedule
    lines = [f"schedule {schedule.name}, {schedule.microbatches} microbatches, {stages_words(step.plan)}"]
    lines += [f"changed: {words}" for words in step.changes]
    lines.append(step_time_words(step))
    lines += [f"note: {words}" for words in step.notes]
    found = [escape(line) for line in lines]
    found += [f'<span class="over">{escape(words)}</span>' for words in misfit_words(step)]
    return found


def _section(title: str, body: str) -> str:
    return f"<h3>{title}</h3>{body}" if body else ""


def _timeline(step: StepSimulation) -> str:
    if step.makespan_s <= 0 or step.step.pipeline_s <= 0:
        return "<div>the plan has no times to show</div>"
    split = step.step.schedule.splits_backward
    keys = "".join(
        f'<span class="key" style="background:{colour}"></span>{words}'
        for colour, words in _KEYS
        if split or words != "weight gradient"
    )
    parts = [f"<div>{keys}</div>", f'<div class="pic">{whole(step)}</div>']
    if not draws_each(step):
        parts.append("<div>Heights are shares of time. Point at the picture for figures.</div>")
        for at, (title, picture) in enumerate(windows(step)):
            opened = " open" if at == 0 else ""
            parts.append(f'<details{opened}><summary>{title}</summary><div class="pic">{picture}</div></details>')
    if step.step.schedule.stages > len({row.stage for row in step.step.schedule.actions}):
        parts.append("<div>Every second stage of a set of devices is paler.</div>")
    return "".join(parts)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: int) -> str:
    """A table of texts; the last `numbers` columns are figures."""
    first = len(header) - numbers

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="n">{escape(text)}</{tag}>' if at >= first else f"<{tag}>{escape(text)}</{tag}>"
            for at, text in enumerate(cells)
        )

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{line('th', header)}</tr></thead><tbody>{body}</tbody></table>"


def _stages(step: StepSimulation) -> str:
    rows = [
        (
            row.label,
            str(row.microbatches),
            format_seconds(row.busy_s),
            format_seconds(row.bubble_s),
            f"{row.bubble_share:.1%}",
            format_seconds(row.end_s),
            str(row.in_flight),
            format_bytes(row.peak_bytes),
            format_bytes(row.limit_bytes) if row.limit_bytes else "-",
        )
        for row in step.groups
    ]
    header = ("group", "microbatches", "busy", "bubble", "share", "ends at", "in flight", "peak memory", "limit")
    table = _table(header, rows, 8)
    return table if len(rows) <= MOST_ROWS else f"<details><summary>{len(rows)} groups</summary>{table}</details>"


def _path(step: StepSimulation) -> str:
    rows = [
        (path_words(step.plan, share), str(share.count), format_seconds(share.time_s), _share(step, share.time_s))
        for share in step.path
    ]
    header = ("what", "times", "time", "of the step")
    if len(rows) <= MOST_ROWS:
        return _table(header, rows, 3)
    rest = f"<details><summary>{len(rows) - 10} more</summary>{_table(header, rows[10:], 3)}</details>"
    return _table(header, rows[:10], 3) + rest


def _what_ifs(step: StepSimulation) -> str:
    rows = [
        (entry.what, format_seconds(entry.makespan_s), format_seconds(entry.gain_s), _share(step, entry.gain_s))
        for entry in step.what_ifs
    ]
    return _table(("if", "step time", "saves", "of the step"), rows, 3) if rows else ""


def _share(step: StepSimulation, time_s: float) -> str:
    return f"{time_s / step.makespan_s:.1%}" if step.makespan_s > 0 else "-"

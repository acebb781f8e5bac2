"""An explanation as one piece of HTML for notebooks: tables, memory bars, a schedule in SVG. No script, one file."""

from collections.abc import Iterator, Sequence
from html import escape

from costmodel.errors import PlanError
from costmodel.simulate import Simulation
from costmodel.units import format_bytes, format_seconds
from planner.device_stages import actor_label
from planner.report.explain import Explanation, StageRow
from planner.report.timeline import run_schedule

MOST_BARS = 2000
WIDTH, ROW, LABEL = 900, 26, 110
COLOURS = {"F": "#4878cf", "B": "#6acc65", "W": "#d5bb67"}
ITEM_COLOURS = ("#4878cf", "#6acc65", "#d65f5f", "#b47cc7", "#c4ad66", "#77bedb", "#999999")

_STYLE = """
.meshplan { font-family: sans-serif; font-size: 13px; line-height: 1.4; max-width: 960px; }
.meshplan h3 { font-size: 15px; margin: 14px 0 4px; }
.meshplan table { border-collapse: collapse; margin: 0; }
.meshplan th, .meshplan td { text-align: left; padding: 2px 10px 2px 0; vertical-align: top; white-space: nowrap; }
.meshplan th { border-bottom: 1px solid #8888; font-weight: 600; }
.meshplan td.number, .meshplan th.number { text-align: right; font-variant-numeric: tabular-nums; }
.meshplan td.wrap { white-space: normal; }
.meshplan .bar { display: flex; height: 14px; width: 420px; border: 1px solid #8888; }
.meshplan .key { display: inline-block; width: 10px; height: 10px; margin: 0 4px 0 10px; }
.meshplan svg text { font-size: 11px; fill: currentColor; }
.meshplan .error { color: #c0392b; } .meshplan .warning { color: #b9770e; }
"""


def render_html(explanation: Explanation) -> str:
    """A ``<div>`` that a notebook or a page can hold."""
    parts = [
        f"<h3>Plan {escape(explanation.plan.name)}</h3>",
        "".join(f"<div>{escape(line)}</div>" for line in explanation.headline),
        _section("Stages", _stages(explanation)),
        _section("Schedule", _schedule(explanation)),
        _section("Delay that links absorb", _slack(explanation)),
        _section("Step time", _time(explanation)),
        _section("Memory per device, worst first", _memory(explanation)),
        _section("Baselines, by the same cost model", _baselines(explanation)),
        _section("Certificate", _list(explanation.certificate)),
        _section("Findings", "".join(_findings(explanation))),
        _section("Where the figures come from", _provenance(explanation)),
    ]
    return f'<div class="meshplan"><style>{_STYLE}</style>{"".join(parts)}</div>'


def render_page(explanation: Explanation) -> str:
    """A whole HTML document."""
    title = escape(f"meshplan: {explanation.plan.name}")
    head = f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>'
    return f"{head}<body>{render_html(explanation)}</body></html>\n"


def _section(title: str, body: str) -> str:
    return f"<h3>{title}</h3>{body}" if body else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = (), wrap: int = -1) -> str:
    """A table of cells that are HTML already."""

    def cell(tag: str, at: int, text: str) -> str:
        name = "number" if at in numbers else "wrap" if at == wrap and tag == "td" else ""
        return f'<{tag} class="{name}">{text}</{tag}>' if name else f"<{tag}>{text}</{tag}>"

    head = "".join(cell("th", at, escape(text)) for at, text in enumerate(header))
    body = "".join(f"<tr>{''.join(cell('td', at, text) for at, text in enumerate(row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _stages(explanation: Explanation) -> str:
    header = ("stage", "blocks", "devices", "kind", "mesh", "degrees", "remat", "microbatches", "F", "B", "once")
    several = any(len(stage.groups) > 1 for stage in explanation.plan.stages)
    rows = [tuple(escape(text) for text in _cells(row, several)) for row in explanation.stages]
    return _table(header, rows, numbers=(7, 8, 9, 10))


def _cells(row: StageRow, several: bool) -> tuple[str, ...]:
    return (
        f"{row.stage}{' ' + row.group if several else ''}{' *' if row.binds else ''}",
        ", ".join(row.blocks),
        " ".join(row.devices),
        row.kind,
        " ".join(f"{name}={size}" for name, size in row.mesh if size > 1) or "-",
        " ".join(row.degrees) or "-",
        row.remat,
        str(row.microbatches),
        format_seconds(row.forward_s),
        format_seconds(row.backward_s),
        format_seconds(row.once_s),
    )


def _slack(explanation: Explanation) -> str:
    header = ("between", "one way", "later without any cost", "without a longer period")
    rows = [
        (
            escape(row.where),
            format_seconds(row.delay_s),
            format_seconds(row.free_s),
            "any delay" if row.absorbs_s is None else format_seconds(row.absorbs_s),
        )
        for row in explanation.slack
    ]
    return _table(header, rows, numbers=(1, 2, 3)) if rows else ""


def _time(explanation: Explanation) -> str:
    rows = [
        (escape(row.part), format_seconds(row.time_s), f"{row.share:.1%}", _bar([(row.part, row.share)]))
        for row in explanation.time
    ]
    return _table(("part", "time", "share", ""), rows, numbers=(1, 2))


def _bar(shares: Sequence[tuple[str, float]]) -> str:
    pieces = []
    for at, (name, share) in enumerate(shares):
        width = 100 * min(max(share, 0.0), 1.0)
        colour = ITEM_COLOURS[at % len(ITEM_COLOURS)]
        pieces.append(f'<div title="{escape(name)}" style="width:{width:.2f}%;background:{colour}"></div>')
    return f'<div class="bar">{"".join(pieces)}</div>'


def _memory(explanation: Explanation) -> str:
    rows = []
    for row in explanation.memory:
        limit = max(row.limit_bytes, row.total_bytes, 1)
        shares = [(f"{name} {format_bytes(count)}", count / limit) for name, count in row.items.items()]
        rows.append(
            (
                f"{row.label} {escape(row.group)}",
                _bar(shares),
                format_bytes(row.total_bytes),
                format_bytes(row.limit_bytes),
                format_bytes(row.headroom_bytes),
            )
        )
    if not rows:
        return ""
    keys = "".join(
        f'<span class="key" style="background:{ITEM_COLOURS[at % len(ITEM_COLOURS)]}"></span>{escape(name)}'
        for at, name in enumerate(explanation.memory[0].items)
    )
    return (
        f"<div>{keys}</div>{_table(('stage', 'of the limit', 'total', 'limit', 'headroom'), rows, numbers=(2, 3, 4))}"
    )


def _schedule(explanation: Explanation) -> str:
    try:
        simulation = run_schedule(explanation.plan)
    except PlanError as error:
        return f'<div class="error">{escape(f"{error.code}: {error.message.splitlines()[0]}")}</div>'
    if len(simulation.timeline) > MOST_BARS:
        words = "too many to draw here: meshplan simulate PLAN --html FILE draws them"
        return f"<div>{len(simulation.timeline)} actions, {words}</div>"
    return _svg(explanation, simulation) if simulation.pipeline_s > 0 else ""


def _svg(explanation: Explanation, simulation: Simulation) -> str:
    scale = WIDTH / simulation.pipeline_s
    rows = {use.actor: at for at, use in enumerate(simulation.actors)}
    height = ROW * len(rows) + 22
    pieces = [
        f'<text x="0" y="{at * ROW + 17}">{escape(actor_label(explanation.plan, actor))}</text>'
        for actor, at in rows.items()
    ]
    for entry in simulation.timeline:
        x, width = LABEL + entry.start_s * scale, max((entry.end_s - entry.start_s) * scale, 0.5)
        y = rows[entry.actor] * ROW + 3
        title = f"{entry.action}: {format_seconds(entry.start_s)} to {format_seconds(entry.end_s)}"
        pieces.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 6}" fill="{COLOURS[entry.action.kind]}" '
            f'stroke="#fff8" stroke-width="0.5"><title>{title}</title></rect>'
        )
        if width > 16:
            pieces.append(f'<text x="{x + 3:.1f}" y="{y + 14}" style="fill:#fff">{entry.action.microbatch}</text>')
    y = height - 5
    pieces.append(f'<text x="{LABEL}" y="{y}">0</text>')
    end = format_seconds(simulation.pipeline_s)
    pieces.append(f'<text x="{LABEL + WIDTH}" y="{y}" text-anchor="end">{end}</text>')
    legend = "forward (blue), backward (green), weight gradient (yellow); numbers are microbatches"
    pieces.append(f'<text x="{LABEL + WIDTH / 2}" y="{y}" text-anchor="middle">{legend}</text>')
    box = f'viewBox="0 0 {LABEL + WIDTH + 4} {height}" width="100%"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {box}>{"".join(pieces)}</svg>'


def _baselines(explanation: Explanation) -> str:
    rows = []
    for row in explanation.baselines:
        time = format_seconds(row.step_time_s) if row.step_time_s is not None else "-"
        ratio = f"{row.ratio:.2f}x" if row.ratio is not None else "-" if row.feasible else "does not fit"
        memory = format_bytes(row.peak_memory_bytes) if row.peak_memory_bytes is not None else "-"
        text = row.description + (f"; {row.reason}" if row.reason else "")
        rows.append((escape(row.name), time, ratio, memory, escape(text)))
    header = ("configuration", "step time", "ratio", "peak memory", "what it is")
    return _table(header, rows, numbers=(1, 2, 3), wrap=4) if rows else ""


def _findings(explanation: Explanation) -> Iterator[str]:
    for finding in explanation.findings:
        hint = f"<br>hint: {escape(finding.hint)}" if finding.hint else ""
        text = f"{finding.severity} {finding.code}: {finding.message}"
        yield f'<div class="{finding.severity}">{escape(text)}{hint}</div>'


def _provenance(explanation: Explanation) -> str:
    rows = [tuple(escape(text) for text in row) for row in explanation.provenance]
    return _table(("figure", "provenance", "meaning"), rows) if rows else ""

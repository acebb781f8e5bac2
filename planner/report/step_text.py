"""A simulated step as text: what changed, stage by stage, what the time is made of, what would help, and a grid."""

from collections.abc import Iterator

from costmodel.units import format_bytes, format_seconds
from planner.device_stages import stages_words
from planner.report.table import format_table
from planner.report.timeline import draw_timeline
from planner.simulation import StepSimulation, path_words

MOST_ROWS = 24  # of a table of groups, and of the grid
MOST_PATH = 8
MOST_MISFITS = 3
HEADINGS = ("Stages", "Critical path", "What would shorten the step", "Timeline")


def render_text(step: StepSimulation, width: int = 110) -> str:
    """The whole report."""
    parts = ["\n".join(_head(step)), f"Stages\n{_stages(step)}", f"Critical path\n{_path(step)}"]
    if step.what_ifs:
        parts.append(f"What would shorten the step\n{_what_ifs(step)}")
    parts.append(f"Timeline\n{_timeline(step, width)}")
    return "\n\n".join(parts) + "\n"


def render_summary(step: StepSimulation) -> str:
    """One screen: the head lines and the stages."""
    return "\n".join(_head(step)) + f"\n\n{_stages(step)}"


def _head(step: StepSimulation) -> Iterator[str]:
    schedule, chunks = step.step.schedule, step.plan.schedule.chunks
    runs = f"{schedule.microbatches} microbatches"
    if chunks > 1:
        runs = f"{schedule.microbatches // chunks} microbatches in {chunks} chunks of the sequence"
    yield f"{step.plan.name}: schedule {schedule.name}, {runs}, {stages_words(step.plan)}"
    for words in step.changes:
        yield f"changed: {words}"
    yield step_time_words(step)
    yield from misfit_words(step)
    for words in step.notes:
        yield f"note: {words}"


def misfit_words(step: StepSimulation) -> Iterator[str]:
    """The groups that need more memory than their devices have, the worst first."""
    over = sorted(
        ((row.peak_bytes - row.limit_bytes, row) for row in step.groups if row.limit_bytes and not row.fits),
        key=lambda entry: (-entry[0], entry[1].stage, entry[1].group),
    )
    for more, row in over[:MOST_MISFITS]:
        yield (
            f"does not fit: {row.label} needs {format_bytes(row.peak_bytes)} a device, "
            f"{format_bytes(more)} more than it has"
        )
    if len(over) > MOST_MISFITS:
        yield f"does not fit: {len(over) - MOST_MISFITS} more groups"


def step_time_words(step: StepSimulation) -> str:
    """The step time beside that without changes, or beside the plan's."""
    text = f"step time {format_seconds(step.makespan_s)}"
    if not step.changes:
        return f"{text}; the plan says {format_seconds(step.plan.prediction.step_time_s)}"
    more_s = step.makespan_s - step.unchanged_s
    if abs(more_s) <= 1e-9 * step.unchanged_s:
        return f"{text}, the same as without changes"
    share = f" ({abs(more_s) / step.unchanged_s:.1%})" if step.unchanged_s > 0 else ""
    word = "more" if more_s > 0 else "less"
    return (
        f"{text}, {format_seconds(abs(more_s))}{share} {word} than {format_seconds(step.unchanged_s)} without changes"
    )


def _stages(step: StepSimulation) -> str:
    header = ("stage", "microbatches", "busy", "bubble", "share", "ends at", "in flight", "peak memory", "of limit")
    rows = []
    for row in step.groups:
        limit = f"{row.peak_bytes / row.limit_bytes:.1%}" if row.limit_bytes else "-"
        rows.append(
            (
                row.label.removeprefix("stage "),
                str(row.microbatches),
                format_seconds(row.busy_s),
                format_seconds(row.bubble_s),
                f"{row.bubble_share:.1%}",
                format_seconds(row.end_s),
                str(row.in_flight),
                format_bytes(row.peak_bytes),
                limit if row.fits else f"{limit} !",
            )
        )
    if len(rows) > MOST_ROWS:
        half = MOST_ROWS // 2
        rows = [*rows[:half], (f"{len(rows) - 2 * half} more", *("...",) * 8), *rows[-half:]]
    return format_table(header, rows, right=range(1, 9))


def _path(step: StepSimulation) -> str:
    shown = step.path[:MOST_PATH]
    rows = [
        (path_words(step.plan, share), str(share.count), format_seconds(share.time_s), _share(step, share.time_s))
        for share in shown
    ]
    rest = step.path[MOST_PATH:]
    if rest:
        rest_s = sum(share.time_s for share in rest)
        count = str(sum(share.count for share in rest))
        rows.append((f"{len(rest)} others", count, format_seconds(rest_s), _share(step, rest_s)))
    return format_table(("what", "times", "time", "of the step"), rows, right=(1, 2, 3))


def _what_ifs(step: StepSimulation) -> str:
    rows = [
        (entry.what, format_seconds(entry.makespan_s), format_seconds(entry.gain_s), _share(step, entry.gain_s))
        for entry in step.what_ifs
    ]
    return format_table(("if", "step time", "saves", "of the step"), rows, right=(1, 2, 3))


def _share(step: StepSimulation, time_s: float) -> str:
    return f"{time_s / step.makespan_s:.1%}" if step.makespan_s > 0 else "-"


def _timeline(step: StepSimulation, width: int) -> str:
    lines = draw_timeline(
        step.step, {use.actor: row.label for use, row in zip(step.step.actors, step.groups, strict=True)}, width
    ).splitlines()
    rows = len(step.groups)
    if MOST_ROWS < rows < len(lines):
        half = MOST_ROWS // 2
        lines = [*lines[:half], f"({rows - 2 * half} more rows)", *lines[rows - half :]]
    return "\n".join(lines)

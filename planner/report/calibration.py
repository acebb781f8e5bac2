"""A calibration as text and as a document."""

import dataclasses
from typing import Any

import msgspec
import numpy as np

from costmodel.units import format_seconds
from planner.calibrating import Calibrated
from planner.report.estimate import strategy_words
from planner.report.table import format_table
from planner.report.text import format_findings

HEADINGS = ("Error of the step time", "Constants", "Runs", "Findings")

_WHICH = (("before", "before"), ("after", "fitted to all runs"), ("held_out", "fitted to the other runs"))


def render_calibration(found: Calibrated) -> str:
    """What was fitted, and how near each run is."""
    verdict = f"the {found.stack.name} constants hold nine of ten runs within {_percent(found.stack.error, width=True)}"
    if not found.improved:
        verdict = (
            "runs that were held out are predicted no better than before: "
            f"the constants of {found.base} are kept, with the error bar of these runs\n{verdict}"
        )
    head = (
        f"{len(found.runs)} runs of {found.source}, held out in {found.parts} parts; from the constants of {found.base}"
    )
    sections = [f"{head}\n{verdict}", f"Error of the step time\n{_errors(found)}"]
    if found.fitted:
        sections.append(f"Constants\n{_constants(found)}")
    sections.append(f"Runs\n{_runs(found)}")
    if found.findings:
        sections.append(f"Findings\n{format_findings(found.findings)}")
    return "\n\n".join(sections) + "\n"


def document(found: Calibrated) -> dict[str, Any]:
    """The same as one JSON document."""
    return {
        "stack": msgspec.to_builtins(found.stack),
        "fitted": msgspec.to_builtins(found.constants.fitted),
        "base": found.base,
        "source": found.source,
        "improved": found.improved,
        "parts": found.parts,
        "mean_error": {name: found.mean_error(name) for name, _ in _WHICH},
        "findings": [msgspec.to_builtins(finding) for finding in found.findings],
        "constants": [dataclasses.asdict(one) for one in found.fitted],
        "runs": [
            {
                "place": one.run.place,
                "strategy": strategy_words(one.run.strategy),
                "global_batch": one.run.global_batch,
                "model": one.run.model,
                "seq": one.run.sequence,
                "measured_s": one.run.step_time_s,
                "before_s": one.before_s,
                "after_s": one.after_s,
                "held_out_s": one.held_out_s,
            }
            for one in found.runs
        ],
    }


def _percent(share: float, *, width: bool = False) -> str:
    return f"{100 * (float(np.expm1(share)) if width else share):.1f}%"


def _errors(found: Calibrated) -> str:
    rows = []
    for name, words in _WHICH:
        sizes = np.abs(found.errors(name))
        rows.append((words, *(_percent(float(size)) for size in (sizes.mean(), np.median(sizes), sizes.max()))))
    return format_table(("constants", "mean", "median", "worst"), rows, right=(1, 2, 3))


def _constants(found: Calibrated) -> str:
    rows = [
        (
            one.owner,
            one.name,
            "the links' own" if one.before is None else f"{one.before:.4g}",
            f"{one.after:.4g}",
            f"x {one.told:.2f}",
        )
        for one in found.fitted
    ]
    return format_table(("of", "constant", "before", "fitted", "told within"), rows, right=(2, 3, 4))


def _runs(found: Calibrated) -> str:
    rows = []
    several = len({one.run.model for one in found.runs}) > 1
    for one, off in zip(found.runs, found.errors("held_out"), strict=True):
        model = f"{one.run.model}: " if several and one.run.model else ""
        rows.append(
            (
                one.run.place.rpartition(" ")[2],
                f"{model}{strategy_words(one.run.strategy)}",
                str(one.run.global_batch),
                format_seconds(one.run.step_time_s),
                format_seconds(one.before_s),
                format_seconds(one.after_s),
                format_seconds(one.held_out_s),
                f"{100 * off:+.1f}%",
            )
        )
    header = ("line", "strategy", "batch", "measured", "before", "fitted", "held out", "off")
    return format_table(header, rows, right=(0, 2, 3, 4, 5, 6, 7))

"""A profile as text: achieved rates, lines of collectives and copies, what could not be measured."""

from typing import TYPE_CHECKING

from costmodel.units import format_bytes, format_rate, format_seconds
from planner.report.table import format_table

if TYPE_CHECKING:
    from profiles.schema import Fit, LineFit, Profile

MOST_GAPS = 10


def render_profile(profile: "Profile") -> str:
    """Tables for a terminal, ending in a newline."""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(profile.software.items()))
    head = (
        f"Profile of {profile.devices} x {profile.device_kind}, measured {profile.measured_at or 'at an unknown time'}"
    )
    parts = [f"{head}\n  {versions or 'unknown software'}; {len(profile.ops)} model ops, {len(profile.blocks)} blocks"]
    if profile.usable_memory_bytes is not None:
        parts[0] += f"; {format_bytes(profile.usable_memory_bytes)} of memory can be used"
    if rates := _rates(profile):
        parts.append(f"Achieved on one device\n\n{rates}")
    lines: list[tuple[str, LineFit]] = [
        (f"{line.kind} in groups of {line.size}" + (f", stride {line.stride}" if line.stride > 1 else ""), line)
        for line in profile.collective_lines
    ]
    lines += [(f"copies, {line.lanes} at once", line) for line in profile.copy_lines]
    if lines:
        header = ("what", "fixed", "per GiB", "error", "samples")
        parts.append(f"Communication\n\n{format_table(header, [_line(*entry) for entry in lines], right=(1, 2, 3, 4))}")
    if profile.gaps:
        gaps = [f"- {gap.what}: {gap.cause}" for gap in profile.gaps[:MOST_GAPS]]
        rest = len(profile.gaps) - MOST_GAPS
        parts.append("\n".join(["Not measured", "", *gaps, *([f"({rest} more)"] if rest > 0 else [])]))
    return "\n\n".join(parts) + "\n"


def _rates(profile: "Profile") -> str:
    rates = profile.rates
    rows = [
        (f"matrix products, {dtype}", format_rate(fit.value, "FLOP/s"), *_quality(fit))
        for dtype, fit in sorted(rates.matmul_flops_per_s.items())
    ]
    if (fit := rates.memory_bandwidth_bytes_per_s) is not None:
        rows.append(("memory", format_rate(fit.value, "B/s"), *_quality(fit)))
    if (fit := rates.launch_s) is not None:
        rows.append(("shortest op", format_seconds(fit.value), *_quality(fit)))
    return format_table(("what", "rate", "error", "samples"), rows, right=(1, 2, 3)) if rows else ""


def _quality(fit: "Fit | LineFit") -> tuple[str, str]:
    return f"{fit.error:.1%}", str(fit.samples)


def _line(what: str, line: "LineFit") -> tuple[str, ...]:
    return (what, format_seconds(line.fixed_s), format_seconds(line.s_per_byte * (1 << 30)), *_quality(line))

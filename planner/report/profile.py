"""A profile as text: achieved rates, lines of collectives and copies, what could not be measured."""

from typing import TYPE_CHECKING, Any

from costmodel.units import format_bytes, format_rate, format_seconds
from planner.report.table import format_table
from profiles.fitting import EVEN
from profiles.records import bandwidth_key, block_key, kernel_key, matmul_key
from profiles.steadiness import steadiness

if TYPE_CHECKING:
    from profiles.resume import Outlook
    from profiles.schema import CopyLine, Fit, LineFit, Profile

MOST_GAPS, MOST_SHAPES, MOST_BLOCKS = 10, 8, 12
SKINNY = 64
"""A product with a side of at most this many is one of few rows or columns."""


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
    lines += [(_copies(line), line) for line in profile.copy_lines]
    if lines:
        header = ("what", "fixed", "per GiB", "error", "samples")
        parts.append(f"Communication\n\n{format_table(header, [_line(*entry) for entry in lines], right=(1, 2, 3, 4))}")
    if shapes := _shapes(profile):
        parts.append(f"Shapes\n\n{shapes}")
    if blocks := _blocks(profile):
        parts.append(f"Blocks\n\n{blocks}")
    if unsteady := steadiness(profile):
        parts.append("\n".join(["Not steady", "", *(f"- {sentence}" for sentence in unsteady)]))
    if profile.sources:
        parts.append("\n".join(["Sources", "", *(f"- {source}" for source in profile.sources)]))
    if profile.gaps:
        gaps = [f"- {gap.what}: {gap.cause}" for gap in profile.gaps[:MOST_GAPS]]
        rest = len(profile.gaps) - MOST_GAPS
        parts.append("\n".join(["Not measured", "", *gaps, *([f"({rest} more)"] if rest > 0 else [])]))
    return "\n\n".join(parts) + "\n"


def _copies(line: "CopyLine") -> str:
    route = "" if line.route == "device_to_device" else f" {line.route.replace('_', ' ')}"
    return f"copies{route}, {line.lanes} at once"


def _shapes(profile: "Profile") -> str:
    """Kernels, and what single products and ops reach of the rates above."""
    rows = [
        (
            kernel_key(one.op, one.dtype, one.shape, one.backward),
            format_seconds(one.time_s),
            format_rate(one.flops / one.time_s, "FLOP/s"),
        )
        for one in profile.kernels
    ]
    products = [one for one in profile.matmuls if one.batch > 1 or min(one.shape) <= SKINNY]
    rows += [
        (
            matmul_key(one.dtype, one.shape, one.batch),
            format_seconds(one.time_s),
            format_rate(one.flops / one.time_s, "FLOP/s"),
        )
        for one in products[:MOST_SHAPES]
    ]
    moved = [one for one in profile.bandwidths if one.op not in EVEN]
    rows += [
        (
            bandwidth_key(one.op, one.dtype, one.shape),
            format_seconds(one.time_s),
            format_rate(one.memory_bytes / one.time_s, "B/s"),
        )
        for one in moved[:MOST_SHAPES]
    ]
    return format_table(("what", "time", "rate"), rows, right=(1, 2)) if rows else ""


def _blocks(profile: "Profile") -> str:
    def seconds(value: float | None) -> str:
        return "-" if value is None else format_seconds(value)

    def size(value: int | None) -> str:
        return "-" if value is None else format_bytes(value)

    rows = [
        (
            block_key(one.block_class, one.mesh, one.microbatch).removeprefix("block "),
            format_seconds(one.forward_s),
            seconds(one.backward_s),
            seconds(one.weight_s),
            seconds(one.update_s),
            size(one.saved_bytes),
            size(one.peak_bytes),
        )
        for one in profile.blocks[:MOST_BLOCKS]
    ]
    if not rows:
        return ""
    rest = len(profile.blocks) - MOST_BLOCKS
    header = ("block", "forward", "backward", "weights", "update", "saved", "peak")
    table = format_table(header, rows, right=(1, 2, 3, 4, 5, 6))
    return table + (f"\n({rest} more)" if rest > 0 else "")


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


def describe_outlook(outlook: "Outlook", where: str, budget_s: float) -> dict[str, Any]:
    """What a run would measure, as a document."""
    return {
        "devices": where,
        "budget_s": budget_s,
        "expected_s": round(outlook.total_s, 1),
        "there": outlook.there,
        "parts": [
            {"part": part, "expected_s": round(outlook.seconds[part], 1), "keys": list(keys)}
            for part, keys in outlook.parts.items()
        ],
    }


def render_outlook(outlook: "Outlook", where: str, budget_s: float) -> str:
    """The same as text, ending in a newline."""
    rows = [
        (part, str(len(keys)), format_seconds(outlook.seconds[part]), ", ".join(keys[:2]) + ", ..." * (len(keys) > 2))
        for part, keys in outlook.parts.items()
        if keys
    ]
    count = sum(len(keys) for keys in outlook.parts.values())
    head = f"{count} measurements on {where}, about {format_seconds(outlook.total_s)} in all"
    if outlook.there:
        head += f"; {outlook.there} are there already"
    table = format_table(("part", "measurements", "about", "such as"), rows, right=(1, 2)) if rows else "nothing to do"
    enough = outlook.total_s <= budget_s
    fit = (
        f"A budget of {format_seconds(budget_s)} is enough."
        if enough
        else f"A budget of {format_seconds(budget_s)} ends before: the last of each part become gaps, which "
        "--resume measures."
    )
    return f"{head}\n\n{table}\n\n{fit} These are estimates: how long programs compile differs most.\n"

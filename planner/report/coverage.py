"""What a model needs and a profile lacks, as text and as a document."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profiles.coverage import Coverage

MOST_KEYS = 20


def describe_coverage(coverage: "Coverage") -> dict[str, Any]:
    """Every key that the model needs, by whether it was measured, and the shares of the forward time."""
    return {
        "measured": list(coverage.measured),
        "measured_share": round(coverage.measured_share, 4),
        "missing": list(coverage.rated),
        "drifted": list(coverage.drifted),
        "blocks": list(coverage.blocks),
        "blocks_missing": list(coverage.blocks_missing),
    }


def render_coverage(coverage: "Coverage") -> str:
    """The same for people: what is missing, the longest first."""
    parts = [coverage.describe()]
    if coverage.rated:
        parts += ["", "Missing, the longest first", "", *(f"- {key}" for key in coverage.rated[:MOST_KEYS])]
        rest = len(coverage.rated) - MOST_KEYS
        parts += [f"({rest} more)"] if rest > 0 else []
    if coverage.drifted:
        parts += ["", "Drifted by over a tenth", "", *(f"- {key}" for key in coverage.drifted[:MOST_KEYS])]
    if coverage.blocks_missing:
        parts += ["", f"Blocks missing: {', '.join(coverage.blocks_missing)} (measure them with --blocks)"]
    return "\n".join(parts) + "\n"

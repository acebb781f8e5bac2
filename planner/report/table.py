"""Plain text tables for reports: columns as wide as their longest cell, numbers to the right."""

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Aligned columns, two blanks apart, with a rule under the header.

    Args:
        header: one cell a column.
        rows: as many cells each.
        right: columns to align to the right.
    """
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[at]) for row in table) for at in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = (f"{c:>{w}}" if at in right else f"{c:<{w}}" for at, (c, w) in enumerate(zip(row, widths, strict=True)))
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])

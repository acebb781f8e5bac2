"""Others' tables of layer times (CSV) as profiles: one entry of the block table for a layer, tp and microbatch.

A table has a row for each measurement. Columns may be called anything: a mapping says which is which, and names that
end in ``_ms`` or ``_us`` are in that unit.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from costmodel.device_kind import DeviceKind
from costmodel.documents import suggestion
from costmodel.errors import InputError
from profiles.block_table import layer_class
from profiles.records import block_key
from profiles.schema import BlockTime, Profile, check_profile

COLUMNS = {
    "model": "model",
    "gpu": "gpu",
    "microbatch": "micro_batch_seqs",
    "tp": "tp",
    "layer": "layer",
    "forward_s": "forward_s",
    "backward_s": "backward_s",
    "update_s": "update_s",
    "both_s": "both_s",
}
"""What is read, and the column that it is read from where nobody says otherwise."""

OPTIONAL = frozenset({"model", "gpu", "tp", "update_s", "both_s"})
"""May be missing: the table is then of one model, one GPU, one device; and says nothing of updates."""

FORWARD_SHARE = 1 / 3
"""Of a time that is of forward and backward together (`both_s`): a backward pass has twice the products."""

_UNITS = {"_ms": 1e-3, "_us": 1e-6, "_ns": 1e-9}


@dataclass(frozen=True)
class _Row:
    line: int
    cells: Mapping[str, str]


def import_layers(
    text: str,
    *,
    source: str,
    model: str,
    kind: DeviceKind,
    gpu: str | None = None,
    columns: Mapping[str, str] | None = None,
) -> Profile:
    """A profile from a CSV table of layer times.

    Args:
        text: the table, with a header line.
        source: the table's file, for messages and for the profile's sources; a column ``source`` is added to them.
        model: whose rows are taken; names the layers, ``MODEL/LAYER``.
        kind: the device kind that was measured.
        gpu: what the table calls it; may be left out where the table has one.
        columns: what is read -> the column's name, where it is not as in `COLUMNS`.

    Raises:
        InputError: MP165, with the line: `columns` names what is not read or not there, a column is missing (that of
            `gpu` too, where it is given), a row is cut short or repeats another with other figures, a number is
            missing, negative or not finite, or no row is of that model and GPU.
    """
    names = _column_names(columns or {})
    rows, header = _rows(text, source)
    _require_columns(header, names, source)
    _require_named(header, columns or {}, gpu, names["gpu"], source)
    mine = _of(_of(rows, names["model"], model, "model", source), names["gpu"], gpu, "gpu", source)
    blocks: dict[str, tuple[int, BlockTime]] = {}
    for row in mine:
        block = _block(row, names, header, model, source)
        key = block_key(block.block_class, block.mesh, block.microbatch)
        if key in blocks and blocks[key][1] != block:
            message = f"{source}, line {row.line}: {key} is in line {blocks[key][0]} already, with other figures"
            raise InputError("MP165", message, "leave one of them, or choose with --gpu")
        blocks.setdefault(key, (row.line, block))
    told = sorted({row.cells["source"] for row in mine if row.cells.get("source")})
    profile = Profile(
        device_kind=kind.name,
        jax_device_kind=kind.jax_names[0] if kind.jax_names else kind.name,
        platform=kind.platform,
        devices=max(math.prod(block.mesh) for _, block in blocks.values()),
        blocks=tuple(block for _, block in blocks.values()),
        sources=(f"{source}: {len(blocks)} layer times of {model}" + (f" on {gpu}" if gpu else ""), *told),
    )
    check_profile(profile)
    return profile


def _column_names(columns: Mapping[str, str]) -> dict[str, str]:
    for name in columns:
        if name not in COLUMNS:
            raise InputError("MP165", f"no column {name!r} is read", suggestion(name, COLUMNS, "columns are"))
    return {**COLUMNS, **columns}


def _rows(text: str, source: str) -> tuple[list[_Row], Sequence[str]]:
    reader = csv.reader(io.StringIO(text))
    header: list[str] = []
    rows: list[_Row] = []
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = [cell.strip() for cell in cells]
                continue
            if len(cells) != len(header):
                message = f"{source}, line {reader.line_num}: {len(cells)} cells under {len(header)} columns"
                raise InputError("MP165", message, "the table may be cut short: fetch it again")
            rows.append(_Row(reader.line_num, dict(zip(header, (cell.strip() for cell in cells), strict=True))))
    except csv.Error as error:
        raise InputError("MP165", f"{source}, line {reader.line_num} is not CSV: {error}") from None
    if not rows:
        raise InputError(
            "MP165", f"{source} has no rows", f"its first line names columns: {', '.join(COLUMNS.values())}"
        )
    return rows, header


def _require_columns(header: Sequence[str], names: Mapping[str, str], source: str) -> None:
    apart = () if names["both_s"] in header else ("forward_s", "backward_s")
    wanted_names = [name for name in names if name not in OPTIONAL and (name in apart or not name.endswith("_s"))]
    missing = [name for name in wanted_names if names[name] not in header]
    if missing:
        wanted = ", ".join(repr(names[name]) for name in missing)
        hint = f"say which column it is: --column {missing[0]}=NAME; the table has {', '.join(header)}"
        raise InputError("MP165", f"{source} has no column {wanted}", hint)


def _require_named(
    header: Sequence[str], columns: Mapping[str, str], gpu: str | None, gpu_column: str, source: str
) -> None:
    """What is asked for by name, also of columns that a table need not have, must be there."""
    for name, column in columns.items():
        if column not in header:
            message = f"{source} has no column {column!r}, which {name} is to be read from"
            raise InputError("MP165", message, suggestion(column, header, "the table has"))
    if gpu is not None and gpu_column not in header:
        message = f"{source} has no column {gpu_column!r} that says which rows are of {gpu!r}"
        raise InputError("MP165", message, "leave out --gpu, or say which column it is: --column gpu=NAME")


def _of(rows: Sequence[_Row], column: str, wanted: str | None, what: str, source: str) -> list[_Row]:
    """Rows with one value in a column; all where the table has none, or one value and none is asked for."""
    values = sorted({row.cells[column] for row in rows if column in row.cells})
    if not values:
        return list(rows)
    if wanted is None:
        if len(values) == 1:
            return list(rows)
        raise InputError("MP165", f"{source} has several: {what} {', '.join(values)}", f"choose one with --{what}")
    if wanted not in values:
        raise InputError("MP165", f"{source} has no {what} {wanted!r}", suggestion(wanted, values, f"it has {what}"))
    return [row for row in rows if row.cells[column] == wanted]


def _block(row: _Row, names: Mapping[str, str], header: Sequence[str], model: str, source: str) -> BlockTime:
    def number(name: str, kind: type, least: float) -> Any:
        column = names[name]
        text = row.cells[column]
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= least):
            legal = (
                "a whole number of at least 1" if kind is int else f"seconds {'above' if least else 'of at least'} 0"
            )
            message = f"{source}, line {row.line}: {column} is {text!r}; it must be {legal}"
            raise InputError("MP165", message, "nothing was written; correct the row or leave it out")
        return value

    def seconds(name: str, least: float = 0.0) -> float:
        unit = next((scale for suffix, scale in _UNITS.items() if names[name].endswith(suffix)), 1.0)
        return number(name, float, least) * unit

    together = names["both_s"] in header
    both_s = seconds("both_s", 1e-12) if together else 0.0
    return BlockTime(
        block_class=layer_class(model, row.cells[names["layer"]]),
        mesh=(number("tp", int, 1) if names["tp"] in header else 1,),
        microbatch=number("microbatch", int, 1),
        forward_s=FORWARD_SHARE * both_s if together else seconds("forward_s", 1e-12),
        backward_s=(1 - FORWARD_SHARE) * both_s if together else seconds("backward_s"),
        update_s=seconds("update_s") if names["update_s"] in header else None,
        provenance="assumed" if together else "measured",
    )

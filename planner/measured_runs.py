"""Measured runs of a user: a CSV table with one run a line, or mappings of the same.

Columns are fields of a strategy (`dp`, `tp`, `microbatch`, ... with the short names that `parse_strategy` knows) or one
column `strategy` of its text; `global_batch`, `step_time_s`; and, where runs are of several models, `model` and `seq`.
An empty cell is the field's default.
"""

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from costmodel.documents import suggestion
from costmodel.errors import InputError
from planner import arguments as given
from planner.strategy.strategy import SHORT_NAMES, Strategy, parse_strategy

STRATEGY, BATCH, TIME, MODEL, SEQUENCE = "strategy", "global_batch", "step_time_s", "model", "seq"

_OWN = (STRATEGY, BATCH, TIME, MODEL, SEQUENCE)
_EXAMPLE = "its first line names columns, such as dp,tp,pp,microbatch,global_batch,step_time_s"


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One configuration and the seconds of its step.

    Attributes:
        model, sequence: as `planner.load_task` takes them; None for those of the calibration.
        place: where it stands, for messages: file and line.
    """

    strategy: Strategy
    global_batch: int
    step_time_s: float
    model: str | None = None
    sequence: int | None = None
    place: str = ""

    @property
    def configuration(self) -> tuple[object, ...]:
        """What repeats of one configuration share."""
        return (self.model, self.sequence, self.strategy, self.global_batch)


def read_runs(path: str | Path) -> tuple[MeasuredRun, ...]:
    """Runs of a CSV file.

    Raises:
        InputError: MP188 for a file that cannot be read, columns that are unknown or missing, or a cell that makes no
            sense; MP186 for a time that is no positive number; MP180 for a strategy that cannot be. Each with the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError("MP188", f"{path} is not UTF-8 text: byte {error.start} cannot be read", _EXAMPLE) from None
    except OSError as error:
        raise InputError("MP188", f"cannot read measured runs {path}: {error.strerror or error}", _EXAMPLE) from None
    return tuple(_run(row, place) for place, row in _rows(text, Path(path).name))


def given_runs(runs: Sequence[Mapping[str, Any]]) -> tuple[MeasuredRun, ...]:
    """Runs from mappings whose keys are the columns of `read_runs`.

    Raises:
        InputError: as `read_runs`, with the position of the run.
    """
    found = []
    if isinstance(runs, Mapping) or not isinstance(runs, Iterable):
        message = f"runs are a {type(runs).__name__}"
        raise InputError("MP188", message, "give a table's path, or a list of mappings")
    for at, row in enumerate(runs):
        if not isinstance(row, Mapping):
            message = f"run {at} is a {type(row).__name__}"
            raise InputError("MP188", message, 'give mappings: {"dp": 8, "global_batch": 64, "step_time_s": 1.2}')
        _require_columns(tuple(row), f"run {at}")
        found.append(_run(row, f"run {at}"))
    return tuple(found)


def _rows(text: str, source: str) -> Iterator[tuple[str, dict[str, str]]]:
    reader = csv.reader(io.StringIO(text))
    header: list[str] = []
    rows: list[tuple[str, dict[str, str]]] = []
    try:
        for cells in reader:
            place = f"{source}, line {reader.line_num}"
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = [cell.strip() for cell in cells]
                _require_columns(header, place)
                continue
            if len(cells) != len(header):
                message = f"{place}: {len(cells)} cells under {len(header)} columns"
                raise InputError("MP188", message, "a partition is written 10+10+12; text with commas needs quotes")
            rows.append((place, dict(zip(header, (cell.strip() for cell in cells), strict=True))))
    except csv.Error as error:
        raise InputError("MP188", f"{source}, line {reader.line_num} is not CSV: {error}", _EXAMPLE) from None
    if not rows:
        raise InputError("MP188", f"{source} has no runs", _EXAMPLE)
    yield from rows


def _require_columns(names: Sequence[str], place: str) -> None:
    known = {f.name for f in fields(Strategy)} | set(SHORT_NAMES) | set(_OWN)
    for name in names:
        if name not in known:
            hint = suggestion(str(name), tuple(sorted(known)), "columns are")
            raise InputError("MP188", f"{place}: unknown column {name!r}", hint)
    meant = [SHORT_NAMES.get(name, name) for name in names]
    twice = next((name for name in meant if meant.count(name) > 1), None)
    if twice is not None:
        raise InputError("MP188", f"{place}: there are two columns of {twice!r}", "leave one of them")
    missing = [name for name in (BATCH, TIME) if name not in names]
    if missing:
        raise InputError("MP188", f"{place}: there is no column {' and no '.join(missing)}", _EXAMPLE)


def _run(row: Mapping[str, Any], place: str) -> MeasuredRun:
    whole, columns = row.get(STRATEGY), [key for key in row if key not in _OWN]
    cells = {key: row[key] for key in columns if row[key] not in ("", None)}
    if whole not in ("", None) and cells:
        message = f"{place}: the strategy is given whole and by {', '.join(map(str, cells))}"
        raise InputError("MP188", message, "give one of them")
    by_columns = cells or (Strategy() if columns else {})  # empty cells are defaults, no columns are no strategy
    strategy = _placed(place, lambda: parse_strategy(by_columns if whole in ("", None) else whole))
    batch = _count(row.get(BATCH), BATCH, place)
    if batch is None:
        raise InputError("MP188", f"{place}: {BATCH} is missing", "examples of one step")
    return MeasuredRun(
        strategy=strategy,
        global_batch=_placed(place, lambda: given.require_count(BATCH, batch, most=given.LARGEST_BATCH)),
        step_time_s=_seconds(row.get(TIME), place),
        model=row.get(MODEL) or None,
        sequence=_count(row.get(SEQUENCE), SEQUENCE, place),
        place=place,
    )


def _placed(place: str, make: Callable[[], Any]) -> Any:
    """What `make` returns; its errors say where."""
    try:
        return make()
    except InputError as error:
        raise InputError(error.code, f"{place}: {error.message}", error.hint) from None


def _seconds(value: Any, place: str) -> float:
    try:
        time_s = float(value)
    except (TypeError, ValueError):
        time_s = math.nan
    if not (math.isfinite(time_s) and time_s > 0):
        raise InputError("MP186", f"{place}: {TIME} is {value!r}", "times are positive seconds; leave failed runs out")
    return time_s


def _count(value: Any, name: str, place: str) -> int | None:
    if value in (None, ""):
        return None
    try:
        count = float(value)
    except (TypeError, ValueError):
        count = math.nan
    if not (math.isfinite(count) and count >= 1 and count == int(count)):
        raise InputError("MP188", f"{place}: {name} is {value!r}; it is a whole number from 1 on", "")
    return int(count)

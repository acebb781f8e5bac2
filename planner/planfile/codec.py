"""Plan documents as bytes and back: canonical, so that equal plans are equal files, and strict, with named mistakes.

Canonical form: UTF-8 JSON in the layout of `layout.dumps`, record fields in the order of the schema, keys of tables
sorted, floats in their shortest form that reads back the same, one newline at the end.
"""

import json
import math
from typing import Any

import msgspec

from costmodel.documents import LARGEST_INTEGER, convert
from costmodel.errors import InputError
from planner.planfile.layout import dumps
from planner.planfile.schema import SCHEMA_VERSION, Plan


def encode(plan: Plan) -> bytes:
    """The canonical bytes of a plan; equal plans give equal bytes, and `decode` gives an equal plan back.

    Raises:
        InputError: MP152 if the record holds values of other types than the schema's, MP154 for a NaN or an infinity.
    """
    checked = convert(_finite(msgspec.to_builtins(plan, enc_hook=_number), ""), Plan, code="MP152")
    return (dumps(_sorted_tables(checked)) + "\n").encode()


def decode(data: bytes, *, source: str = "") -> Plan:
    """Reads a plan document.

    Args:
        data: the file's bytes.
        source: where they come from, to name in errors.

    Raises:
        InputError: MP151 not JSON, or cut short; MP152 an unknown, missing or mistyped field, with its path; MP153 a
            schema version that this meshplan does not read.
    """
    document = _parse(data, source)
    if not isinstance(document, dict):
        raise InputError("MP152", f"{_in(source)}a plan is a JSON object, got {_name(document)}", _WRITE_HINT)
    _check_version(document, source)
    try:
        _check_numbers(document, "")
        return convert(document, Plan, code="MP152")
    except InputError as error:
        raise InputError(error.code, f"{_in(source)}{error.message}", error.hint or _WRITE_HINT) from None


_WRITE_HINT = "write plans with `meshplan plan -o FILE` or `planner.save_plan`"


def _in(source: str) -> str:
    return f"{source}: " if source else ""


def _name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _parse(data: bytes, source: str) -> Any:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = f"byte {error.start} of {len(data)}"
        raise InputError("MP151", f"{_in(source)}not UTF-8 text at {at}", _WRITE_HINT) from None
    if not text.strip():
        raise InputError("MP151", f"{_in(source)}the file is empty", _WRITE_HINT)
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        rest = text[error.pos :].rstrip()  # nothing, or of a word or number cut short, such as `tr` or `.`
        cut = error.msg.startswith(("Unterminated string", "Invalid \\escape: end"))
        cut = cut or any(word.startswith(rest) for word in ("true", "false", "null", "-", ".", "e+", "E+", "e-", "E-"))
        at = f"line {error.lineno}, byte {len(text[: error.pos].encode())} of {len(data)}"
        if cut:
            hint = "the file was not written or copied whole; write the plan again"
            message = f"{_in(source)}the plan is cut short: it ends inside a value at {at}"
            raise InputError("MP151", message, hint) from None
        raise InputError("MP151", f"{_in(source)}not JSON at {at}: {error.msg}", _WRITE_HINT) from None
    except _DocumentError as error:
        raise InputError("MP151", f"{_in(source)}{error}", _WRITE_HINT) from None
    except (RecursionError, ValueError) as error:  # nesting, and integers of thousands of digits
        reason = "values are nested too deeply" if isinstance(error, RecursionError) else str(error).split(";")[0]
        raise InputError("MP151", f"{_in(source)}not a plan: {reason}", _WRITE_HINT) from None


class _DocumentError(Exception):
    """JSON that Python would take and other readers would not."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _DocumentError(f"the field {twice!r} is given twice in one object")
    return table


def _no_constant(text: str) -> Any:
    raise _DocumentError(f"{text} is not a JSON number")


def _check_version(document: dict[str, Any], source: str) -> None:
    version = document.get("schema_version")
    if isinstance(version, bool) or not isinstance(version, int):
        got = "has no schema_version" if "schema_version" not in document else f"has schema_version {version!r}"
        raise InputError("MP153", f"{_in(source)}the document {got}: not a plan", _WRITE_HINT)
    if version > SCHEMA_VERSION:
        hint = "use the meshplan that wrote it, or a newer one: pip install -U meshplan"
        got = f"schema version {version} is newer than {SCHEMA_VERSION}, the newest that this meshplan reads"
        raise InputError("MP153", f"{_in(source)}{got}", hint)
    if version < SCHEMA_VERSION:
        got = f"schema version {version} is older than {SCHEMA_VERSION} and cannot be converted"
        raise InputError("MP153", f"{_in(source)}{got}", "plan again with this meshplan")


def _number(value: Any) -> Any:
    """Python's number for a number of an array library, such as numpy's float64."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()
    raise TypeError(f"a plan cannot hold {type(value).__name__}: {value!r}")


def _finite(value: Any, path: str) -> Any:
    """Plain data, after a look for numbers that JSON does not have."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InputError("MP154", f"{path} is {value}, which a plan file cannot hold", "report how it was made")
        return value
    if isinstance(value, dict):
        return {key: _finite(entry, f"{path}.{key}" if path else str(key)) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry, f"{path}[{at}]") for at, entry in enumerate(value)]
    return value


def _check_numbers(value: Any, path: str) -> None:
    """InputError MP152 for a whole number that 64 bits cannot hold: nothing in a plan is that large, and sums and
    products of such numbers overflow elsewhere."""
    if isinstance(value, int):
        if not -LARGEST_INTEGER <= value <= LARGEST_INTEGER:
            got = f"{path} is a whole number of {len(str(abs(value)))} digits, the largest is {LARGEST_INTEGER}"
            raise InputError("MP152", got, "correct the field; a real number this large is written such as 1e30")
    elif isinstance(value, dict):
        for key, entry in value.items():
            _check_numbers(entry, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for at, entry in enumerate(value):
            _check_numbers(entry, f"{path}[{at}]")


def _sorted_tables(value: Any) -> Any:
    """Records as tables in the schema's field order, other tables by key."""
    if isinstance(value, msgspec.Struct):
        return {name: _sorted_tables(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: _sorted_tables(value[key]) for key in sorted(value)}
    if isinstance(value, tuple):
        return [_sorted_tables(entry) for entry in value]
    return value

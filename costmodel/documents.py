"""Checked conversion of plain data (parsed TOML or JSON) into records; errors name the path and what is legal."""

import difflib
import math
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from costmodel.errors import InputError

T = TypeVar("T")

LARGEST_INTEGER = (1 << 63) - 1

_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<at>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `(?P<field>[^`]*)`")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]*)`")
_WRONG_TYPE = re.compile(r"^Expected `(?P<want>[^`]*)`, got `(?P<got>[^`]*)`$")


def convert(data: Any, record: type[T], *, code: str, root: str = "") -> T:
    """Converts plain data into `record`, a msgspec Struct type.

    Args:
        data: dicts, lists, strings and numbers.
        record: the Struct type that describes the document.
        code: error code to raise with, such as ``MP131``.
        root: path of `data` inside a larger document, for messages (``group[0].device``).

    Raises:
        InputError: an unknown field (with the nearest legal names), a missing field, or a value of the wrong type.
    """
    try:
        return msgspec.convert(data, record)
    except msgspec.ValidationError as error:
        raise _explain(str(error), record, code, root) from None


def _explain(text: str, record: type, code: str, root: str) -> InputError:
    match = _AT.match(text)
    what, at = (match["what"], match["at"] or "$") if match else (text, "$")
    at = at.removeprefix("key in ")
    path = join_path(root, at.removeprefix("$").lstrip("."))
    where = path or "the document"
    names = field_names(record, at)
    if unknown := _UNKNOWN.search(what):
        field = unknown["field"]
        return InputError(code, f"unknown field {field!r} in {where}", suggestion(field, names, "fields are"))
    if missing := _MISSING.search(what):
        return InputError(code, f"{where} has no {missing['field']!r}", f"fields are {', '.join(names)}")
    if wrong := _WRONG_TYPE.match(what):
        hints = {
            ("int", "float"): "write it as a whole number, such as 80_000_000_000",
            ("array", "object"): f"write [[{path}]] rather than [{path}]: it is a list of tables",
        }
        hint = hints.get((wrong["want"], wrong["got"]), "")
        return InputError(code, f"{where} must be {wrong['want']}, got {wrong['got']}", hint)
    if "enum value" in what and (legal := _choices(record, at)):
        return InputError(
            code, f"{where}: {what}", suggestion(what.split("'")[1] if "'" in what else "", legal, "legal:")
        )
    return InputError(code, f"{where}: {what}")


def _choices(record: type, path: str) -> tuple[str, ...]:
    """Legal values of the field at `path`, where it is one of some words."""
    info: Any = msgspec.inspect.type_info(record)
    for step in re.findall(r"\.\.\.|[^.\[\]$]+|\[[^\]]*\]", path):
        info = _table(info, step)
    return tuple(str(value) for value in info.values) if isinstance(info, msgspec.inspect.LiteralType) else ()


def field_names(record: type, path: str) -> tuple[str, ...]:
    """Legal field names of the table at `path` (msgspec's form: ``$.group[0].inter``, ``...`` for a dict's value)."""
    info: Any = msgspec.inspect.type_info(record)
    for step in re.findall(r"\.\.\.|[^.\[\]$]+|\[[^\]]*\]", path):
        info = _table(info, step)
        if info is None:
            return ()
    info = _struct(info)
    return tuple(field.encode_name for field in info.fields) if info is not None else ()


def _struct(info: Any) -> Any:
    if isinstance(info, msgspec.inspect.UnionType):
        return next((one for one in info.types if isinstance(one, msgspec.inspect.StructType)), None)
    return info if isinstance(info, msgspec.inspect.StructType) else None


def _table(info: Any, step: str) -> Any:
    if step.startswith("["):
        item = getattr(info, "item_type", None)
        if item is None and isinstance(info, msgspec.inspect.DictType):
            item = info.value_type
        return item
    struct = _struct(info)
    return next((field.type for field in struct.fields if field.encode_name == step), None) if struct else None


def join_path(root: str, path: str) -> str:
    """`join_path("group[0]", "inter")` is ``'group[0].inter'``."""
    return f"{root}.{path}" if root and path and not path.startswith("[") else f"{root}{path}"


def nearest(name: str, options: Iterable[str], limit: int = 4) -> tuple[str, ...]:
    """Options that a misspelt or shortened `name` may have meant, best first.

    Example:
        >>> nearest("h100", ["A100", "H100-PCIe-80GB", "H100-SXM5-80GB", "H200"])
        ('H100-PCIe-80GB', 'H100-SXM5-80GB', 'H200', 'A100')
    """
    lowered = {option.lower(): option for option in sorted(options)}
    part = name.lower().strip()
    inside = [option for low, option in lowered.items() if part and (part in low or low in part)]
    close = [lowered[low] for low in difflib.get_close_matches(part, lowered, n=limit, cutoff=0.6)]
    return tuple(dict.fromkeys(inside + close))[:limit]


def suggestion(name: str, options: Iterable[str], legal: str) -> str:
    """A hint for an unknown name: what was probably meant, else the list of what is legal."""
    options = sorted(options)
    if guesses := nearest(name, options):
        return f"did you mean {' or '.join(guesses)}?"
    return f"{legal} {', '.join(options)}"


def require_number(
    value: float,
    path: str,
    code: str,
    *,
    above: float | None = 0.0,
    least: float | None = None,
    most: float | None = None,
) -> None:
    """Raises InputError unless `value` is finite and ``above < value``, ``least <= value``, ``value <= most``."""
    if least is not None:
        above = None
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise InputError(code, f"{path} is a whole number of {len(str(abs(value)))} digits", "write a smaller one")
    high_enough = (above is None or value > above) and (least is None or value >= least)
    if math.isfinite(value) and high_enough and (most is None or value <= most):
        return
    low = f"above {above:g}" if above is not None else f"at least {least:g}" if least is not None else ""
    high = f"at most {most:g}" if most is not None else ""
    raise InputError(code, f"{path} must be {' and '.join(filter(None, (low, high)))}, got {value:g}")

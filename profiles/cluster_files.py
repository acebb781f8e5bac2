"""Cluster documents on disk: TOML in, TOML out. `render_cluster` and `load_cluster` are inverse to each other."""

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from costmodel.cluster import Cluster, DeviceGroup, parse_cluster
from costmodel.device_kind import DeviceKind
from costmodel.errors import InputError
from profiles.catalogue import load_catalogue
from profiles.node_types import with_node_types

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Reads a cluster file, with devices and node types taken from the shipped catalogue.

    Raises:
        InputError: MP130 for a file that cannot be read or is not TOML (with the line); MP131 to MP137 as
            `costmodel.cluster.parse_cluster`, with the file in front.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        hint = "examples/clusters has cluster files to start from; `meshplan cluster init` writes one"
        raise InputError("MP130", f"cannot read cluster file {path}: {reason}", hint) from None
    return read_cluster(text, str(path))


def read_cluster(text: str, name: str) -> Cluster:
    """As `load_cluster`, from text; `name` stands for the file in messages."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            "MP130", f"{name} is not TOML: {error}", "a cluster file has a name and [[group]] tables"
        ) from None
    try:
        return parse_cluster(with_node_types(data), load_catalogue())
    except InputError as error:
        raise InputError(error.code, f"{name}: {error.message}", error.hint) from None


def write_cluster(path: str | os.PathLike[str], cluster: Cluster) -> None:
    """Writes a cluster file in one step: the file is the old one or the new one, never a part.

    Raises:
        InputError: MP130 if the place cannot be written.
    """
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    text = render_cluster(cluster)
    try:
        try:
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise InputError("MP130", f"cannot write cluster file {path}: {error.strerror}") from None


def render_cluster(cluster: Cluster) -> str:
    """The cluster as TOML. A device kind that is the catalogue's stands as its name, any other as a table of facts."""
    lines = [f"name = {_value(cluster.name)}"]
    for group in cluster.groups:
        lines += ["", "[[group]]", *_fields(_group_table(group))]
    for link in cluster.links:
        lines += ["", "[[link]]", *_fields(_stated(link))]
    return "\n".join(lines) + "\n"


def _group_table(group: DeviceGroup) -> dict[str, Any]:
    table = _stated(group)
    known = load_catalogue().get(group.device.name)
    table["device"] = group.device.name if known == group.device else _kind_table(group.device)
    table["intra"] = [_stated(tier) for tier in group.intra]
    if group.inter is not None:
        table["inter"] = _stated(group.inter)
    table["overrides"] = _stated(group.overrides)
    return {key: value for key, value in table.items() if value not in ([], {})}


def _kind_table(kind: DeviceKind) -> dict[str, Any]:
    return {**_stated(kind), "reserve_bytes": kind.reserve_bytes}


def _stated(record: msgspec.Struct) -> dict[str, Any]:
    """Fields that differ from their defaults, as plain data."""
    every = msgspec.to_builtins(record)
    defaults = {
        field.encode_name: field.default if field.default is not msgspec.NODEFAULT else field.default_factory
        for field in msgspec.structs.fields(record)
    }
    plain = {
        key: value() if callable(value) else value for key, value in defaults.items() if value is not msgspec.NODEFAULT
    }
    return {key: value for key, value in every.items() if key not in plain or value != msgspec.to_builtins(plain[key])}


def _fields(table: dict[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in table.items()]


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:_}"
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, dict):
        return "{ " + ", ".join(_fields(value)) + " }"
    return "[" + ", ".join(_value(one) for one in value) + "]"


def _float(value: float) -> str:
    """As people write rates (``300e9``) where that reads back as the same number, else the shortest exact form."""
    for exponent in (12, 9, 6):
        mantissa = f"{value / 10**exponent:.6g}"
        if value >= 10**exponent and "e" not in mantissa and float(f"{mantissa}e{exponent}") == value:
            return f"{mantissa}e{exponent}"
    return repr(value)

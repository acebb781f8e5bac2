"""Datasheets of device kinds: `catalog/*.toml`, one file a vendor, each number with its source."""

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from costmodel.device_kind import DeviceKind, check_device_kind
from costmodel.documents import convert
from costmodel.errors import InputError


@lru_cache(maxsize=1)
def datasheet_kinds() -> Mapping[str, DeviceKind]:
    """Every shipped device kind by name, read once.

    Raises:
        InputError: MP131 or MP133 for a catalogue file with a mistake; MP134 for a name that stands twice.
    """
    kinds: dict[str, DeviceKind] = {}
    folder = files("profiles").joinpath("catalog")
    for entry in sorted(folder.iterdir(), key=lambda one: one.name):
        if entry.name.endswith(".toml"):
            for kind in read_kinds(tomllib.loads(entry.read_text(encoding="utf-8")), entry.name):
                if kind.name in kinds:
                    raise InputError("MP134", f"catalog/{entry.name}: {kind.name!r} is in the catalogue already")
                kinds[kind.name] = kind
    return MappingProxyType(kinds)


def read_kinds(document: Mapping[str, Any], name: str) -> tuple[DeviceKind, ...]:
    """The device kinds of one parsed catalogue file; `name` is the file's, for messages."""
    kinds = []
    for at, entry in enumerate(document.get("device", ())):
        path = f"catalog/{name}: device[{at}]"
        kind = convert(entry, DeviceKind, code="MP131", root=path)
        check_device_kind(kind, path)
        kinds.append(kind)
    return tuple(kinds)

"""The shipped catalogue of device kinds: `catalog/*.toml`, one file a vendor, each number with its source."""

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from costmodel.cluster_checks import require_device_name
from costmodel.device_kind import DeviceKind, check_device_kind
from costmodel.documents import convert
from costmodel.errors import InputError


@lru_cache(maxsize=1)
def load_catalogue() -> Mapping[str, DeviceKind]:
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


def device_kind(name: str) -> DeviceKind:
    """The catalogue's kind called `name`.

    Raises:
        InputError: MP132, with the names that were probably meant: ``H100`` is not silently one of the H100s.
    """
    return require_device_name(name, "device", load_catalogue())


def kind_for_jax_name(jax_name: str) -> DeviceKind | None:
    """The kind whose devices JAX calls `jax_name` (`jax.Device.device_kind`); None if the catalogue has none."""
    for kind in load_catalogue().values():
        if jax_name in kind.jax_names:
            return kind
    return None

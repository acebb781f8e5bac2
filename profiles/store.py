"""Profiles on disk: canonical JSON, written whole or not at all, and the user's cache of them by device kind."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from costmodel.documents import convert, suggestion
from costmodel.errors import InputError, ProfileError
from profiles.schema import SCHEMA_VERSION, Profile, check_profile
from profiles.whole_file import write_whole

SUFFIX = ".profile.json"
SHIPPED = "measured:"
"""In front of a device kind's name, in the place of a path: the profile that comes with meshplan."""

_AGAIN = "measure again with `meshplan profile`"


def encode_profile(profile: Profile) -> bytes:
    """The document: fields in the order of the schema, tables sorted by key, one entry a line. Equal profiles give
    equal bytes."""
    fields = [f" {json.dumps(name)}: {_lay_out(_plain(getattr(profile, name)))}" for name in profile.__struct_fields__]
    return ("{\n" + ",\n".join(fields) + "\n}\n").encode()


def _lay_out(value: Any) -> str:
    """A field's text: tables and lists with one entry a line."""
    if isinstance(value, dict) and value:
        entries, opening, closing = [f"{_text(key)}: {_text(one)}" for key, one in value.items()], "{", "}"
    elif isinstance(value, list) and value:
        entries, opening, closing = [_text(one) for one in value], "[", "]"
    else:
        return _text(value)
    return opening + "\n" + ",\n".join(f"  {entry}" for entry in entries) + f"\n {closing}"


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    """As dicts and lists; the keys of tables in order."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: _plain(value[key]) for key in sorted(value)}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def profile_id(profile: Profile) -> str:
    """Sixteen hex digits that name a profile by its content, for plan files."""
    return hashlib.sha256(encode_profile(profile)).hexdigest()[:16]


def decode_profile(data: bytes, source: str = "the profile") -> Profile:
    """Reads and checks a document; `source` names it in messages.

    Raises:
        ProfileError: MP302 another schema version; MP303 not JSON, or cut off; MP304 unknown, missing or mistyped
            fields; MP305 impossible numbers.
    """
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProfileError("MP303", f"{source} is not whole JSON ({len(data)} bytes): {error}", _AGAIN) from None
    if not isinstance(document, dict) or "schema_version" not in document:
        raise ProfileError("MP304", f"{source} has no schema_version: it is not a profile", _AGAIN)
    if document["schema_version"] != SCHEMA_VERSION:
        message = f"{source} has schema version {document['schema_version']!r}; this meshplan reads {SCHEMA_VERSION}"
        raise ProfileError("MP302", message, _AGAIN)
    try:
        profile = convert(document, Profile, code="MP304")
        check_profile(profile)
    except InputError as error:
        raise ProfileError(error.code, f"{source}: {error.message}", error.hint) from None
    return profile


def read_profile(path: str | Path) -> Profile:
    """Reads and checks a profile.

    Args:
        path: of a file; ``measured:A100-SXM4-40GB`` is the shipped one of a device kind, from published measurements.

    Raises:
        ProfileError: MP300 for a file that cannot be read; else as `decode_profile`.
    """
    if str(path).startswith(SHIPPED):
        return _read_shipped(str(path).removeprefix(SHIPPED))
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        hint = "`meshplan profile -o FILE` writes one from the attached devices"
        raise ProfileError("MP300", f"cannot read profile {path}: {reason}", hint) from None
    return decode_profile(data, str(path))


def shipped_profiles() -> tuple[str, ...]:
    """Device kinds of which a profile comes with meshplan, fitted to published measurements."""
    folder = files("profiles").joinpath("measured")
    return tuple(sorted(one.name.removesuffix(SUFFIX) for one in folder.iterdir() if one.name.endswith(SUFFIX)))


def _read_shipped(kind_name: str) -> Profile:
    known = shipped_profiles()
    if kind_name not in known:
        hint = suggestion(kind_name, known, "there are profiles of")
        raise ProfileError("MP300", f"no published measurements of {kind_name!r} come with meshplan", hint)
    file = files("profiles").joinpath("measured", kind_name + SUFFIX)
    return decode_profile(file.read_bytes(), SHIPPED + kind_name)


def write_profile(path: str | Path, profile: Profile) -> None:
    """Writes a profile through a temporary file beside it, so that readers see the old one or all of the new one.

    Raises:
        ProfileError: MP300 if the place cannot be written; MP305 for a profile with impossible numbers.
    """
    try:
        check_profile(profile)
    except InputError as error:
        raise ProfileError(error.code, f"not written to {path}: {error.message}", error.hint) from None
    try:
        write_whole(Path(os.path.realpath(path)), encode_profile(profile), 0o644)
    except OSError as error:
        raise ProfileError("MP300", f"cannot write profile {path}: {error.strerror or error}", "") from None


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Where the user's profiles lie: ``$XDG_CACHE_HOME/meshplan/profiles``, else under ``~/.cache``.

    Args:
        environment: such as `os.environ`; read by the caller, at the edge.
    """
    base = environment.get("XDG_CACHE_HOME") or ""
    home = environment.get("HOME") or str(Path.home())
    return (Path(base) if base.startswith("/") else Path(home) / ".cache") / "meshplan" / "profiles"


def cached_path(kind_name: str, directory: Path) -> Path:
    """The file in the cache `directory` that holds the profile of a device kind."""
    return directory / (re.sub(r"[^A-Za-z0-9._-]+", "_", kind_name).strip(".") + SUFFIX)


def find_profile(kind_name: str, directory: Path) -> Path | None:
    """The cached profile of a device kind, or None."""
    path = cached_path(kind_name, directory)
    return path if path.is_file() else None


def save_in_cache(profile: Profile, directory: Path) -> Path:
    """Writes a profile where `find_profile` finds it, making the folder; returns the path."""
    path = cached_path(profile.device_kind, directory)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProfileError("MP300", f"cannot make {path.parent}: {error.strerror or error}", "") from None
    write_profile(path, profile)
    return path

"""Compiled figures by the hash of what they follow from: program, target, versions."""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from profiles.compiled.records import CompiledProgram
from profiles.compiled.target import Target
from profiles.store import cache_directory
from profiles.whole_file import write_whole

_log = logging.getLogger(__name__)
FORMAT = 1
"""Counts up when the same program would be read differently."""


def compiled_directory(environment: Mapping[str, str]) -> Path:
    """Where the user's compiled figures lie, beside the profiles."""
    return cache_directory(environment).parent / "compiled"


def cache_key(program: bytes, header: bytes, target: Target, versions: Mapping[str, str]) -> str:
    """Name of an entry: equal for equal programs (or what identifies them), targets and versions only."""
    parts = (
        program,
        header,
        msgspec.json.encode(target),
        msgspec.json.encode(sorted(versions.items())),
        bytes([FORMAT]),
    )
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()[:32]


def read_entry(directory: Path, key: str) -> CompiledProgram | None:
    """The entry, or None where there is none; a damaged one counts as none."""
    try:
        return msgspec.json.decode((directory / f"{key}.json").read_bytes(), type=CompiledProgram)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        _log.warning("a compiled figure in %s cannot be read and is made again: %s", directory, error)
        return None


def write_entry(directory: Path, key: str, found: CompiledProgram) -> None:
    """Writes an entry, whole or not at all. A place that cannot be written costs a compilation next time, no more."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / f"{key}.json", msgspec.json.encode(found))
    except OSError as error:
        _log.warning("compiled figures are not kept: cannot write %s: %s", directory, error.strerror or error)

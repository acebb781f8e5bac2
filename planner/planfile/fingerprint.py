"""Fingerprints: SHA-256 of plain data in one canonical form, so that equal facts give equal text on any machine."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from costmodel.cluster import Cluster

_ALGORITHM = "sha256"


def fingerprint(payload: Any) -> str:
    """``sha256:`` and 64 hex digits of `payload`.

    Args:
        payload: dicts with string keys, lists, tuples (equal to lists), strings, finite numbers, booleans, None. The
            order of keys does not matter; 1 and 1.0 differ.

    Raises:
        TypeError: anything else, such as an array, a set or a dict with other keys.
        ValueError: a NaN or an infinity.
    """
    _check_keys(payload, "payload")
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return f"{_ALGORITHM}:{hashlib.sha256(text.encode()).hexdigest()}"


def short_fingerprint(text: str) -> str:
    """The first 12 digits, for reports: `short_fingerprint("sha256:0123456789abcdef")` is ``'0123456789ab'``."""
    return text.removeprefix(f"{_ALGORITHM}:")[:12]


def cluster_fingerprint(cluster: Cluster) -> str:
    """Fingerprint of what a plan depends on in a cluster: devices, links and their rates; not prices or notes."""
    return fingerprint(cluster.fingerprint_payload())


def _check_keys(value: Any, path: str) -> None:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{path} has the key {key!r}, keys must be strings")
            _check_keys(entry, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for at, entry in enumerate(value):
            _check_keys(entry, f"{path}[{at}]")

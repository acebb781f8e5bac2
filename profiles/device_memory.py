"""How much memory a program may use on each attached device."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def usable_memory_bytes(devices: Sequence[Any]) -> int | None:
    """What each of the `jax.Device`s may use when all of them do; None where nobody says.

    GPUs and TPUs report what their allocator may use. CPU devices share this machine's memory evenly, or what its
    container may use of it.
    """
    if devices[0].platform == "cpu":
        total = _host_memory_bytes()
        return None if total is None else total // len(devices)
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    stated = [int(limit) for limit in limits if limit]
    return min(stated) if stated else None


def _host_memory_bytes() -> int | None:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not every system knows these names
        return None
    try:
        return min(total, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return total

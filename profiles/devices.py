"""The attached devices as a cluster document: what `meshplan cluster init` starts from. JAX is imported on call."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from costmodel.cluster import Cluster, DeviceGroup, GroupLink, Link, Overrides, assumed_tiers
from costmodel.device_kind import DeviceKind, Platform, assumed_reserve_bytes
from costmodel.units import GIB
from profiles.catalogue import kind_for_jax_name

ASSUMED_MEMORY_BYTES = 16 * GIB
_ASSUMED_INTER = Link(bandwidth_bytes_per_s=12.5e9, latency_s=30e-6, provenance="assumed")


def attached_cluster(name: str = "local") -> Cluster:
    """The devices that JAX sees, of all processes, as a cluster.

    A process is a node; for TPUs a slice is, as ICI joins its hosts. Kinds in the catalogue take their facts from it;
    any other kind gets facts marked `assumed`, with the memory that its devices report. All links are marked `assumed`
    until they are measured.

    Args:
        name: the cluster's name.

    Returns:
        A cluster of one group per device kind, groups in order of their first device.
    """
    import jax

    return cluster_of(jax.devices(), name)


def cluster_of(devices: Sequence[Any], name: str) -> Cluster:
    """As `attached_cluster`, of the given `jax.Device`s."""
    if not devices:
        raise ValueError("cluster_of() needs at least one device")
    by_kind: dict[str, list[Any]] = {}
    for device in sorted(devices, key=lambda one: one.id):
        by_kind.setdefault(device.device_kind, []).append(device)
    groups: list[DeviceGroup] = []
    for jax_name, members in by_kind.items():
        kind = kind_for_jax_name(jax_name) or assumed_kind(members[0])
        groups.append(_group(kind, members, taken=[group.name for group in groups]))
    links = tuple(
        GroupLink(between=(one.name, other.name), bandwidth_bytes_per_s=12.5e9, latency_s=30e-6, provenance="assumed")
        for at, one in enumerate(groups)
        for other in groups[at + 1 :]
    )
    return Cluster(name=name, groups=tuple(groups), links=links)


def _group(kind: DeviceKind, members: Sequence[Any], taken: Sequence[str]) -> DeviceGroup:
    counts = list(Counter(map(_node_of, sorted(members, key=_node_of))).values())
    width = max(counts)
    missing = tuple(f"{node}/{index}" for node, count in enumerate(counts) for index in range(count, width))
    return DeviceGroup(
        name=_group_name(kind.name, taken),
        nodes=len(counts),
        device=kind,
        devices_per_node=width,
        intra=assumed_tiers(kind, width) if width > 1 else (),
        inter=_ASSUMED_INTER if len(counts) > 1 else None,
        overrides=Overrides(missing=missing),
    )


def _node_of(device: Any) -> int:
    index = getattr(device, "slice_index", None) if device.platform == "tpu" else None
    return device.process_index if index is None else index


def _group_name(kind: str, taken: Sequence[str]) -> str:
    """The kind's first word (``a100`` of ``A100-SXM4-80GB``), or all of it where the first word is taken."""
    words = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-") or "group"
    short = words.split("-")[0]
    if short not in taken:
        return short
    free = (f"{words}-{at}" if at else words for at in range(len(taken) + 1))
    return next(one for one in free if one not in taken)


def assumed_kind(device: Any) -> DeviceKind:
    """Facts for a device that the catalogue does not know: round numbers, every one marked `assumed`."""
    platform: Platform = device.platform if device.platform in ("cpu", "tpu") else "gpu"
    memory_bytes = _reported_memory_bytes(device)
    rate = 50e9 if platform == "cpu" else 10e12
    return DeviceKind(
        name=device.device_kind,
        platform=platform,
        peak_flops_per_s={"float32": rate, "bfloat16": rate * (1 if platform == "cpu" else 4)},
        memory_bytes=memory_bytes or ASSUMED_MEMORY_BYTES,
        memory_bandwidth_bytes_per_s=10e9 if platform == "cpu" else 500e9,
        reserve_bytes=assumed_reserve_bytes(platform, memory_bytes or ASSUMED_MEMORY_BYTES),
        jax_names=(device.device_kind,),
        provenance={
            "peak_flops_per_s": "assumed",
            "memory_bytes": "measured" if memory_bytes else "assumed",
            "memory_bandwidth_bytes_per_s": "assumed",
        },
        source="assumed: not in the catalogue",
        notes="replace these figures by the vendor's, or measure them with `meshplan profile`",
    )


def _reported_memory_bytes(device: Any) -> int | None:
    """What the device's allocator may use, where it says; a GPU process that preallocates reports its pool."""
    stats = device.memory_stats()
    return int(stats["bytes_limit"]) if stats and stats.get("bytes_limit") else None

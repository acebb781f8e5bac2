"""What collectives cost on a mesh axis, and what transfers between sets of devices cost.

Alpha-beta model: with `n` devices, start `s`, latency `a` per hop, bandwidth `b` per device, and `S` bytes,

    C1  all_reduce        s + min(2 (n-1) a + 2 (n-1)/n S/b,  t + 2 S/d)    ring; across nodes also double binary tree
    C2  all_gather        s + (n-1) a + (n-1)/n S/b                         S = gathered output
    C3  reduce_scatter    s + (n-1) a + (n-1)/n S/b                         S = input
    C4  all_to_all        s + (n-1) a + (n-1)/n S/c                         S = local input
    C5  permute           s + a + S/b                                       S = what each device sends
    C6  transfer          a + S/b                                           point to point

C1 to C4: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005); they
are also the bus-bandwidth factors of nccl-tests (doc/PERFORMANCE.md). The tree term of C1 is NCCL's since 2.4, after
Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009); `t` is its
latency: a chain inside each node and a binary tree over nodes, up and down. Its bandwidth `d` is the ring's, except
between two nodes (each sends S in all: half to its parent in one tree, half to its child in the other) and three (1.5 S
at most), where it exceeds the network's as far as the links inside nodes allow (NVIDIA/nccl-tests issue 196).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args, overload

import numpy as np
from numpy.typing import NDArray

from costmodel.cluster import DeviceGroup, Link, LinkTier

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]
COLLECTIVES: tuple[CollectiveKind, ...] = get_args(CollectiveKind)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AxisLink:
    """The communication that one mesh axis (or one pair of device sets) sees.

    Attributes:
        size: devices in one group of the axis.
        bandwidth_bytes_per_s: of one ring through the group, with all groups of the axis at work at once.
        latency_s: of one hop, averaged over the hops of the ring.
        all_to_all_bytes_per_s: bandwidth of one device in an all-to-all; None where it is that of the ring.
        tree_latency_s: latency of a tree all-reduce, up and down; None inside a node, where rings are used.
        tree_bytes_per_s: `d` of C1, with all groups of the axis at work at once; None where it is that of the ring.
        start_s: what any collective takes beside its hops and its bytes.
    """

    size: int
    bandwidth_bytes_per_s: float
    latency_s: float
    all_to_all_bytes_per_s: float | None = None
    tree_latency_s: float | None = None
    tree_bytes_per_s: float | None = None
    start_s: float = 0.0


TREE_GAIN = {2: 2.0, 3: 4 / 3}
"""What a double binary tree over so many nodes gains over a ring: 2 S over the most that a node sends; 1 over more."""

NO_LINK = AxisLink(size=1, bandwidth_bytes_per_s=math.inf, latency_s=0.0)
"""Where nothing moves: on an axis of one device, and from a set of devices to itself."""


@overload
def collective_time_s(kind: CollectiveKind, full_bytes: float, link: AxisLink) -> float: ...
@overload
def collective_time_s(kind: CollectiveKind, full_bytes: Floats, link: AxisLink) -> Floats: ...
def collective_time_s(kind: CollectiveKind, full_bytes: float | Floats, link: AxisLink) -> float | Floats:
    """Seconds that a collective takes (C1 to C5).

    Args:
        kind: which collective.
        full_bytes: bytes, per device position, of the tensor not sharded on this axis: all_gather's output,
            reduce_scatter's and all_reduce's input, all_to_all's local input, what permute sends. A number or an array.
        link: the axis.

    Returns:
        Seconds, in the shape of `full_bytes`; 0 on an axis of size 1 and for no bytes.

    Example:
        >>> link = AxisLink(size=4, bandwidth_bytes_per_s=100e9, latency_s=0.0)
        >>> collective_time_s("all_gather", 4e9, link)
        0.03
    """
    size = np.asarray(full_bytes, dtype=np.float64)
    hops, share, rate, alpha = link.size - 1, (link.size - 1) / link.size, link.bandwidth_bytes_per_s, link.latency_s
    if link.size == 1:
        return np.zeros_like(size) if isinstance(full_bytes, np.ndarray) else 0.0
    if kind == "all_reduce":
        time = 2 * hops * alpha + 2 * share * size / rate
        if link.tree_latency_s is not None:
            time = np.minimum(time, link.tree_latency_s + 2 * size / (link.tree_bytes_per_s or rate))
    elif kind in ("all_gather", "reduce_scatter"):
        time = hops * alpha + share * size / rate
    elif kind == "all_to_all":
        time = hops * alpha + share * size / (link.all_to_all_bytes_per_s or rate)
    elif kind == "permute":
        time = alpha + size / rate
    else:
        raise ValueError(f"unknown collective {kind!r}; legal are {', '.join(COLLECTIVES)}")
    time = np.where(size > 0, link.start_s + time, 0.0)
    return time if isinstance(full_bytes, np.ndarray) else float(time)


@overload
def transfer_time_s(transfer_bytes: float, link: AxisLink) -> float: ...
@overload
def transfer_time_s(transfer_bytes: Floats, link: AxisLink) -> Floats: ...
def transfer_time_s(transfer_bytes: float | Floats, link: AxisLink) -> float | Floats:
    """Seconds to move bytes between two sets of devices (C6), with `link` from `Transfers.link`; 0 for no bytes."""
    size = np.asarray(transfer_bytes, dtype=np.float64)
    time = np.where(size > 0, link.latency_s + size / link.bandwidth_bytes_per_s, 0.0)
    return time if isinstance(transfer_bytes, np.ndarray) else float(time)


def axis_links(
    group: DeviceGroup, mesh_shape: tuple[int, ...], device_count: int | None = None, *, first: int = 0
) -> tuple[AxisLink, ...]:
    """What each axis of a mesh sees, for a mesh laid out row-major over consecutive devices of a group.

    The last axis is innermost. All groups of an axis communicate at once. A ring visits its devices in order, so it
    enters and leaves each of its nodes once, and the `c` rings that touch a node share its bandwidth `B`. A ring with
    `m` devices in a node can use at most ``m max(1, nics/d) / nics`` of `B` (`d` devices per node); hops inside a node
    take the narrowest tier that joins the two devices, and the slowest tier in use counts. So, across nodes,

        ring bandwidth        min(tier, B min(1/c, m max(1, nics/d)/nics))
        all-to-all            min(tier, B min(1/(c m), max(1, nics/d)/nics) (n-1)/(n-m))

    as of an all-to-all's bytes the share ``(n-m)/(n-1)`` leaves the node. The slowest ring of the axis counts. Missing
    devices shift the layout: what is computed is what the real devices see.

    Args:
        group: the device group; its missing devices and slow links count.
        mesh_shape: axis sizes; their product is the number of devices used.
        device_count: that number again, as a check.
        first: position in the group of the mesh's first device.

    Raises:
        ValueError: the shape does not have `device_count` devices, or the group has fewer.
    """
    count = math.prod(mesh_shape)
    if device_count is not None and count != device_count:
        raise ValueError(f"mesh {mesh_shape} has {count} devices, got device_count = {device_count}")
    if first < 0 or first + count > group.device_count:
        had = f"group {group.name!r} has {group.device_count}"
        raise ValueError(f"mesh {mesh_shape} from device {first} needs {count} devices; {had}")
    return _axis_links(group, tuple(mesh_shape), first)


@lru_cache(maxsize=4096)
def _axis_links(group: DeviceGroup, mesh_shape: tuple[int, ...], first: int) -> tuple[AxisLink, ...]:
    count = math.prod(mesh_shape)
    node, index = np.array(group.slots[first : first + count], dtype=np.int64).T
    positions = np.arange(count).reshape(mesh_shape)
    rings = (np.moveaxis(positions, axis, -1).reshape(-1, size) for axis, size in enumerate(mesh_shape))
    return tuple(
        rings_link((group,), np.zeros_like(ring), node[ring], index[ring], lambda _one, _other: _inter(group))
        for ring in rings
    )


def _inter(group: DeviceGroup) -> Link:
    if group.inter is None:
        raise ValueError(
            f"group {group.name!r} has {group.nodes} nodes and no inter-node link; parse_cluster fills it in"
        )
    return group.inter


def rings_link(
    groups: Sequence[DeviceGroup],
    at: NDArray[np.int64],
    node: NDArray[np.int64],
    index: NDArray[np.int64],
    between: Callable[[int, int], Link],
) -> AxisLink:
    """What an axis sees whose rings visit devices of one or several groups (`axis_links` says how).

    Args:
        at, node, index: [ring, position] each device's group (its place in `groups`), node there and index in the node.
        between: the link that a node of one group sends to nodes of another by, or of its own.
    """
    size = node.shape[1]
    if size == 1:
        return NO_LINK
    next_at, next_node, next_index = (np.roll(a, -1, axis=1) for a in (at, node, index))
    outer = (node != next_node) | (at != next_at)
    tiers = [t for g, group in enumerate(groups) for t in _tiers_used(group, index, next_index, ~outer & (at == g))]
    tier_rate = min((tier.achieved_bytes_per_s for tier in tiers), default=math.inf)
    tier_latency_s = max((tier.latency_s for tier in tiers), default=0.0)
    start_s = max((tier.start_s for tier in tiers), default=0.0)
    if not outer.any():
        return AxisLink(size=size, bandwidth_bytes_per_s=tier_rate, latency_s=tier_latency_s, start_s=start_s)
    pairs = sorted({(int(a), int(b)) for a, b in zip(at[outer], next_at[outer], strict=True)})
    links = {pair: between(*pair) for pair in pairs}
    inter_latency_s = max(link.latency_s for link in links.values())
    ring_rate, scatter_rate = _rates_between_nodes(groups, links, at, node, next_at, outer)
    outer_hops = int(outer.sum(axis=1).max())
    latency_s = (outer_hops * inter_latency_s + (size - outer_hops) * tier_latency_s) / size
    trees = all(_fabric_in_nodes(group) for group in groups)
    chain = max(0, math.ceil(size / outer_hops) - 1)
    return AxisLink(
        size=size,
        bandwidth_bytes_per_s=min(tier_rate, ring_rate),
        latency_s=max(latency_s, tier_latency_s if (~outer).all(axis=1).any() else 0.0),
        all_to_all_bytes_per_s=min(tier_rate, scatter_rate),
        tree_bytes_per_s=min(tier_rate, ring_rate * TREE_GAIN.get(outer_hops, 1.0)) if trees else None,
        tree_latency_s=2 * (chain * tier_latency_s + math.ceil(math.log2(outer_hops)) * inter_latency_s),
        start_s=max(start_s, *(link.start_s for link in links.values())),
    )


def _fabric_in_nodes(group: DeviceGroup) -> bool:
    """Whether GPUs reach each other beside the PCIe that they reach their network by: else a tree's chains take the
    bandwidth that it would gain there."""
    return group.device.platform == "gpu" and group.device.link_bandwidth_bytes_per_s is not None


def _tiers_used(
    group: DeviceGroup, index: NDArray[np.int64], next_index: NDArray[np.int64], inner: NDArray[np.bool_]
) -> tuple[LinkTier, ...]:
    """Tiers that the hops inside nodes take; each takes the narrowest that joins its two devices."""
    left, used = inner.copy(), []
    for tier in group.intra:
        joined = left & (index // tier.span == next_index // tier.span)
        if joined.any():
            used.append(tier)
        left &= ~joined
    if left.any():
        raise ValueError(f"group {group.name!r} has no tier that joins its nodes' devices; parse_cluster fills it in")
    return tuple(used)


def _rates_between_nodes(
    groups: Sequence[DeviceGroup],
    links: Mapping[tuple[int, int], Link],
    at: NDArray[np.int64],
    node: NDArray[np.int64],
    next_at: NDArray[np.int64],
    outer: NDArray[np.bool_],
) -> tuple[float, float]:
    """Slowest (ring, all-to-all) bandwidth over the rings that cross nodes, by the link that each leaves a node by."""
    rows, size = node.shape
    most = max(group.nodes for group in groups)
    place = at * most + node
    count = most * len(groups)
    ring_of = np.broadcast_to(np.arange(rows)[:, None], place.shape)
    crossing = outer.any(axis=1)
    keys, here = np.unique((ring_of * count + place)[crossing], return_counts=True)
    rings = np.bincount(keys % count, minlength=count)
    devices = np.bincount(keys % count, weights=here, minlength=count)
    here_of = np.bincount(keys, weights=here, minlength=rows * count)
    ring_rate = scatter_rate = math.inf
    for (one, other), link in links.items():
        leaving = outer & (at == one) & (next_at == other)
        places, here = place[leaving], here_of[(ring_of * count + place)[leaving]]
        group = groups[one]
        slow = np.array([group.overrides.slow_links.get(str(n), 1.0) for n in range(group.nodes)])
        rate = link.achieved_bytes_per_s / slow[node[leaving]]
        own = max(1.0, link.nics / group.devices_per_node) / link.nics
        ring_rate = min(ring_rate, float((rate * np.minimum(1 / rings[places], here * own)).min()))
        scatter = rate * np.minimum(1 / devices[places], own) * (size - 1) / (size - here)
        scatter_rate = min(scatter_rate, float(scatter.min()))
    return ring_rate, scatter_rate

"""What each axis of a strategy sees of the cluster: its devices are laid out in the strategy's rank order."""

from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np

from costmodel.cluster import Cluster, DeviceGroup
from costmodel.collectives import NO_LINK, AxisLink, CollectiveKind, axis_links, collective_time_s
from costmodel.errors import InputError
from costmodel.stack import Stack
from planner.strategy.strategy import Strategy

_SMALL, _LARGE = 1e6, 1e9  # bytes through which a collective's line is drawn


@dataclass(frozen=True)
class AxisLinks:
    """Links by axis name (``dp``, ``tp``, ``pp``, ``cp``; with experts shared out ``ep`` and ``edp`` too), and how many
    nodes the strategy's devices stand in."""

    by_axis: dict[str, AxisLink]
    nodes: int

    def line(self, kind: str, axis: str) -> tuple[float, float]:
        """Fixed seconds and seconds per byte of a collective on an axis."""
        link = self.by_axis[axis]
        if link.size == 1:
            return 0.0, 0.0
        low, high = (collective_time_s(_kind(kind), size, link) for size in (_SMALL, _LARGE))
        slope = (high - low) / (_LARGE - _SMALL)
        return max(0.0, low - slope * _SMALL), slope

    def seconds(self, kind: str, axis: str, moved_bytes: float, starts: float = 1.0) -> float:
        """Seconds of `starts` collectives that move so many bytes together."""
        if moved_bytes <= 0.0:
            return 0.0
        fixed, slope = self.line(kind, axis)
        return fixed * starts + slope * moved_bytes


def _kind(kind: str) -> CollectiveKind:
    return kind  # type: ignore[return-value]


def group_with(group: DeviceGroup, stack: Stack) -> DeviceGroup:
    """The group with the shares and starts of a stack in place of its links' own."""
    tiers, inter = group.intra, group.inter
    if stack.tier_share is not None:
        tiers = tuple(msgspec.structs.replace(t, efficiency=stack.tier_share) for t in tiers)
    if stack.start_s is not None:
        tiers = tuple(msgspec.structs.replace(t, start_s=stack.start_s) for t in tiers)
    if inter is not None and stack.inter_share is not None:
        inter = msgspec.structs.replace(inter, efficiency=stack.inter_share)
    if inter is not None and stack.inter_start_s is not None:
        inter = msgspec.structs.replace(inter, start_s=stack.inter_start_s)
    return msgspec.structs.replace(group, intra=tiers, inter=inter)


def strategy_links(cluster: Cluster, strategy: Strategy, stack: Stack) -> AxisLinks:
    """Links of every axis of a strategy on a cluster.

    Where the cluster has several groups, an axis that crosses them sees the slowest of them and of the links between.

    Raises:
        InputError: MP183 if the cluster has fewer devices than the strategy uses.
    """
    have = sum(group.device_count for group in cluster.groups)
    if strategy.devices > have:
        s = strategy
        message = f"dp={s.dp} x cp={s.cp} x tp={s.tp} x pp={s.pp} uses {s.devices} devices, the cluster has {have}"
        raise InputError("MP183", message, "lower a degree, or name a larger cluster")
    found = _links(tuple(cluster.groups), cluster, strategy.devices, _sizes(strategy), stack)
    if strategy.ep == 1:
        return found
    apart = _links(tuple(cluster.groups), cluster, strategy.devices, _sizes(strategy, experts=True), stack)
    return AxisLinks({**found.by_axis, **{name: apart.by_axis[name] for name in ("ep", "edp")}}, found.nodes)


def _sizes(strategy: Strategy, *, experts: bool = False) -> tuple[tuple[str, int], ...]:
    """Axes with their sizes, outermost first.

    Args:
        experts: whether data parallelism is two axes, of replicas of the experts (``edp``) and of devices that share
            these out (``ep``), which lie next to each other.
    """
    sizes: list[tuple[str, int]] = []
    for name in reversed(strategy.rank_order.split("-")):
        if experts and name == "dp":
            sizes += [("edp", strategy.dp // strategy.ep), ("ep", strategy.ep)]
        else:
            sizes.append((name, getattr(strategy, name)))
    return tuple(sizes)


def _links(
    groups: tuple[DeviceGroup, ...], cluster: Cluster, devices: int, sizes: tuple[tuple[str, int], ...], stack: Stack
) -> AxisLinks:
    names = tuple(name for name, _ in sizes)
    mesh = tuple(size for _, size in sizes)
    if len(groups) == 1:
        group = group_with(groups[0], stack)
        found = axis_links(group, mesh)
        nodes = _nodes(groups[0], devices)
        return AxisLinks(dict(zip(names, found, strict=True)), nodes)
    return _mixed_links(cluster, devices, names, mesh, stack)


@lru_cache(maxsize=4096)
def _nodes(group: DeviceGroup, devices: int) -> int:
    return len({node for node, _ in group.slots[:devices]})


def _mixed_links(
    cluster: Cluster, devices: int, names: tuple[str, ...], mesh: tuple[int, ...], stack: Stack
) -> AxisLinks:
    """Each ring's slowest hop binds it; a node's network cards are shared by the rings that leave it."""
    used = cluster.devices[:devices]
    place = np.array([[_group_index(cluster, d.group), d.node] for d in used])
    node_of = place[:, 0] * 10_000 + place[:, 1]
    positions = np.arange(devices).reshape(mesh)
    found = {}
    for axis, name in enumerate(names):
        rings = np.moveaxis(positions, axis, -1).reshape(-1, mesh[axis])
        found[name] = _ring_link(cluster, used, node_of, rings, stack) if mesh[axis] > 1 else NO_LINK
    return AxisLinks(found, len(set(node_of.tolist())))


def _ring_link(cluster: Cluster, used: object, node_of: np.ndarray, rings: np.ndarray, stack: Stack) -> AxisLink:
    devices = list(used)  # type: ignore[call-overload]
    groups = {g.name: group_with(g, stack) for g in cluster.groups}
    size = rings.shape[1]
    after = np.roll(rings, -1, axis=1)
    crosses = node_of[rings] != node_of[after]
    leaving = np.bincount(node_of[rings[crosses]] if crosses.any() else np.zeros(0, dtype=int), minlength=1)
    rate, latency_s, start_s = np.inf, 0.0, 0.0
    for a, b, crossing in zip(rings.ravel(), after.ravel(), crosses.ravel(), strict=True):
        one, other = devices[a], devices[b]
        group = groups[one.group]
        if not crossing:
            tier = next((t for t in group.intra if one.index // t.span == other.index // t.span), None)
            if tier is not None:
                rate, latency_s = min(rate, tier.achieved_bytes_per_s), max(latency_s, tier.latency_s)
                start_s = max(start_s, tier.start_s)
            continue
        link = cluster.group_link(one.group, other.group)
        share = stack.inter_share if stack.inter_share is not None else None
        bandwidth = link.bandwidth_bytes_per_s * share if share is not None else link.achieved_bytes_per_s
        rate = min(rate, bandwidth / max(1, int(leaving[node_of[a]])))
        latency_s = max(latency_s, link.latency_s)
        start_s = max(start_s, stack.inter_start_s if stack.inter_start_s is not None else link.start_s)
    tree = 2 * latency_s * np.ceil(np.log2(size)) if crosses.any() else None
    return AxisLink(
        size=size, bandwidth_bytes_per_s=float(rate), latency_s=latency_s, tree_latency_s=tree, start_s=start_s
    )


@lru_cache(maxsize=64)
def _index(names: tuple[str, ...]) -> dict[str, int]:
    return {name: i for i, name in enumerate(names)}


def _group_index(cluster: Cluster, name: str) -> int:
    return _index(tuple(g.name for g in cluster.groups))[name]

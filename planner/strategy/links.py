"""What each axis of a strategy sees of the cluster: its devices are laid out in the strategy's rank order."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from costmodel.cluster import Cluster, DeviceGroup, Link
from costmodel.collectives import AxisLink, CollectiveKind, axis_links, collective_time_s, rings_link
from costmodel.errors import InputError
from costmodel.stack import Stack
from planner.strategy.strategy import Strategy

Positions = NDArray[np.int64]
_SMALL, _LARGE = 1e6, 1e9  # bytes through which a collective's line is drawn


@dataclass(frozen=True)
class AxisLinks:
    """What the devices of one stage see.

    Attributes:
        by_axis: links by axis name (``dp``, ``tp``, ``pp``, ``cp``; with experts shared out ``ep`` and ``edp`` too).
        nodes: in which the devices of all stages stand.
        like: the first stage whose links are the same.
        across: axes along which some of the stage's devices are of several groups of the cluster -> these groups.
    """

    by_axis: dict[str, AxisLink]
    nodes: int
    like: int = 0
    across: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def line(self, kind: str, axis: str) -> tuple[float, float]:
        """Fixed seconds and seconds per byte of a collective on an axis."""
        if (kind, axis) not in self._lines:
            self._lines[kind, axis] = self._line(kind, axis)
        return self._lines[kind, axis]

    @cached_property
    def _lines(self) -> dict[tuple[str, str], tuple[float, float]]:
        return {}

    def _line(self, kind: str, axis: str) -> tuple[float, float]:
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
    return msgspec.structs.replace(group, intra=tiers, inter=None if inter is None else _link_with(inter, stack))


def _link_with(link: Link, stack: Stack) -> Link:
    """A link between nodes with the share and start of a stack in place of its own."""
    if stack.inter_share is not None:
        link = msgspec.structs.replace(link, efficiency=stack.inter_share)
    if stack.inter_start_s is not None:
        link = msgspec.structs.replace(link, start_s=stack.inter_start_s)
    return link


def strategy_links(cluster: Cluster, strategy: Strategy, stack: Stack) -> tuple[AxisLinks, ...]:
    """Links of every axis of a strategy on a cluster, by stage.

    Where the cluster has several groups, an axis that crosses them sees the slowest of them and of the links between;
    one that does not, those of its own group.

    Raises:
        InputError: MP183 if the cluster has fewer devices than the strategy uses.
    """
    have = sum(group.device_count for group in cluster.groups)
    if strategy.devices > have:
        s = strategy
        message = f"dp={s.dp} x cp={s.cp} x tp={s.tp} x pp={s.pp} uses {s.devices} devices, the cluster has {have}"
        raise InputError("MP183", message, "lower a degree, or name a larger cluster")
    found = _links(cluster, strategy.devices, _sizes(strategy), stack)
    if strategy.ep > 1:
        apart = _links(cluster, strategy.devices, _sizes(strategy, experts=True), stack)
        found = [own | {name: more[name] for name in ("ep", "edp")} for own, more in zip(found, apart, strict=True)]
    if strategy.pp > 1 and stack.send_share is not None:
        sending = msgspec.structs.replace(stack, inter_share=stack.send_share)
        sends = _links(cluster, strategy.devices, _sizes(strategy), sending)
        found = [own | {"pp": more["pp"]} for own, more in zip(found, sends, strict=True)]
    nodes = _nodes(cluster, strategy.devices)
    if len(cluster.groups) == 1:
        return (AxisLinks(found[0], nodes),) * strategy.pp
    across = _across(cluster, strategy.devices, _sizes(strategy))
    return tuple(AxisLinks(own, nodes, found.index(own), crossed) for own, crossed in zip(found, across, strict=True))


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
    cluster: Cluster, devices: int, sizes: tuple[tuple[str, int], ...], stack: Stack
) -> list[dict[str, AxisLink]]:
    names, mesh = zip(*sizes, strict=True)
    if len(cluster.groups) == 1:
        found = axis_links(group_with(cluster.groups[0], stack), mesh)
        return [dict(zip(names, found, strict=True))] * mesh[names.index("pp")]
    return _mixed_links(cluster, devices, names, mesh, stack)


def _nodes(cluster: Cluster, devices: int) -> int:
    if len(cluster.groups) == 1:
        return _nodes_of(cluster.groups[0], devices)
    return len({(d.group, d.node) for d in cluster.devices[:devices]})


@lru_cache(maxsize=4096)
def _nodes_of(group: DeviceGroup, devices: int) -> int:
    return len({node for node, _ in group.slots[:devices]})


def _mixed_links(
    cluster: Cluster, devices: int, names: tuple[str, ...], mesh: tuple[int, ...], stack: Stack
) -> list[dict[str, AxisLink]]:
    """As on one group's devices (`costmodel.collectives.rings_link`), by the links between groups where rings cross.
    What a stage sees depends on its own rings, and on those of others that they share a node with."""
    used = cluster.devices[:devices]
    at = np.array([_group_index(cluster, d.group) for d in used])
    node, index = np.array([(d.node, d.index) for d in used]).T
    groups = tuple(group_with(group, stack) for group in cluster.groups)

    def between(one: int, other: int) -> Link:
        return _link_with(cluster.group_link(groups[one].name, groups[other].name), stack)

    machine = at * (1 + node.max()) + node
    found: list[dict[str, AxisLink]] = [{} for _ in range(mesh[names.index("pp")])]
    for name, rings in _rings(names, mesh).items():
        known: dict[bytes, AxisLink] = {}
        for links, own in zip(found, _of_stages(name, rings, names, mesh), strict=True):
            beside = rings[np.isin(machine[rings], machine[own]).any(axis=1)]
            key = beside.tobytes()
            if key not in known:
                known[key] = rings_link(groups, at[beside], node[beside], index[beside], between)
            links[name] = known[key]
    return found


def _across(cluster: Cluster, devices: int, sizes: tuple[tuple[str, int], ...]) -> list[dict[str, tuple[str, ...]]]:
    """Of each stage, the axes along which devices are of several groups, and the groups of the first such ring."""
    names, mesh = zip(*sizes, strict=True)
    group = np.array([device.group for device in cluster.devices[:devices]])
    found: list[dict[str, tuple[str, ...]]] = [{} for _ in range(mesh[names.index("pp")])]
    for name, rings in _rings(names, mesh).items():
        for crossed, own in zip(found, _of_stages(name, rings, names, mesh), strict=True):
            several = (group[own] != group[own[:, :1]]).any(axis=1)
            if several.any():
                crossed[name] = tuple(sorted(set(group[own[several.argmax()]].tolist())))
    return found


def _rings(names: tuple[str, ...], mesh: tuple[int, ...]) -> dict[str, Positions]:
    """[ring, position] of each axis: places of devices in the strategy's order."""
    positions = np.arange(math.prod(mesh)).reshape(mesh)
    return {name: np.moveaxis(positions, a, -1).reshape(-1, mesh[a]) for a, name in enumerate(names)}


def _of_stages(name: str, rings: Positions, names: tuple[str, ...], mesh: tuple[int, ...]) -> list[Positions]:
    """The rings of an axis that each stage has a part in."""
    stages = range(mesh[names.index("pp")])
    if name == "pp":
        return [rings for _ in stages]
    stage = np.indices(mesh)[names.index("pp")].reshape(-1)[rings[:, 0]]
    return [rings[stage == s] for s in stages]


@lru_cache(maxsize=64)
def _index(names: tuple[str, ...]) -> dict[str, int]:
    return {name: i for i, name in enumerate(names)}


def _group_index(cluster: Cluster, name: str) -> int:
    return _index(tuple(g.name for g in cluster.groups))[name]

"""A cluster: groups of equal nodes, the links inside and between them, and its devices by id (``group/node/index``).

Bandwidths are bytes per second in one direction. A tier's bandwidth is per device; `inter` and the links between groups
are per node. `parse_cluster` turns a document into a checked `Cluster`; `profiles.cluster_files` reads and writes TOML.
"""

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

import msgspec

from costmodel.cluster_checks import check_cluster, require_device_name
from costmodel.device_kind import DeviceKind, assumed_reserve_bytes
from costmodel.documents import convert
from costmodel.provenance import Provenance

TIER_EFFICIENCY = 0.8
"""Achieved share of a datasheet fabric bandwidth in large rings, where a tier states none. Bus bandwidth of rings in
published nccl-tests (stas00/ml-engineering, network/README.md): 235 of 300 GB/s on A100, 363 of 450 on H200, 682 of
900 on B200."""

INTER_EFFICIENCY = 0.85
"""The same between nodes: 381 of 400 GB/s per node on EFA v4 (the same tables), 0.4 to 0.6 of the NIC rate fitted to
vTrain's training times."""

COLLECTIVE_START_S = 25e-6
"""Time that any collective takes beside its hops and its bytes, unless a link states its own. Fitted with 1.5 us a hop
to nccl-tests on eight A100s, H200s and B200s (8 B to 16 GiB, without all-to-all): mean error 20%."""

ASSUMED_LATENCY_S = 2e-6
ASSUMED_INTER_BYTES_PER_S = 12.5e9
ASSUMED_INTER_LATENCY_S = 30e-6
ASSUMED_TIER_BYTES_PER_S = 10e9

_TIMED = ("measured", "fitted", "interpolated")


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What joins the nodes of a group.

    Attributes:
        bandwidth_bytes_per_s: of one node, in one direction, all its NICs together.
        latency_s: of one hop between nodes.
        nics: NICs that share the bandwidth; a device alone can use only its own share of them.
        efficiency: achieved share of the bandwidth for large messages; without it 1 for a timed figure, else assumed.
        start_s: what any collective takes beside its hops and its bytes.
        provenance: where bandwidth and latency come from.
    """

    bandwidth_bytes_per_s: float
    latency_s: float
    nics: int = 1
    efficiency: float | None = None
    start_s: float = COLLECTIVE_START_S
    provenance: Provenance = "datasheet"

    @property
    def achieved_bytes_per_s(self) -> float:
        """Bandwidth that large messages see."""
        return self.bandwidth_bytes_per_s * _efficiency(self.efficiency, self.provenance, INTER_EFFICIENCY)

    @property
    def achieved_provenance(self) -> Provenance:
        """How far `achieved_bytes_per_s` can be trusted."""
        return _achieved_provenance(self.efficiency, self.provenance)


class LinkTier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One level of the fabric inside a node: it joins each block of `span` consecutive devices.

    Attributes:
        span: devices in a block, counted in consecutive device indices from 0.
        bandwidth_bytes_per_s: of one device, in one direction.
        latency_s: of one hop of a collective.
        efficiency, start_s, provenance: as in `Link`.
    """

    span: int
    bandwidth_bytes_per_s: float
    latency_s: float
    efficiency: float | None = None
    start_s: float = COLLECTIVE_START_S
    provenance: Provenance = "datasheet"

    @property
    def achieved_bytes_per_s(self) -> float:
        """Bandwidth that large messages see."""
        return self.bandwidth_bytes_per_s * _efficiency(self.efficiency, self.provenance, TIER_EFFICIENCY)

    @property
    def achieved_provenance(self) -> Provenance:
        """How far `achieved_bytes_per_s` can be trusted."""
        return _achieved_provenance(self.efficiency, self.provenance)


def _efficiency(stated: float | None, provenance: Provenance, assumed: float) -> float:
    if stated is not None:
        return stated
    return 1.0 if provenance in _TIMED else assumed


def _achieved_provenance(stated: float | None, provenance: Provenance) -> Provenance:
    return provenance if stated is not None or provenance in _TIMED else "assumed"


class Overrides(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the real nodes of a group differ from the ideal.

    Attributes:
        missing: devices that are not there or not to be used, as ``node/index``.
        slow: device (``node/index``) to factor of at least 1: its ops take that many times as long.
        slow_links: node (``"1"``) to factor of at least 1: its inter-node bandwidth is divided by it.
    """

    missing: tuple[str, ...] = ()
    slow: dict[str, float] = {}
    slow_links: dict[str, float] = {}


@lru_cache(maxsize=256)
def _slots(nodes: int, devices_per_node: int, missing: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    gone = set(missing)
    every = ((node, index) for node in range(nodes) for index in range(devices_per_node))
    return tuple(slot for slot in every if not gone or f"{slot[0]}/{slot[1]}" not in gone)


class DeviceGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Equal nodes of equal devices.

    Attributes:
        name: letters, digits, ``_ . -``; unique in the cluster.
        nodes: count; any number.
        device: the kind of all its devices.
        devices_per_node: count; any number. A node is what one fabric joins: a TPU slice or an NVL72 rack is one node.
        intra: tiers inside a node, narrow to wide; the last spans the node.
        inter: link between nodes; None for one node.
        price_per_device_hour: in any one currency; None if unknown.
        overrides: missing and slow devices, slow links.
    """

    name: str
    nodes: int
    device: DeviceKind
    devices_per_node: int
    intra: tuple[LinkTier, ...] = ()
    inter: Link | None = None
    price_per_device_hour: float | None = None
    overrides: Overrides = Overrides()

    def __hash__(self) -> int:
        return hash((self.name, self.nodes, self.devices_per_node, self.intra, self.inter))

    @cached_property
    def slots(self) -> tuple[tuple[int, int], ...]:
        """(node, index) of every device that is there, in order."""
        return _slots(self.nodes, self.devices_per_node, self.overrides.missing)

    @property
    def device_count(self) -> int:
        """Devices that are there (missing ones left out)."""
        return len(self.slots)

    def tier(self, span: int) -> LinkTier:
        """The narrowest tier that joins `span` consecutive devices of a node.

        Raises:
            ValueError: `span` is not between 1 and `devices_per_node`.
        """
        if not 1 <= span <= self.devices_per_node:
            raise ValueError(
                f"span must be 1 to {self.devices_per_node} (devices per node of {self.name!r}), got {span}"
            )
        return next((tier for tier in self.intra if tier.span >= span), _alone(self.device))


class GroupLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What joins two groups.

    Attributes:
        between: names of the two groups.
        bandwidth_bytes_per_s: per node, from the first to the second group (and back, unless stated).
        latency_s: of one message.
        bandwidth_back_bytes_per_s: per node, from the second to the first group, where it differs.
        efficiency: as in `Link`.
        provenance: as in `Link`.
    """

    between: tuple[str, str]
    bandwidth_bytes_per_s: float
    latency_s: float
    bandwidth_back_bytes_per_s: float | None = None
    efficiency: float | None = None
    provenance: Provenance = "datasheet"

    def directed(self, source: str) -> Link:
        """The link as seen by messages that leave group `source`."""
        back = self.bandwidth_back_bytes_per_s
        rate = back if back is not None and source == self.between[1] else self.bandwidth_bytes_per_s
        return Link(
            bandwidth_bytes_per_s=rate, latency_s=self.latency_s, efficiency=self.efficiency, provenance=self.provenance
        )


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a cluster. `id` is ``group/node/index``; its ops take `slowdown` times its kind's time."""

    id: str
    group: str
    node: int
    index: int
    kind: DeviceKind
    slowdown: float = 1.0


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Groups of nodes and the links between them.

    Attributes:
        name: for reports.
        groups: in document order, which is also the order of `devices`.
        links: one for each pair of groups.
    """

    name: str
    groups: tuple[DeviceGroup, ...] = msgspec.field(name="group")
    links: tuple[GroupLink, ...] = msgspec.field(name="link", default=())

    def __hash__(self) -> int:
        return hash((self.name, self.groups))

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Every device that is there, by group, node, index."""
        return tuple(
            Device(
                id=f"{group.name}/{node}/{index}",
                group=group.name,
                node=node,
                index=index,
                kind=group.device,
                slowdown=group.overrides.slow.get(f"{node}/{index}", 1.0),
            )
            for group in self.groups
            for node, index in group.slots
        )

    @cached_property
    def device_by_id(self) -> Mapping[str, Device]:
        """`devices` by id."""
        return {device.id: device for device in self.devices}

    @cached_property
    def kinds(self) -> tuple[DeviceKind, ...]:
        """The distinct device kinds, in order of first use."""
        return tuple({group.device.name: group.device for group in self.groups}.values())

    @property
    def device_count(self) -> int:
        """Devices in all."""
        return len(self.devices)

    @property
    def device_counts(self) -> dict[str, int]:
        """Devices per group name."""
        return {group.name: group.device_count for group in self.groups}

    def group(self, name: str) -> DeviceGroup:
        """The group called `name`; KeyError if there is none."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(f"cluster {self.name!r} has no group {name!r}; it has {', '.join(g.name for g in self.groups)}")

    def devices_of(self, name: str) -> tuple[Device, ...]:
        """Devices of the group called `name`, by node and index."""
        return tuple(device for device in self.devices if device.group == name)

    def tier(self, group: str, span: int) -> LinkTier:
        """The narrowest tier of `group` that joins `span` consecutive devices of a node (see `DeviceGroup.tier`)."""
        return self.group(group).tier(span)

    def group_link(self, source: str, target: str) -> Link:
        """The link that messages from a node of `source` to a node of `target` take, per node.

        Within one group that is its `inter` link. KeyError for unknown groups and for a group of one node.
        """
        if source == target:
            inter = self.group(source).inter
            if inter is None:
                raise KeyError(f"group {source!r} has one node and no inter-node link")
            return inter
        for link in self.links:
            if set(link.between) == {source, target}:
                return link.directed(source)
        raise KeyError(f"cluster {self.name!r} has no link between {source!r} and {target!r}")

    def fingerprint_payload(self) -> dict[str, Any]:
        """What makes two clusters the same for a plan, as plain data to hash: everything but text, prices and what is
        of fused attention, which no plan has (`planner.strategy` estimates it)."""
        payload = msgspec.to_builtins(self)
        for group in payload["group"]:
            group.pop("price_per_device_hour")
            for field in ("vendor", "source", "notes", "provenance", "jax_names", "attention_efficiency"):
                group["device"].pop(field)
        return payload


def _alone(kind: DeviceKind) -> LinkTier:
    """A tier for a device that talks to nobody in its node."""
    return assumed_tiers(kind, 1)[-1]


def assumed_tiers(kind: DeviceKind, devices_per_node: int) -> tuple[LinkTier, ...]:
    """Tiers of a node that states none: the kind's fabric, then host links where that joins only a few devices."""
    fabric, host = kind.link_bandwidth_bytes_per_s, kind.host_bandwidth_bytes_per_s or ASSUMED_TIER_BYTES_PER_S

    def tier(span: int, rate: float) -> LinkTier:
        return LinkTier(span=span, bandwidth_bytes_per_s=rate, latency_s=ASSUMED_LATENCY_S, provenance="assumed")

    if fabric is None:
        return (tier(devices_per_node, host),)
    if kind.link_span is None or kind.link_span >= devices_per_node:
        return (tier(devices_per_node, fabric),)
    return (tier(kind.link_span, fabric), tier(devices_per_node, host))


def parse_cluster(data: Mapping[str, Any], catalogue: Mapping[str, DeviceKind]) -> Cluster:
    """Checks a cluster document and resolves what it leaves out.

    Args:
        data: the parsed document, shaped as in `examples/clusters`. `device` is a name in `catalogue` or a table of a
            `DeviceKind`'s facts. A node without `intra` gets the kind's fabric, several nodes without `inter` get
            12.5 GB/s; both are marked `assumed`.
        catalogue: device kinds by name.

    Returns:
        The cluster, with every link filled in.

    Raises:
        InputError: MP131 unknown, missing or mistyped field; MP132 unknown device kind; MP133 a number out of range;
            MP134 names; MP135 links between groups; MP136 tiers; MP137 overrides. Each names the path in the document.
    """
    document = dict(data)
    groups = document.get("group")
    if isinstance(groups, list):
        document["group"] = [_resolve(group, f"group[{at}]", catalogue) for at, group in enumerate(groups)]
    cluster = convert(document, Cluster, code="MP131")
    check_cluster(cluster)
    filled = tuple(_fill(group) for group in cluster.groups)
    return msgspec.structs.replace(cluster, groups=filled)


def _resolve(group: Any, path: str, catalogue: Mapping[str, DeviceKind]) -> Any:
    """The group's table with `device` as a table of facts."""
    if not isinstance(group, Mapping) or "device" not in group:
        return group
    device = group["device"]
    if isinstance(device, str):
        kind = require_device_name(device, f"{path}.device", catalogue)
        return {**group, "device": msgspec.to_builtins(kind)}
    kind = convert(device, DeviceKind, code="MP131", root=f"{path}.device")
    if "reserve_bytes" not in device:
        kind = msgspec.structs.replace(kind, reserve_bytes=assumed_reserve_bytes(kind.platform, kind.memory_bytes))
    return {**group, "device": msgspec.to_builtins(kind)}


def _fill(group: DeviceGroup) -> DeviceGroup:
    intra, inter = group.intra, group.inter
    if not intra and group.devices_per_node > 1:
        intra = assumed_tiers(group.device, group.devices_per_node)
    if inter is None and group.nodes > 1:
        inter = Link(
            bandwidth_bytes_per_s=ASSUMED_INTER_BYTES_PER_S, latency_s=ASSUMED_INTER_LATENCY_S, provenance="assumed"
        )
    return msgspec.structs.replace(group, intra=intra, inter=inter)

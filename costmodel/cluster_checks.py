"""What a cluster document may not say, beyond its shape: one check a kind of mistake, each with a code and a path."""

import re
from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING

from costmodel.device_kind import DeviceKind, check_device_kind
from costmodel.documents import require_number, suggestion
from costmodel.errors import InputError

if TYPE_CHECKING:
    from costmodel.cluster import Cluster, DeviceGroup

MAX_DEVICES = 100_000
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def require_device_name(name: str, path: str, catalogue: Mapping[str, DeviceKind]) -> DeviceKind:
    """The kind called `name`, or InputError MP132 with the names that were probably meant."""
    if name in catalogue:
        return catalogue[name]
    hint = suggestion(name, catalogue, "device kinds are") + " A table of facts in place of the name is legal too."
    raise InputError("MP132", f"{path}: unknown device kind {name!r}", hint)


def check_cluster(cluster: "Cluster") -> None:
    """Raises InputError (MP133 to MP137) for a cluster that cannot exist."""
    if not cluster.groups:
        raise InputError(
            "MP134", "the cluster has no group", "add a [[group]] with name, nodes, device, devices_per_node"
        )
    for at, group in enumerate(cluster.groups):
        path = f"group[{at}]"
        _check_name(group.name, f"{path}.name")
        _check_counts(group, path)
        check_device_kind(group.device, f"{path}.device")
        _check_tiers(group, path)
        _check_inter(group, path)
        _check_overrides(group, path)
    _check_unique(cluster)
    _check_links(cluster)


def _check_name(name: str, path: str) -> None:
    if not _NAME.fullmatch(name):
        raise InputError(
            "MP134", f"{path} must be letters, digits, '_', '.', '-', got {name!r}", "device ids are group/node/index"
        )


def _check_counts(group: "DeviceGroup", path: str) -> None:
    require_number(group.nodes, f"{path}.nodes", "MP133")
    require_number(group.devices_per_node, f"{path}.devices_per_node", "MP133")
    require_number(group.nodes * group.devices_per_node, f"{path}: nodes * devices_per_node", "MP133", most=MAX_DEVICES)
    if group.price_per_device_hour is not None:
        require_number(group.price_per_device_hour, f"{path}.price_per_device_hour", "MP133", least=0)


def _check_efficiency(value: float | None, path: str) -> None:
    if value is not None:
        require_number(value, f"{path}.efficiency", "MP133", most=1)


def _check_tiers(group: "DeviceGroup", path: str) -> None:
    last = 0
    for at, tier in enumerate(group.intra):
        here = f"{path}.intra[{at}]"
        require_number(tier.span, f"{here}.span", "MP136")
        require_number(tier.bandwidth_bytes_per_s, f"{here}.bandwidth_bytes_per_s", "MP133")
        require_number(tier.latency_s, f"{here}.latency_s", "MP133", least=0)
        require_number(tier.start_s, f"{here}.start_s", "MP133", least=0)
        _check_efficiency(tier.efficiency, here)
        if tier.span <= last:
            raise InputError(
                "MP136", f"{here}.span must be above {last}, got {tier.span}", "list tiers from narrow to wide"
            )
        last = tier.span
        if tier.span > group.devices_per_node:
            got = f"{here}.span is {tier.span}, a node has devices_per_node = {group.devices_per_node}"
            raise InputError("MP136", got, "a span is a number of devices of one node; links between nodes are 'inter'")
    if group.intra and last < group.devices_per_node:
        here = f"{path}.intra[{len(group.intra) - 1}].span"
        got = f"{here} must reach devices_per_node = {group.devices_per_node}, got {last}"
        raise InputError("MP136", got, "add a tier that joins all devices of a node")


def _check_inter(group: "DeviceGroup", path: str) -> None:
    if group.inter is None:
        return
    here = f"{path}.inter"
    require_number(group.inter.bandwidth_bytes_per_s, f"{here}.bandwidth_bytes_per_s", "MP133")
    require_number(group.inter.latency_s, f"{here}.latency_s", "MP133", least=0)
    require_number(group.inter.start_s, f"{here}.start_s", "MP133", least=0)
    require_number(group.inter.nics, f"{here}.nics", "MP133")
    _check_efficiency(group.inter.efficiency, here)


def _check_overrides(group: "DeviceGroup", path: str) -> None:
    here = f"{path}.overrides"
    for at, slot in enumerate(group.overrides.missing):
        _check_slot(group, slot, f"{here}.missing[{at}]")
    if len(set(group.overrides.missing)) >= group.nodes * group.devices_per_node:
        raise InputError(
            "MP137", f"{here}.missing leaves no device in group {group.name!r}", "remove the group instead"
        )
    for slot, factor in group.overrides.slow.items():
        _check_slot(group, slot, f"{here}.slow")
        require_number(factor, f"{here}.slow[{slot!r}]", "MP137", least=1)
    for node, factor in group.overrides.slow_links.items():
        if node not in map(str, range(group.nodes)):
            raise InputError("MP137", f"{here}.slow_links: no node {node!r}", f"nodes are '0' to '{group.nodes - 1}'")
        require_number(factor, f"{here}.slow_links[{node!r}]", "MP137", least=1)


def _check_slot(group: "DeviceGroup", slot: str, path: str) -> None:
    node, _, index = slot.partition("/")
    for part, limit in ((node, group.nodes), (index, group.devices_per_node)):
        if not (part.isascii() and part.isdigit() and str(int(part)) == part and int(part) < limit):
            hint = f"write 'node/index', from '0/0' to '{group.nodes - 1}/{group.devices_per_node - 1}'"
            raise InputError("MP137", f"{path}: no device {slot!r} in group {group.name!r}", hint)


def _check_unique(cluster: "Cluster") -> None:
    names: dict[str, int] = {}
    kinds: dict[str, tuple[int, DeviceKind]] = {}
    for at, group in enumerate(cluster.groups):
        if group.name in names:
            got = f"group[{at}].name {group.name!r} is also the name of group[{names[group.name]}]"
            raise InputError("MP134", got, "give each group its own name")
        names[group.name] = at
        first, kind = kinds.setdefault(group.device.name, (at, group.device))
        if kind != group.device:
            got = f"group[{at}].device and group[{first}].device are both named {kind.name!r} but state different facts"
            raise InputError("MP134", got, "give each kind its own name")


def _check_links(cluster: "Cluster") -> None:
    names = [group.name for group in cluster.groups]
    seen: dict[frozenset[str], int] = {}
    for at, link in enumerate(cluster.links):
        path = f"link[{at}]"
        for side, name in enumerate(link.between):
            if name not in names:
                hint = suggestion(name, names, "groups are")
                raise InputError("MP135", f"{path}.between[{side}]: no group {name!r}", hint)
        if link.between[0] == link.between[1]:
            hint = "the link between nodes of one group is its 'inter'"
            raise InputError("MP135", f"{path}.between joins {link.between[0]!r} with itself", hint)
        require_number(link.bandwidth_bytes_per_s, f"{path}.bandwidth_bytes_per_s", "MP133")
        require_number(link.latency_s, f"{path}.latency_s", "MP133", least=0)
        if link.bandwidth_back_bytes_per_s is not None:
            require_number(link.bandwidth_back_bytes_per_s, f"{path}.bandwidth_back_bytes_per_s", "MP133")
        _check_efficiency(link.efficiency, path)
        first = seen.setdefault(frozenset(link.between), at)
        if first != at:
            got = f"{path} and link[{first}] both join {' and '.join(sorted(link.between))}"
            raise InputError("MP135", got, "keep one; bandwidth_back_bytes_per_s states the other direction")
    for one, other in combinations(names, 2):
        if frozenset((one, other)) not in seen:
            hint = f'add [[link]] with between = ["{one}", "{other}"], bandwidth_bytes_per_s and latency_s'
            raise InputError("MP135", f"no link between groups {one!r} and {other!r}", hint)

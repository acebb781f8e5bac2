"""A cluster as text tables and as plain data: groups, fabrics, links, totals."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from costmodel.cluster import Cluster, DeviceGroup
from costmodel.units import format_bytes, format_rate, format_seconds
from planner.planfile.fingerprint import cluster_fingerprint, short_fingerprint
from planner.report.table import format_table

if TYPE_CHECKING:
    from profiles.node_types import NodeType


def describe_cluster(cluster: Cluster) -> dict[str, Any]:
    """The cluster with everything filled in, and its totals."""
    return {
        "name": cluster.name,
        "fingerprint": cluster_fingerprint(cluster),
        "devices": cluster.device_count,
        "memory_bytes": sum(device.kind.memory_bytes for device in cluster.devices),
        "price_per_hour": _price(cluster),
        "cluster": msgspec.to_builtins(cluster),
    }


def render_cluster_table(cluster: Cluster) -> str:
    """Tables for a terminal, ending in a newline."""
    memory = sum(device.kind.memory_bytes for device in cluster.devices)
    nodes = sum(group.nodes for group in cluster.groups)
    head = f"Cluster {cluster.name}: {_count(cluster.device_count, 'device')}, {_count(nodes, 'node')}, "
    head += f"{format_bytes(memory)} of device memory, {short_fingerprint(cluster_fingerprint(cluster))}"
    price = _price(cluster)
    if price is not None:
        head += f", price {price:g} an hour"
    parts = [head, f"Groups\n\n{_groups(cluster)}"]
    if fabrics := _fabrics(cluster):
        parts.append(f"Links, per direction\n\n{fabrics}")
    if differences := "\n".join(line for group in cluster.groups for line in _overrides(group)):
        parts.append(f"Overrides\n\n{differences}")
    return "\n\n".join(parts) + "\n"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _price(cluster: Cluster) -> float | None:
    """Per hour of the whole cluster; None unless every group states one."""
    prices = [group.price_per_device_hour for group in cluster.groups]
    if any(price is None for price in prices):
        return None
    return sum(price * group.device_count for price, group in zip(prices, cluster.groups, strict=True) if price)


def _groups(cluster: Cluster) -> str:
    rows = []
    for group in cluster.groups:
        kind = group.device
        dtype, rate = max(kind.peak_flops_per_s.items(), key=lambda item: item[1])
        facts = {kind.provenance_of("peak_flops_per_s"), kind.provenance_of("memory_bytes")}
        rows.append(
            (
                group.name,
                str(group.nodes),
                str(group.devices_per_node),
                str(group.device_count),
                kind.name,
                format_bytes(kind.memory_bytes),
                format_bytes(kind.reserve_bytes),
                f"{format_rate(rate, 'FLOP/s')} {dtype}",
                format_rate(kind.memory_bandwidth_bytes_per_s, "B/s"),
                ", ".join(sorted(facts)),
            )
        )
    header = ("group", "nodes", "per node", "devices", "kind", "memory", "reserve", "peak", "memory rate", "provenance")
    return format_table(header, rows, right=(1, 2, 3, 5, 6))


def _fabrics(cluster: Cluster) -> str:
    rows = []
    for group in cluster.groups:
        if group.devices_per_node > 1:
            for tier in group.intra:
                what = f"{tier.span} devices of a node"
                rate, reached = tier.bandwidth_bytes_per_s, tier.achieved_bytes_per_s
                rows.append((group.name, what, "device", rate, reached, tier.latency_s, tier.provenance))
        if group.inter is not None:
            link = group.inter
            what, rate, reached = f"{group.nodes} nodes", link.bandwidth_bytes_per_s, link.achieved_bytes_per_s
            rows.append((group.name, what, "node", rate, reached, link.latency_s, link.provenance))
    for pair in cluster.links:
        both = (pair.between, pair.between[::-1]) if pair.bandwidth_back_bytes_per_s is not None else (pair.between,)
        for source, target in both:
            link, arrow = pair.directed(source), "->" if len(both) > 1 else "and"
            rate, reached = link.bandwidth_bytes_per_s, link.achieved_bytes_per_s
            rows.append((f"{source} {arrow} {target}", "nodes", "node", rate, reached, link.latency_s, link.provenance))
    cells = [
        (where, what, per, format_rate(rate, "B/s"), format_rate(reached, "B/s"), format_seconds(wait), source)
        for where, what, per, rate, reached, wait, source in rows
    ]
    header = ("where", "joins", "per", "bandwidth", "reached", "latency", "provenance")
    return format_table(header, cells, right=(3, 4, 5)) if cells else ""


def _overrides(group: DeviceGroup) -> list[str]:
    overrides = group.overrides
    lines = [f"{group.name}/{slot} is missing" for slot in overrides.missing]
    lines += [f"{group.name}/{slot} takes {factor:g} times as long" for slot, factor in overrides.slow.items()]
    slow = (
        f"node {node} of {group.name} has {factor:g} times less bandwidth"
        for node, factor in overrides.slow_links.items()
    )
    return [*lines, *slow]


def describe_node_types(nodes: "Mapping[str, NodeType]") -> list[dict[str, Any]]:
    """Every node type as plain data."""
    return [msgspec.to_builtins(node) for node in nodes.values()]


def render_node_types(nodes: "Mapping[str, NodeType]") -> str:
    """A table of node types, ending in a newline."""
    rows = [
        (
            node.name,
            f"{node.devices_per_node} x {node.device}",
            ", ".join(f"{tier.span}: {format_rate(tier.bandwidth_bytes_per_s, 'B/s')}" for tier in node.intra),
            "-" if node.inter is None else format_rate(node.inter.bandwidth_bytes_per_s, "B/s"),
            "-" if node.inter is None else str(node.inter.nics),
        )
        for node in nodes.values()
    ]
    table = format_table(("node", "devices", "links inside, by span", "out of it", "NICs"), rows, right=(3, 4))
    return f"{table}\n\nBandwidths are per direction: inside per device, out of it per node. --json has sources.\n"

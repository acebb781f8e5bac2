"""What transfers between sets of devices of a cluster see: copies as measured inside a node, else the cluster's links.

    T1  latency = fixed,  bandwidth = lanes / slope     a measured line of copies in the nearest number of lanes
    T2  bandwidth = lanes * tier                        inside a node, where none was measured
    T3  bandwidth = min over the two sides of the sum over a side's nodes of  link * min(1, m max(1, nics/d) / nics)

T3 is between nodes, with `m` of a node's `d` devices taking part. Lanes are the devices that send at once: those
of the smaller side. Times follow from these by C6 of `costmodel.collectives`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from costmodel.cluster import Cluster, Device, DeviceGroup, Link, LinkTier
from costmodel.collectives import NO_LINK, AxisLink
from costmodel.provenance import Provenance

CopyLines = Mapping[int, tuple[float, float]]  # lanes -> (fixed seconds, seconds per byte of one lane)


@dataclass(frozen=True)
class Transfers:
    """Links between sets of devices of a cluster.

    Attributes:
        copies: by device kind name, lines of copies between devices of one node.
    """

    cluster: Cluster
    copies: Mapping[str, CopyLines] = field(default_factory=dict)

    def link(self, source: Sequence[Device], target: Sequence[Device]) -> AxisLink:
        """What a tensor spread evenly over `source` sees on its way to `target`, all devices sending at once.

        Args:
            source: devices that hold the tensor, all of one group.
            target: devices that receive it, all of one group.

        Returns:
            A link for `costmodel.collectives.transfer_time_s`, with bandwidth in total bytes per second; infinite where
            nothing moves.
        """
        if {device.id for device in source} == {device.id for device in target}:
            return NO_LINK
        one, other = self.cluster.group(source[0].group), self.cluster.group(target[0].group)
        if len({(device.group, device.node) for device in (*source, *target)}) == 1:
            return self._inside(one, source, target)
        link = self.cluster.group_link(one.name, other.name)
        rate = min(_node_rates(one, link, source), _node_rates(other, link, target))
        return AxisLink(size=_count(source, target), bandwidth_bytes_per_s=rate, latency_s=link.latency_s)

    def provenance(self, source: Sequence[Device], target: Sequence[Device]) -> Provenance:
        """How far `link` can be trusted between two sets of devices."""
        one, other = self.cluster.group(source[0].group), self.cluster.group(target[0].group)
        if len({(device.group, device.node) for device in (*source, *target)}) > 1:
            return self.cluster.group_link(one.name, other.name).achieved_provenance
        if self.copies.get(one.device.name):
            return "fitted"
        return self._tier(one, source, target).achieved_provenance

    def _tier(self, group: DeviceGroup, source: Sequence[Device], target: Sequence[Device]) -> LinkTier:
        """The narrowest tier that joins all of some devices of a node."""
        indices = [device.index for device in (*source, *target)]
        return next(tier for tier in group.intra if len({index // tier.span for index in indices}) == 1)

    def _inside(self, group: DeviceGroup, source: Sequence[Device], target: Sequence[Device]) -> AxisLink:
        """Inside a node the lanes take the narrowest tier that joins all devices, if nothing was measured."""
        lanes, tier = min(len(source), len(target)), self._tier(group, source, target)
        rate, latency_s = lanes * tier.achieved_bytes_per_s, tier.latency_s
        measured = self.copies.get(group.device.name)
        if measured:
            fixed_s, slope = measured[min(measured, key=lambda count: (abs(count - lanes), count))]
            latency_s = fixed_s
            if slope:  # where the copies' time did not grow with their bytes, only the tier says how fast bytes go
                rate = lanes / slope
        return AxisLink(size=_count(source, target), bandwidth_bytes_per_s=rate, latency_s=latency_s)


def _count(source: Sequence[Device], target: Sequence[Device]) -> int:
    return len({device.id for device in (*source, *target)})


def _node_rates(group: DeviceGroup, link: Link, devices: Sequence[Device]) -> float:
    """Total bandwidth of the nodes that `devices` stand in, each limited by how many of its devices take part (T3)."""
    own = max(1.0, link.nics / group.devices_per_node) / link.nics
    total = 0.0
    for node in sorted({device.node for device in devices}):
        here = sum(device.node == node for device in devices)
        slow = group.overrides.slow_links.get(str(node), 1.0)
        total += link.achieved_bytes_per_s / slow * min(1.0, here * own)
    return total

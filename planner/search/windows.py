"""Which devices of a pool a stage group takes: a window of neighbours that lies in as few nodes as it can.

Stages take devices in the pool's order. Where that lays some window across more nodes than it needs, the windows are
dealt out largest first, each at the first free place with the fewest nodes. A window decides what a mesh's axes see
(`costmodel.collectives.axis_links`) and which slow devices it holds.
"""

from collections.abc import Sequence

from costmodel.cluster import Device


def windows(devices: Sequence[Device], counts: Sequence[int]) -> list[tuple[Device, ...]]:
    """A window for each count, none overlapping.

    Args:
        devices: of one pool, in its order.
        counts: devices that each stage group takes, in pipeline order; together at most all of them.
    """
    in_order, at = [], 0
    for count in counts:
        in_order.append(range(at, at + count))
        at += count
    found = in_order
    if sum(_nodes(devices, w) for w in in_order) > sum(_least_nodes(devices, count) for count in counts):
        dealt = _dealt(devices, counts)
        if dealt is not None and sum(_nodes(devices, w) for w in dealt) < sum(_nodes(devices, w) for w in in_order):
            found = dealt
    return [tuple(devices[i] for i in window) for window in found]


def starts(devices: Sequence[Device], count: int) -> list[int]:
    """Places of windows of so many devices with the fewest nodes that any such window has."""
    places = range(len(devices) - count + 1)
    nodes = [_nodes(devices, range(at, at + count)) for at in places]
    return [at for at, n in zip(places, nodes, strict=True) if n == min(nodes)]


def _dealt(devices: Sequence[Device], counts: Sequence[int]) -> list[range] | None:
    """Largest first; None where the devices that are left over lie too far apart for a window."""
    free = [True] * len(devices)
    found: dict[int, range] = {}
    for i in sorted(range(len(counts)), key=lambda i: (-counts[i], i)):
        places = (range(at, at + counts[i]) for at in range(len(devices) - counts[i] + 1))
        open_places = [w for w in places if all(free[j] for j in w)]
        if not open_places:
            return None
        found[i] = min(open_places, key=lambda w: (_nodes(devices, w), w.start))
        for j in found[i]:
            free[j] = False
    return [found[i] for i in range(len(counts))]


def _nodes(devices: Sequence[Device], window: range) -> int:
    return len({devices[i].node for i in window})


def _least_nodes(devices: Sequence[Device], count: int) -> int:
    per_node: dict[int, int] = {}
    for device in devices:
        per_node[device.node] = per_node.get(device.node, 0) + 1
    left, nodes = count, 0
    for size in sorted(per_node.values(), reverse=True):
        if left <= 0:
            break
        left, nodes = left - size, nodes + 1
    return nodes

"""How many devices a stage may have, and the meshes that they may form."""

from collections.abc import Iterator

from costmodel.cluster import Cluster, Device

Mesh = tuple[int, ...]


def meshes(devices: int, per_node: int) -> Iterator[Mesh]:
    """Meshes of so many devices: one axis, or two of which the inner one stays inside a node."""
    if devices == 1:
        yield ()
        return
    yield (devices,)
    for inner in range(2, devices // 2 + 1):
        if devices % inner == 0 and inner <= per_node and (per_node % inner == 0 or devices <= per_node):
            yield (devices // inner, inner)


def stage_sizes(total: int, per_node: int) -> tuple[int, ...]:
    """Device counts that a stage may have: all of them up to 8, then divisors of a node and whole nodes."""
    if total <= 8:
        return tuple(range(1, total + 1))
    inside = [n for n in range(1, per_node + 1) if per_node % n == 0]
    nodes = [per_node * k for k in range(1, total // per_node + 1) if (total // per_node) % k == 0]
    return tuple(sorted({*inside, *nodes, total}))


def pool_devices(cluster: Cluster, pool: str) -> tuple[Device, ...]:
    return tuple(d for d in cluster.devices if d.group == pool)

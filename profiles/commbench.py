"""Collective and copy times on the attached devices.

A collective runs in all its groups at once, as it does in a plan: devices are laid out ``[outer, size, stride]`` and
the collective goes over the middle axis, so that members of a group are `stride` devices apart.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from costmodel.collectives import COLLECTIVES, CollectiveKind
from costmodel.device_kind import Platform
from profiles.device_loop import DeviceLoop, Input
from profiles.schema import CollectiveSample, CopySample
from profiles.timing import measure, rounded

Grouping = tuple[int, int]  # devices in a group, distance of neighbours

_AXIS = "x1"  # the middle one of three
_ITEM = 4  # bytes of a float32


def groupings(devices: int, platform: Platform) -> tuple[Grouping, ...]:
    """All (size, stride) of a row-major mesh over so many devices: the whole first, then neighbours, then strided.

    CPU devices are all equally far apart, so only neighbours are grouped there.
    """
    pairs = [
        (size, stride)
        for size in range(2, devices + 1)
        for stride in range(1, devices // size + 1)
        if devices % (size * stride) == 0 and (stride == 1 or platform != "cpu")
    ]
    return tuple(sorted(pairs, key=lambda pair: (pair[1], -pair[0])))


def collective_sizes(platform: Platform) -> tuple[int, ...]:
    """Bytes to time each collective with; the first two alone give a line."""
    kib, mib = 1 << 10, 1 << 20
    if platform == "cpu":
        return (4 * kib, mib, 64 * kib, 8 * mib)
    return (64 * kib, 64 * mib, mib, 512 * mib)


def time_collective(
    kind: CollectiveKind, grouping: Grouping, full_bytes: int, loop: DeviceLoop, runs_s: float
) -> CollectiveSample:
    """Times a collective of `full_bytes`, rounded up to what divides by the group, in all groups at once."""
    size, stride = grouping
    outer = len(loop.devices) // (size * stride)
    share = -(-full_bytes // (_ITEM * size)) * _ITEM
    full_bytes = share * size
    length = (share if kind == "all_gather" else full_bytes) // _ITEM
    spread = loop.with_mesh((outer, size, stride))
    sample = spread.time(_call(kind, size), [Input((length,), "float32")], runs_s)
    return CollectiveSample(kind=kind, size=size, stride=stride, full_bytes=full_bytes, **sample.figures)


def _call(kind: CollectiveKind, size: int) -> Callable[[Any], Any]:
    ring = [(at, (at + 1) % size) for at in range(size)]
    return {
        "all_reduce": lambda x: lax.psum(x, _AXIS),
        "all_gather": lambda x: lax.all_gather(x, _AXIS, tiled=True),
        "reduce_scatter": lambda x: lax.psum_scatter(x, _AXIS, tiled=True),
        "all_to_all": lambda x: lax.all_to_all(x, _AXIS, 0, 0, tiled=True),
        "permute": lambda x: lax.ppermute(x, _AXIS, ring),
    }[kind]


def collective_jobs(devices: int, platform: Platform) -> tuple[tuple[CollectiveKind, Grouping, int], ...]:
    """What to time, most telling first: two sizes of every collective in every grouping, then the other sizes."""
    sizes, groups = collective_sizes(platform), groupings(devices, platform)
    first = [(kind, group, size) for group in groups for kind in COLLECTIVES for size in sizes[:2]]
    return (*first, *((kind, group, size) for size in sizes[2:] for group in groups for kind in COLLECTIVES))


def copy_jobs(devices: int, platform: Platform) -> tuple[tuple[int, int], ...]:
    """(lanes, bytes of a lane): one device to one other, then half of the devices to the other half."""
    lanes = sorted({1, devices // 2} - {0}) if devices > 1 else []
    return tuple((lane, size) for lane in lanes for size in collective_sizes(platform)[:2])


def time_copy(lanes: int, lane_bytes: int, loop: DeviceLoop, runs_s: float) -> CopySample:
    """Times `jax.device_put` of an array that is split over the first `lanes` devices onto the last `lanes`."""
    source, target = _row(loop.devices[:lanes]), _row(loop.devices[-lanes:])
    length = max(1, lane_bytes // _ITEM)
    array = jax.device_put(np.ones((lanes * length,), np.float32), source)
    jax.block_until_ready(array)

    def run() -> float:
        start = loop.clock()
        jax.block_until_ready(jax.device_put(array, target))
        return loop.clock() - start

    sample = measure(run, runs_s, clock=loop.clock)
    figures = {**sample.figures, "time_s": rounded(sample.time_s), "spread_s": rounded(sample.spread_s)}
    return CopySample(route="device_to_device", lanes=lanes, lane_bytes=length * _ITEM, **figures)


def _row(devices: Sequence[Any]) -> NamedSharding:
    mesh = Mesh(np.array(devices, dtype=object), ("x",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec("x"))

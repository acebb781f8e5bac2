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
from profiles.schema import CollectiveSample, CopySample, Route
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


def rounded_bytes(full_bytes: int, size: int) -> int:
    """Bytes of float32s that divide evenly among a group: `full_bytes` or a little more."""
    return -(-full_bytes // (_ITEM * size)) * _ITEM * size


def time_collective(
    kind: CollectiveKind, grouping: Grouping, full_bytes: int, loop: DeviceLoop, runs_s: float
) -> CollectiveSample:
    """Times a collective of `full_bytes`, rounded up to what divides by the group, in all groups at once."""
    size, stride = grouping
    outer = len(loop.devices) // (size * stride)
    full_bytes = rounded_bytes(full_bytes, size)
    share = full_bytes // size
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


def copy_jobs(devices: int, platform: Platform) -> tuple[tuple[Route, int, int], ...]:
    """(route, lanes, bytes of a lane): one device to one other, then half of the devices to the other half; to the host
    and from it, one device and all of them. The memory of CPU devices is the host's."""
    sizes = collective_sizes(platform)[:2]
    lanes = sorted({1, devices // 2} - {0}) if devices > 1 else []
    between: list[tuple[Route, int, int]] = [("device_to_device", lane, size) for lane in lanes for size in sizes]
    if platform == "cpu":
        return tuple(between)
    routes: tuple[Route, ...] = ("host_to_device", "device_to_host")
    return (*between, *((route, lane, size) for lane in sorted({1, devices}) for route in routes for size in sizes))


def time_copy(route: Route, lanes: int, lane_bytes: int, loop: DeviceLoop, runs_s: float) -> CopySample:
    """Times moving an array that is split over `lanes` devices: from the first of them to the last, or to or from the
    host's memory, all lanes at the same time."""
    length = max(1, lane_bytes // _ITEM)
    make = {"device_to_device": _between, "host_to_device": _from_host, "device_to_host": _to_host}[route]
    sample = measure(make(lanes, length, loop), runs_s, clock=loop.clock)
    figures = {**sample.figures, "time_s": rounded(sample.time_s), "spread_s": rounded(sample.spread_s)}
    return CopySample(route=route, lanes=lanes, lane_bytes=length * _ITEM, **figures)


def _between(lanes: int, length: int, loop: DeviceLoop) -> Callable[[], float]:
    source, target = _row(loop.devices[:lanes]), _row(loop.devices[-lanes:])
    array = jax.block_until_ready(jax.device_put(np.ones((lanes * length,), np.float32), source))

    def run() -> float:
        start = loop.clock()
        jax.block_until_ready(jax.device_put(array, target))
        return loop.clock() - start

    return run


def _from_host(lanes: int, length: int, loop: DeviceLoop) -> Callable[[], float]:
    array, target = np.ones((lanes * length,), np.float32), _row(loop.devices[:lanes])

    def run() -> float:
        start = loop.clock()
        jax.block_until_ready(jax.device_put(array, target))
        return loop.clock() - start

    return run


def _to_host(lanes: int, length: int, loop: DeviceLoop) -> Callable[[], float]:
    ones = jax.block_until_ready(jax.device_put(np.ones((lanes * length,), np.float32), _row(loop.devices[:lanes])))
    fresh = jax.jit(lambda x: x + 1)  # JAX keeps the host's copy of an array: each run moves a new one

    def run() -> float:
        array = jax.block_until_ready(fresh(ones))
        start = loop.clock()
        array.copy_to_host_async()
        np.asarray(array)
        return loop.clock() - start

    return run


def _row(devices: Sequence[Any]) -> NamedSharding:
    mesh = Mesh(np.array(devices, dtype=object), ("x",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec("x"))

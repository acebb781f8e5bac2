"""Measurements of a profile by key: what a second run need not measure again, and what two profiles both have.

A key is also what a gap says was not measured.
"""

from collections.abc import Iterable, Iterator

import msgspec

from profiles.schema import (
    BandwidthSample,
    BlockTime,
    CollectiveSample,
    CopySample,
    KernelSample,
    MatmulSample,
    OpTime,
    Profile,
)

Sampled = MatmulSample | BandwidthSample | KernelSample | CollectiveSample | CopySample | BlockTime
Record = Sampled | tuple[str, OpTime]
"""One measurement; an op's goes with its key."""

_TABLES: dict[type, str] = {
    MatmulSample: "matmuls",
    BandwidthSample: "bandwidths",
    KernelSample: "kernels",
    CollectiveSample: "collectives",
    CopySample: "copies",
    BlockTime: "blocks",
}


def matmul_key(dtype: str, shape: tuple[int, int, int], batch: int = 1) -> str:
    many = f"{batch} of " if batch > 1 else ""
    return f"matmul {dtype} {many}{_by(shape)}"


def bandwidth_key(op: str, dtype: str, shape: tuple[int, ...]) -> str:
    return f"{op} {dtype} {_by(shape)}"


def kernel_key(op: str, dtype: str, shape: tuple[int, ...], backward: bool) -> str:
    return f"{op}{' with gradients' if backward else ''} {dtype} {_by(shape)}"


def collective_key(kind: str, size: int, stride: int, full_bytes: int) -> str:
    return f"{kind} of {full_bytes} bytes in groups of {size}, stride {stride}"


def copy_key(route: str, lanes: int, lane_bytes: int) -> str:
    name = "copy" if route == "device_to_device" else f"copy {route.replace('_', ' ')}"
    return f"{name} of {lane_bytes} bytes in {lanes} lanes"


def block_key(block_class: str, mesh: tuple[int, ...], microbatch: int) -> str:
    where = f" on a mesh of {_by(mesh)}" if any(size > 1 for size in mesh) else ""
    return f"block {block_class} at microbatch {microbatch}{where}"


def _by(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def key_of(record: Record) -> str:
    """The key of a measurement; an op's is its `costmodel.graph.Op.key`."""
    if isinstance(record, tuple):
        return record[0]
    if isinstance(record, MatmulSample):
        return matmul_key(record.dtype, record.shape, record.batch)
    if isinstance(record, BandwidthSample):
        return bandwidth_key(record.op, record.dtype, record.shape)
    if isinstance(record, KernelSample):
        return kernel_key(record.op, record.dtype, record.shape, record.backward)
    if isinstance(record, CollectiveSample):
        return collective_key(record.kind, record.size, record.stride, record.full_bytes)
    if isinstance(record, CopySample):
        return copy_key(record.route, record.lanes, record.lane_bytes)
    return block_key(record.block_class, record.mesh, record.microbatch)


def records_of(profile: Profile) -> Iterator[tuple[str, Record]]:
    """Every measurement of a profile with its key, table after table."""
    for table in _TABLES.values():
        for record in getattr(profile, table):
            yield key_of(record), record
    yield from ((key, (key, op)) for key, op in profile.ops.items())


def with_records(profile: Profile, records: Iterable[Record]) -> Profile:
    """The profile with these measurements in the place of its own, each table in the order given."""
    tables: dict[str, list[Record]] = {table: [] for table in _TABLES.values()}
    ops: dict[str, OpTime] = {}
    for record in records:
        if isinstance(record, tuple):
            ops[record[0]] = record[1]
        else:
            tables[_TABLES[type(record)]].append(record)
    changes = {table: tuple(mine) for table, mine in tables.items()}
    return msgspec.structs.replace(profile, ops=ops, **changes)


def drift_of(record: Record) -> float:
    """How much longer the later runs of a measurement took than the earlier ones, as a share."""
    return record[1].drift if isinstance(record, tuple) else record.drift


def time_of(record: Record) -> float:
    """Seconds of a measurement, all passes of an op or a block together."""
    if isinstance(record, tuple):
        return record[1].forward_s + record[1].backward_s
    if isinstance(record, BlockTime):
        return record.forward_s + record.gradients_s
    return record.time_s


def spread_of(record: Record) -> float:
    """Median absolute deviation of a measurement's runs, in seconds."""
    return record[1].spread_s if isinstance(record, tuple) else record.spread_s

"""What there is to measure on some devices: jobs as data, which a worker process can be sent.

A job's key is its record's (`records.key_of`), so what a profile has already is known before anything runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from costmodel.compute import op_time_s
from costmodel.device_kind import DeviceKind, Platform
from profiles import blockbench, commbench, grids, kernelbench, opbench
from profiles.blockbench import BlockProgram
from profiles.device_loop import DeviceLoop
from profiles.opbench import OpProgram
from profiles.records import (
    Record,
    bandwidth_key,
    block_key,
    collective_key,
    copy_key,
    kernel_key,
    matmul_key,
)
from profiles.schema import BandwidthOp, OpTime
from profiles.timing import LEAST

Part = Literal["rates", "collectives", "copies", "shapes", "ops", "blocks"]

LABELS: dict[Part, str] = {
    "rates": "rates",
    "collectives": "collectives",
    "copies": "copies",
    "shapes": "shapes",
    "ops": "ops of the model",
    "blocks": "blocks of the model",
}

LONGEST_RUN_S = 0.5
"""Most time to spend on the repetitions of one measurement."""

COMPILE_S: dict[Platform, float] = {"cpu": 0.15, "gpu": 0.6, "tpu": 1.0}
"""About what a small program takes to compile, for saying how long a profile will take."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One measurement.

    Attributes:
        measure: from the devices and the seconds to spend on runs to the record; a function that can be pickled.
        flops, memory_bytes, dtype: of one run of the thing, for estimates.
        passes: how many times one run all programs of the job together take; programs: how many it compiles.
    """

    key: str
    part: Part
    measure: Callable[[DeviceLoop, float], Record]
    flops: float = 0.0
    memory_bytes: float = 0.0
    dtype: str = "float32"
    passes: float = 1.0
    programs: int = 2

    def least_s(self, kind: DeviceKind) -> float:
        """About what the fewest runs take on a kind of device."""
        once_s = op_time_s(self.flops, self.memory_bytes, self.dtype, kind, is_matmul=self.flops > 0)
        return LEAST * self.passes * once_s

    def expected_s(self, kind: DeviceKind) -> float:
        """About what compiling and a steady figure take."""
        return COMPILE_S[kind.platform] * self.programs + max(LONGEST_RUN_S / 4, 4 * self.least_s(kind))


def rate_jobs(platform: Platform) -> tuple[Job, ...]:
    """Large products and long streams in turns, the most telling first."""
    products = [
        Job(
            key=matmul_key(dtype, shape),
            part="rates",
            measure=partial(opbench.time_matmul, dtype, shape),
            flops=2.0 * shape[0] * shape[1] * shape[2],
            dtype=dtype,
        )
        for dtype, shape in grids.matmul_grid(platform)
    ]
    streams = [_stream(op, dtype, shape) for op, dtype, shape in grids.bandwidth_grid(platform)]
    return tuple(_in_turns(products, streams))


def _stream(op: BandwidthOp, dtype: str, shape: tuple[int, ...]) -> Job:
    measure = partial(opbench.time_bandwidth, op, dtype, shape)
    return Job(
        key=bandwidth_key(op, dtype, shape), part="rates", measure=measure, memory_bytes=12.0 * shape[0] * shape[1]
    )


def _in_turns(one: Sequence[Job], other: Sequence[Job]) -> list[Job]:
    mixed = [each for pair in zip(one, other) for each in pair]
    shared = min(len(one), len(other))
    return [*mixed, *one[shared:], *other[shared:]]


def shape_jobs(platform: Platform) -> tuple[Job, ...]:
    """Skinny and batched products, attention, convolutions, ops that move data, and the grid of products."""
    done = {matmul_key(dtype, shape) for dtype, shape in grids.matmul_grid(platform)}
    products = [
        Job(
            key=matmul_key(dtype, shape, batch),
            part="shapes",
            measure=partial(opbench.time_matmul, dtype, shape, batch=batch),
            flops=2.0 * batch * shape[0] * shape[1] * shape[2],
            dtype=dtype,
        )
        for dtype, shape, batch in grids.shaped_matmuls(platform)
        if matmul_key(dtype, shape, batch) not in done
    ]
    kernels = [
        Job(
            key=kernel_key(op, dtype, shape, backward),
            part="shapes",
            measure=partial(kernelbench.time_kernel, op, dtype, shape, backward),
            memory_bytes=8.0 * shape[0] * shape[1] * shape[2] * shape[3],
            passes=3.0 if backward else 1.0,
        )
        for op, dtype, shape, backward in grids.kernels(platform)
    ]
    moved = [
        Job(
            key=bandwidth_key(op, dtype, shape),
            part="shapes",
            measure=partial(kernelbench.time_moved, op, dtype, shape),
            memory_bytes=12.0 * shape[0] * shape[1],
        )
        for op, dtype, shape in grids.moved_shapes(platform)
    ]
    telling = len(products) - sum("x" in job.key and " of " not in job.key for job in products[8:])
    return (*products[:telling], *kernels, *moved, *products[telling:])


def collective_jobs(devices: int, platform: Platform) -> tuple[Job, ...]:
    """Every collective in every grouping, two sizes first."""
    return tuple(
        Job(
            key=collective_key(kind, grouping[0], grouping[1], commbench.rounded_bytes(size, grouping[0])),
            part="collectives",
            measure=partial(commbench.time_collective, kind, grouping, size),
            memory_bytes=4.0 * size,
        )
        for kind, grouping, size in commbench.collective_jobs(devices, platform)
    )


def copy_jobs(devices: int, platform: Platform) -> tuple[Job, ...]:
    """Copies between devices, and between the host and devices."""
    return tuple(
        Job(
            key=copy_key(route, lanes, size),
            part="copies",
            measure=partial(commbench.time_copy, route, lanes, size),
            memory_bytes=8.0 * size,
            programs=0,
        )
        for route, lanes, size in commbench.copy_jobs(devices, platform)
    )


def op_jobs(programs: Sequence[OpProgram], kind: DeviceKind) -> tuple[Job, ...]:
    """A model's ops, those that take most of a step first.

    Args:
        kind: whose rates say how long an op takes.
    """

    def estimate_s(program: OpProgram) -> float:
        return op_time_s(program.flops, float(program.memory_bytes), program.dtype, kind, is_matmul=program.flops > 0)

    return tuple(
        Job(
            key=program.key,
            part="ops",
            measure=partial(_time_op, program, estimate_s(program)),
            flops=program.flops,
            memory_bytes=float(program.memory_bytes),
            dtype=program.dtype,
            passes=1.0 if program.forward_backward is None else 4.0,
            programs=2 if program.forward_backward is None else 4,
        )
        for program in sorted(programs, key=lambda one: -one.count * estimate_s(one))
    )


def _time_op(program: OpProgram, estimate_s: float, loop: DeviceLoop, runs_s: float) -> tuple[str, OpTime]:
    return program.key, opbench.time_op(program, loop, runs_s, estimate_s)


def block_jobs(programs: Sequence[BlockProgram]) -> tuple[Job, ...]:
    """A model's block classes, those that take most of a step first."""
    return tuple(
        Job(
            key=block_key(program.block_class, (1,), program.microbatch),
            part="blocks",
            measure=partial(blockbench.time_block, program),
            flops=program.layers * program.flops,
            memory_bytes=float(program.layers * program.memory_bytes),
            dtype=program.dtype,
            passes=1.0 + 3.0 + 2.0,
            programs=6,
        )
        for program in sorted(programs, key=lambda one: (-one.count * one.flops, one.block_class, one.microbatch))
    )

"""Shapes to measure, on any device of a platform: the most telling first, as time may run out."""

import math
from typing import Any

from costmodel.device_kind import Platform
from profiles.schema import BandwidthOp, KernelOp

_ROW = 1024
"""Elements of a row in the bandwidth ops."""

Matmul = tuple[str, tuple[int, int, int], int]  # dtype, (m, k, n), batch
Kernel = tuple[KernelOp, str, tuple[int, int, int, int], bool]
Moved = tuple[BandwidthOp, str, tuple[int, int]]

SIDES: dict[str, tuple[int, ...]] = {"cpu": (32, 128, 512), "gpu": (256, 2048, 16384), "tpu": (256, 2048, 16384)}
"""Sizes of each side of the grid of products."""


OTHER_DTYPES: dict[str, tuple[str, ...]] = {"cpu": (), "gpu": ("float16", "float8", "int8"), "tpu": ("int8", "float8")}
"""Dtypes of products that a platform may have units for; where a device has none, the measurement is a gap."""


def matmul_grid(platform: Platform) -> tuple[tuple[str, tuple[int, int, int]], ...]:
    """(dtype, (m, k, n)) of the matrix products to time, most telling first: large float32 and bfloat16, then smaller
    and thin ones, then the other dtypes."""
    large = 512 if platform == "cpu" else 4096
    cube, thin = (large, large, large), (large // 8, large, large)
    small, wide = (large // 4, large // 4, large // 4), (large, large, 4 * large)
    common = [(dtype, shape) for shape in (cube, small, wide, thin) for dtype in ("float32", "bfloat16")]
    others = [(dtype, shape) for dtype in OTHER_DTYPES[platform] for shape in (cube, wide)]
    return (*common, *others)


def bandwidth_grid(platform: Platform) -> tuple[tuple[BandwidthOp, str, tuple[int, ...]], ...]:
    """(op, dtype, shape) of the memory-bound ops to time, most telling first."""
    rows = 1024 if platform == "cpu" else 32768
    ops: tuple[BandwidthOp, ...] = ("add", "normalise", "gather")
    sizes = (rows, rows // 8, 4 * rows)
    return tuple((op, "float32", (size, _ROW)) for size in sizes for op in ops)


def shaped_matmuls(platform: Platform) -> tuple[Matmul, ...]:
    """Products to time, most telling first: skinny ones (few rows, as in decoding and small microbatches), batched ones
    (attention heads, experts), then the grid of every side's sizes, large ones first."""
    small, middle, large = SIDES[platform]
    wide = ("bfloat16", "float32") if platform != "cpu" else ("float32", "bfloat16")
    skinny = [(1, large, large), (16, large, large), (large, 64, large), (large, large, 64)]
    batched = [((middle, 64, middle), 32), ((middle, middle, 64), 32), ((small, middle, middle), 8)]
    grid = sorted(
        ((m, k, n) for m in SIDES[platform] for k in SIDES[platform] for n in SIDES[platform]),
        key=lambda shape: (-math.prod(shape), shape),
    )
    first = [(dtype, shape, 1) for dtype in wide for shape in skinny]
    first += [(dtype, shape, batch) for dtype in wide for shape, batch in batched]
    return (*first, *((dtype, shape, 1) for dtype in wide for shape in grid))


def kernels(platform: Platform) -> tuple[Kernel, ...]:
    """Attention and convolutions to time, values and gradients."""
    if platform == "cpu":
        attention, image, dtype = [(1, 256, 4, 32), (4, 64, 4, 32)], [(2, 32, 32, 32), (2, 8, 8, 128)], "float32"
    else:
        attention, image, dtype = (
            [(2, 4096, 16, 128), (8, 1024, 16, 64)],
            [(32, 56, 56, 64), (32, 14, 14, 256)],
            "bfloat16",
        )
    ops: list[tuple[KernelOp, Any]] = [("attention", attention), ("convolution", image)]
    if platform == "gpu":
        ops.insert(1, ("fused_attention", attention))
    return tuple((op, dtype, shape, backward) for op, shapes in ops for shape in shapes for backward in (False, True))


def moved_shapes(platform: Platform) -> tuple[Moved, ...]:
    """Ops bound by memory to time: normalisations, softmax, sums, transposes, scatters and a parameter update."""
    rows = 1024 if platform == "cpu" else 32768
    dtypes = ("float32",) if platform == "cpu" else ("bfloat16", "float32")
    ops: tuple[BandwidthOp, ...] = ("rms_normalise", "softmax", "scatter_add", "transpose", "reduce", "update")
    return tuple((op, dtype, (rows, 1024)) for dtype in dtypes for op in ops)

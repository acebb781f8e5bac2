"""Shapes that a profile holds beside rates: each runs, and counts the work that it does."""

import jax
import pytest

from profiles import commbench, grids
from profiles.device_loop import DeviceLoop
from profiles.fitting import fitted
from profiles.jobs import shape_jobs
from profiles.kernelbench import time_kernel, time_moved
from profiles.opbench import time_matmul
from profiles.schema import BandwidthOp, KernelOp, Route, check_profile
from tests.small_profiles import small_profile


@pytest.fixture(scope="module")
def loop() -> DeviceLoop:
    return DeviceLoop(devices=tuple(jax.devices()[:1]), memory_bytes=1 << 30)


def test_a_batch_of_products_counts_all_of_them(loop: DeviceLoop) -> None:
    one = time_matmul("float32", (8, 16, 4), loop, 0.01, batch=3)
    assert (one.shape, one.batch, one.flops) == ((8, 16, 4), 3, 3 * 2 * 8 * 16 * 4) and one.time_s > 0


@pytest.mark.parametrize("dtype", ["float16", "float8", "int8"])
def test_products_of_other_dtypes_run_and_give_a_rate_of_theirs(loop: DeviceLoop, dtype: str) -> None:
    one = time_matmul(dtype, (16, 32, 8), loop, 0.01)
    assert one.dtype == dtype and one.flops == 2 * 16 * 32 * 8
    profile = fitted(small_profile(matmuls=(one,)))
    assert profile.rates.matmul_flops_per_s[dtype].value == pytest.approx(one.flops / one.time_s, rel=1e-3)
    check_profile(profile)
    assert {"float16", "float8", "int8"} <= {key for key, _ in grids.matmul_grid("gpu")}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("op", "flops"), [("attention", 4.0 * 2 * 3 * 16 * 16 * 4), ("convolution", 2.0 * 9 * 2 * 16 * 3 * 4 * 4)]
)
def test_attention_and_convolutions_run_with_and_without_gradients(
    loop: DeviceLoop, op: KernelOp, flops: float, backward: bool
) -> None:
    one = time_kernel(op, "float32", (2, 16, 3, 4), backward, loop, 0.01)
    assert one.flops == (3 * flops if backward else flops) and one.time_s > 0 and one.backward is backward


def test_a_kernel_that_the_device_does_not_have_is_what_it_says(loop: DeviceLoop) -> None:
    with pytest.raises(Exception, match=r"(?i)cudnn|gpu|platform"):
        time_kernel("fused_attention", "bfloat16", (1, 128, 2, 64), False, loop, 0.01)


@pytest.mark.parametrize("op", ["rms_normalise", "softmax", "scatter_add", "transpose", "reduce", "update"])
def test_ops_that_move_data_count_their_bytes(loop: DeviceLoop, op: BandwidthOp) -> None:
    one = time_moved(op, "float32", (64, 32), loop, 0.01)
    whole, row = 4 * 64 * 32, 4 * 32
    expected = {
        "rms_normalise": 2 * whole + row,
        "softmax": 2 * whole,
        "scatter_add": 3 * whole + 4 * 64,
        "transpose": 2 * whole,
        "reduce": whole + row,
        "update": 7 * whole,
    }
    assert one.memory_bytes == expected[op] and one.time_s > 0


@pytest.mark.parametrize("route", ["device_to_device", "host_to_device", "device_to_host"])
def test_copies_go_every_way(route: Route) -> None:
    pair = DeviceLoop(devices=tuple(jax.devices()[:2]))
    one = commbench.time_copy(route, 1, 4096, pair, 0.01)
    assert (one.route, one.lanes, one.lane_bytes) == (route, 1, 4096) and one.time_s > 0


def test_the_host_is_copied_to_and_from_where_it_is_another_memory() -> None:
    routes = {route for route, _, _ in commbench.copy_jobs(4, "gpu")}
    assert routes == {"device_to_device", "host_to_device", "device_to_host"}
    assert {lanes for route, lanes, _ in commbench.copy_jobs(4, "gpu") if route == "host_to_device"} == {1, 4}
    assert {route for route, _, _ in commbench.copy_jobs(1, "gpu")} == {"host_to_device", "device_to_host"}
    assert {route for route, _, _ in commbench.copy_jobs(4, "cpu")} == {"device_to_device"}


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_every_platform_has_skinny_batched_and_grid_products_and_kernels(platform) -> None:
    jobs = shape_jobs(platform)
    keys = [job.key for job in jobs]
    assert len(keys) == len(set(keys))
    small, _, large = grids.SIDES[platform]
    assert any(f"1x{large}x{large}" in key for key in keys) and any(" of " in key for key in keys)
    assert any(key.startswith("attention") for key in keys) and any(key.startswith("scatter_add") for key in keys)
    assert any(key.startswith("fused_attention") for key in keys) == (platform == "gpu")
    last = max(i for i, key in enumerate(keys) if not key.startswith("matmul"))
    assert f"matmul float32 {small}x{small}x{large}" in keys[last:], "the grid comes after the telling shapes"

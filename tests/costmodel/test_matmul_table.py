"""Lookups of products: exact where measured, between neighbours near them, the roofline elsewhere."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.matmul_table import MatmulTable, Product, matmul_table
from profiles.lookup import matmul_table_of
from tests.small_profiles import small_profile

RATE, BANDWIDTH, LAUNCH = 1e14, 1e12, 2e-6
SIDES = (256, 2048, 16384)


def true_s(m: float, k: float, n: float, batch: float = 1) -> float:
    """A device whose share of the roofline is a power of the sides."""
    table = matmul_table((), {"bfloat16": RATE}, BANDWIDTH, LAUNCH)
    share = 0.9 * (min(m, 16384) / 16384) ** 0.1 * (k / 16384) ** 0.05 * (n / 16384) ** 0.02 * batch**-0.01
    return table.roofline_s(int(m), int(k), int(n), "bfloat16", int(batch)) / share


def product(m: int, k: int, n: int, batch: int = 1) -> Product:
    return Product("bfloat16", m, k, n, batch, true_s(m, k, n, batch))


GRID = tuple(product(*shape) for shape in itertools.product(SIDES, repeat=3))
TABLE = MatmulTable(GRID, {"bfloat16": RATE}, BANDWIDTH, LAUNCH)
SIDE = st.integers(256, 16384)


@pytest.mark.parametrize("one", GRID[::5])
def test_at_a_measured_shape_the_time_is_as_measured(one: Product) -> None:
    assert TABLE.seconds(one.m, one.k, one.n, "bfloat16") == (pytest.approx(one.time_s), "measured")


@given(m=SIDE, k=SIDE, n=SIDE)
@settings(max_examples=80, deadline=None)
def test_inside_the_grid_a_smooth_device_is_found_again(m: int, k: int, n: int) -> None:
    found = TABLE.seconds(m, k, n, "bfloat16")
    assert found is not None
    time_s, provenance = found
    assert provenance == ("measured" if {m, k, n} <= set(SIDES) else "interpolated")
    assert time_s == pytest.approx(true_s(m, k, n), rel=0.1)


@given(m=SIDE, k=SIDE, n=SIDE, shares=st.lists(st.floats(0.05, 1.0), min_size=27, max_size=27))
@settings(max_examples=60, deadline=None)
def test_no_lookup_is_outside_of_what_was_measured(m: int, k: int, n: int, shares: list[float]) -> None:
    roof = MatmulTable((), {"bfloat16": RATE}, BANDWIDTH, LAUNCH)
    noisy = tuple(
        one._replace(time_s=roof.roofline_s(one.m, one.k, one.n, "bfloat16") / share)
        for one, share in zip(GRID, shares, strict=True)
    )
    found = MatmulTable(noisy, {"bfloat16": RATE}, BANDWIDTH, LAUNCH).seconds(m, k, n, "bfloat16")
    assert found is not None
    share = roof.roofline_s(m, k, n, "bfloat16") / found[0]
    assert min(shares) * (1 - 1e-9) <= share <= max(shares) * (1 + 1e-9)


def test_outside_of_the_grid_the_roofline_with_fitted_rates_holds() -> None:
    for shape in ((16, 2048, 2048), (2048, 1 << 20, 2048), (100, 100, 100)):
        assert TABLE.seconds(*shape, "bfloat16") is None
        assert TABLE.seconds_anywhere(*shape, "bfloat16") == (TABLE.roofline_s(*shape, "bfloat16"), "fitted")
    assert TABLE.seconds_anywhere(2048, 2048, 2048, "bfloat16") == TABLE.seconds(2048, 2048, 2048, "bfloat16")


def test_the_roofline_is_the_largest_of_work_traffic_and_launch() -> None:
    assert TABLE.roofline_s(8192, 8192, 8192, "bfloat16") == 2 * 8192**3 / RATE
    assert TABLE.roofline_s(1, 8192, 8192, "bfloat16") == 2 * (8192 + 8192**2 + 8192) / BANDWIDTH
    assert TABLE.roofline_s(1, 1, 1, "bfloat16") == LAUNCH
    assert TABLE.roofline_s(64, 64, 64, "bfloat16", batch=4096) == 4096 * 2 * 3 * 64**2 / BANDWIDTH


def test_a_hole_in_the_range_is_outside() -> None:
    corners = (product(256, 256, 256), product(16384, 16384, 16384))
    table = MatmulTable(corners, {"bfloat16": RATE}, BANDWIDTH, LAUNCH)
    assert table.seconds(2048, 2048, 2048, "bfloat16") is None
    assert table.seconds(300, 300, 300, "bfloat16") is not None


def test_batched_products_are_a_table_of_their_own() -> None:
    batched = tuple(product(size, 64, size, batch) for size in (256, 1024) for batch in (8, 64))
    table = MatmulTable((*GRID, *batched), {"bfloat16": RATE}, BANDWIDTH, LAUNCH)
    assert table.seconds(1024, 64, 1024, "bfloat16", batch=64) == (
        pytest.approx(true_s(1024, 64, 1024, 64)),
        "measured",
    )
    found = table.seconds(512, 64, 512, "bfloat16", batch=16)
    assert found == (pytest.approx(true_s(512, 64, 512, 16), rel=0.05), "interpolated")
    assert table.seconds(2048, 2048, 2048, "bfloat16", batch=8) is None
    assert table.seconds(1024, 64, 1024, "bfloat16") is None, "products of one are another matter"


def test_what_was_not_measured_is_not_known() -> None:
    assert TABLE.seconds(2048, 2048, 2048, "float8") is None
    assert TABLE.seconds_anywhere(2048, 2048, 2048, "float8") is None
    with pytest.raises(ValueError, match="sides of at least 1"):
        TABLE.seconds(0, 1, 1, "bfloat16")


def test_the_table_of_a_profile_has_its_products_and_rates() -> None:
    table = matmul_table_of(small_profile())
    assert table.seconds(8, 16, 4, "float32") == (pytest.approx(1e-4), "measured")
    assert table.seconds_anywhere(512, 512, 512, "bfloat16") == (2 * 512**3 / 10e9, "fitted")
    bare = matmul_table((), {"float32": 1e9})
    assert bare.seconds_anywhere(1, 1, 1, "float32") == (2e-9, "fitted") and math.isinf(bare.memory_bytes_per_s)

"""Measured lines of collectives, and what they say of collectives that were not measured."""

import pytest

from costmodel.collective_lines import CollectiveLines
from costmodel.collectives import AxisLink, collective_time_s
from costmodel.resharding import CastTable

LINES = CollectiveLines(
    {
        ("all_reduce", 2, 1): (1e-4, 1e-9),
        ("all_reduce", 8, 1): (2e-4, 2e-9),
        ("all_gather", 8, 1): (3e-4, 7e-10),
        ("all_gather", 2, 4): (5e-4, 5e-9),
    }
)


def test_a_measured_line_is_used_as_it_is() -> None:
    assert LINES.line("all_reduce", 2) == (1e-4, 1e-9)
    assert LINES.provenance("all_reduce", 2) == "fitted"


def test_another_group_size_moves_another_share() -> None:
    fixed_s, slope = LINES.line("all_reduce", 7) or (0.0, 0.0)
    assert fixed_s == 2e-4 and slope == pytest.approx(2e-9 * (6 / 7) / (7 / 8))
    assert LINES.provenance("all_reduce", 7) == "interpolated"


def test_another_kind_moves_another_share() -> None:
    fixed_s, slope = LINES.line("reduce_scatter", 8) or (0.0, 0.0)
    assert (fixed_s, slope) == (3e-4, pytest.approx(7e-10))
    assert LINES.line("permute", 8) == (3e-4, pytest.approx(7e-10 / (7 / 8)))


def test_the_group_size_counts_before_the_stride() -> None:
    assert LINES.line("all_gather", 2, 1) == (5e-4, 5e-9)
    assert LINES.line("all_gather", 4, 4) is not None


def test_nothing_measured_is_nothing_known() -> None:
    assert CollectiveLines().line("all_reduce", 2) is None
    assert CollectiveLines().provenance("all_reduce", 2) is None


def test_only_axes_inside_a_node_are_priced_by_measured_lines() -> None:
    inside = AxisLink(size=2, bandwidth_bytes_per_s=1e9, latency_s=1e-6)
    outside = AxisLink(size=8, bandwidth_bytes_per_s=1e9, latency_s=1e-6, tree_latency_s=1e-5)
    table = CastTable((8, 2), (outside, inside), LINES)
    assert table.line("all_reduce", 1) == (1e-4, 1e-9)
    fixed_s, slope = table.line("all_reduce", 0)
    assert fixed_s + 1e9 * slope == pytest.approx(collective_time_s("all_reduce", 1e9, outside))


def test_the_distance_of_an_axis_neighbours_follows_from_the_mesh() -> None:
    inside = AxisLink(size=2, bandwidth_bytes_per_s=1e9, latency_s=1e-6)
    table = CastTable((2, 4), (inside, inside), LINES)
    assert table.line("all_gather", 0) == (5e-4, 5e-9)

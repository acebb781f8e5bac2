"""Collective formulas C1 to C6 and what a mesh axis sees of a cluster."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.cluster import DeviceGroup, Link, LinkTier, Overrides
from costmodel.collectives import COLLECTIVES, AxisLink, axis_links, collective_time_s, rings_link, transfer_time_s
from costmodel.device_kind import DeviceKind

KIND = DeviceKind(
    name="k",
    platform="gpu",
    peak_flops_per_s={"float32": 1e12},
    memory_bytes=1 << 34,
    memory_bandwidth_bytes_per_s=1e12,
    link_bandwidth_bytes_per_s=100e9,
)


def group(nodes=2, width=8, nics=1, tiers=((8, 100e9),), name="g", **overrides) -> DeviceGroup:
    return DeviceGroup(
        name=name,
        nodes=nodes,
        device=KIND,
        devices_per_node=width,
        intra=tuple(
            LinkTier(span=span, bandwidth_bytes_per_s=rate, latency_s=1e-6, efficiency=1, start_s=0)
            for span, rate in tiers
        ),
        inter=Link(bandwidth_bytes_per_s=40e9, latency_s=10e-6, nics=nics, efficiency=1, start_s=0),
        overrides=Overrides(**overrides),
    )


def test_formulas_c1_to_c5():
    link = AxisLink(size=4, bandwidth_bytes_per_s=100e9, latency_s=1e-6, all_to_all_bytes_per_s=50e9, start_s=5e-6)
    time = {kind: collective_time_s(kind, 4e9, link) for kind in COLLECTIVES}
    assert time["all_reduce"] == pytest.approx(5e-6 + 6e-6 + 2 * 0.75 * 0.04)
    assert time["all_gather"] == time["reduce_scatter"] == pytest.approx(5e-6 + 3e-6 + 0.75 * 0.04)
    assert time["all_to_all"] == pytest.approx(5e-6 + 3e-6 + 0.75 * 0.08)
    assert time["permute"] == pytest.approx(5e-6 + 1e-6 + 0.04)


def test_all_reduce_across_nodes_takes_the_tree_where_that_is_faster():
    link = AxisLink(size=64, bandwidth_bytes_per_s=100e9, latency_s=5e-6, tree_latency_s=80e-6)
    assert collective_time_s("all_reduce", 1000, link) == pytest.approx(80e-6 + 2 * 1000 / 100e9)
    assert collective_time_s("all_reduce", 100e9, link) == pytest.approx(2 * 63 * 5e-6 + 2 * 63 / 64)


@pytest.mark.parametrize(("nodes", "sent"), [(2, 1.0), (3, 1.5), (4, 2.0), (5, 2.0)])
def test_trees_over_few_nodes_send_less_than_rings(nodes, sent):
    """The node that sends most, in bytes of the reduced array: NVIDIA/nccl-tests issue 196 for two."""
    (whole,) = axis_links(group(nodes=nodes), (8 * nodes,))
    network_s = sent * 8e9 / 40e9
    ring_s = 2 * (8 * nodes - 1) / (8 * nodes) * 8e9 / 40e9
    assert collective_time_s("all_reduce", 8e9, whole) == pytest.approx(min(network_s, ring_s), rel=1e-2)


def test_a_tree_gains_nothing_where_devices_have_no_fabric_of_their_own():
    """PCIe carries their messages to each other and to the network alike."""
    plain = msgspec.structs.replace(group(), device=msgspec.structs.replace(KIND, link_bandwidth_bytes_per_s=None))
    (whole,) = axis_links(plain, (16,))
    assert collective_time_s("all_reduce", 8e9, whole) == pytest.approx(2 * 15 / 16 * 8e9 / 40e9, rel=1e-2)


def test_a_tree_is_no_faster_than_the_links_inside_nodes():
    (whole,) = axis_links(group(tiers=((8, 50e9),)), (16,))
    assert collective_time_s("all_reduce", 8e9, whole) == pytest.approx(2 * 8e9 / 50e9, rel=1e-2)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_nothing_to_send_takes_no_time(kind):
    alone = AxisLink(size=1, bandwidth_bytes_per_s=math.inf, latency_s=0.0)
    assert collective_time_s(kind, 1e9, alone) == 0
    assert collective_time_s(kind, 0, AxisLink(size=4, bandwidth_bytes_per_s=1e9, latency_s=1e-6)) == 0


def test_unknown_collective_says_what_is_legal():
    with pytest.raises(ValueError, match="legal are all_reduce, all_gather"):
        collective_time_s("broadcast", 1.0, AxisLink(size=2, bandwidth_bytes_per_s=1.0, latency_s=0.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("size", [1, 5])
def test_arrays_give_what_numbers_give(kind, size):
    link = AxisLink(size=size, bandwidth_bytes_per_s=1e9, latency_s=1e-6, tree_latency_s=2e-6)
    many = np.array([0.0, 1.0, 1e3, 1e9])
    assert collective_time_s(kind, many, link).tolist() == [collective_time_s(kind, float(one), link) for one in many]
    assert transfer_time_s(many, link).tolist() == [transfer_time_s(float(one), link) for one in many]


@given(
    kind=st.sampled_from(COLLECTIVES),
    size=st.integers(2, 100),
    rate=st.floats(1e6, 1e12),
    count=st.floats(1, 1e12),
    more=st.floats(1, 10),
    tree=st.none() | st.floats(0, 1e-3),
)
def test_time_grows_with_bytes_and_falls_with_bandwidth(kind, size, rate, count, more, tree):
    link = AxisLink(size=size, bandwidth_bytes_per_s=rate, latency_s=1e-6, tree_latency_s=tree)
    faster = AxisLink(size=size, bandwidth_bytes_per_s=rate * more, latency_s=1e-6, tree_latency_s=tree)
    time = collective_time_s(kind, count, link)
    assert 0 < time <= collective_time_s(kind, count * more, link)
    assert collective_time_s(kind, count, faster) <= time


def test_all_reduce_is_reduce_scatter_then_all_gather():
    link = AxisLink(size=6, bandwidth_bytes_per_s=1e9, latency_s=1e-6)
    parts = collective_time_s("reduce_scatter", 1e8, link) + collective_time_s("all_gather", 1e8, link)
    assert collective_time_s("all_reduce", 1e8, link) == pytest.approx(parts)


def test_an_axis_inside_a_node_sees_the_tier():
    outer, inner = axis_links(group(), (2, 8), 16)
    assert inner == AxisLink(size=8, bandwidth_bytes_per_s=100e9, latency_s=1e-6)
    assert outer.size == 2


def test_rings_that_cross_at_once_share_the_node():
    outer, _ = axis_links(group(), (2, 8))
    assert outer.bandwidth_bytes_per_s == pytest.approx(40e9 / 8)
    assert outer.latency_s == pytest.approx(10e-6)
    (whole,) = axis_links(group(), (16,))
    assert whole.bandwidth_bytes_per_s == pytest.approx(40e9)
    assert whole.latency_s == pytest.approx((2 * 10e-6 + 14 * 1e-6) / 16)


def test_a_fast_network_is_bound_by_the_fabric_in_the_node():
    (whole,) = axis_links(group(tiers=((8, 10e9),)), (16,))
    assert whole.bandwidth_bytes_per_s == 10e9


def test_one_device_alone_has_only_its_share_of_the_nics():
    (pair,) = axis_links(group(width=1, nics=1, tiers=()), (2,))
    assert pair.bandwidth_bytes_per_s == 40e9
    missing = tuple(f"{node}/{index}" for node in range(2) for index in range(1, 8))
    (pair,) = axis_links(group(nics=8, missing=missing), (2,))
    assert pair.bandwidth_bytes_per_s == 5e9


def test_all_to_all_sends_most_of_its_bytes_through_the_nic():
    (whole,) = axis_links(group(), (16,))
    assert whole.all_to_all_bytes_per_s == pytest.approx(40e9 / 8 * 15 / 8)


def test_strided_axis_takes_the_wide_tier():
    tiers = ((2, 100e9), (8, 10e9))
    outer, inner = axis_links(group(nodes=1, tiers=tiers), (4, 2))
    assert (outer.bandwidth_bytes_per_s, inner.bandwidth_bytes_per_s) == (10e9, 100e9)


def test_a_mesh_that_starts_inside_a_node_crosses_nodes():
    (aligned,) = axis_links(group(), (8,))
    (shifted,) = axis_links(group(), (8,), first=4)
    assert aligned.bandwidth_bytes_per_s == 100e9
    assert shifted.bandwidth_bytes_per_s == 40e9


def test_missing_devices_shift_the_layout():
    _, inner = axis_links(group(missing=("0/7",)), (3, 5))
    assert inner.bandwidth_bytes_per_s == 40e9


def test_the_slowest_node_counts():
    (whole,) = axis_links(group(slow_links={"1": 4.0}), (16,))
    assert whole.bandwidth_bytes_per_s == 10e9


def test_meshes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"mesh \(3, 8\) from device 0 needs 24 devices; group 'g' has 16"):
        axis_links(group(), (3, 8))
    with pytest.raises(ValueError, match="has 8 devices, got device_count = 9"):
        axis_links(group(), (8,), 9)


@given(nodes=st.integers(1, 4), width=st.integers(1, 7), data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_mesh_of_any_group_has_finite_links(nodes, width, data):
    one = group(nodes=nodes, width=width, tiers=((width, 100e9),))
    total = nodes * width
    first = data.draw(st.sampled_from([size for size in range(1, total + 1) if total % size == 0]))
    links = axis_links(one, (total // first, first))
    assert [link.size for link in links] == [total // first, first]
    for link in links:
        assert link.size == 1 or 0 < link.bandwidth_bytes_per_s <= 100e9
        assert link.size == 1 or 0 < (link.all_to_all_bytes_per_s or 1) <= 100e9


@given(rate=st.floats(1e9, 1e12), more=st.floats(1, 10))
@settings(max_examples=30, deadline=None)
def test_faster_networks_are_never_slower(rate, more):
    def built(bandwidth):
        link = Link(bandwidth_bytes_per_s=bandwidth, latency_s=1e-6, efficiency=1)
        tier = LinkTier(span=3, bandwidth_bytes_per_s=100e9, latency_s=1e-6, efficiency=1)
        return DeviceGroup(name="g", nodes=3, device=KIND, devices_per_node=3, intra=(tier,), inter=link)

    for slow, fast in zip(axis_links(built(rate), (3, 3)), axis_links(built(rate * more), (3, 3))):
        assert collective_time_s("all_gather", 1e9, fast) <= collective_time_s("all_gather", 1e9, slow)


@pytest.mark.parametrize(
    ("kind", "size_bytes", "measured_s"),
    [
        ("all_reduce", 2**27, 1327.6e-6),
        ("all_reduce", 2**30, 8203.9e-6),
        ("all_gather", 2**30, 4413.4e-6),
        ("reduce_scatter", 2**28, 1108.7e-6),
        ("reduce_scatter", 2**33, 32464.0e-6),
        ("all_to_all", 2**28, 1189.1e-6),
        ("all_gather", 64, 34.4e-6),
        ("all_reduce", 4096, 35.9e-6),
    ],
)
def test_datasheet_figures_of_eight_a100s_predict_nccl_tests(kind, size_bytes, measured_s):
    """nccl-tests on A100s with NVSwitch: stas00/ml-engineering@744d01e18b, microsoft/superbenchmark@700d6501f1."""
    tier = LinkTier(span=8, bandwidth_bytes_per_s=300e9, latency_s=2e-6)
    (link,) = axis_links(DeviceGroup(name="g", nodes=1, device=KIND, devices_per_node=8, intra=(tier,)), (8,))
    assert collective_time_s(kind, size_bytes, link) == pytest.approx(measured_s, rel=0.5 if size_bytes < 1e6 else 0.25)


@pytest.mark.parametrize("mesh", [(4, 8), (2, 2, 8), (8, 4), (16, 2), (4, 2, 4), (32,)])
@pytest.mark.parametrize("nics", [1, 4, 8])
def test_an_axis_sees_the_same_of_a_group_that_is_laid_out_as_several(mesh, nics):
    """Four nodes of a group, or two groups of two nodes each with the same links between them as inside them."""
    whole, halves = (
        group(nodes=4, nics=nics),
        (group(nodes=2, nics=nics, name="a"), group(nodes=2, nics=nics, name="b")),
    )
    places = [(g, node, index) for g in (0, 1) for node in (0, 1) for index in range(8)]
    at, node, index = np.array(places).T
    positions = np.arange(32).reshape(mesh)
    for axis, wanted in enumerate(axis_links(whole, mesh)):
        rings = np.moveaxis(positions, axis, -1).reshape(-1, mesh[axis])
        assert rings_link(halves, at[rings], node[rings], index[rings], lambda _a, _b: whole.inter) == wanted


def test_a_slower_link_between_groups_binds_the_rings_that_cross_it():
    halves, slow = (group(name="a"), group(name="b")), Link(bandwidth_bytes_per_s=4e9, latency_s=90e-6, efficiency=1)
    places = np.array([(g, node, index) for g in (0, 1) for node in (0, 1) for index in range(8)]).T

    def between(one, other):
        return halves[0].inter if one == other else slow

    rings = np.arange(32)[None, :]
    crossing = rings_link(halves, *(row[rings] for row in places), between)
    assert crossing.bandwidth_bytes_per_s == 4e9 and crossing.latency_s == pytest.approx((4 * 90e-6 + 28 * 1e-6) / 32)
    inside = rings_link(halves, *(row[np.arange(32).reshape(2, 16)] for row in places), between)
    assert inside.bandwidth_bytes_per_s == 40e9

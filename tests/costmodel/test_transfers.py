"""Transfers T1 to T3: measured copies inside a node, links of the cluster elsewhere."""

import pytest

from costmodel.cluster import Cluster, DeviceGroup, GroupLink, Link, LinkTier
from costmodel.collectives import NO_LINK, transfer_time_s
from costmodel.device_kind import DeviceKind
from costmodel.transfers import Transfers

COPIES = {1: (1e-4, 1e-10), 4: (2e-4, 4e-10)}


def group(name: str) -> DeviceGroup:
    kind = DeviceKind(
        name=f"kind of {name}",
        platform="gpu",
        peak_flops_per_s={"float32": 1e12},
        memory_bytes=1 << 34,
        memory_bandwidth_bytes_per_s=1e12,
    )
    return DeviceGroup(
        name=name,
        nodes=2,
        device=kind,
        devices_per_node=8,
        intra=(LinkTier(span=8, bandwidth_bytes_per_s=100e9, latency_s=1e-6, efficiency=1),),
        inter=Link(bandwidth_bytes_per_s=40e9, latency_s=10e-6, nics=8, efficiency=1),
    )


CLUSTER = Cluster(
    name="c",
    groups=(group("g"), group("h")),
    links=(GroupLink(between=("g", "h"), bandwidth_bytes_per_s=10e9, latency_s=30e-6, efficiency=1),),
)
G, H = CLUSTER.devices_of("g"), CLUSTER.devices_of("h")
STATED, MEASURED = Transfers(CLUSTER), Transfers(CLUSTER, {"kind of g": COPIES, "kind of h": {}})


def test_t1_the_copies_of_as_many_lanes_as_the_smaller_side_has_devices() -> None:
    assert transfer_time_s(1e6, MEASURED.link(G[:1], G[1:2])) == pytest.approx(1e-4 + 1e-4)
    assert transfer_time_s(4e6, MEASURED.link(G[:4], G[4:8])) == pytest.approx(2e-4 + 4e-4)
    assert MEASURED.link(G[:2], G[2:8]).bandwidth_bytes_per_s == pytest.approx(2 / 1e-10)  # 2 is nearer to 1 than to 4
    assert MEASURED.link(G[:3], G[3:8]).latency_s == 2e-4


def test_t1_a_line_without_a_slope_leaves_the_bandwidth_of_the_tier() -> None:
    link = Transfers(CLUSTER, {"kind of g": {1: (5e-4, 0.0)}}).link(G[:1], G[1:2])
    assert (link.latency_s, link.bandwidth_bytes_per_s) == (5e-4, 100e9)


def test_t1_says_nothing_of_other_kinds_nodes_and_groups() -> None:
    for source, target in ((H[:1], H[1:2]), (G[:8], G[8:]), (G, H), (G[:1], H[:1])):
        assert MEASURED.link(source, target) == STATED.link(source, target)


def test_t2_inside_a_node_the_devices_of_the_smaller_side_send() -> None:
    link = STATED.link(G[:2], G[4:8])
    assert (link.bandwidth_bytes_per_s, link.latency_s) == (200e9, 1e-6)
    assert transfer_time_s(2e9, link) == pytest.approx(0.01 + 1e-6)


def test_nothing_moves_from_devices_to_themselves() -> None:
    assert STATED.link(G[:2], G[:2]) == MEASURED.link(G[:2], G[:2]) == NO_LINK
    assert transfer_time_s(2e9, NO_LINK) == 0


def test_t3_between_nodes_the_nics_of_those_that_send() -> None:
    assert STATED.link(G[:8], G[8:]).bandwidth_bytes_per_s == pytest.approx(40e9)
    assert STATED.link(G[:1], G[8:]).bandwidth_bytes_per_s == pytest.approx(5e9)


def test_t3_between_groups_nodes_count() -> None:
    assert STATED.link(G, H).bandwidth_bytes_per_s == pytest.approx(20e9)
    assert STATED.link(G[:8], H).bandwidth_bytes_per_s == pytest.approx(10e9)

"""Devices of stages: neighbours in few nodes, priced where they stand."""

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.cluster import Cluster, parse_cluster
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.models import gpt
from planner.search.candidates import Candidates
from planner.search.facts import Facts
from planner.search.meshes import pool_devices
from planner.search.pinned import GroupPin, StagePin, pinned_layout
from planner.search.windows import starts, windows
from profiles.catalogue import load_catalogue


def nodes_of_a100(nodes: int, per_node: int, **overrides) -> Cluster:
    group = {
        "name": "a",
        "nodes": nodes,
        "device": "A100-SXM4-80GB",
        "devices_per_node": per_node,
        "intra": [{"span": per_node, "bandwidth_bytes_per_s": 240e9, "latency_s": 3e-6}],
        "inter": {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-5},
        **overrides,
    }
    return parse_cluster({"name": "nodes", "group": [group]}, load_catalogue())


def places(cluster, counts):
    return [[(d.node, d.index) for d in w] for w in windows(pool_devices(cluster, "a"), counts)]


def test_stages_take_devices_in_order_where_nodes_allow():
    assert places(nodes_of_a100(1, 8), [3, 5]) == [[(0, i) for i in range(3)], [(0, i) for i in range(3, 8)]]
    assert [w[0] for w in places(nodes_of_a100(2, 4), [4, 2, 2])] == [(0, 0), (1, 0), (1, 2)]


def test_a_window_that_would_straddle_nodes_moves():
    small, large, last = places(nodes_of_a100(2, 4), [2, 4, 2])
    assert {n for n, _ in large} == {0} and {n for n, _ in small} == {n for n, _ in last} == {1}


@settings(max_examples=200, deadline=None)
@given(data=st.data(), nodes=st.integers(1, 4), per_node=st.integers(1, 6))
def test_windows_are_apart_and_neighbours(data, nodes, per_node):
    cluster = nodes_of_a100(nodes, per_node)
    left, counts = nodes * per_node, []
    while left and (not counts or data.draw(st.booleans())):
        counts.append(data.draw(st.integers(1, left)))
        left -= counts[-1]
    found = windows(pool_devices(cluster, "a"), counts)
    order = {d.id: i for i, d in enumerate(pool_devices(cluster, "a"))}
    taken = [order[d.id] for w in found for d in w]
    assert [len(w) for w in found] == counts and len(set(taken)) == sum(counts)
    for window in found:
        first = order[window[0].id]
        assert [order[d.id] for d in window] == list(range(first, first + len(window)))


def test_starts_have_the_fewest_nodes():
    devices = pool_devices(nodes_of_a100(2, 4), "a")
    assert starts(devices, 3) == [0, 1, 4, 5] and starts(devices, 8) == [0] and starts(devices, 5) == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def graph():
    task = gpt(hidden=64, layers=4, heads=4, vocab=256, seq=32, dtype="float32")
    return model_graph(capture(task, 8))


def score_of(cluster, graph, *devices, mesh=None):
    candidates = Candidates(
        cluster=cluster, graph_of=lambda size: graph, facts={g.device.name: Facts(g.device) for g in cluster.groups}
    )
    pins = tuple(
        StagePin(groups=(GroupPin(pool="a", devices=n, mesh=mesh and mesh[i]),)) for i, n in enumerate(devices)
    )
    return pinned_layout(candidates, pins, microbatch=8, microbatches=4, schedule="1f1b")


def test_a_stage_across_nodes_pays_for_the_link_between_them(graph):
    """Six of eight devices in two nodes of four: the second stage has to straddle them."""
    near = score_of(nodes_of_a100(1, 8), graph, 2, 4, mesh=((2,), (4,)))
    far = score_of(nodes_of_a100(3, 2), graph, 2, 4, mesh=((2,), (4,)))
    links = [s.layout.stages[1].groups[0].decision.space.pricing.links[0].bandwidth_bytes_per_s for s in (near, far)]
    assert links[0] > 100 * links[1]
    once = [s.layout.stages[1].groups[0].decision for s in (near, far)]
    assert jnp.isfinite(far.time_s) and once[0].space.pricing.mesh == once[1].space.pricing.mesh
    assert far.time_s > near.time_s


def test_only_the_stage_with_the_slow_device_is_slow(graph):
    cluster = nodes_of_a100(1, 4, overrides={"slow": {"0/3": 2.0}})
    found = score_of(cluster, graph, 2, 2, mesh=((2,), (2,)))
    slowdowns = [s.groups[0].decision.space.pricing.slowdown for s in found.layout.stages]
    assert slowdowns == [1.0, 2.0]

"""Node types: possible, with sources, links as tiers; and a cluster file names one."""

import pytest

from costmodel.cluster import parse_cluster
from costmodel.errors import InputError
from profiles.catalogue import load_catalogue
from profiles.cluster_files import read_cluster, render_cluster
from profiles.node_types import load_node_types, node_type

NODES, KINDS = load_node_types(), load_catalogue()


def test_there_are_many_accelerators_and_nodes() -> None:
    assert sum(kind.platform != "cpu" for kind in KINDS.values()) >= 44
    assert len(NODES) >= 50
    named = "DGX-A100-80GB DGX-H100 DGX-B300 GB300-NVL72 p5.48xlarge a3-megagpu-8g ND96isr_H100_v5 MI355X-x8 TPU-v5p-64"
    assert set(named.split()) <= set(NODES)


@pytest.mark.parametrize("name", sorted(NODES))
def test_every_node_is_a_legal_group_and_names_its_source(name: str) -> None:
    node = NODES[name]
    assert node.source and node.device in KINDS and node.intra[-1].span == node.devices_per_node
    count = 2 if node.inter else 1
    cluster = read_cluster(f'name = "c"\n[[group]]\nname = "g"\nnodes = {count}\nnode = "{name}"\n', "c.toml")
    (group,) = cluster.groups
    assert group.device == KINDS[node.device] and group.devices_per_node == node.devices_per_node
    assert group.intra == node.intra and group.inter == node.inter
    assert read_cluster(render_cluster(cluster), "again") == cluster
    links = [*node.intra, *([node.inter] if node.inter else [])]
    if "from memory" in node.source or "assumed" in node.source:
        assert "assumed" in {link.provenance for link in links}


@pytest.mark.parametrize("name", sorted(name for name, node in NODES.items() if KINDS[node.device].platform == "tpu"))
def test_a_slice_has_the_links_of_its_chips(name: str) -> None:
    (tier,) = NODES[name].intra
    assert tier.bandwidth_bytes_per_s == KINDS[NODES[name].device].link_bandwidth_bytes_per_s


def test_the_same_device_stands_behind_different_links() -> None:
    links = [node.inter for node in NODES.values() if node.device == "A100-SXM4-40GB"]
    rates = {link.bandwidth_bytes_per_s for link in links if link is not None}
    assert len(rates) >= 3


def test_what_a_group_states_itself_stays() -> None:
    text = 'name = "c"\n[[group]]\nname = "g"\nnodes = 2\nnode = "DGX-H100"\n'
    slow = "inter = { bandwidth_bytes_per_s = 1e9, latency_s = 1e-6 }\n"
    group = read_cluster(text + slow, "c").groups[0]
    assert group.inter is not None and group.inter.bandwidth_bytes_per_s == 1e9 and group.devices_per_node == 8
    fewer = read_cluster(text + "devices_per_node = 6\n", "c").groups[0]
    assert fewer.devices_per_node == 6 and fewer.intra[-1].span == 6 and fewer.intra[-1].provenance == "assumed"


def test_an_unknown_node_type_is_a_question() -> None:
    text = 'name = "c"\n[[group]]\nname = "g"\nnodes = 2\nnode = {}\n'
    with pytest.raises(InputError, match=r"MP132: c\.toml: group\[0\]\.node: unknown node type 'dgx-h10'") as caught:
        read_cluster(text.format('"dgx-h10"'), "c.toml")
    assert "DGX-H100" in caught.value.hint
    with pytest.raises(InputError, match=r"MP131: .*group\[0\]\.node must be str, got int"):
        read_cluster(text.format(8), "c.toml")
    with pytest.raises(InputError, match="MP131"):
        parse_cluster({"name": "c", "group": [{"name": "g", "nodes": 1, "node": "DGX-H100"}]}, KINDS)
    with pytest.raises(InputError, match="MP132"):
        node_type("H100")

"""Cluster files: round trips, bad files, and the cluster of the attached devices."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.cluster import Cluster, DeviceGroup, GroupLink, Link, LinkTier, Overrides, parse_cluster
from costmodel.errors import InputError
from profiles.catalogue import load_catalogue
from profiles.cluster_files import load_cluster, read_cluster, render_cluster, write_cluster
from profiles.devices import attached_cluster, cluster_of

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "clusters").glob("*.toml"))
KINDS = tuple(load_catalogue().values())
RATES = st.floats(1e3, 1e15)
TIMES = st.floats(0, 1)
SOURCES = st.sampled_from(["measured", "datasheet", "assumed"])
SHARES = st.none() | st.floats(0.1, 1)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load_and_round_trip(path, tmp_path):
    cluster = load_cluster(path)
    write_cluster(tmp_path / "copy.toml", cluster)
    again = load_cluster(tmp_path / "copy.toml")
    assert again == cluster
    assert again.fingerprint_payload() == cluster.fingerprint_payload()
    assert [entry.name for entry in tmp_path.iterdir()] == ["copy.toml"]


def test_there_are_examples_of_odd_and_mixed_clusters():
    counts = {path.stem: load_cluster(path).device_counts for path in EXAMPLES}
    assert counts["a100x16"] == {"a100": 16}
    assert counts["cpu_mixed"] == {"full": 3, "half": 5}
    assert counts["rtx4090x7"] == {"rtx": 7}
    assert counts["a100x128_h100x64"] == {"a100": 128, "h100": 64}


@st.composite
def groups(draw, name):
    nodes, width = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    kind = draw(st.sampled_from(KINDS))
    if draw(st.booleans()):
        notes = draw(st.text(max_size=8))
        kind = msgspec.structs.replace(kind, name=f"{kind.name} {name}", notes=notes, launch_s=draw(TIMES))
    spans = sorted(draw(st.sets(st.integers(1, width), max_size=2)) | {width})
    intra = tuple(
        LinkTier(
            span=span,
            bandwidth_bytes_per_s=draw(RATES),
            latency_s=draw(TIMES),
            efficiency=draw(SHARES),
            provenance=draw(SOURCES),
        )
        for span in spans
    )
    inter = Link(
        bandwidth_bytes_per_s=draw(RATES), latency_s=draw(TIMES), nics=draw(st.integers(1, 9)), efficiency=draw(SHARES)
    )
    slots = [f"{node}/{index}" for node in range(nodes) for index in range(width)]
    overrides = Overrides(
        missing=tuple(draw(st.lists(st.sampled_from(slots[1:]), unique=True))) if len(slots) > 1 else (),
        slow=draw(st.dictionaries(st.sampled_from(slots), st.floats(1, 9), max_size=2)),
        slow_links=draw(
            st.dictionaries(st.sampled_from([str(node) for node in range(nodes)]), st.floats(1, 9), max_size=1)
        ),
    )
    price = draw(st.none() | st.floats(0, 100))
    return DeviceGroup(
        name=name,
        nodes=nodes,
        device=kind,
        devices_per_node=width,
        intra=intra,
        inter=inter,
        price_per_device_hour=price,
        overrides=overrides,
    )


@given(one=groups("one"), other=groups("other"), name=st.text(max_size=9), rate=RATES, back=st.none() | RATES)
@settings(max_examples=60, deadline=None)
def test_rendered_clusters_read_back_the_same(one, other, name, rate, back):
    link = GroupLink(
        between=("one", "other"), bandwidth_bytes_per_s=rate, latency_s=0.5, bandwidth_back_bytes_per_s=back
    )
    cluster = Cluster(name=name, groups=(one, other), links=(link,))
    text = render_cluster(cluster)
    assert read_cluster(text, "text") == cluster
    assert render_cluster(read_cluster(text, "text")) == text


def test_rendered_text_is_what_people_write():
    text = render_cluster(load_cluster(next(path for path in EXAMPLES if path.stem == "a100x16")))
    assert 'device = "A100-SXM4-80GB"' in text
    assert "intra = [{ span = 8, bandwidth_bytes_per_s = 300e9, latency_s = 2e-06 }]" in text


def test_malformed_toml_names_file_and_line(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text('name = "x"\n[[group]\n')
    with pytest.raises(InputError, match=r"MP130: .*bad\.toml is not TOML: .*line 2") as caught:
        load_cluster(path)
    assert caught.value.exit_code == 2


def test_unreadable_files_say_why(tmp_path):
    with pytest.raises(InputError, match=r"MP130: cannot read cluster file .*none\.toml: No such file"):
        load_cluster(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="it is not UTF-8 text"):
        load_cluster(tmp_path / "binary.toml")


def test_mistakes_in_a_file_name_the_file(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('name = "x"\n[[group]]\nname = "g"\nnodes = 1\ndevice = "H100"\ndevices_per_node = 8\n')
    with pytest.raises(InputError, match=r"MP132: .*c\.toml: group\[0\]\.device: unknown device kind 'H100'"):
        load_cluster(path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    cluster = load_cluster(EXAMPLES[0])
    (tmp_path / "taken").mkdir()
    with pytest.raises(InputError, match="MP130: cannot write cluster file"):
        write_cluster(tmp_path / "taken", cluster)
    with pytest.raises(InputError, match="MP130: cannot write cluster file"):
        write_cluster(tmp_path / "none" / "c.toml", cluster)
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]


def test_attached_cluster_is_a_legal_document():
    import jax

    cluster = attached_cluster()
    assert cluster.device_count == len(jax.devices())
    assert read_cluster(render_cluster(cluster), "attached") == cluster


def device(at, kind, platform="gpu", process=0, limit=None, **more):
    stats = {"bytes_limit": limit} if limit else None
    facts = {"id": at, "device_kind": kind, "platform": platform, "process_index": process, **more}
    return SimpleNamespace(**facts, memory_stats=lambda: stats)


def test_processes_are_nodes_and_kinds_are_groups():
    a100 = [device(at, "NVIDIA A100-SXM4-80GB", process=at // 4) for at in range(7)]
    v100 = [device(7 + at, "Tesla V100-SXM2-32GB", process=2) for at in range(3)]
    cluster = cluster_of(a100 + v100, "mine")
    assert cluster.device_counts == {"a100": 7, "v100": 3}
    assert cluster.group("a100").overrides.missing == ("1/3",)
    assert cluster.group("a100").device == load_catalogue()["A100-SXM4-80GB"]
    assert cluster.group_link("a100", "v100").provenance == "assumed"
    assert parse_cluster(msgspec.to_builtins(cluster), load_catalogue()) == cluster


def test_hosts_of_a_tpu_slice_are_one_node():
    cluster = cluster_of([device(at, "TPU v5", "tpu", at // 4, slice_index=0) for at in range(16)], "slice")
    assert (cluster.groups[0].nodes, cluster.groups[0].devices_per_node) == (1, 16)


def test_unknown_kinds_get_assumed_facts_and_their_own_memory():
    cluster = cluster_of([device(0, "NVIDIA Z1000", limit=20 << 30), device(1, "NVIDIA Z1000", limit=20 << 30)], "new")
    kind = cluster.groups[0].device
    assert (kind.name, kind.memory_bytes) == ("NVIDIA Z1000", 20 << 30)
    assert kind.provenance_of("memory_bytes") == "measured"
    assert kind.provenance_of("peak_flops_per_s.bfloat16") == "assumed"
    assert read_cluster(render_cluster(cluster), "new") == cluster


def test_kinds_that_share_a_first_word_get_their_own_group_names():
    both = [device(0, "NVIDIA A100-SXM4-80GB"), device(1, "NVIDIA A100-SXM4-40GB")]
    assert list(cluster_of(both, "x").device_counts) == ["a100", "a100-sxm4-40gb"]
    with pytest.raises(ValueError, match="at least one device"):
        cluster_of([], "none")

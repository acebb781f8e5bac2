"""Cluster documents: what they become, and what each mistake says."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.cluster import Cluster, parse_cluster
from costmodel.device_kind import DeviceKind
from costmodel.documents import nearest
from costmodel.errors import InputError
from costmodel.provenance import weakest


def kind(name: str = "K80", **facts) -> DeviceKind:
    base = {
        "name": name,
        "platform": "gpu",
        "peak_flops_per_s": {"float32": 1e12, "bfloat16": 4e12},
        "memory_bytes": 10 << 30,
        "memory_bandwidth_bytes_per_s": 100e9,
    }
    return DeviceKind(**{**base, **facts})


CATALOGUE = {one.name: one for one in (kind("A100-SXM4-40GB"), kind("A100-SXM4-80GB"), kind("V100-SXM2-32GB"))}
TIER = {"span": 8, "bandwidth_bytes_per_s": 300e9, "latency_s": 3e-6}
INTER = {"bandwidth_bytes_per_s": 100e9, "latency_s": 8e-6}


def group(name: str = "a", **changes) -> dict:
    base = {
        "name": name,
        "nodes": 2,
        "device": "A100-SXM4-80GB",
        "devices_per_node": 8,
        "intra": [TIER],
        "inter": INTER,
    }
    return {key: value for key, value in {**base, **changes}.items() if value is not None}


def parse(*groups: dict, link: list | None = None, **more) -> Cluster:
    return parse_cluster({"name": "c", "group": list(groups), "link": link or [], **more}, CATALOGUE)


def link(one: str = "a", other: str = "b", **changes) -> dict:
    return {"between": [one, other], "bandwidth_bytes_per_s": 12.5e9, "latency_s": 30e-6, **changes}


def test_devices_have_canonical_ids_in_order():
    a = group(nodes=1, devices_per_node=3, intra=[TIER | {"span": 3}])
    b = group("b", nodes=2, devices_per_node=2, intra=[TIER | {"span": 2}])
    cluster = parse(a, b, link=[link()])
    ids = ["a/0/0", "a/0/1", "a/0/2", "b/0/0", "b/0/1", "b/1/0", "b/1/1"]
    assert [device.id for device in cluster.devices] == ids
    assert cluster.device_counts == {"a": 3, "b": 4}
    assert cluster.device_count == 7
    assert cluster.device_by_id["b/1/0"].node == 1
    assert [device.id for device in cluster.devices_of("b")] == ids[3:]
    assert cluster.kinds == (CATALOGUE["A100-SXM4-80GB"],)


def test_overrides_remove_and_slow_devices():
    overrides = {"missing": ["1/7"], "slow": {"0/3": 1.5}, "slow_links": {"1": 2}}
    cluster = parse(group(overrides=overrides))
    assert cluster.device_count == 15
    assert "a/1/7" not in cluster.device_by_id
    assert [device.id for device in cluster.devices if device.slowdown != 1] == ["a/0/3"]


def test_group_link_is_directed_and_within_a_group_is_inter():
    cluster = parse(group(), group("b"), link=[link(bandwidth_back_bytes_per_s=1e9)])
    assert cluster.group_link("a", "b").bandwidth_bytes_per_s == 12.5e9
    assert cluster.group_link("b", "a").bandwidth_bytes_per_s == 1e9
    assert cluster.group_link("a", "a").bandwidth_bytes_per_s == 100e9
    with pytest.raises(KeyError, match="no link between 'a' and 'c'"):
        cluster.group_link("a", "c")


def test_tier_is_the_narrowest_that_joins():
    tiers = [{**TIER, "span": 2, "bandwidth_bytes_per_s": 5e10}, {**TIER, "span": 8, "bandwidth_bytes_per_s": 1e10}]
    cluster = parse(group(intra=tiers))
    assert [cluster.tier("a", span).span for span in (1, 2, 3, 8)] == [2, 2, 8, 8]
    with pytest.raises(ValueError, match=r"span must be 1 to 8 .* got 9"):
        cluster.tier("a", 9)


def test_links_left_out_are_filled_in_and_marked_assumed():
    bridged = kind("pair", link_bandwidth_bytes_per_s=50e9, link_span=2, host_bandwidth_bytes_per_s=30e9)
    cluster = parse_cluster({"name": "c", "group": [group(device="pair", intra=None, inter=None)]}, {"pair": bridged})
    first = cluster.group("a")
    assert [(tier.span, tier.bandwidth_bytes_per_s) for tier in first.intra] == [(2, 50e9), (8, 30e9)]
    assert {tier.provenance for tier in first.intra} == {"assumed"}
    assert first.inter is not None
    assert first.inter.provenance == "assumed"
    alone = parse(group(nodes=1, devices_per_node=1, intra=None, inter=None)).group("a")
    assert (alone.intra, alone.inter) == ((), None)


def test_a_timed_figure_is_taken_as_it_is_and_a_datasheet_one_is_not():
    timed = parse(group(intra=[{**TIER, "provenance": "measured"}])).tier("a", 8)
    sheet = parse(group()).tier("a", 8)
    stated = parse(group(intra=[{**TIER, "efficiency": 0.5}])).tier("a", 8)
    assert timed.achieved_bytes_per_s == 300e9
    assert sheet.achieved_bytes_per_s == pytest.approx(240e9)
    assert stated.achieved_bytes_per_s == 150e9


def test_inline_device_gets_an_assumed_reserve_unless_it_states_one():
    facts = msgspec.to_builtins(kind("mine"))
    del facts["reserve_bytes"]
    without = parse(group(device=facts)).kinds[0]
    assert without.reserve_bytes == (10 << 30) // 10
    assert without.usable_bytes == without.memory_bytes - without.reserve_bytes
    assert without.provenance_of("reserve_bytes") == "assumed"
    assert without.provenance_of("memory_bytes") == "datasheet"
    assert parse(group(device={**facts, "reserve_bytes": 5})).kinds[0].reserve_bytes == 5


def test_provenance_of_a_peak_falls_back_to_the_whole_field():
    one = kind(provenance={"peak_flops_per_s": "assumed", "peak_flops_per_s.bfloat16": "measured"})
    assert one.provenance_of("peak_flops_per_s.float32") == "assumed"
    assert one.provenance_of("peak_flops_per_s.bfloat16") == "measured"


def test_fingerprint_payload_ignores_text_prices_and_fused_attention_only():
    plain = parse(group())
    priced = parse(group(price_per_device_hour=2.0))
    (own,) = plain.groups
    fused = msgspec.structs.replace(own, device=msgspec.structs.replace(own.device, attention_efficiency=0.7))
    assert plain.fingerprint_payload() == msgspec.structs.replace(plain, groups=(fused,)).fingerprint_payload()
    slower = parse(group(inter={**INTER, "bandwidth_bytes_per_s": 50e9}))
    assert plain.fingerprint_payload() == priced.fingerprint_payload()
    assert plain.fingerprint_payload() != slower.fingerprint_payload()
    assert msgspec.json.encode(plain.fingerprint_payload())


def test_clusters_are_hashable_and_equal_by_value():
    assert parse(group()) == parse(group())
    assert len({parse(group()), parse(group()), parse(group(nodes=3))}) == 2


@given(nodes=st.integers(1, 9), width=st.integers(1, 9), gone=st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8))))
@settings(max_examples=60, deadline=None)
def test_any_counts_are_legal(nodes, width, gone):
    missing = [f"{node}/{index}" for node, index in sorted(gone) if node < nodes and index < width]
    changes = {
        "nodes": nodes,
        "devices_per_node": width,
        "intra": None,
        "inter": None,
        "overrides": {"missing": missing},
    }
    if len(missing) == nodes * width:
        with pytest.raises(InputError, match="MP137"):
            parse(group(**changes))
        return
    cluster = parse(group(**changes))
    assert cluster.device_count == nodes * width - len(missing) == len({device.id for device in cluster.devices})


DEVICE = msgspec.to_builtins(kind("mine"))
BAD = [
    (lambda: parse(), "MP134", "the cluster has no group", "[[group]]"),
    (lambda: parse(group(nods=1)), "MP131", "unknown field 'nods' in group[0]", "did you mean nodes?"),
    (
        lambda: parse(group(intra=[{**TIER, "bandwith": 1}])),
        "MP131",
        "unknown field 'bandwith' in group[0].intra[0]",
        "bandwidth_bytes_per_s",
    ),
    (lambda: parse(group(nodes=None)), "MP131", "group[0] has no 'nodes'", "fields are"),
    (lambda: parse(group(nodes="two")), "MP131", "group[0].nodes must be int, got str", ""),
    (lambda: parse(group(nodes=2.5)), "MP131", "group[0].nodes must be int, got float", "whole number"),
    (
        lambda: parse_cluster({"name": "c", "group": group()}, CATALOGUE),
        "MP131",
        "group must be array, got object",
        "[[group]]",
    ),
    (lambda: parse(group(), groups=[]), "MP131", "unknown field 'groups' in the document", "did you mean group?"),
    (
        lambda: parse(group(), group("b", device="A100")),
        "MP132",
        "group[1].device: unknown device kind 'A100'",
        "did you mean A100-SXM4-40GB or A100-SXM4-80GB?",
    ),
    (lambda: parse(group(device="zzz")), "MP132", "unknown device kind 'zzz'", "device kinds are A100-SXM4-40GB"),
    (
        lambda: parse(group(device={**DEVICE, "memory": 1})),
        "MP131",
        "unknown field 'memory' in group[0].device",
        "memory_bytes",
    ),
    (
        lambda: parse(group(device={**DEVICE, "memory_bytes": 0})),
        "MP133",
        "group[0].device.memory_bytes must be above 0, got 0",
        "",
    ),
    (lambda: parse(group(device={**DEVICE, "reserve_bytes": 10 << 30})), "MP133", "leaves no usable memory", "reserve"),
    (lambda: parse(group(device={**DEVICE, "matmul_efficiency": 1.2})), "MP133", "at most 1, got 1.2", ""),
    (
        lambda: parse(group(device={**DEVICE, "peak_flops_per_s": {"bfloat16": 1e12}})),
        "MP133",
        "peak_flops_per_s has no 'float32'",
        "priced",
    ),
    (
        lambda: parse(group(device={**DEVICE, "peak_flops_per_s": {"float32": 1e12, "bf16": 1e12}})),
        "MP133",
        "unknown dtype 'bf16'",
        "bfloat16",
    ),
    (lambda: parse(group(device={**DEVICE, "name": " "})), "MP133", "group[0].device.name is empty", ""),
    (lambda: parse(group(nodes=0)), "MP133", "group[0].nodes must be above 0, got 0", ""),
    (lambda: parse(group(devices_per_node=-1)), "MP133", "group[0].devices_per_node must be above 0, got -1", ""),
    (lambda: parse(group(nodes=10**9)), "MP133", "must be above 0 and at most 100000", ""),
    (lambda: parse(group(price_per_device_hour=-1.0)), "MP133", "must be at least 0, got -1", ""),
    (
        lambda: parse(group(inter={**INTER, "bandwidth_bytes_per_s": 0})),
        "MP133",
        "group[0].inter.bandwidth_bytes_per_s must be above 0",
        "",
    ),
    (
        lambda: parse(group(inter={**INTER, "latency_s": float("nan")})),
        "MP133",
        "group[0].inter.latency_s must be at least 0, got nan",
        "",
    ),
    (lambda: parse(group(inter={**INTER, "nics": 0})), "MP133", "group[0].inter.nics must be above 0", ""),
    (lambda: parse(group("a/b")), "MP134", "got 'a/b'", "group/node/index"),
    (
        lambda: parse(group(), group(), link=[]),
        "MP134",
        "group[1].name 'a' is also the name of group[0]",
        "its own name",
    ),
    (
        lambda: parse(group(device=DEVICE), group("b", device={**DEVICE, "memory_bytes": 5 << 30}), link=[link()]),
        "MP134",
        "are both named 'mine'",
        "",
    ),
    (
        lambda: parse(group(), group("b"), link=[link("a", "bb")]),
        "MP135",
        "link[0].between[1]: no group 'bb'",
        "did you mean b?",
    ),
    (lambda: parse(group(), group("b"), link=[link("a", "a")]), "MP135", "joins 'a' with itself", "inter"),
    (
        lambda: parse(group(), group("b"), link=[link(), link("b", "a")]),
        "MP135",
        "link[1] and link[0] both join a and b",
        "bandwidth_back",
    ),
    (
        lambda: parse(group(), group("b"), group("c"), link=[link(), link("a", "c")]),
        "MP135",
        "no link between groups 'b' and 'c'",
        'between = ["b", "c"]',
    ),
    (
        lambda: parse(group(), group("b"), link=[link(bandwidth_back_bytes_per_s=-1)]),
        "MP133",
        "link[0].bandwidth_back_bytes_per_s must be above 0",
        "",
    ),
    (
        lambda: parse(group(intra=[{**TIER, "span": 4}, {**TIER, "span": 4}])),
        "MP136",
        "group[0].intra[1].span must be above 4, got 4",
        "narrow to wide",
    ),
    (
        lambda: parse(group(intra=[{**TIER, "span": 4}])),
        "MP136",
        "group[0].intra[0].span must reach devices_per_node = 8, got 4",
        "joins all",
    ),
    (
        lambda: parse(group(overrides={"missing": ["2/0"]})),
        "MP137",
        "group[0].overrides.missing[0]: no device '2/0'",
        "'0/0' to '1/7'",
    ),
    (lambda: parse(group(overrides={"missing": ["0"]})), "MP137", "no device '0'", "node/index"),
    (lambda: parse(group(overrides={"slow": {"0/0": 0.5}})), "MP137", "must be at least 1, got 0.5", ""),
    (lambda: parse(group(overrides={"slow_links": {"5": 2.0}})), "MP137", "no node '5'", "'0' to '1'"),
]


@pytest.mark.parametrize(("make", "code", "message", "hint"), BAD, ids=[f"{one[1]}-{at}" for at, one in enumerate(BAD)])
def test_mistakes_name_the_path_and_what_is_legal(make, code, message, hint):
    with pytest.raises(InputError) as caught:
        make()
    assert caught.value.code == code
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_nearest_prefers_names_that_contain_the_word():
    assert nearest("h100", ["A100", "H100-PCIe-80GB", "H100-SXM5-80GB"])[:2] == ("H100-PCIe-80GB", "H100-SXM5-80GB")


def test_a_chain_of_figures_is_as_good_as_its_weakest():
    assert weakest("measured", "assumed", "compiled") == "assumed"
    with pytest.raises(ValueError, match="at least one"):
        weakest()


def test_a_tier_is_not_wider_than_its_node():
    with pytest.raises(InputError, match=r"MP136: group\[0\]\.intra\[0\]\.span is 16, a node has devices_per_node = 8"):
        parse(group(intra=[TIER | {"span": 16}]))


def test_words_that_are_not_legal_come_with_those_that_are():
    facts = {**msgspec.to_builtins(kind("X")), "platform": "abacus"}
    with pytest.raises(InputError, match=r"group\[0\]\.device\.platform: .*'abacus'\nhint: legal: cpu, gpu, tpu"):
        parse(group(device=facts))


@pytest.mark.parametrize("field", ["nodes", "devices_per_node"])
def test_huge_counts(field):
    with pytest.raises(InputError, match=rf"MP133: .*{field} is a whole number of 400 digits"):
        parse(group(**{field: 10**399}))

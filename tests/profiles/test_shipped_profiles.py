"""Profiles that come with meshplan: of known kinds, plausible beside datasheets, with sources, and usable in a plan."""

import pytest

from costmodel.cluster import parse_cluster
from costmodel.errors import ProfileError
from profiles.catalogue import device_kind, load_catalogue
from profiles.fitting import fitted
from profiles.store import read_profile, shipped_profiles

NAMES = shipped_profiles()


def test_there_are_profiles_of_the_large_kinds() -> None:
    assert set(NAMES) >= {"A100-SXM4-40GB", "A100-SXM4-80GB", "H100-SXM5-80GB", "H200-SXM-141GB", "B200-SXM", "MI300X"}


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_profile_names_its_sources_and_stays_below_the_datasheet(name: str) -> None:
    profile, kind = read_profile(f"measured:{name}"), device_kind(name)
    assert profile.device_kind == name and profile.jax_device_kind in kind.jax_names and profile.sources
    assert all("github.com/" in source and "@" in source for source in profile.sources)
    for dtype, fit in profile.rates.matmul_flops_per_s.items():
        assert 0.3 < fit.value / kind.peak_flops_per_s[dtype] < 1 and fit.provenance == "fitted"
    fabric = kind.link_bandwidth_bytes_per_s
    for line in profile.collective_lines:
        turns = (2 if line.kind == "all_reduce" else 1) * (line.size - 1) / line.size
        assert fabric is not None and line.error < 0.3
        if name != "MI250X-GCD":  # two of its dies are joined by more links than a ring takes
            assert 0.2 * fabric < turns / line.s_per_byte < 1.2 * fabric, "NVLS sums in the switch: above the ring"
    assert fitted(profile) == profile, "the lines are those of the samples"


def test_a_kind_without_published_measurements_is_a_question() -> None:
    with pytest.raises(ProfileError, match=r"MP300: no published measurements of 'A100' come") as caught:
        read_profile("measured:A100")
    assert "A100-SXM4-40GB" in caught.value.hint


def test_a_plan_is_priced_from_a_shipped_profile() -> None:
    import planner
    from planner.models import gpt

    group = {"name": "g", "nodes": 1, "device": "A100-SXM4-40GB", "devices_per_node": 8}
    cluster = parse_cluster({"name": "c", "group": [group]}, load_catalogue())
    task = gpt(hidden=256, layers=2, heads=4, vocab=512, seq=128, dtype="bfloat16")
    options = {"cluster": cluster, "global_batch": 64, "baselines": False, "microbatch": 64, "stages": 1}
    bare, measured = planner.plan(task, **options), planner.plan(task, profile="measured:A100-SXM4-40GB", **options)
    assert measured.profile is not None and bare.profile is None
    assert bare.prediction.provenance["communication"] == "assumed"
    assert measured.prediction.provenance["communication"] == "fitted"

"""The shipped catalogue: complete, sane, with sources, and never guessing a name."""

import pytest

from costmodel.device_kind import check_device_kind
from costmodel.errors import InputError
from profiles.catalogue import device_kind, kind_for_jax_name, load_catalogue
from profiles.datasheets import read_kinds

KINDS = load_catalogue()


def test_the_kinds_that_people_have_are_there():
    named = """
        P100-SXM2-16GB V100-SXM2-16GB V100-SXM2-32GB V100-PCIe-16GB T4 A10G A10 L4 L40S RTX-3090 RTX-4090 RTX-A6000
        A40 A800-SXM4-80GB H800-SXM5-80GB H20-SXM5-96GB RTX-5090 RTX-6000-Ada RTX-2080-Ti Titan-RTX
        A100-SXM4-40GB A100-SXM4-80GB A100-PCIe-40GB A100-PCIe-80GB H100-SXM5-80GB H100-PCIe-80GB H200-SXM-141GB
        GH200-96GB B200-SXM GB200 B300-SXM GB300 MI250X-GCD MI300X MI325X MI355X TPU-v4 TPU-v5e TPU-v5p TPU-v6e
        TPU7x-core cpu
    """
    assert set(named.split()) <= set(KINDS)
    assert {kind.vendor for kind in KINDS.values()} == {"NVIDIA", "AMD", "Google", "generic"}


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_kind_is_possible_and_names_its_source(name):
    kind = KINDS[name]
    check_device_kind(kind, name)
    assert kind.source
    assert kind.jax_names
    assert 0 < kind.usable_bytes < kind.memory_bytes or kind.platform == "cpu"
    assert kind.reserve_bytes < 0.1 * kind.memory_bytes
    assert kind.provenance_of("reserve_bytes") == "assumed"
    fields = {field.split(".")[0] for field in kind.provenance}
    assert fields <= set(kind.__struct_fields__)
    assert {field.split(".")[1] for field in kind.provenance if "." in field} <= set(kind.peak_flops_per_s)


@pytest.mark.parametrize("name", sorted(name for name, kind in KINDS.items() if "bfloat16" in kind.peak_flops_per_s))
def test_rates_are_in_a_plausible_relation(name):
    kind = KINDS[name]
    peaks = kind.peak_flops_per_s
    assert peaks["bfloat16"] >= peaks["float32"]
    assert peaks.get("float8", peaks["bfloat16"]) >= peaks["bfloat16"]
    assert peaks.get("int8", peaks["bfloat16"]) >= peaks["bfloat16"]
    assert 30 < peaks["bfloat16"] / kind.memory_bandwidth_bytes_per_s < 800


@pytest.mark.parametrize(
    ("name", "rate"),
    [("A100-SXM4-80GB", 624e12), ("H100-SXM5-80GB", 1979e12), ("T4", 130e12), ("MI300X", 2.6e15), ("TPU-v4", 275e12)],
)
def test_int8_rates_against_their_datasheets(name, rate):
    assert KINDS[name].peak_flops_per_s["int8"] == rate


def test_int8_rates_are_those_of_matrix_units():
    """NVIDIA's from Turing on, AMD's and TPUs have them; what is published of Blackwell Ultra disagrees."""
    without = {name for name, kind in KINDS.items() if "int8" not in kind.peak_flops_per_s}
    named = {name for name in without if not name.startswith(("P100", "V100"))}
    assert named == {"B300-SXM", "GB300", "TPU-v3-core", "TPU7x-core", "cpu"}


def test_some_facts_against_their_datasheets():
    a100 = KINDS["A100-SXM4-80GB"]
    assert a100.peak_flops_per_s["bfloat16"] == 312e12
    assert a100.memory_bandwidth_bytes_per_s == 2039e9
    assert 79 < a100.memory_bytes / 2**30 < 80
    assert "bfloat16" not in KINDS["V100-SXM2-32GB"].peak_flops_per_s
    assert KINDS["TPU-v5e"].memory_bytes == 16 << 30


def test_a_short_name_is_a_question_not_a_choice():
    with pytest.raises(InputError) as caught:
        device_kind("H100")
    assert caught.value.code == "MP132"
    assert "did you mean H100-PCIe-80GB or H100-SXM5-80GB?" in caught.value.hint
    assert device_kind("H100-SXM5-80GB").name == "H100-SXM5-80GB"


def test_names_that_jax_gives_devices_are_unique():
    every = [name for kind in KINDS.values() for name in kind.jax_names]
    assert len(every) == len(set(every))
    found = kind_for_jax_name("NVIDIA A100-SXM4-80GB")
    assert found is not None and found.name == "A100-SXM4-80GB"
    assert kind_for_jax_name("NVIDIA Z1000") is None


def test_a_mistake_in_a_catalogue_file_names_the_file_and_entry():
    with pytest.raises(InputError, match=r"catalog/x\.toml: device\[0\]"):
        read_kinds({"device": [{"name": "x"}]}, "x.toml")

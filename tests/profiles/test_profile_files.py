"""Profile documents: canonical, round trip, written whole, and bad ones refused with a code and the place."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from costmodel.errors import ProfileError
from profiles.schema import MatmulSample, OpTime
from profiles.store import (
    cache_directory,
    cached_path,
    decode_profile,
    encode_profile,
    find_profile,
    profile_id,
    read_profile,
    save_in_cache,
    write_profile,
)
from tests.small_profiles import DOT, small_profile


def test_a_profile_comes_back_as_it_was_and_equal_ones_give_equal_bytes(tmp_path: Path) -> None:
    profile = small_profile()
    write_profile(tmp_path / "a.profile.json", profile)
    assert read_profile(tmp_path / "a.profile.json") == profile
    reordered = small_profile(ops=dict(reversed(profile.ops.items())))
    assert encode_profile(reordered) == encode_profile(profile)
    assert profile_id(reordered) == profile_id(profile) != profile_id(small_profile(devices=3))
    assert [path.name for path in tmp_path.iterdir()] == ["a.profile.json"]


def test_an_entry_of_a_table_is_a_line_so_that_diffs_stay_small() -> None:
    before = encode_profile(small_profile()).decode().splitlines()
    ops = {**small_profile().ops, DOT: OpTime(forward_s=1e-3, backward_s=2e-4)}
    after = encode_profile(small_profile(ops=ops)).decode().splitlines()
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 1


def edited(**changes: Any) -> bytes:
    return json.dumps({**json.loads(encode_profile(small_profile())), **changes}).encode()


def with_op(**fields: Any) -> bytes:
    return edited(ops={"tanh": {"forward_s": 1e-3, **fields}})


def with_line(**fields: Any) -> bytes:
    return edited(collective_lines=[{"stride": 1, "fixed_s": 0, "s_per_byte": 0, **fields}])


def with_block(**fields: Any) -> bytes:
    return edited(
        blocks=[{"block_class": "a", "mesh": [1], "microbatch": 1, "forward_s": 1e-3, "backward_s": 0, **fields}]
    )


GOOD = encode_profile(small_profile())


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (GOOD[: len(GOOD) // 2], "MP303", "not whole JSON"),
        (b"", "MP303", "0 bytes"),
        (b"\xff\xfe", "MP303", "not whole JSON"),
        (GOOD.replace(b"0.0002", b"NaN", 1), "MP303", "not whole JSON"),
        (b"[]", "MP304", "not a profile"),
        (edited(schema_version=99), "MP302", "99"),
        (edited(schema_version="1"), "MP302", "'1'"),
        (edited(matmul=[]), "MP304", "unknown field 'matmul'"),
        (with_op(bacward_s=1.0), "MP304", "bacward_s"),
        (with_op(forward_s="fast"), "MP304", "ops"),
        (with_op(forward_s=-1e-3), "MP305", "ops['tanh'].forward_s"),
        (with_op(forward_s=0), "MP305", "above 0"),
        (with_op(backward_s=-1e-9), "MP305", "ops['tanh'].backward_s"),
        (GOOD.replace(b"0.0002", b"1e999", 1), "MP30", "test"),
        (with_block(layers=0), "MP305", "blocks[0].layers"),
        (with_block(layers=-4), "MP305", "blocks[0].layers"),
        (edited(devices=0), "MP305", "devices"),
        (edited(rates={"matmul_flops_per_s": {"float31": {"value": 1e9}}}), "MP305", "float31"),
        (with_line(kind="gossip", size=2), "MP304", "collective_lines"),
        (with_line(kind="permute", size=1), "MP305", "collective_lines[0].size"),
        (with_line(kind="permute", size=2, s_per_byte=-1e-9), "MP305", "collective_lines[0].s_per_byte"),
    ],
)
def test_a_bad_document_is_refused_with_its_place(data: bytes, code: str, words: str) -> None:
    with pytest.raises(ProfileError) as caught:
        decode_profile(data, "test")
    assert caught.value.code.startswith(code) and caught.value.exit_code == 4
    assert "test" in caught.value.message and words in caught.value.message


def test_impossible_numbers_are_not_written(tmp_path: Path) -> None:
    sample = MatmulSample(dtype="float32", shape=(1, 1, 1), time_s=math.nan)
    with pytest.raises(ProfileError, match=r"MP305.*matmuls"):
        write_profile(tmp_path / "a.profile.json", small_profile(matmuls=(sample,)))
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"MP300.*none\.json"):
        read_profile(tmp_path / "none.json")
    with pytest.raises(ProfileError, match="MP300"):
        read_profile(tmp_path)
    with pytest.raises(ProfileError, match=r"MP300.*absent"):
        write_profile(tmp_path / "absent" / "a.profile.json", small_profile())


def test_the_cache_is_found_by_device_kind(tmp_path: Path) -> None:
    assert cache_directory({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "meshplan" / "profiles"
    assert cache_directory({"HOME": "/home/ada"}) == Path("/home/ada/.cache/meshplan/profiles")
    assert cache_directory({"XDG_CACHE_HOME": "not/absolute", "HOME": "/h"}) == Path("/h/.cache/meshplan/profiles")
    folder = cache_directory({"XDG_CACHE_HOME": str(tmp_path)})
    assert find_profile("cpu", folder) is None
    path = save_in_cache(small_profile(), folder)
    assert find_profile("cpu", folder) == path == cached_path("cpu", folder)
    assert read_profile(path) == small_profile()
    assert cached_path("NVIDIA H100 80GB/HBM3", folder).name == "NVIDIA_H100_80GB_HBM3.profile.json"

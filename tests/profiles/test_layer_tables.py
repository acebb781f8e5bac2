"""Others' layer tables: read with every mistake named, and looked up between and outside their sizes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.errors import InputError, ProfileError
from profiles.block_table import layer_names, layer_times, over_degrees, over_microbatches
from profiles.catalogue import device_kind
from profiles.import_layers import import_layers
from profiles.schema import Profile
from profiles.store import decode_profile, encode_profile
from tests.small_profiles import small_profile

A100 = device_kind("A100-SXM4-40GB")
HEADER = "model,gpu,micro_batch_seqs,tp,layer,forward_s,backward_s,update_s"


def table(*rows: str, header: str = HEADER) -> str:
    return "\n".join([header, *rows]) + "\n"


def read(text: str, **options: object) -> Profile:
    return import_layers(text, **{"source": "t.csv", "model": "m", "kind": A100, **options})


GOOD = table(
    *(
        f"m,x,{size},{tp},{layer},{0.01 * size / tp},{0.02 * size / tp},{0.004 / tp}"
        for size in (1, 2, 8)
        for tp in (1, 4)
        for layer in (0, 1)
    ),
    "m,x,1,1,head,0.5,0,0",
    "other,x,1,1,0,9,9,9",
)


def test_a_table_becomes_a_block_table() -> None:
    profile = read(GOOD)
    assert profile.device_kind == A100.name and profile.jax_device_kind in A100.jax_names
    assert len(profile.blocks) == 13 and layer_names(profile) == ("0", "1", "head")
    one = profile.blocks[0]
    assert (one.block_class, one.mesh, one.microbatch) == ("m/0", (1,), 1)
    assert (one.forward_s, one.backward_s, one.weight_s, one.update_s, one.saved_bytes) == (
        0.01,
        0.02,
        None,
        0.004,
        None,
    )
    assert profile.sources == ("t.csv: 13 layer times of m",) and profile.devices == 4
    assert decode_profile(encode_profile(profile)) == profile


def test_columns_may_be_called_anything_and_be_in_milliseconds() -> None:
    text = table("2,0,10,20", header="batch,index,fwd_ms,bwd_us")
    names = {"microbatch": "batch", "layer": "index", "forward_s": "fwd_ms", "backward_s": "bwd_us"}
    (block,) = read(text, columns=names).blocks
    assert (block.forward_s, block.backward_s) == (0.01, pytest.approx(2e-5))
    assert block.update_s is None and block.mesh == (1,) and block.microbatch == 2


def test_one_time_of_both_passes_is_split_and_marked_so() -> None:
    text = table("2,4,0,30", header="batch,tp,index,both_ms")
    (block,) = read(text, columns={"microbatch": "batch", "layer": "index", "both_s": "both_ms"}).blocks
    assert (block.forward_s, block.backward_s) == (pytest.approx(0.01), pytest.approx(0.02))
    assert block.provenance == "assumed" and block.mesh == (4,)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", {}, "has no rows"),
        (HEADER + "\n", {}, "has no rows"),
        (table("m,x,1,1,0,0.1,0.2"), {}, "line 2: 7 cells under 8 columns"),
        (GOOD[: len(GOOD) - 5], {}, "cells under 8 columns"),
        (table("m,x,1,1,0,nan,0.2,0"), {}, "line 2: forward_s is 'nan'; it must be seconds above 0"),
        (table("m,x,1,1,0,0,0.2,0"), {}, "forward_s is '0'"),
        (table("m,x,1,1,0,0.1,-0.2,0"), {}, "line 2: backward_s is '-0.2'; it must be seconds of at least 0"),
        (table("m,x,1,1,0,0.1,0.2,inf"), {}, "update_s is 'inf'"),
        (table("m,x,1,1,0,,0.2,0"), {}, "forward_s is ''"),
        (table("m,x,0,1,0,0.1,0.2,0"), {}, "micro_batch_seqs is '0'; it must be a whole number"),
        (table("m,x,1,1.5,0,0.1,0.2,0"), {}, "tp is '1.5'"),
        (table("m,x,1,1,0,0.1,0.2,0", "m,x,1,1,0,0.3,0.2,0"), {}, "line 3: block m/0 at microbatch 1 is in line 2"),
        (table("m,x,1,1,0,0.1,0.2,0", "m,y,1,1,0,0.1,0.2,0"), {}, "has several: gpu x, y"),
        (table("m,x,1,1,0,0.1,0.2,0"), {"model": "n"}, "has no model 'n'"),
        (table("m,x,1,1,0,0.1,0.2,0"), {"gpu": "z"}, "has no gpu 'z'"),
        (table("1", header="layer"), {}, "has no column 'micro_batch_seqs', 'forward_s', 'backward_s'"),
        (GOOD, {"columns": {"speed": "x"}}, "no column 'speed' is read"),
        (GOOD, {"columns": {"layer": "lay"}}, "has no column 'lay'"),
        (GOOD, {"columns": {"tp": "TP"}}, "has no column 'TP', which tp is to be read from"),
        (GOOD, {"columns": {"update_s": "upd_ms"}}, "has no column 'upd_ms'"),
        (table("1,0,0.1,0.2", header="micro_batch_seqs,layer,forward_s,backward_s"), {"gpu": "x"}, "rows are of 'x'"),
    ],
)
def test_every_mistake_is_named_with_its_line(text: str, options: dict, words: str) -> None:
    with pytest.raises(InputError) as caught:
        read(text, **options)
    assert caught.value.code == "MP165" and words in caught.value.message and caught.value.exit_code == 2


def test_equal_rows_may_repeat() -> None:
    assert len(read(table("m,x,1,1,0,0.1,0.2,0", "m,x,1,1,0,0.1,0.2,0")).blocks) == 1


def test_a_layer_at_the_tables_own_sizes_is_as_measured() -> None:
    found = layer_times(read(GOOD), 1, tp=4, microbatch=8)
    assert found == (0.02, 0.04, 0.001, "measured")
    assert layer_times(read(GOOD), "head", 1, 1, model="m").forward_s == 0.5


def test_between_sizes_times_are_interpolated_and_outside_fitted() -> None:
    profile = read(GOOD)
    between = layer_times(profile, 0, tp=1, microbatch=4)
    assert between == (pytest.approx(0.04), pytest.approx(0.08), pytest.approx(0.004), "interpolated")
    two = layer_times(profile, 0, tp=2, microbatch=2)
    assert two == (pytest.approx(0.01), pytest.approx(0.02), pytest.approx(0.002), "interpolated")
    large = layer_times(profile, 0, tp=8, microbatch=16)
    assert large.provenance == "fitted" and large.forward_s == pytest.approx(0.02)


def test_outside_of_measured_microbatches_the_fixed_part_stays() -> None:
    points = [(1.0, 1.5), (2.0, 2.0), (4.0, 3.0)]  # 1 + m / 2
    assert over_microbatches(points, 8) == (pytest.approx(5.0), "fitted")
    assert over_microbatches(points, 0.5) == (pytest.approx(1.25), "fitted")
    assert over_microbatches([(2.0, 3.0)], 4) == (6.0, "fitted")
    falling = [(1.0, 2.0), (2.0, 1.0)]
    assert over_microbatches(falling, 4) == (1.0, "fitted"), "more examples never take less"
    steep = [(1.0, 1.0), (2.0, 4.0)]
    assert over_microbatches(steep, 4) == (8.0, "fitted"), "nor a negative time for none"


def test_outside_of_measured_degrees_more_devices_never_take_longer_nor_less_than_their_share() -> None:
    assert over_degrees([(4.0, 1.0)], 8) == (0.5, "fitted")
    assert over_degrees([(1.0, 4.0), (2.0, 3.0)], 4)[0] == pytest.approx(3.0 * 0.75)
    assert over_degrees([(1.0, 4.0), (2.0, 5.0)], 4) == (5.0, "fitted")
    assert over_degrees([(1.0, 8.0), (2.0, 1.0)], 4) == (0.5, "fitted")
    assert over_degrees([(1.0, 0.0), (4.0, 0.0)], 2) == (0.0, "interpolated")


@given(
    a=st.floats(0, 1),
    b=st.floats(1e-3, 1),
    size=st.floats(0.1, 100),
    sizes=st.sets(st.integers(1, 64), min_size=1, max_size=5),
)
def test_lookups_are_positive_and_between_neighbours(a: float, b: float, size: float, sizes: set[int]) -> None:
    points = [(float(m), a + b * m) for m in sorted(sizes)]
    value, how = over_microbatches(points, size)
    assert math.isfinite(value) and value > 0
    if points[0][0] < size < points[-1][0]:
        assert points[0][1] <= value <= points[-1][1]
    if how == "fitted" and len(points) > 1:
        assert value == pytest.approx(a + b * size, rel=1e-6)


def test_what_the_table_does_not_have_is_named() -> None:
    with pytest.raises(ProfileError, match=r"MP311: the block table has no 'm/7'"):
        layer_times(read(GOOD), 7, 1, 1)
    with pytest.raises(ProfileError, match=r"MP311: .*no imported layers"):
        layer_times(small_profile(), 0, 1, 1)
    both = Profile(**{**_fields(read(GOOD)), "blocks": (*read(GOOD).blocks, *read(GOOD, model="other").blocks)})
    with pytest.raises(ProfileError, match=r"MP311: .*layers of m, other"):
        layer_names(both)
    assert layer_times(both, 0, 1, 1, model="other").forward_s == 9
    with pytest.raises(ProfileError, match=r"MP311: .*no layers of 'n'"):
        layer_names(both, "n")


def _fields(profile: Profile) -> dict:
    return {name: getattr(profile, name) for name in profile.__struct_fields__}

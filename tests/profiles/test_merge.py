"""Profiles of several machines as one: all that either has, the steadier of what both have, what they disagree on."""

import pytest

from costmodel.errors import ProfileError
from profiles.merge import merge_profiles
from profiles.records import records_of
from profiles.schema import BlockTime, CollectiveSample, Fit, Gap, MatmulSample, OpTime, Profile, Pulse, Rates
from profiles.steadiness import steadiness
from profiles.store import decode_profile, encode_profile
from tests.small_profiles import small_profile


def product(time_s: float, *, n: int = 4, drift: float = 0.0, spread_s: float = 0.0) -> MatmulSample:
    return MatmulSample(dtype="float32", shape=(8, 16, n), time_s=time_s, drift=drift, spread_s=spread_s)


def with_products(*products: MatmulSample, **changes: object) -> Profile:
    return small_profile(matmuls=products, **changes)


def test_a_profile_merged_with_itself_is_what_it_was() -> None:
    merged = merge_profiles([("a", small_profile()), ("b", small_profile())])
    assert merged.conflicts == ()
    assert dict(records_of(merged.profile)) == dict(records_of(small_profile()))
    assert merged.profile.copy_lines == small_profile().copy_lines, "lines without samples stay"
    assert decode_profile(encode_profile(merged.profile)) == merged.profile


def test_what_either_has_is_there_and_no_longer_a_gap() -> None:
    other = small_profile(
        ops={"tanh": OpTime(forward_s=1e-3)},
        microbatches=(8,),
        matmuls=(product(1e-3, n=5),),
        gaps=(Gap(what="add f32[4] f32[4] -> f32[4]", cause="x"), Gap(what="left", cause="y")),
        usable_memory_bytes=1 << 30,
        sources=("a table",),
        measured_at="2027-01-01T00:00:00+00:00",
    )
    merged = merge_profiles([("a", small_profile(microbatches=(4,))), ("b", other)]).profile
    assert set(merged.ops) == {*small_profile().ops, "tanh"} and merged.microbatches == (4, 8)
    assert [one.shape for one in merged.matmuls] == [(8, 16, 4), (8, 16, 5)]
    assert {gap.what for gap in merged.gaps if "line" not in gap.what} == {"gather", "left"}
    assert merged.usable_memory_bytes == 1 << 30 and merged.sources == ("a table", "merged of a, b")
    assert merged.measured_at == "2027-01-01T00:00:00+00:00"


def test_the_steadier_of_two_is_kept_and_a_conflict_is_explained() -> None:
    drifted, steady = product(1e-3, drift=0.5), product(2e-3)
    merged = merge_profiles([("a", with_products(drifted)), ("b", with_products(steady))])
    assert merged.profile.matmuls == (steady,)
    assert merged.conflicts == ("matmul float32 8x16x4: 1 ms in a, 2 ms in b; that of b is kept",)
    scattered = product(1.1e-3, spread_s=1e-4)
    merged = merge_profiles([("a", with_products(scattered)), ("b", with_products(product(1e-3)))])
    assert merged.profile.matmuls == (product(1e-3),) and merged.conflicts == ()


def test_constants_are_fitted_again_to_all_samples() -> None:
    def reduced(full_bytes: int, time_s: float) -> tuple[CollectiveSample, ...]:
        return (CollectiveSample(kind="all_reduce", size=4, stride=1, full_bytes=full_bytes, time_s=time_s),)

    one = small_profile(collectives=reduced(1000, 2e-3), collective_lines=())
    other = small_profile(collectives=reduced(2000, 3e-3), collective_lines=())
    (line,) = merge_profiles([("a", one), ("b", other)]).profile.collective_lines
    assert (line.size, line.fixed_s, line.s_per_byte) == (4, pytest.approx(1e-3), pytest.approx(1e-6))
    rates = Rates(matmul_flops_per_s={"bfloat16": Fit(value=7.0)})
    merged = merge_profiles([("a", with_products(product(1e-3))), ("b", small_profile(rates=rates))]).profile
    assert merged.rates.matmul_flops_per_s["float32"].value == pytest.approx(2 * 8 * 16 * 4 / 1e-3, rel=1e-3)
    assert merged.rates.matmul_flops_per_s["bfloat16"].value == 10e9, "the first part's, of which there are no samples"


def test_other_kinds_and_other_versions_are_refused() -> None:
    with pytest.raises(ProfileError, match=r"MP301: b is of 'T4', a of 'cpu'"):
        merge_profiles([("a", small_profile()), ("b", small_profile(device_kind="T4"))])
    with pytest.raises(ProfileError, match=r"MP309: .*jax: 0\.10\.2 in a, 0\.11\.0 in b"):
        merge_profiles([("a", small_profile()), ("b", small_profile(software={"jax": "0.11.0"}))])
    near = merge_profiles(
        [("a", small_profile(software={"jax": "0.10.2"})), ("b", small_profile(software={"jax": "0.10.3"}))]
    )
    assert near.conflicts == ("jax: 0.10.2 in a, 0.10.3 in b",)
    imported = merge_profiles([("a", small_profile()), ("b", small_profile(software={}))])
    assert imported.conflicts == () and imported.profile.software == small_profile().software


def test_different_counts_of_devices_are_said() -> None:
    merged = merge_profiles([("a", small_profile()), ("b", small_profile(devices=8))])
    assert merged.profile.devices == 8 and "2 in a, 8 in b" in merged.conflicts[0]


def test_drift_and_a_device_that_slows_down_are_reported() -> None:
    assert steadiness(small_profile(pulses=(Pulse(after_s=0, time_s=1.0), Pulse(after_s=9, time_s=1.04)))) == ()
    slow = small_profile(pulses=(Pulse(after_s=1, time_s=1.0), Pulse(after_s=61, time_s=1.3)))
    assert steadiness(slow) == (
        "the device slowed down: the same product took 30% longer 60 s later (heat, a power limit, or other work "
        "on it)",
    )
    unsteady = with_products(product(1.0, drift=-0.4), product(1.0, n=5, spread_s=0.5), product(1.0, n=6, drift=0.09))
    drifted, scattered = steadiness(unsteady)
    assert drifted == "1 of 7 measurements drifted by over 10%, most matmul float32 8x16x4: 40%"
    assert scattered == "1 of 7 measurements scatter by over 20%, most matmul float32 8x16x5: 50%"


def test_blocks_timed_in_longer_loops_are_kept_however_steady_others_are() -> None:
    """Blocks on their own lack the copies that stacks cost: to pick by drift would mix two things."""
    alone = BlockTime(block_class="a", mesh=(1,), microbatch=4, forward_s=1e-3, backward_s=1e-3)
    looped = BlockTime(block_class="a", mesh=(1,), microbatch=4, forward_s=1.1e-3, backward_s=1e-3, layers=4, drift=0.1)
    for parts in ([("a", alone), ("b", looped)], [("b", looped), ("a", alone)]):
        merged = merge_profiles([(name, small_profile(blocks=(block,))) for name, block in parts])
        assert merged.profile.blocks == (looped,)
        (said,) = merged.conflicts
        assert "1 layer in a" in said and "4 layers in b" in said and said.endswith("that of b is kept")

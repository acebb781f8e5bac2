"""What a profile changes in prices, and that a profile of another kind is refused."""

from typing import Any

import msgspec
import pytest

from costmodel.collectives import AxisLink
from costmodel.compute import op_time_s
from costmodel.device_kind import DeviceKind
from costmodel.errors import ProfileError
from costmodel.estimator import OpCost, Pricing
from costmodel.graph import Block, BlockClass, Factor, ModelGraph, Op, Tensor, Work
from costmodel.sharding import PARTIAL, REPLICATED
from costmodel.traffic import Traffic
from profiles.apply import AppliedProfile, apply_profile
from profiles.catalogue import device_kind
from profiles.coverage import op_coverage
from profiles.schema import CollectiveLine, CopyLine, Fit, OpTime, Profile, Rates
from tests.small_profiles import DOT, small_profile

CPU = device_kind("cpu")
LINK = AxisLink(size=2, bandwidth_bytes_per_s=5e9, latency_s=1e-6)
TENSORS = {
    name: Tensor(name, shape, "float32", 4, needs_grad=True)
    for name, shape in {"x": (8, 16), "w": (16, 4), "y": (8, 4), "a": (4096, 1024), "b": (4096, 1024)}.items()
}
PRODUCT = Op(
    name="dot_general.0",
    primitive="dot_general",
    inputs=("x", "w"),
    outputs=("y",),
    factors=(Factor("b", 8), Factor("m", 16, combine="sum"), Factor("n", 4)),
    in_dims=(((0,), (1,)), ((1,), (2,))),
    out_dims=(((0,), (2,)),),
    flops=1024.0,
    backward_flops=2048.0,
    work="matmul",
    key=DOT,
)


def elementwise(work: Work = "elementwise") -> Op:
    dims = ((0,), (1,))
    return Op(
        name="tanh.0",
        primitive="tanh",
        inputs=("a",),
        outputs=("b",),
        factors=(Factor("i", 4096), Factor("j", 1024)),
        in_dims=(dims,),
        out_dims=(dims,),
        flops=4e7,
        backward_flops=4e7,
        work=work,
        fuses=True,
        key="tanh",
    )


def pricing(applied: AppliedProfile, **changes: Any) -> Pricing:
    fields: dict[str, Any] = {
        "kind": applied.kind,
        "mesh": (2,),
        "axis_names": ("x",),
        "links": (LINK,),
        "op_times": applied.op_times,
        "products": applied.products,
        "collective_lines": applied.collectives,
    }
    return Pricing(**{**fields, **changes})


def price(profile: Profile, op: Op = PRODUCT, code: int = REPLICATED) -> OpCost:
    traffic = Traffic.of_block((op,), TENSORS, frozenset(op.outputs))
    return pricing(apply_profile(CPU, profile)).op(op, (code,), TENSORS, traffic)


def test_a_measured_op_costs_what_was_measured() -> None:
    cost = price(small_profile())
    assert (cost.forward_s, cost.backward_s, cost.provenance) == (1e-4, 2e-4, "measured")
    half = price(small_profile(), code=0)
    assert (half.forward_s, half.backward_s) == (0.5e-4, 1e-4)


def test_an_op_made_ten_times_slower_is_priced_so_and_no_other_is() -> None:
    slow = {**small_profile().ops, DOT: OpTime(forward_s=1e-3, backward_s=2e-3)}
    cost = price(small_profile(ops=slow))
    assert (cost.forward_s, cost.backward_s) == (1e-3, 2e-3)
    other = msgspec.structs.replace(small_profile(), ops=slow)
    assert price(other, elementwise()) == price(small_profile(), elementwise())


def test_an_op_without_a_needed_cotangent_has_no_backward() -> None:
    frozen = {name: Tensor(name, t.shape, t.dtype, t.itemsize) for name, t in TENSORS.items()}
    traffic = Traffic.of_block((PRODUCT,), frozen, frozenset({"y"}))
    assert pricing(apply_profile(CPU, small_profile())).op(PRODUCT, (REPLICATED,), frozen, traffic).backward_s == 0.0


def test_rates_of_the_profile_price_what_was_not_measured() -> None:
    kind = apply_profile(CPU, small_profile()).kind
    assert op_time_s(1e12, 0.0, "float32", kind, is_matmul=True) == pytest.approx(1e12 / 20e9)
    assert op_time_s(1e12, 0.0, "bfloat16", kind, is_matmul=True) == pytest.approx(1e12 / 10e9)
    assert op_time_s(0.0, 1e9, "float32", kind, is_matmul=False) == pytest.approx(1e9 / 2e9)
    assert op_time_s(0.0, 1.0, "float32", kind, is_matmul=False) == 1e-6
    for field in ("peak_flops_per_s.float32", "memory_bandwidth_bytes_per_s", "launch_s"):
        assert kind.provenance_of(field) == "fitted"
    assert kind.provenance_of("peak_flops_per_s.float64") == "assumed"
    slower = small_profile(rates=Rates(matmul_flops_per_s={"float32": Fit(value=2e9)}))
    assert price(small_profile(ops={})).forward_s < price(msgspec.structs.replace(slower, ops={})).forward_s


def test_float32_products_are_timed_on_the_unit_that_runs_them() -> None:
    gpu = device_kind("A100-SXM4-80GB")
    profile = small_profile(device_kind=gpu.name, jax_device_kind="", platform="gpu", usable_memory_bytes=None)
    kind = apply_profile(gpu, profile).kind
    assert op_time_s(1e12, 0.0, "float32", kind, is_matmul=True) == pytest.approx(1e12 / 20e9)
    assert kind.peak_flops_per_s["float32"] == gpu.peak_flops_per_s["float32"]


def test_a_fused_op_saves_the_traffic_that_fusing_saves() -> None:
    op, whole = elementwise(), 2 * 4096 * 1024 * 4 / 2e9
    profile = small_profile(ops={"tanh": OpTime(forward_s=2 * whole, backward_s=2 * whole)})
    kind = apply_profile(CPU, profile)
    alone = pricing(kind).op(op, (REPLICATED,), TENSORS, Traffic(TENSORS, frozenset({"a", "b"})))
    fused = pricing(kind).op(op, (REPLICATED,), TENSORS, Traffic(TENSORS, frozenset()))
    assert alone.forward_s == pytest.approx(2 * whole)
    assert fused.forward_s == pytest.approx(whole) and fused.backward_s == pytest.approx(whole)
    light = small_profile(ops={"tanh": OpTime(forward_s=whole / 2)})
    assert price(light, op).forward_s >= whole / 2


def test_collectives_follow_the_fitted_lines() -> None:
    line = {"fixed_s": 7e-4, "s_per_byte": 3e-9, "size": 2, "stride": 1}
    profile = small_profile(collective_lines=(CollectiveLine(kind="all_reduce", **line),))
    prices = pricing(apply_profile(CPU, profile))
    assert prices.collective_s("all_reduce", 0, 1e6) == pytest.approx(7e-4 + 3e-3)
    forward_s, backward_s = prices.cast(TENSORS["a"], (PARTIAL,), (REPLICATED,))
    assert forward_s == pytest.approx(7e-4 + 3e-9 * TENSORS["a"].bytes) and backward_s == 0.0
    assert pricing(apply_profile(CPU, small_profile())).cast(TENSORS["a"], (PARTIAL,), (REPLICATED,))[0] < forward_s
    largest = Op(
        name="reduce_max.0",
        primitive="reduce_max",
        inputs=("x",),
        outputs=("y",),
        factors=(Factor("b", 8), Factor("m", 16, combine="max")),
        in_dims=(((0,), (1,)),),
        out_dims=(((0,), ()),),
        work="reduce",
        key="reduce_max",
    )
    traffic = Traffic.of_block((largest,), TENSORS, frozenset({"y"}))
    assert prices.op(largest, (1,), TENSORS, traffic).forward_s > 7e-4


def test_copies_are_lines_by_lanes() -> None:
    lines = tuple(
        CopyLine(route="device_to_device", lanes=lanes, fixed_s=1e-4, s_per_byte=rate)
        for lanes, rate in ((1, 1e-10), (4, 4e-10))
    )
    assert apply_profile(CPU, small_profile(copy_lines=lines)).copies == {1: (1e-4, 1e-10), 4: (1e-4, 4e-10)}
    assert apply_profile(CPU, small_profile(copy_lines=())).copies == {}


def test_a_profile_of_another_kind_is_refused_and_names_both() -> None:
    with pytest.raises(ProfileError, match=r"MP301.*'cpu'.*'A100-SXM4-80GB'"):
        apply_profile(device_kind("A100-SXM4-80GB"), small_profile())
    own = DeviceKind(
        name="my-box",
        platform="cpu",
        peak_flops_per_s={"float32": 1e9},
        memory_bytes=1 << 30,
        memory_bandwidth_bytes_per_s=1e9,
        jax_names=("cpu",),
    )
    assert apply_profile(own, small_profile()).kind.name == "my-box"


def test_memory_only_shrinks() -> None:
    assert apply_profile(CPU, small_profile()).kind.usable_bytes == 3 << 30
    assert apply_profile(CPU, small_profile(usable_memory_bytes=1 << 40)).kind.usable_bytes == CPU.usable_bytes
    assert apply_profile(CPU, small_profile(usable_memory_bytes=None)).kind.usable_bytes == CPU.usable_bytes


def test_fewer_devices_and_gaps_are_noted() -> None:
    notes = apply_profile(CPU, small_profile(), devices=8).notes
    assert any("2 devices" in note and "has 8" in note for note in notes) and any("1 gap" in note for note in notes)
    assert apply_profile(CPU, small_profile(gaps=()), devices=2).notes == ()


def test_coverage_names_what_is_missing_and_its_share() -> None:
    ops = (PRODUCT, elementwise(), elementwise("view"))
    cls = BlockClass(key="c", ops=ops, tensors=TENSORS, inputs=("x", "w", "a"), outputs=("y", "b"))
    graph = ModelGraph(
        name="two ops",
        microbatch=1,
        classes={"c": cls},
        blocks=tuple(Block(name=f"layers[{i}]", class_key="c", inputs=(), outputs=()) for i in range(3)),
        values={},
        batch_dims={},
        params={},
        loss=(),
        results=(),
    )
    profile = small_profile(ops={DOT: OpTime(forward_s=1e-4, drift=0.3)})
    found = op_coverage(graph, profile, apply_profile(CPU, profile).kind)
    assert (found.measured, found.rated, found.drifted) == ((DOT,), ("tanh",), (DOT,))
    assert 0 < found.measured_share < 0.1 and "1 of 2" in found.describe() and "tanh" in found.describe()
    both = op_coverage(graph, profile, apply_profile(CPU, profile).kind, {DOT, "tanh"})
    assert (both.measured, both.carried, both.rated) == ((DOT,), ("tanh",), ())
    assert both.measured_share == found.measured_share and both.measured_share + both.carried_share == pytest.approx(1)
    assert "1 are carried over from another microbatch size" in both.describe() and "largest" not in both.describe()


def test_lines_without_a_cost_per_byte_are_not_used():
    """Of two small samples a fit may find none: a gather of any size would then cost the same."""
    flat = CollectiveLine(kind="all_gather", size=2, stride=1, fixed_s=6e-5, s_per_byte=0.0)
    copy = CopyLine(route="device_to_device", lanes=2, fixed_s=5e-5, s_per_byte=0.0)
    applied = apply_profile(CPU, small_profile(collective_lines=(flat,), copy_lines=(copy,)))
    assert applied.collectives.line("all_gather", 2) is None and applied.copies == {}
    (note,) = [note for note in applied.notes if "no cost per byte" in note]
    assert "all_gather of 2, copies in 2 lanes" in note and "--budget" in note


def test_copies_to_the_host_become_its_bandwidth_and_are_no_copies_between_devices() -> None:
    lines = (
        CopyLine(route="device_to_device", lanes=1, fixed_s=5e-5, s_per_byte=1e-10),
        CopyLine(route="host_to_device", lanes=1, fixed_s=1e-5, s_per_byte=1e-11),
        CopyLine(route="host_to_device", lanes=2, fixed_s=1e-5, s_per_byte=2e-11),
        CopyLine(route="device_to_host", lanes=2, fixed_s=1e-5, s_per_byte=4e-11),
    )
    applied = apply_profile(CPU, small_profile(copy_lines=lines))
    assert applied.copies == {1: (5e-5, 1e-10)}
    assert applied.kind.host_bandwidth_bytes_per_s == pytest.approx(1 / 4e-11), "the slower way, with all at once"
    assert applied.kind.provenance_of("host_bandwidth_bytes_per_s") == "fitted"
    assert apply_profile(CPU, small_profile()).kind.host_bandwidth_bytes_per_s == CPU.host_bandwidth_bytes_per_s


GRID = {(m, k, n): 1e-3 * (m * k * n) ** 0.8 / 1e4 for m in (2, 8, 32) for k in (4, 16, 64) for n in (2, 4, 16)}
"""Seconds of products, of which smaller ones achieve less."""


def gridded(**changes: Any) -> Profile:
    sample = small_profile().matmuls[0]
    matmuls = [
        msgspec.structs.replace(sample, dtype="float32", shape=shape, batch=1, time_s=time_s)
        for shape, time_s in GRID.items()
    ]
    return small_profile(matmuls=tuple(matmuls), **changes)


def test_a_product_that_was_not_measured_as_an_op_costs_what_measured_products_say() -> None:
    cost = price(gridded(ops={}))
    assert cost.forward_s == pytest.approx(GRID[8, 16, 4])
    assert cost.backward_s == pytest.approx(2 * GRID[8, 16, 4], rel=0.05)  # two products of as many FLOPs
    assert cost.provenance == "measured"
    between = price(gridded(ops={}), code=0)  # four rows: no measured shape
    assert GRID[2, 16, 4] < between.forward_s < GRID[8, 16, 4] and between.provenance == "interpolated"
    assert between.forward_s == pytest.approx(1e-3 * (4 * 16 * 4) ** 0.8 / 1e4, rel=0.05)


def test_a_part_of_a_measured_product_keeps_as_much_less_of_its_rate_as_measured_products_do() -> None:
    whole, half = price(gridded()), price(gridded(), code=0)
    assert (whole.forward_s, whole.backward_s) == (1e-4, 2e-4)
    assert half.forward_s == pytest.approx(1e-4 * 0.5**0.8, rel=0.05)
    assert half.backward_s == pytest.approx(2e-4 * 0.5**0.8, rel=0.05)


def test_no_product_is_priced_above_the_highest_rate_of_its_table() -> None:
    products = apply_profile(CPU, gridded()).products
    assert products is not None
    fastest = max(2 * m * k * n / time_s for (m, k, n), time_s in GRID.items())
    assert products.highest_rate() >= fastest
    for m in (2, 5, 11, 32):
        found = products.seconds(m, 20, 7, "float32")
        assert found is not None and 2 * m * 20 * 7 / found[0] <= products.highest_rate()
    assert apply_profile(CPU, small_profile(matmuls=())).products is None

"""Profiling for real, on a few fake CPU devices and a budget of seconds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from costmodel.errors import ProfileError
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.frontend.op_programs import op_programs
from profiles import commbench, opbench
from profiles.apply import apply_profile
from profiles.catalogue import device_kind
from profiles.collect import profile_devices
from profiles.commbench import collective_jobs, groupings
from profiles.coverage import op_coverage
from profiles.device_loop import DeviceLoop, Input, calibrate
from profiles.opbench import OpProgram, least_s, time_exported
from profiles.schema import OpTime
from profiles.store import decode_profile, encode_profile
from profiles.timing import MeasurementError
from tests.models.tiny import TINY

TASK = TINY["gpt"](hidden=64, seq=32)


@pytest.fixture(scope="module")
def loop() -> DeviceLoop:
    return calibrate(DeviceLoop(devices=tuple(jax.devices()[:2]), memory_bytes=1 << 30), 0.2)[0]


def test_a_few_seconds_give_a_profile_that_prices_a_model() -> None:
    seen: list[tuple[str, int, int]] = []
    captured = capture(TASK, 4)
    programs = (*op_programs(captured, most=3), OpProgram(key="broken", forward=b"no program"))
    profile = profile_devices(
        devices=2, budget_s=10.0, programs=programs, progress=lambda what, done, total: seen.append((what, done, total))
    )
    assert profile.devices == 2 and profile.device_kind == "cpu" and profile.software["jax"] == jax.__version__
    assert profile.microbatches == (4,)
    assert profile.rates.matmul_flops_per_s["float32"].value > 1e6
    assert profile.rates.memory_bandwidth_bytes_per_s is not None and profile.rates.launch_s is not None
    assert {line.kind for line in profile.collective_lines} >= {"all_reduce"}
    assert programs[0].key in profile.ops and profile.ops[programs[0].key].forward_s > 0
    assert decode_profile(encode_profile(profile)) == profile
    broken = next(gap for gap in profile.gaps if gap.what == "broken")
    assert broken.cause
    assert {"rates", "collectives", "copies", "ops of the model"} <= {what for what, _, _ in seen}
    assert all(done <= total for _, done, total in seen)

    applied = apply_profile(device_kind("cpu"), profile)
    found = op_coverage(model_graph(captured), profile, applied.kind)
    assert programs[0].key in found.measured and 0 < found.measured_share < 1


def test_a_measurement_that_fails_is_a_gap_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nwhile trying to allocate")

    monkeypatch.setattr(commbench, "time_collective", out_of_memory)
    profile = profile_devices(devices=2, budget_s=1.0)
    assert profile.collectives == () and profile.collective_lines == ()
    failed = [gap for gap in profile.gaps if gap.what.startswith("all_reduce")]
    assert failed and failed[0].cause == "RuntimeError: RESOURCE_EXHAUSTED: out of memory"
    assert profile.matmuls and profile.rates.launch_s is not None


def test_a_budget_of_nothing_still_gives_rates_and_says_what_is_missing() -> None:
    profile = profile_devices(devices=1, budget_s=0.0)
    assert len(profile.matmuls) == 1 and len(profile.bandwidths) == 1
    assert profile.rates.launch_s is not None and profile.collectives == () and profile.copies == ()
    assert profile.gaps and all("budget" in gap.cause for gap in profile.gaps)


def test_ops_that_would_not_fit_the_budget_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def time_op(program: OpProgram, *_: object) -> OpTime:
        begun.append(program.key)
        return OpTime(forward_s=1e-3)

    monkeypatch.setattr(opbench, "time_op", time_op)
    long, short = OpProgram(key="long", flops=1e15, dtype="bfloat16"), OpProgram(key="short", flops=1e6)
    profile = profile_devices(devices=1, budget_s=1.0, programs=(long, short))
    assert begun == ["short"] == list(profile.ops)
    (gap,) = (gap for gap in profile.gaps if gap.what == "long")
    assert "would take about" in gap.cause and "left" in gap.cause


def test_a_backward_pass_counts_in_what_an_op_needs() -> None:
    assert least_s(OpProgram(key="op"), 1.0) == 2.0
    assert least_s(OpProgram(key="op", forward_backward=b"program"), 1.0) == 8.0


def test_nothing_measured_is_an_error_not_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("driver gone")

    for name in ("time_matmul", "time_bandwidth"):
        monkeypatch.setattr(opbench, name, broken)
    with pytest.raises(ProfileError, match=r"MP307.*driver gone"):
        profile_devices(devices=1, budget_s=0.0)


@pytest.mark.parametrize("count", [0, 9])
def test_devices_that_are_not_there_are_refused(count: int) -> None:
    with pytest.raises(ProfileError, match=f"MP306: {count} devices.*8 of kind"):
        profile_devices(devices=count, budget_s=0.0)


def test_the_loop_neither_drops_nor_shares_the_repeated_op(loop: DeviceLoop) -> None:
    """More work takes longer: nothing is hoisted out of the loop, or thinned to the part that is looked at."""
    product = [loop.time(lambda a, b: a @ b, [Input((n, n), "float32")] * 2, 0.5).time_s for n in (64, 256)]
    assert product[1] > 4 * product[0]
    add = [loop.time(lambda a, b: a + b, [Input((n,), "float32")] * 2, 0.5).time_s for n in (1 << 16, 1 << 20)]
    assert add[1] > 4 * add[0]


def test_cold_runs_take_turns_with_copies_that_together_exceed_a_cache(loop: DeviceLoop) -> None:
    megabytes = [Input((1 << 18,), "float32")] * 4
    assert loop.copies(megabytes) == 17  # 64 MB beside the one whose turn it is
    assert loop.copies([Input((1 << 27,), "float32")]) == 1  # half of the device's memory
    assert loop.copies([Input((8,), "float32")]) == 32
    copies = [loop.arrays(megabytes[:1]) for _ in range(2)]
    copies[1][0].delete()
    run = loop.runner(lambda x: x + 1, copies, 1)
    assert run() > 0
    with pytest.raises(RuntimeError, match="deleted"):
        run()
    assert run() > 0


def test_what_does_not_fit_is_refused_before_it_is_made(loop: DeviceLoop) -> None:
    with pytest.raises(MeasurementError, match=r"of 1\.00 GiB"):
        loop.time(lambda a: a, [Input((1 << 30,), "float32")], 0.05)


def test_exported_programs_are_timed_on_every_device(loop: DeviceLoop) -> None:
    table, rows = jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16), jax.ShapeDtypeStruct((2048,), jnp.int32)
    program = export.export(jax.jit(lambda t, r: (t[r].sum(axis=1), t.astype(jnp.float32))))(table, rows)
    assert time_exported(bytes(program.serialize()), (2, 4096), loop, 0.05).time_s > 0


def test_any_number_of_devices_has_groupings() -> None:
    assert groupings(1, "gpu") == () and groupings(7, "gpu") == ((7, 1),)
    assert groupings(6, "cpu") == ((6, 1), (3, 1), (2, 1))
    assert groupings(6, "gpu") == ((6, 1), (3, 1), (2, 1), (3, 2), (2, 3))
    assert len(groupings(8, "gpu")) == 6
    jobs = collective_jobs(3, "cpu")
    assert jobs[0][:2] == ("all_reduce", (3, 1)) and len(jobs) == len(set(jobs)) == 20


@pytest.mark.parametrize("name", ["gpt-dropout", "moe-capacity", "wide_resnet"])
def test_every_op_of_a_model_exports_and_computes_what_it_computes(name: str) -> None:
    captured = capture(TINY[name](), 4)
    programs = op_programs(captured, most=1000, smallest_bytes=0)
    assert [program.problem for program in programs if program.problem] == []
    keys = {op.key for block in captured.blocks for op in block.cls.ops.values()}
    assert {program.key for program in programs} <= keys and len({program.key for program in programs}) == len(programs)
    heavy = next(program for program in programs if program.forward_backward)
    both = export.deserialize(bytearray(heavy.forward_backward or b""))
    given = [np.ones(aval.shape, aval.dtype) for aval in both.in_avals]
    results = both.call(*given)
    forward = export.deserialize(bytearray(heavy.forward))
    alone = forward.call(*given[: len(forward.in_avals)])
    np.testing.assert_allclose(np.asarray(results[0], np.float32), np.asarray(alone[0], np.float32), rtol=1e-2)
    assert len(results) > len(alone) and len(both.in_avals) == len(forward.in_avals) + len(alone)
    assert len(heavy.below) == len(forward.in_avals)

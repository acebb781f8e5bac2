"""Compiling for devices that are not attached: targets, limits, cache, what is said when there is no compiler."""

import fcntl
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import pytest
from jax import export, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from profiles.catalogue import device_kind, load_catalogue
from profiles.compiled import oracle as oracle_module
from profiles.compiled.oracle import Limits, Oracle, Request, default_oracle
from profiles.compiled.records import CompiledProgram, CompileFailure, Memory, Platform
from profiles.compiled.target import Target, cpu_target, target_of, topology_shape
from profiles.compiled.worker import Job, compile_lowered

AXES, SIZES = ("data", "model"), (2, 2)
WIDE, ROWS = 1024, 512


def program(platform: Platform) -> bytes:
    """Two matrix products split over `model`, on rows split over `data`; their parameters are updated in place."""
    mesh = AbstractMesh(SIZES, AXES, axis_types=(AxisType.Auto,) * 2)

    def local(first: jax.Array, second: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        y = lax.psum(jnp.tanh(x @ first) @ second, "model")
        return first * 0.5, second * 0.5, lax.psum(jnp.sum(y), "data")

    split, rows, whole = PartitionSpec(None, "model"), PartitionSpec("model"), PartitionSpec()
    data = PartitionSpec("data")
    run = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(split, rows, data), out_specs=(split, rows, whole)),
        donate_argnums=(0, 1),
    )
    shapes = (((WIDE, WIDE), split), ((WIDE, WIDE), rows), ((ROWS, WIDE), data))
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for shape, spec in shapes]
    return bytes(export.export(run, platforms=[platform])(*avals).serialize())


def request_for(kind: str) -> Request:
    target = target_of(device_kind(kind), 4)
    assert target is not None
    return asked(target)


def asked(target: Target) -> Request:
    return Request(program=program(target.platform), target=target, donated=(0, 1), axis_names=AXES, sizes=SIZES)


@pytest.fixture
def oracle(tmp_path: Path) -> Oracle:
    return default_oracle(cache=tmp_path / "compiled")


def compiled(oracle: Oracle, request: Request) -> CompiledProgram:
    (found,) = oracle.compile([request])
    if isinstance(found, CompileFailure) and found.reason == "missing":
        pytest.skip(f"{found.message} ({found.hint})")
    assert isinstance(found, CompiledProgram), found
    return found


ARGUMENTS = 4 * (2 * WIDE * WIDE // 2 + ROWS * WIDE // 2)  # bytes on one device


# H100 has op times by XLA's speed-of-light model, TPU v5e by the scheduler's cycles, A100 none.
@pytest.mark.parametrize(("kind", "timed"), [("A100-SXM4-80GB", False), ("H100-SXM5-80GB", True), ("TPU-v5e", True)])
def test_a_program_compiled_for_absent_devices(oracle: Oracle, kind: str, timed: bool) -> None:
    found = compiled(oracle, request_for(kind))
    assert (found.kind, found.devices, found.provenance) == (kind, 4, "compiled")
    memory = found.memory
    assert memory is not None and memory.argument_bytes == ARGUMENTS
    assert memory.alias_bytes == 4 * WIDE * WIDE  # both parameters are written over
    assert memory.total_bytes >= ARGUMENTS and (memory.peak_bytes or 0) <= memory.total_bytes
    assert found.collectives is not None
    (sum_,) = [c for c in found.collectives if c.bytes > 64]
    assert (sum_.kind, sum_.axes, sum_.bytes, sum_.runs) == ("all_reduce", ("model",), 4 * ROWS * WIDE // 2, 1)
    assert sorted(map(sorted, sum_.groups)) == [[0, 1], [2, 3]]
    assert (found.ops is not None) == timed
    for op in found.ops or ():
        assert 0 < op.time_s < 1 and op.runs == 1


def test_compilers_for_tpus_do_not_wait_for_each_other(oracle: Oracle) -> None:
    """libtpu keeps a lock as if there were a TPU: what another process holds does not stop a compilation."""
    with Path("/tmp/libtpu_lockfile").open("a") as lock:
        with suppress(BlockingIOError):  # then another process has it
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert compiled(oracle, request_for("TPU-v5e")).devices == 4


def test_the_cpu_compiler_is_always_there(oracle: Oracle) -> None:
    found = compiled(oracle, asked(cpu_target(4)))
    assert found.platform == "cpu" and found.memory is not None and found.memory.argument_bytes == ARGUMENTS


def test_figures_are_kept_and_damaged_ones_made_again(oracle: Oracle) -> None:
    asked_for = asked(cpu_target(4))
    first = compiled(oracle, asked_for)
    (entry,) = oracle.directory.iterdir()
    no_worker = replace(oracle, worker=(sys.executable, "-c", "raise SystemExit(9)"))
    assert no_worker.compile([asked_for]) == [first]
    other = replace(asked_for, target=replace(asked_for.target, kind="other"))
    assert isinstance(no_worker.compile([other])[0], CompileFailure)  # another target is another entry
    entry.write_text("{")
    assert isinstance(no_worker.compile([asked_for])[0], CompileFailure)
    again = compiled(oracle, asked_for)
    assert again.memory == first.memory and again.collectives == first.collectives


def test_a_cache_that_cannot_be_written_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    found = compiled(default_oracle(cache=tmp_path / "file" / "folder"), asked(cpu_target(4)))
    assert found.memory is not None and "not kept" in caplog.text


def failing(oracle: Oracle, code: str, **limits: float) -> CompileFailure:
    own = replace(oracle, worker=(sys.executable, "-c", code), limits=Limits(**limits))  # type: ignore[arg-type]
    first, second = own.compile([asked(cpu_target(4)), asked(cpu_target(4, "again"))])
    assert isinstance(first, CompileFailure) and isinstance(second, CompileFailure)  # the second is still tried
    assert second.kind == "again" and not oracle.directory.exists()
    return first


def test_a_compiler_that_crashes(oracle: Oracle) -> None:
    found = failing(oracle, "import os, sys; print('check failed: oh', file=sys.stderr, flush=True); os.abort()")
    assert found.reason == "crashed" and "SIGABRT" in found.message and "check failed: oh" in found.message


def test_a_compiler_that_hangs(oracle: Oracle) -> None:
    found = failing(oracle, "import time; time.sleep(600)", time_s=0.3)
    assert found.reason == "timeout" and "0.3 s" in found.message


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="this system does not tell a process's memory")
def test_a_compiler_that_takes_all_memory_through_a_child(oracle: Oracle) -> None:
    code = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', "
        "'x = bytearray(300_000_000)\\nimport time; time.sleep(600)'])"
    )
    found = failing(oracle, code, memory_bytes=200_000_000, time_s=60)
    assert found.reason == "memory" and "are allowed" in found.message


def test_a_compiler_that_the_system_ends(oracle: Oracle) -> None:
    found = failing(oracle, "import os; os.kill(os.getpid(), 9)")
    assert found.reason == "memory" and "SIGKILL" in found.message


def test_a_program_that_the_compiler_refuses(oracle: Oracle) -> None:
    (found,) = oracle.compile([replace(asked(cpu_target(4)), program=b"no program")])
    assert isinstance(found, CompileFailure) and found.reason == "refused" and "Traceback" not in found.message


class WithoutTiles:
    """A program for which XLA's own matrix kernels have no tiles."""

    def __init__(self, message: str) -> None:
        self.message, self.asked = message, []

    def compile(self, compiler_options: dict[str, object] | None = None) -> str:
        self.asked.append(compiler_options)
        if (compiler_options or {}).get("xla_gpu_enable_triton_gemm") is False:
            return "compiled"
        raise jax.errors.JaxRuntimeError(self.message)


def job(kind: str) -> Job:
    target = target_of(device_kind(kind), 1)
    assert target is not None
    return Job(target=target, donated=(), axis_names=("x",), sizes=(1,), options={"other": 1})


def test_products_without_tiles_go_to_cublas() -> None:
    lowered, notes = WithoutTiles("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.77"), []
    assert compile_lowered(lowered, job("A100-SXM4-80GB"), notes) == "compiled"
    assert lowered.asked == [{"other": 1}, {"other": 1, "xla_gpu_enable_triton_gemm": False}] and "cuBLAS" in notes[0]


@pytest.mark.parametrize(("kind", "message"), [("A100-SXM4-80GB", "INTERNAL: other"), ("TPU-v5e", "tile sizes")])
def test_other_errors_of_a_compiler_stand(kind: str, message: str) -> None:
    lowered = WithoutTiles(message)
    with pytest.raises(jax.errors.JaxRuntimeError):
        compile_lowered(lowered, job(kind), [])
    assert len(lowered.asked) == 1


@pytest.mark.parametrize(("kind", "extra"), [("A100-SXM4-80GB", "cuda-check"), ("TPU-v5e", "tpu-check")])
def test_a_missing_compiler_says_what_installs_it(
    oracle: Oracle, kind: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle_module, "installed", lambda platform, path: "the compiler is not installed")
    (found,) = oracle.compile([request_for(kind)])
    assert isinstance(found, CompileFailure) and found.reason == "missing" and extra in found.hint
    assert extra in oracle.missing("cuda" if extra == "cuda-check" else "tpu")


def test_every_nvidia_and_tpu_kind_has_a_target() -> None:
    without = {kind.name for kind in load_catalogue().values() if target_of(kind, 8) is None}
    assert without and all(load_catalogue()[name].vendor not in ("NVIDIA", "Google") for name in without)
    assert target_of(msgspec.structs.replace(device_kind("T4"), name="my-gpu"), 8) is None


def test_what_a_gpu_target_says() -> None:
    kind = device_kind("V100-SXM2-32GB")
    target = target_of(kind, 16, nodes=2)
    assert target is not None and (target.devices, target.nodes, target.timed) == (16, 2, False)
    for line in ("major: 7 minor: 0", "core_count: 80", f"device_memory_size: {kind.memory_bytes}", "900000000000"):
        assert line in target.description
    uneven = target_of(kind, 5, nodes=2)
    assert uneven is not None and uneven.nodes == 1


@pytest.mark.parametrize(
    ("kind", "devices", "topology", "every"),
    [
        ("TPU-v5e", 1, "v5e:1x1", 1),
        ("TPU-v5e", 2, "v5e:2x2", 1),
        ("TPU-v5e", 8, "v5e:2x4", 1),
        ("TPU-v5e", 9, "v5e:4x4", 1),
        ("TPU-v5p", 8, "v5p:2x2x2", 1),
        ("TPU-v4", 4, "v4:2x2x1", 2),  # the compiler lists both cores of a chip
        ("TPU-v3-core", 8, "v3:2x2", 1),
    ],
)
def test_a_tpu_topology_has_room_for_the_devices(kind: str, devices: int, topology: str, every: int) -> None:
    target = target_of(device_kind(kind), devices)
    assert target is not None and (target.description, target.every) == (topology, every)


def test_topologies_are_whole_hosts() -> None:
    assert [topology_shape(n, 3) for n in (1, 3, 5, 16, 64)] == [
        (1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (4, 4, 4),
    ]  # fmt: skip


def test_total_memory_counts_what_is_written_over_once() -> None:
    assert Memory(argument_bytes=10, output_bytes=8, alias_bytes=6, temporary_bytes=5).total_bytes == 17

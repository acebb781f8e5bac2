"""Compiles one exported program in a process of its own: ``python -m profiles.compiled.worker FOLDER``.

FOLDER holds ``program`` (a `jax.export` artefact) and ``job.json`` (a `Job`); the result is written to ``result.json``
there: a `CompiledProgram`, or ``{"error": text}`` where the compiler reported an error. What kills the process is for
the caller to see. The environment is made by the caller, before JAX is imported here.
"""

import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from costmodel.errors import LoweringError
from profiles.compiled.hlo import collectives
from profiles.compiled.op_estimates import op_estimates
from profiles.compiled.records import CompiledProgram, Memory
from profiles.compiled.target import Target


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to compile.

    Attributes:
        donated: positions of the flat arguments that the program may write over.
        axis_names, sizes: of the mesh that it was exported for.
        options: XLA's compiler options.
        versions: what the caller found installed.
    """

    target: Target
    donated: tuple[int, ...]
    axis_names: tuple[str, ...]
    sizes: tuple[int, ...]
    options: dict[str, Any] = {}
    versions: dict[str, str] = {}


def compile_job(job: Job, program: bytes) -> CompiledProgram:
    """Compiles in this process."""
    import jax
    import numpy as np
    from jax import export
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    devices = np.empty(job.target.devices, dtype=object)
    devices[:] = _devices(job.target)
    mesh = Mesh(devices.reshape(job.sizes), job.axis_names, axis_types=(AxisType.Auto,) * len(job.sizes))
    exported = export.deserialize(bytearray(program))
    whole = NamedSharding(mesh, PartitionSpec())
    avals = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding or whole)
        for aval, sharding in zip(exported.in_avals, exported.in_shardings_jax(mesh), strict=True)
    ]

    def flat(*leaves: Any) -> Any:
        args, kwargs = jax.tree.unflatten(exported.in_tree, leaves)
        return exported.call(*args, **kwargs)

    started, notes = time.perf_counter(), []
    compiled = compile_lowered(jax.jit(flat, donate_argnums=job.donated).lower(*avals), job, notes)
    took = time.perf_counter() - started
    text = _text(compiled, notes)
    return CompiledProgram(
        kind=job.target.kind,
        platform=job.target.platform,
        devices=job.target.devices,
        memory=_memory(compiled, notes),
        collectives=_collectives(text, job, notes),
        ops=op_estimates(text, job.target.clock_hz) if text and job.target.timed else None,
        compile_s=took,
        versions=job.versions,
        notes=tuple(notes),
    )


def compile_lowered(lowered: Any, job: Job, notes: list[str]) -> Any:
    """The program compiled. XLA:GPU chooses tiles of its own matrix kernels by trying them; without a device its
    default ones do not fit some shapes (788 rows), which then go to cuBLAS, as they do on a device where that is
    faster."""
    import jax

    try:
        return lowered.compile(compiler_options=job.options or None)
    except jax.errors.JaxRuntimeError as error:
        if job.target.platform != "cuda" or "tile sizes" not in str(error):
            raise
    notes.append("XLA's own matrix kernels have no tiles for this program: compiled with cuBLAS")
    return lowered.compile(compiler_options={**job.options, "xla_gpu_enable_triton_gemm": False})


def _devices(target: Target) -> list[Any]:
    import jax

    if target.platform == "cpu":
        return jax.devices("cpu")[: target.devices]
    from jax.experimental import topologies

    if target.platform == "cuda":
        shape = f"1x{target.nodes}x{target.devices // target.nodes}"
        found = topologies.get_topology_desc("topology", "cuda", target_config=target.description, topology=shape)
    else:
        alone = {"chips_per_host_bounds": [1, 1, 1]} if set(target.description.split(":")[1]) <= {"1", "x"} else {}
        found = topologies.get_topology_desc(platform="tpu", topology_name=target.description, **alone)
    return list(found.devices[:: target.every][: target.devices])


def _memory(compiled: Any, notes: list[str]) -> Memory | None:
    a: Any = compiled.memory_analysis()
    if a is None or not any((a.argument_size_in_bytes, a.output_size_in_bytes, a.temp_size_in_bytes)):
        notes.append("the compiler's memory figures are all zero")
        return None
    memory = Memory(
        argument_bytes=a.argument_size_in_bytes,
        output_bytes=a.output_size_in_bytes,
        alias_bytes=a.alias_size_in_bytes,
        temporary_bytes=a.temp_size_in_bytes,
        peak_bytes=getattr(a, "peak_memory_in_bytes", None) or None,
    )
    if memory.peak_bytes is not None and memory.peak_bytes > memory.total_bytes:
        notes.append(
            f"the compiler's peak ({memory.peak_bytes} bytes) exceeds what it allocates: it counts other memory"
        )
        memory = msgspec.structs.replace(memory, peak_bytes=None)
    return memory


def _text(compiled: Any, notes: list[str]) -> str | None:
    import jax

    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError as error:  # libtpu cannot print every program that it compiles
        notes.append(f"the compiled program cannot be printed: {str(error).splitlines()[0][:200]}")
        return None


def _collectives(text: str | None, job: Job, notes: list[str]) -> Any:
    if text is None:
        return None
    axes = tuple((n, k) for n, k in zip(job.axis_names, job.sizes, strict=True) if k > 1)
    try:
        return tuple(collectives(text, [n for n, _ in axes], [k for _, k in axes]))
    except LoweringError as error:
        notes.append(error.message)
        return None


def main(folder: Path) -> None:
    """Reads the job in a folder, writes the result there."""
    job = msgspec.json.decode((folder / "job.json").read_bytes(), type=Job)
    try:
        found: Any = compile_job(job, (folder / "program").read_bytes())
    except MemoryError:
        raise
    except Exception as error:  # whatever a compiler raises is reported by the caller, with its message
        found = {"error": f"{type(error).__name__}: {error}"}
    draft = folder / "result.draft"
    draft.write_bytes(msgspec.json.encode(found))
    draft.rename(folder / "result.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

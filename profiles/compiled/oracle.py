"""Asks compilers, each in a process of its own with limits, and remembers what they said.

A compiler may crash, hang or take all memory: that ends its process and gives a `CompileFailure` in place of figures;
the other programs are compiled all the same. Where the compiler for a kind is not installed, the CPU's is asked, and
the record says so (`CompiledProgram.platform`).
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

import profiles
from costmodel.units import GIB, format_bytes
from profiles.compiled.cache import cache_key, compiled_directory, read_entry, write_entry
from profiles.compiled.installed import EXTRAS, Installed, installed
from profiles.compiled.records import CompiledProgram, CompileFailure, Platform
from profiles.compiled.target import Target
from profiles.compiled.worker import Job

_log = logging.getLogger(__name__)
_POLL_S = 0.05
_TIMED = "--xla_gpu_collect_cost_model_stats=true"
_NO_MACHINE_CODE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Buffers are assigned before LLVM sees the program, and nobody runs it."""

Outcome = CompiledProgram | CompileFailure
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one compilation may take: wall time, and resident memory of its process and their children (Linux)."""

    time_s: float = 600.0
    memory_bytes: int = 8 * GIB


@dataclass(frozen=True, kw_only=True)
class Request:
    """One program for one target.

    Attributes:
        program: serialised `jax.export` artefact, exported for the platform of `target`.
        identity: equal for equal programs, as `program` may not be: it has the places in the source that called for it.
            Empty: `program` itself.
        donated: positions of the flat arguments that it may write over.
        axis_names, sizes: of the mesh that it was exported for, all axes.
        options: XLA compiler options.
    """

    program: bytes = field(repr=False)
    target: Target
    donated: tuple[int, ...]
    axis_names: tuple[str, ...]
    sizes: tuple[int, ...]
    options: Mapping[str, str | bool | int] = field(default_factory=dict)
    identity: str = ""


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """Compiles programs for devices that are not attached.

    Attributes:
        environment: of the workers; also says where the cache lies.
        cache: folder of the figures; None: the user's cache directory.
        cached: whether figures are read from the cache and kept in it.
        worker: command that runs a worker on a folder, for tests of what compilers do.
    """

    environment: Mapping[str, str]
    limits: Limits = Limits()
    cache: Path | None = None
    cached: bool = True
    worker: tuple[str, ...] = (sys.executable, "-m", "profiles.compiled.worker")

    @property
    def directory(self) -> Path:
        return self.cache if self.cache is not None else compiled_directory(self.environment)

    def missing(self, platform: Platform) -> str:
        """What is missing to compile for a platform and how to get it, in words; empty if nothing is."""
        found = installed(platform, self.environment.get("PATH", ""))
        if isinstance(found, Installed):
            return ""
        return f"{found}: pip install 'meshplan[{EXTRAS[platform]}]'"

    def compile(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Outcome]:
        """What the compilers say, in the order of the requests. Equal requests are compiled once.

        Args:
            progress: called with (done, of how many).
        """
        done: dict[str, Outcome] = {}
        out: list[Outcome] = []
        for at, request in enumerate(requests):
            if progress is not None:
                progress(at, len(requests))
            out.append(self._one(request, done))
        if progress is not None:
            progress(len(requests), len(requests))
        return out

    def _one(self, request: Request, done: dict[str, Outcome]) -> Outcome:
        target = request.target
        compiler = installed(target.platform, self.environment.get("PATH", ""))
        if not isinstance(compiler, Installed):
            return CompileFailure(
                kind=target.kind,
                reason="missing",
                message=f"nothing is compiled for {target.kind}: {compiler}",
                hint=f"pip install 'meshplan[{EXTRAS[target.platform]}]'",
            )
        job = Job(
            target=target,
            donated=request.donated,
            axis_names=request.axis_names,
            sizes=request.sizes,
            options=dict(request.options),
            versions=dict(compiler.versions),
        )
        header = msgspec.json.encode((job.donated, job.axis_names, job.sizes, sorted(job.options.items())))
        key = cache_key(request.identity.encode() or request.program, header, target, compiler.versions)
        if key in done:
            return done[key]
        found: Outcome | None = read_entry(self.directory, key) if self.cached else None
        if found is None:
            found = self._run(job, request.program, compiler)
            if self.cached and isinstance(found, CompiledProgram):
                write_entry(self.directory, key, found)
        done[key] = found
        return found

    def _run(self, job: Job, program: bytes, compiler: Installed) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="meshplan-compile-") as name:
            folder = Path(name)
            (folder / "program").write_bytes(program)
            (folder / "job.json").write_bytes(msgspec.json.encode(job))
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen(
                    [*self.worker, str(folder)],
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    env=self._environment(job.target, compiler),
                    start_new_session=True,
                )
                try:
                    stopped = self._watch(process, job.target)
                finally:
                    _end(process)
            if stopped is not None:
                return stopped
            text = (folder / "log").read_bytes().decode(errors="replace")
            return _result(folder, process.returncode, text, job.target)

    def _environment(self, target: Target, compiler: Installed) -> dict[str, str]:
        """The worker's. Flags of XLA are ours alone: figures must follow from what the cache is keyed by."""
        own = {**self.environment, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "1"}
        own["XLA_FLAGS"] = ""
        if target.platform == "cpu":
            own["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={target.devices} {_NO_MACHINE_CODE}"
        if target.platform == "cuda" and target.timed:
            own["XLA_FLAGS"] = _TIMED
        if target.platform == "tpu":  # without these libtpu asks the metadata server of a machine in Google's cloud
            own |= {
                "TPU_SKIP_MDS_QUERY": "1",
                "TPU_ACCELERATOR_TYPE": "v5litepod-8",
                "TPU_WORKER_HOSTNAMES": "localhost",
                "TPU_WORKER_ID": "0",
                "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing is attached that two compilers could fight over
            }
        own["PATH"] = os.pathsep.join([*compiler.path, *filter(None, [own.get("PATH")])])
        root = str(Path(profiles.__path__[0]).parent)  # also where meshplan is used from a checkout
        own["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [own.get("PYTHONPATH")])])
        return own

    def _watch(self, process: "subprocess.Popen[bytes]", target: Target) -> CompileFailure | None:
        """Waits for the end of a worker; why it must be stopped, if it must."""
        started = time.monotonic()
        while process.poll() is None:
            if time.monotonic() - started > self.limits.time_s:
                return CompileFailure(
                    kind=target.kind,
                    reason="timeout",
                    message=f"the compiler for {target.kind} had not finished after {self.limits.time_s:g} s",
                    hint="give it more time, or compile where fewer programs share the cores",
                )
            taken = _resident_bytes(process.pid)
            if taken > self.limits.memory_bytes:
                return CompileFailure(
                    kind=target.kind,
                    reason="memory",
                    message=f"the compiler for {target.kind} took {format_bytes(taken)} of this machine's memory, "
                    f"{format_bytes(self.limits.memory_bytes)} are allowed",
                    hint="allow more memory, or compile on a larger machine",
                )
            time.sleep(_POLL_S)
        return None


def default_oracle(environment: Mapping[str, str] | None = None, **more: object) -> Oracle:
    """An oracle with the user's cache and this process's environment."""
    return Oracle(environment=dict(os.environ if environment is None else environment), **more)  # type: ignore[arg-type]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a worker and whatever it started (ptxas)."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _resident_bytes(pid: int) -> int:
    """Resident memory of a process and its children; 0 where the system does not say (no /proc)."""
    pages = 0
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        try:
            pages += int(Path(f"/proc/{one}/statm").read_text().split()[1])
            for task in Path(f"/proc/{one}/task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
        except (OSError, ValueError, IndexError):
            continue  # it has just ended
    return pages * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _result(folder: Path, code: int, log: str, target: Target) -> Outcome:
    path = folder / "result.json"
    if not path.is_file():
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        said = _last_words(log)
        reason = "memory" if code == -signal.SIGKILL or "MemoryError" in said else "crashed"
        return CompileFailure(
            kind=target.kind,
            reason=reason,
            message=f"the compiler for {target.kind} died ({how})" + (f": {said}" if said else ""),
            hint="the system may have run out of memory" if reason == "memory" else "a defect of this compiler version",
        )
    data = path.read_bytes()
    document = msgspec.json.decode(data)
    if set(document) == {"error"}:
        _log.debug("compiler's error for %s: %s", target.kind, document["error"])
        return CompileFailure(
            kind=target.kind,
            reason="refused",
            message=f"the compiler for {target.kind} reports: {document['error'].strip().splitlines()[0][:400]}",
            hint="--debug logs its whole message",
        )
    return msgspec.json.decode(data, type=CompiledProgram)


def _last_words(log: str) -> str:
    """The last line of a log that is none of JAX's start-up notes."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("WARNING: All log", "I0", "*** ", "@ "))]
    return kept[-1][:300] if kept else ""

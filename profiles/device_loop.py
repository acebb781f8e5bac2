"""Running something on all devices at once, many times inside one program, so that calling it costs nothing.

    token = 0
    repeat R times:   results = call(*inputs), token += 1    in one compiled loop
    time of one call  = (time of the program - time of an empty one) / R - what one turn of the loop takes

`call` runs on every device's own data inside shard_map, so fake CPU devices share their cores, and GPUs their power and
links, as they will in a plan. Two things keep the compiler from thinning the loop out: the inputs pass a barrier with
the token that every turn changes, so that no turn's call is another's; and the results are operands of a branch that is
never taken, so that they are made whole and copied nowhere.

What a program last touched long ago comes from memory, not from a cache. A block of a model is such a thing: between
two runs of it all others run. It is timed cold: each run of the program takes another copy of the inputs, of so many
that caches hold no more of the one whose turn it is. (What is so short that a program repeats it is cold at its first
repetition alone.)
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from costmodel.units import format_bytes
from profiles.schema import Sample
from profiles.timing import Budget, Clock, MeasurementError, combine, measure

Call = Callable[..., Any]

MOST_REPEATS = 64
CALLS_WORTH = 6.0
"""The repetitions of a program take at least this many times as long as calling it, if MOST_REPEATS allows."""

CALIBRATION_S = 0.05
"""Least time to spend on each of the programs that measure what calling takes."""

MOST_DRAWN = (1 << 20) - 3
"""Random numbers in an array before they repeat: no power of two, so that rows differ."""

CACHE_BYTES = 64 << 20
"""Bytes that push what was there before out of a device's last cache: H100s have 50 MB of it, EPYCs 32 MB for each
complex of cores."""

MOST_COPIES = 32
"""Copies of inputs that are made at most: what is so small is kept near by compilers and hardware anyway."""

_NEVER = 1e30
_SEED = 7


@dataclass(frozen=True)
class Input:
    """An array on each device: floats in [0.5, 1.5), integers in [0, below)."""

    shape: tuple[int, ...]
    dtype: str
    below: int = 2

    @property
    def memory_bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True, eq=False)
class DeviceLoop:
    """Devices that run together, and what running anything on them costs.

    Attributes:
        devices: `jax.Device`s of one kind.
        mesh_shape: how they are laid out, row-major; () for one row.
        memory_bytes: what a program may use of each; None if unknown.
        call_s: a program's time beside its repetitions; each_s: a repetition's beside the thing that it repeats.
    """

    devices: tuple[Any, ...]
    mesh_shape: tuple[int, ...] = ()
    memory_bytes: int | None = None
    call_s: float = 0.0
    each_s: float = 0.0
    clock: Clock = field(default=time.perf_counter, repr=False)

    @cached_property
    def mesh(self) -> Mesh:
        """Axes ``x0``, ``x1``, ..."""
        shape = self.mesh_shape or (len(self.devices),)
        names = tuple(f"x{i}" for i in range(len(shape)))
        laid_out = np.array(self.devices, dtype=object).reshape(shape)
        return Mesh(laid_out, names, axis_types=(AxisType.Auto,) * len(shape))

    def with_mesh(self, shape: tuple[int, ...]) -> "DeviceLoop":
        """The same devices in another layout."""
        return replace(self, mesh_shape=shape)

    def time(
        self,
        call: Call,
        inputs: Sequence[Input],
        runs_s: float,
        *,
        estimate_s: float | None = None,
        result_bytes: int = 0,
        cold: bool = False,
    ) -> Sample:
        """Seconds of ``call(*inputs)`` when all devices run it.

        Args:
            call: from arrays to an array or a flat sequence of them.
            inputs: what each device's arrays look like; every device has its own.
            runs_s: time to spend on running it; compiling comes on top. Something that takes longer runs two or three
                times, and its sample says so.
            estimate_s: saves a compilation where it is near the truth.
            result_bytes: what the results take on each device, where that is known.
            cold: each run takes other copies of the inputs, which come from memory.

        Raises:
            MeasurementError: it does not fit, or is too short to be told from what surrounds it.
        """
        self._check_memory(inputs, result_bytes)
        copies = [self.arrays(inputs) for _ in range(self.copies(inputs) if cold else 1)]
        repeats = 1 if estimate_s is None else self._repeats(estimate_s)
        run = self.runner(call, copies, repeats)
        budget = Budget.of(runs_s, self.clock)
        run_s = run()
        if budget.left_s > 2 * run_s:
            run_s = min(run(), run())
        better = self._repeats(max(run_s - self.call_s, 0.0) / repeats)
        if repeats < MOST_REPEATS and better > 2 * repeats:
            repeats = better
            sample = measure(self.runner(call, copies, repeats), budget.left_s, clock=self.clock)
        else:
            sample = measure(run, budget.left_s, clock=self.clock, before_s=run_s)
        return combine(sample, repeats=repeats, call_s=self.call_s, each_s=self.each_s)

    def _repeats(self, once_s: float) -> int:
        wanted = CALLS_WORTH * self.call_s / max(once_s, 1e-9)
        return min(MOST_REPEATS, max(1, math.ceil(wanted)))

    def copies(self, inputs: Sequence[Input]) -> int:
        """Copies of inputs by which one of them leaves the caches before its next turn, as far as memory goes."""
        whole = max(1, sum(one.memory_bytes for one in inputs))
        most = MOST_COPIES if self.memory_bytes is None else min(MOST_COPIES, self.memory_bytes // (2 * whole))
        return max(1, min(most, 1 + math.ceil(CACHE_BYTES / whole)))

    def runner(self, call: Call, copies: Sequence[Sequence[Any]], repeats: int) -> Callable[[], float]:
        """A function that runs the compiled program once, on the next of the copies of its inputs, and returns its
        seconds."""
        everywhere = PartitionSpec(self.mesh.axis_names)
        program = jax.shard_map(
            _loop(call, repeats), mesh=self.mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
        )
        token = self._spread([np.zeros(1, np.float32)] * len(self.devices))
        compiled = jax.jit(program).lower(token, *copies[0]).compile()
        turns = itertools.cycle(copies)

        def run() -> float:
            arrays = next(turns)
            start = self.clock()
            jax.block_until_ready(compiled(token, *arrays))
            return self.clock() - start

        return run

    def arrays(self, inputs: Sequence[Input]) -> list[Any]:
        """Global arrays of which each device holds its own copy of every input, along dim 0."""
        source = np.random.default_rng(_SEED)
        return [self._spread([one.copy()[None] for _ in self.devices]) for one in (_fill(i, source) for i in inputs)]

    def _spread(self, parts: Sequence[np.ndarray]) -> Any:
        """One global array of which each device holds its part, along dim 0."""
        sharding = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        held = [jax.device_put(part, device) for part, device in zip(parts, self.mesh.devices.flat, strict=True)]
        shape = (len(parts) * parts[0].shape[0], *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, held)

    def _check_memory(self, inputs: Sequence[Input], result_bytes: int) -> None:
        """Refuses what would not leave room for the temporaries that only the compiled program knows."""
        needed = sum(one.memory_bytes for one in inputs) + result_bytes
        if self.memory_bytes is not None and needed > 0.7 * self.memory_bytes:
            have = format_bytes(self.memory_bytes)
            raise MeasurementError(f"operands and results take {format_bytes(needed)} of {have} on each device")


def _loop(call: Call, repeats: int) -> Callable[..., Any]:
    def look(*results: Any) -> Any:
        return sum((one[(0,) * one.ndim].real.astype(jnp.float32) for one in results if one.size), jnp.float32(1))

    def local(token: Any, *arrays: Any) -> Any:
        def turn(_: Any, carry: Any) -> Any:
            inputs, count = lax.optimization_barrier(carry)
            results = call(*inputs)
            flat = tuple(results) if isinstance(results, list | tuple) else (results,)
            return inputs, count + lax.cond(count > _NEVER, look, lambda *_: jnp.float32(1), *flat)

        start = (tuple(array[0] for array in arrays), token[0])
        return lax.fori_loop(0, repeats, turn, start)[1][None]

    return local


def _fill(want: Input, source: np.random.Generator) -> np.ndarray:
    """Random numbers; large arrays repeat them, as making gigabytes of them takes longer than what is timed."""
    dtype, count = jnp.dtype(want.dtype), math.prod(want.shape)
    drawn = min(count, MOST_DRAWN)
    if dtype == np.bool_:
        numbers = source.random(drawn, dtype=np.float32) < 0.5
    elif jnp.issubdtype(dtype, jnp.integer):
        numbers = source.integers(0, max(1, want.below), drawn).astype(dtype)
    else:
        numbers = (source.random(drawn, dtype=np.float32) + np.float32(0.5)).astype(dtype)
    return numbers.reshape(want.shape) if drawn == count else np.resize(numbers, want.shape)


def calibrate(loop: DeviceLoop, runs_s: float) -> tuple[DeviceLoop, Sample]:
    """What calling a program and turning its loop take; and the shortest time of an op, which a plan's ops take too.

    A chain of products of small matrices, each of which needs the one before, is timed at two lengths. The slope is one
    op's time; what is left of the short chain is the loop's own. All other measurements rest on these, and the programs
    are short: each gets `CALIBRATION_S` even where less was asked for.
    """
    runs_s = max(runs_s, CALIBRATION_S)
    small = loop.arrays([Input((8, 8), "float32")])
    call_s = measure(loop.runner(lambda x: x, [small], 0), runs_s, clock=loop.clock).time_s
    bare = replace(loop, call_s=call_s)
    short, long = 2, 18

    def chain(length: int) -> Sample:
        def call(x: Any) -> Any:
            result = x
            for _ in range(length):
                result = result @ x
            return result

        sample = measure(bare.runner(call, [small], MOST_REPEATS), runs_s, clock=loop.clock)
        return combine(sample, repeats=MOST_REPEATS, call_s=call_s, each_s=0.0)

    few, many = chain(short), chain(long)
    launch_s = (many.time_s - few.time_s) / (long - short)
    if launch_s <= 0:
        raise MeasurementError(f"a chain of {long} ops took no longer than one of {short}")
    each_s = max(0.0, few.time_s - short * launch_s)
    spread_s = (few.spread_s + many.spread_s) / (long - short)
    launch = Sample(time_s=launch_s, spread_s=spread_s, drift=many.drift, samples=few.samples + many.samples)
    return replace(bare, each_s=each_s), launch

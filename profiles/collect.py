"""Profiling the attached devices within a time budget.

What tells most comes first in each part (launch time and rates, collectives, copies, the model's ops), and a part that
finishes early leaves its time to the next, so that a budget of seconds gives a rough profile and one of minutes a full
one. Every measurement stands alone: one that fails becomes a gap with its cause, and so does one that time ran out for.
"""

import datetime
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jaxlib

from costmodel.compute import op_time_s
from costmodel.errors import ProfileError
from costmodel.units import format_seconds
from profiles import commbench, opbench
from profiles.apply import rated_kind
from profiles.catalogue import kind_for_jax_name
from profiles.device_loop import DeviceLoop, calibrate
from profiles.device_memory import usable_memory_bytes
from profiles.devices import assumed_kind
from profiles.fits import fit_line, fit_rate
from profiles.opbench import OpProgram
from profiles.schema import (
    BandwidthSample,
    CollectiveLine,
    CollectiveSample,
    CopyLine,
    CopySample,
    Fit,
    Gap,
    LineFit,
    MatmulSample,
    OpTime,
    Profile,
    Rates,
    Sample,
)
from profiles.timing import Budget, rounded

Progress = Callable[[str, int, int], None]
T = TypeVar("T")

PARTS = {"rates": 0.3, "collectives": 0.3, "copies": 0.05, "ops": 0.35}
"""Share of the budget of each part, in this order."""

LONGEST_RUN_S = 0.5
"""Most time to spend on the repetitions of one measurement."""

_log = logging.getLogger(__name__)


def profile_devices(
    *,
    devices: int | None = None,
    budget_s: float = 120.0,
    progress: Progress | None = None,
    programs: Sequence[OpProgram] = (),
) -> Profile:
    """Measures the devices that are attached to this process, all of one kind, running together.

    Args:
        devices: how many of them; all if None.
        budget_s: time to spend. The first few measurements of each part are made in any case, and one that has begun
            is finished, with two runs if they are long. Ops that would not fit, by the rates, are gaps.
        progress: told what is being measured, how many of its measurements are done, and of how many.
        programs: ops of a model to time too.

    Returns:
        The profile; what could not be measured is in its `gaps`.

    Raises:
        ProfileError: MP306 fewer devices are attached; MP307 no op could be measured.
    """
    chosen = _choose(devices)
    kind = kind_for_jax_name(chosen[0].device_kind) or assumed_kind(chosen[0])
    work = _Collection(
        loop=DeviceLoop(devices=chosen, memory_bytes=usable_memory_bytes(chosen)),
        platform=kind.platform,
        progress=progress or (lambda what, done, total: None),
        ends=_ends(Budget.of(budget_s), budget_s),
    )
    rates, matmuls, bandwidths = work.rates()
    profile = Profile(
        device_kind=kind.name,
        jax_device_kind=chosen[0].device_kind,
        platform=kind.platform,
        devices=len(chosen),
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        software=_software(chosen[0]),
        usable_memory_bytes=work.loop.memory_bytes,
        rates=rates,
        matmuls=matmuls,
        bandwidths=bandwidths,
    )
    rated = rated_kind(kind, profile)

    def estimate_s(program: OpProgram) -> float:
        return op_time_s(program.flops, float(program.memory_bytes), program.dtype, rated, is_matmul=program.flops > 0)

    collectives = work.collectives()
    copies = work.copies()
    ops = work.ops(sorted(programs, key=lambda program: -program.count * estimate_s(program)), estimate_s)
    if not (matmuls or bandwidths or ops):
        causes = "; ".join(f"{gap.what}: {gap.cause}" for gap in work.gaps[:3])
        raise ProfileError("MP307", f"no op could be measured on {len(chosen)} x {kind.name}: {causes}")
    return _with(
        profile,
        ops=ops,
        microbatches=tuple(sorted({program.microbatch for program in programs if program.microbatch})),
        collectives=collectives,
        collective_lines=work.collective_lines(collectives),
        copies=copies,
        copy_lines=work.copy_lines(copies),
        gaps=tuple(work.gaps),
    )


def _with(profile: Profile, **changes: Any) -> Profile:
    fields = {name: getattr(profile, name) for name in profile.__struct_fields__}
    return Profile(**{**fields, **changes})


def _choose(count: int | None) -> tuple[Any, ...]:
    """Devices of the first one's kind."""
    attached = jax.local_devices()
    equal = tuple(one for one in attached if one.device_kind == attached[0].device_kind)
    if count is not None and not 1 <= count <= len(equal):
        message = f"{count} devices were asked for, {len(equal)} of kind {equal[0].device_kind!r} are attached"
        raise ProfileError("MP306", message, "ask for fewer, or use --fake-devices")
    return equal[:count]


def _software(device: Any) -> dict[str, str]:
    runtime = str(device.client.platform_version).strip().splitlines()
    return {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "runtime": runtime[0][:80] if runtime else ""}


def _ends(whole: Budget, budget_s: float) -> dict[str, Budget]:
    """When each part ends, if all parts before it used up their time."""
    ends, left = {}, 1.0
    for part, share in PARTS.items():
        left -= share
        ends[part] = replace(whole, end_s=whole.end_s - max(0.0, left) * budget_s)
    return ends


@dataclass
class _Collection:
    """The measurements of one profile as they are made."""

    loop: DeviceLoop
    platform: Any
    progress: Progress
    ends: dict[str, Budget]
    gaps: list[Gap] = field(default_factory=list)

    def attempt(self, what: str, run: Callable[[], T]) -> T | None:
        """The result of one measurement, or None and a gap: anything that a device, driver or compiler throws."""
        try:
            return run()
        except Exception as error:
            text = str(error).strip().splitlines()
            cause = f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ")
            self.gaps.append(Gap(what=what, cause=cause))
            _log.info("%s was not measured: %s", what, cause, exc_info=True)
            return None

    def part(
        self,
        name: str,
        label: str,
        jobs: Iterable[tuple[str, Callable[[float], T]]],
        sure: int = 1,
        needs_s: Mapping[str, float] = MappingProxyType({}),
    ) -> list[T]:
        """Results of a part's jobs in order; a gap for each that fails or that time ran out for.

        Args:
            sure: so many of them run even where time has run out.
            needs_s: about what the fewest runs of a job take, where that is known; a job that needs longer than what
                is left, and longer than `LONGEST_RUN_S`, does not begin.
        """
        listed, results, end = list(jobs), [], self.ends[name]
        for at, (what, run) in enumerate(listed):
            if at >= sure and end.left_s <= 0:
                self.gaps.append(Gap(what=what, cause="the time budget was spent"))
                continue
            left_s = max(end.left_s, LONGEST_RUN_S)
            if needs_s.get(what, 0.0) > left_s:
                need = f"it would take about {format_seconds(needs_s[what])} to measure"
                cause = f"{need}, {format_seconds(left_s)} of the time budget were left"
                self.gaps.append(Gap(what=what, cause=cause))
                continue
            self.progress(label, at, len(listed))
            runs_s = min(
                LONGEST_RUN_S, max(0.0, end.left_s) / (2 * (len(listed) - at))
            )  # compiling takes the other half
            result = self.attempt(what, lambda run=run, runs_s=runs_s: run(runs_s))
            if result is not None:
                results.append(result)
        self.progress(label, len(listed), len(listed))
        return results

    def rates(self) -> tuple[Rates, tuple[MatmulSample, ...], tuple[BandwidthSample, ...]]:
        """Launch time, then matrix products and memory-bound ops in turns, and what was fitted to them."""
        launches: list[Sample] = []

        def launch(runs_s: float) -> Sample:
            self.loop, sample = calibrate(self.loop, runs_s)
            launches.append(sample)
            return sample

        def matmul(dtype: str, shape: tuple[int, int, int]) -> Callable[[float], Any]:
            return lambda runs_s: opbench.time_matmul(dtype, shape, self.loop, runs_s)

        def bandwidth(op: Any, dtype: str, shape: tuple[int, ...]) -> Callable[[float], Any]:
            return lambda runs_s: opbench.time_bandwidth(op, dtype, shape, self.loop, runs_s)

        products = [
            (f"matmul {dtype} {'x'.join(map(str, shape))}", matmul(dtype, shape))
            for dtype, shape in opbench.matmul_grid(self.platform)
        ]
        streams = [
            (f"{op} {dtype} {'x'.join(map(str, shape))}", bandwidth(op, dtype, shape))
            for op, dtype, shape in opbench.bandwidth_grid(self.platform)
        ]
        jobs = [("launch time", launch), products[0], streams[0], *_in_turns(products[1:], streams[1:])]
        found = self.part("rates", "rates", jobs, sure=3)
        matmuls = tuple(one for one in found if isinstance(one, MatmulSample))
        streamed = tuple(one for one in found if isinstance(one, BandwidthSample))
        return self._fitted_rates(launches, matmuls, streamed), matmuls, streamed

    def _fitted_rates(
        self, launches: Sequence[Sample], matmuls: Sequence[MatmulSample], streamed: Sequence[BandwidthSample]
    ) -> Rates:
        floor_s = launches[0].time_s if launches else 0.0
        by_dtype: dict[str, list[MatmulSample]] = defaultdict(list)
        for one in matmuls:
            by_dtype[one.dtype].append(one)
        even = [one for one in streamed if one.op != "gather"]
        return Rates(
            matmul_flops_per_s={
                dtype: fit_rate([one.flops for one in mine], [one.time_s for one in mine], floor_s)
                for dtype, mine in sorted(by_dtype.items())
            },
            memory_bandwidth_bytes_per_s=fit_rate(
                [one.memory_bytes for one in even], [one.time_s for one in even], floor_s
            )
            if even
            else None,
            launch_s=Fit(value=rounded(floor_s), error=round(launches[0].spread_s / floor_s, 4)) if launches else None,
        )

    def collectives(self) -> tuple[CollectiveSample, ...]:
        def job(kind: Any, grouping: commbench.Grouping, size: int) -> Callable[[float], CollectiveSample]:
            return lambda runs_s: commbench.time_collective(kind, grouping, size, self.loop, runs_s)

        jobs = [
            (f"{kind} of {size} bytes in groups of {grouping[0]}, stride {grouping[1]}", job(kind, grouping, size))
            for kind, grouping, size in commbench.collective_jobs(len(self.loop.devices), self.platform)
        ]
        return tuple(self.part("collectives", "collectives", jobs, sure=2))

    def copies(self) -> tuple[CopySample, ...]:
        def job(lanes: int, size: int) -> Callable[[float], CopySample]:
            return lambda runs_s: commbench.time_copy(lanes, size, self.loop, runs_s)

        jobs = [
            (f"copy of {size} bytes in {lanes} lanes", job(lanes, size))
            for lanes, size in commbench.copy_jobs(len(self.loop.devices), self.platform)
        ]
        return tuple(self.part("copies", "copies", jobs, sure=2))

    def ops(self, programs: Sequence[OpProgram], estimate_s: Callable[[OpProgram], float]) -> dict[str, OpTime]:
        def job(program: OpProgram) -> Callable[[float], tuple[str, OpTime]]:
            return lambda runs_s: (program.key, opbench.time_op(program, self.loop, runs_s, estimate_s(program)))

        jobs = [(program.key, job(program)) for program in programs]
        needs_s = {program.key: opbench.least_s(program, estimate_s(program)) for program in programs}
        return dict(self.part("ops", "ops of the model", jobs, needs_s=needs_s))

    def collective_lines(self, samples: Sequence[CollectiveSample]) -> tuple[CollectiveLine, ...]:
        groups: dict[tuple[Any, int, int], list[CollectiveSample]] = defaultdict(list)
        for one in samples:
            groups[one.kind, one.size, one.stride].append(one)
        lines = []
        for (kind, size, stride), mine in sorted(groups.items()):
            what = f"line of {kind} in groups of {size}, stride {stride}"
            if fit := self._line(what, [one.full_bytes for one in mine], mine):
                lines.append(CollectiveLine(kind=kind, size=size, stride=stride, **_constants(fit)))
        return tuple(lines)

    def copy_lines(self, samples: Sequence[CopySample]) -> tuple[CopyLine, ...]:
        groups: dict[int, list[CopySample]] = defaultdict(list)
        for one in samples:
            groups[one.lanes].append(one)
        lines = []
        for lanes, mine in sorted(groups.items()):
            if fit := self._line(f"line of copies in {lanes} lanes", [one.lane_bytes for one in mine], mine):
                lines.append(CopyLine(route="device_to_device", lanes=lanes, **_constants(fit)))
        return tuple(lines)

    def _line(self, what: str, sizes: Sequence[float], samples: Sequence[Sample]) -> LineFit | None:
        return self.attempt(what, lambda: fit_line(sizes, [one.time_s for one in samples]))


def _constants(fit: LineFit) -> dict[str, Any]:
    return {name: getattr(fit, name) for name in LineFit.__struct_fields__}


def _in_turns(one: Sequence[T], other: Sequence[T]) -> list[T]:
    mixed = [each for pair in zip(one, other) for each in pair]
    shared = min(len(one), len(other))
    return [*mixed, *one[shared:], *other[shared:]]

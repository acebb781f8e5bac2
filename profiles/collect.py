"""Profiling devices within a time budget.

What tells most comes first in each part (rates, collectives, copies, the model's ops and blocks, shapes), and a part
that finishes early leaves its time to the next, so that a budget of seconds gives a rough profile and one of minutes a
full one. Every measurement stands alone: one that fails becomes a gap with its cause, and so does one that time ran out
for. The profile as it stands is handed out after each measurement, so that whoever is stopped can go on from there.
"""

import datetime
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from costmodel.errors import ProfileError
from costmodel.units import format_seconds
from profiles import opbench
from profiles.apply import rated_kind
from profiles.blockbench import BlockProgram
from profiles.fitting import fitted
from profiles.gpu_clocks import while_running
from profiles.grids import matmul_grid
from profiles.jobs import (
    LABELS,
    LONGEST_RUN_S,
    Job,
    Part,
    block_jobs,
    collective_jobs,
    copy_jobs,
    op_jobs,
    rate_jobs,
    shape_jobs,
)
from profiles.opbench import OpProgram
from profiles.records import Record, block_key, drift_of, records_of, with_records
from profiles.resume import require_same_devices
from profiles.runner import DeviceFacts, LocalRunner, Runner, cause_of
from profiles.schema import BlockTime, Fit, Gap, MatmulSample, Profile, Pulse
from profiles.steadiness import DRIFTED
from profiles.timing import Budget, rounded

Progress = Callable[[str, int, int], None]
Programs = Sequence[OpProgram | BlockProgram]

PARTS: dict[Part, float] = {
    "rates": 0.2,
    "collectives": 0.2,
    "copies": 0.05,
    "ops": 0.3,
    "blocks": 0.15,
    "shapes": 0.1,
}
"""Share of the budget of each part, in this order; that of parts without a measurement goes to the others."""

PULSE = "reference product"

_log = logging.getLogger(__name__)


def profile_devices(
    *,
    devices: int | None = None,
    budget_s: float = 120.0,
    progress: Progress | None = None,
    programs: Programs | Callable[[DeviceFacts], Programs] = (),
    known: Profile | Callable[[DeviceFacts], Profile | None] | None = None,
    checkpoint: Callable[[Profile], None] | None = None,
    runner: Runner | None = None,
) -> Profile:
    """Measures devices of one kind, running together.

    Args:
        devices: how many of those attached to this process; all if None.
        budget_s: time to spend. The first few measurements of each part are made in any case, and one that has begun
            is finished, with two runs if they are long. Ops that would not fit, by the rates, are gaps.
        progress: told what is being measured, how many of its measurements are done, and of how many.
        programs: ops and blocks of a model to time too, or what makes them once the devices are known.
        known: measured before on these devices, or what finds it once they are known; it is not measured again.
        checkpoint: given the profile as it stands after each measurement; what is not measured yet is in its gaps.
        runner: where to measure, in place of this process (`worker.WorkerRunner`).

    Returns:
        The profile; what could not be measured is in its `gaps`.

    Raises:
        ProfileError: MP306 fewer devices are attached; MP307 no op could be measured; MP308 `known` is of other
            devices.
    """
    runner = runner or LocalRunner(devices)
    try:
        facts = runner.start(min(LONGEST_RUN_S, budget_s / 100))
        before = known(facts) if callable(known) else known
        if before is not None:
            require_same_devices(before, facts)
        listed = tuple(programs(facts) if callable(programs) else programs)
        work = _Collection(
            runner=runner,
            facts=facts,
            progress=progress or (lambda what, done, total: None),
            whole=Budget.of(budget_s),
            budget_s=budget_s,
            base=_base(facts, before, listed),
            checkpoint=checkpoint or (lambda profile: None),
        )
        work.collect(listed)
        return work.profile()
    finally:
        runner.close()


def _base(facts: DeviceFacts, known: Profile | None, programs: Programs) -> Profile:
    """The profile without measurements; with those that are known."""
    sizes = {one.microbatch for one in programs if isinstance(one, OpProgram) and one.microbatch}
    common = {
        "device_kind": facts.kind.name,
        "jax_device_kind": facts.jax_device_kind,
        "platform": facts.kind.platform,
        "devices": facts.count,
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "software": facts.software,
        "usable_memory_bytes": facts.memory_bytes,
    }
    if known is None:
        return Profile(**common, microbatches=tuple(sorted(sizes)))
    sizes |= set(known.microbatches)
    return msgspec.structs.replace(known, **common, microbatches=tuple(sorted(sizes)), gaps=())


def planned_jobs(facts: DeviceFacts, programs: Programs, known: Profile | None = None) -> dict[Part, tuple[Job, ...]]:
    """What there is to measure, part after part, without what `known` has; blocks that it has on their own, or in
    another loop, are timed again."""
    blocks = [one for one in programs if isinstance(one, BlockProgram)]
    layers = {block_key(one.block_class, (1,), one.microbatch): one.layers for one in blocks}
    there = {
        key
        for key, record in (records_of(known) if known is not None else ())
        if not isinstance(record, BlockTime) or record.layers == layers.get(key, record.layers)
    }
    kind = rated_kind(facts.kind, known) if known is not None else facts.kind
    every: dict[Part, tuple[Job, ...]] = {
        "rates": rate_jobs(kind.platform),
        "collectives": collective_jobs(facts.count, kind.platform),
        "copies": copy_jobs(facts.count, kind.platform),
        "ops": op_jobs([one for one in programs if isinstance(one, OpProgram)], kind),
        "blocks": block_jobs(blocks),
        "shapes": shape_jobs(kind.platform),
    }
    return {part: tuple(job for job in jobs if job.key not in there) for part, jobs in every.items()}


@dataclass
class _Collection:
    """The measurements of one profile as they are made."""

    runner: Runner
    facts: DeviceFacts
    progress: Progress
    whole: Budget
    budget_s: float
    base: Profile
    checkpoint: Callable[[Profile], None]
    records: dict[str, Record] = field(default_factory=dict)
    gaps: dict[str, str] = field(default_factory=dict)
    pulses: list[Pulse] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    started_s: float = field(default_factory=time.perf_counter)

    def collect(self, programs: Programs) -> None:
        """Makes all measurements; what is there is handed out even where it is interrupted."""
        self.records = dict(records_of(self.base))
        self.pulses = list(self.base.pulses)
        if self.facts.problem:
            self.gaps["launch time"] = self.facts.problem
        plan = planned_jobs(self.facts, programs, self.base)
        self.waiting = [job.key for jobs in plan.values() for job in jobs]
        ends = self._ends([part for part in PARTS if plan[part]])
        with self._handing_out():
            self._part("rates", plan["rates"], ends, sure=2)
            if not self.records:
                causes = "; ".join(f"{what}: {cause}" for what, cause in list(self.gaps.items())[:3])
                where = f"{self.facts.count} x {self.facts.kind.name}"
                raise ProfileError("MP307", f"no op could be measured on {where}: {causes}")
            self._pulse()
            self._part("collectives", plan["collectives"], ends, sure=2)
            self._part("copies", plan["copies"], ends, sure=2 if self.facts.count > 1 else 0)
            self._pulse()
            rated = planned_jobs(self.facts, programs, self.profile())
            self._part("ops", rated["ops"], ends, sure=1)
            self._part("blocks", rated["blocks"], ends, sure=1)
            self._part("shapes", plan["shapes"], ends)
            self._pulse()
        for program in programs:
            if isinstance(program, BlockProgram) and program.update_problem:
                key = block_key(program.block_class, (1,), program.microbatch)
                self.gaps[f"update of {key}"] = program.update_problem

    def profile(self) -> Profile:
        """What is there now, with its constants."""
        gaps = dict.fromkeys(self.waiting, "the run was stopped before it") | self.gaps
        launch = self.facts.launch
        bare = msgspec.structs.replace(
            with_records(self.base, self.records.values()),
            pulses=tuple(self.pulses),
            gaps=tuple(Gap(what=what, cause=cause) for what, cause in gaps.items()),
        )
        if launch is None:
            return fitted(bare)
        error = round(launch.spread_s / launch.time_s, 4)
        return fitted(bare, Fit(value=rounded(launch.time_s), error=error))

    @contextmanager
    def _handing_out(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self.records:
                self.checkpoint(self.profile())
            raise

    def _ends(self, parts: Sequence[Part]) -> Mapping[Part, Budget]:
        """When each part ends, if all parts before it used up their time."""
        total, left = sum(PARTS[part] for part in parts), 1.0
        ends: dict[Part, Budget] = dict.fromkeys(PARTS, self.whole)
        for part in parts:
            left -= PARTS[part] / total
            ends[part] = replace(self.whole, end_s=self.whole.end_s - max(0.0, left) * self.budget_s)
        return ends

    def _part(self, part: Part, jobs: Sequence[Job], ends: Mapping[Part, Budget], sure: int = 0) -> None:
        """Makes a part's measurements in order: a gap for each that fails or that time ran out for.

        Args:
            sure: so many of them run even where time has run out. A job that needs longer than what is left, and longer
                than `LONGEST_RUN_S`, does not begin.
        """
        if not jobs:
            return
        end, kind = ends[part], rated_kind(self.facts.kind, fitted(with_records(self.base, self.records.values())))
        for at, job in enumerate(jobs):
            left_s, need_s = max(end.left_s, LONGEST_RUN_S), job.least_s(kind)
            if at >= sure and end.left_s <= 0:
                self._gap(job, "the time budget was spent")
            elif part in ("ops", "blocks") and need_s > left_s:
                need = f"it would take about {format_seconds(need_s)} to measure"
                self._gap(job, f"{need}, {format_seconds(left_s)} of the time budget were left")
            else:
                self.progress(LABELS[part], at, len(jobs))
                share_s = max(0.0, end.left_s) / (2 * (len(jobs) - at))  # compiling takes the other half
                self._measure(job, min(LONGEST_RUN_S, share_s))
        self._again([job for job in jobs if job.key in self.records and abs(self._drift(job)) > DRIFTED], end)
        self.progress(LABELS[part], len(jobs), len(jobs))

    def _drift(self, job: Job) -> float:
        return drift_of(self.records[job.key])

    def _again(self, jobs: Sequence[Job], end: Budget) -> None:
        """Measures once more what drifted, while there is time, and keeps the steadier record."""
        for job in jobs:
            if end.left_s <= LONGEST_RUN_S:
                return
            before = self.records[job.key]
            self._measure(job, LONGEST_RUN_S)
            if job.key in self.gaps or abs(self._drift(job)) > abs(drift_of(before)):
                self.records[job.key] = before
                self.gaps.pop(job.key, None)

    def _measure(self, job: Job, runs_s: float) -> None:
        try:
            self.records[job.key] = self.runner.run(job, runs_s)
        except Exception as error:  # anything that a device, driver or compiler throws
            self._gap(job, cause_of(error))
            _log.info("%s was not measured: %s", job.key, cause_of(error), exc_info=True)
        else:
            self._done(job)
        self.checkpoint(self.profile())

    def _gap(self, job: Job, cause: str) -> None:
        self.gaps[job.key] = cause
        self._done(job)

    def _done(self, job: Job) -> None:
        if job.key in self.waiting:
            self.waiting.remove(job.key)

    def _pulse(self) -> None:
        """Times the reference product, if there is time: whether the device is as fast as it was."""
        if self.whole.left_s <= LONGEST_RUN_S:
            return
        dtype, shape = matmul_grid(self.facts.kind.platform)[0]
        job = Job(key=PULSE, part="rates", measure=partial(opbench.time_matmul, dtype, shape))
        after_s = rounded(time.perf_counter() - self.started_s)
        runs_s = min(LONGEST_RUN_S, self.budget_s / 100)
        try:
            sample, clocks = while_running(lambda: self.runner.run(job, runs_s), self.facts.kind.platform)
        except Exception as error:  # as above
            self.gaps[PULSE] = cause_of(error)
            return
        assert isinstance(sample, MatmulSample)
        told = {"sm_clock_hz": clocks.sm_clock_hz, "held_back": clocks.held_back}
        self.pulses.append(Pulse(after_s=after_s, **told, **sample.figures))

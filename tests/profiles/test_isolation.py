"""Measuring in a process of its own: whatever happens to it is a gap, and the next measurement is made."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from costmodel.errors import ProfileError
from profiles.collect import profile_devices
from profiles.device_loop import DeviceLoop
from profiles.jobs import Job, rate_jobs
from profiles.records import Record, records_of
from profiles.runner import LocalRunner, ReportedError
from profiles.schema import MatmulSample
from profiles.worker import WorkerRunner


def product(loop: DeviceLoop, runs_s: float) -> MatmulSample:
    return MatmulSample(dtype="float32", shape=(1, 2, len(loop.devices)), time_s=1e-3)


def killed(loop: DeviceLoop, runs_s: float) -> Record:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def leaves(loop: DeviceLoop, runs_s: float) -> Record:
    os._exit(7)


def hangs(loop: DeviceLoop, runs_s: float) -> Record:
    time.sleep(600)
    raise AssertionError


def out_of_memory(loop: DeviceLoop, runs_s: float) -> Record:
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nwhile allocating")


def job(measure: Callable[[DeviceLoop, float], Record]) -> Job:
    return Job(key=measure.__name__, part="rates", measure=measure)


def test_a_worker_that_dies_or_hangs_is_replaced_and_says_how() -> None:
    runner = WorkerRunner(2, limit_s=4.0)
    try:
        facts = runner.start(None)
        assert (facts.count, facts.kind.name, facts.export_platform, facts.launch) == (2, "cpu", "cpu", None)
        assert runner.run(job(product), 0.1) == MatmulSample(dtype="float32", shape=(1, 2, 2), time_s=1e-3)
        with pytest.raises(ReportedError, match=r"^RuntimeError: RESOURCE_EXHAUSTED: out of memory$"):
            runner.run(job(out_of_memory), 0.1)
        with pytest.raises(ReportedError, match=r"killed by SIGKILL: often .* too little memory"):
            runner.run(job(killed), 0.1)
        assert runner.deaths == 1
        assert runner.run(job(product), 0.1)
        with pytest.raises(ReportedError, match=r"ended with exit code 7"):
            runner.run(job(leaves), 0.1)
        with pytest.raises(ReportedError, match=r"stopped: it took longer than 4 s to measure"):
            runner.run(job(hangs), 0.1)
        with pytest.raises(ReportedError, match=r"PicklingError|AttributeError"):
            runner.run(replace(job(product), measure=unpicklable()), 0.1)
    finally:
        runner.close()


def unpicklable() -> Callable[[DeviceLoop, float], Record]:
    return lambda loop, runs_s: product(loop, runs_s)


class Saboteur(WorkerRunner):
    """Makes one job crash."""

    def __init__(self, key: str) -> None:
        super().__init__(2)
        self.key, self.ran = key, []

    def run(self, job: Job, runs_s: float) -> Record:
        self.ran.append(job.key)
        return super().run(replace(job, measure=killed) if job.key == self.key else job, runs_s)


def test_a_crash_in_the_middle_is_a_gap_and_the_profile_goes_on() -> None:
    victim = rate_jobs("cpu")[1].key
    runner = Saboteur(victim)
    profile = profile_devices(budget_s=3.0, runner=runner)
    (gap,) = (gap for gap in profile.gaps if gap.what == victim)
    assert "killed by SIGKILL" in gap.cause and runner.deaths == 1
    assert runner.ran.index(victim) < len(runner.ran) - 1
    assert profile.matmuls and profile.collectives and profile.rates.launch_s is not None
    assert victim not in dict(records_of(profile))


def test_devices_that_are_not_there_are_refused_by_the_worker_too() -> None:
    with pytest.raises(ProfileError, match=r"MP306: 9 devices.*8 of kind"):
        profile_devices(budget_s=0.0, runner=WorkerRunner(9))


def test_a_worker_that_cannot_reach_its_devices_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    with pytest.raises(ProfileError, match=r"MP307: the devices cannot be used: .*nonsense"):
        profile_devices(budget_s=0.0, runner=WorkerRunner())


def test_devices_that_go_away_end_the_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = WorkerRunner(1)
    try:
        runner.start(None)
        with pytest.raises(ReportedError, match="SIGKILL"):
            runner.run(job(killed), 0.1)
        monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
        causes = []
        for _ in range(4):
            with pytest.raises(ReportedError) as caught:
                runner.run(job(product), 0.1)
            causes.append(str(caught.value))
        assert all("nonsense" in cause for cause in causes[:3])
        assert causes[3] == "the devices could not be reached again after 3 tries"
    finally:
        runner.close()


def test_both_runners_give_the_same_facts() -> None:
    worker, local = WorkerRunner(3), LocalRunner(3)
    try:
        assert worker.start(None) == local.start(None)
    finally:
        worker.close()
        local.close()

"""Measuring in a process of its own, which is replaced when it dies.

A driver's crash, the system's out-of-memory killer or a compiler that never ends takes the worker with it, not the
profile: the measurement at fault becomes a gap, a new worker takes the devices and goes on behind it. As long as
nothing goes wrong one worker makes all measurements, so that isolation costs one start of JAX.
"""

import multiprocessing
import pickle
import signal
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from costmodel.errors import PlanError, ProfileError
from profiles.jobs import Job
from profiles.records import Record
from profiles.runner import DeviceFacts, LocalRunner, ReportedError, cause_of

START_S = 180.0
"""Longest that a worker may take to reach its devices."""

LIMIT_S = 300.0
"""Longest that one measurement may take, its compilation included."""

MOST_STARTS = 3
"""Workers in a row that may fail to reach the devices before the rest is given up."""


class WorkerRunner:
    """As `LocalRunner`, in another process.

    Args:
        devices: how many of the attached; all if None.
        limit_s: longest that one measurement may take.
    """

    def __init__(self, devices: int | None = None, *, limit_s: float = LIMIT_S) -> None:
        self.devices, self.limit_s = devices, limit_s
        self.deaths = 0
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._calibrate_s: float | None = None
        self._failed_starts = 0

    def start(self, calibrate_s: float | None) -> DeviceFacts:
        self._calibrate_s = calibrate_s
        try:
            return self._spawn()
        except ReportedError as error:
            hint = "see that JAX finds the devices: python -c 'import jax; print(jax.devices())'"
            raise ProfileError("MP307", f"the devices cannot be used: {error}", hint) from None

    def run(self, job: Job, runs_s: float) -> Record:
        if self._connection is None:
            if self._failed_starts >= MOST_STARTS:
                raise ReportedError(f"the devices could not be reached again after {MOST_STARTS} tries")
            self._spawn()
        return self._ask((job, runs_s), self.limit_s)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _spawn(self) -> DeviceFacts:
        context = multiprocessing.get_context("spawn")
        own, other = context.Pipe()
        process = context.Process(target=_serve, args=(other, self.devices, self._calibrate_s), daemon=True)
        process.start()
        other.close()
        self._process, self._connection = process, own
        self._failed_starts += 1
        try:
            facts = self._receive(START_S, "reach the devices")
        except ReportedError:
            self.close()
            raise
        self._failed_starts = 0
        return facts

    def _ask(self, request: Any, limit_s: float) -> Any:
        assert self._connection is not None
        try:
            self._connection.send(request)
        except OSError:  # it died between two measurements
            raise ReportedError(self._end()) from None
        except (AttributeError, TypeError, ValueError, pickle.PicklingError) as error:  # nothing was sent
            raise ReportedError(cause_of(error)) from None
        return self._receive(limit_s, "measure")

    def _receive(self, limit_s: float, what: str) -> Any:
        assert self._connection is not None
        try:
            if not self._connection.poll(limit_s):
                self.close()
                raise ReportedError(f"stopped: it took longer than {limit_s:g} s to {what}")
            outcome, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise ReportedError(self._end()) from None
        if outcome == "refused":
            self.close()
            raise ProfileError(*value)
        if outcome == "failed":
            raise ReportedError(value)
        return value

    def _end(self) -> str:
        """How the worker died; the next measurement starts another."""
        assert self._process is not None
        self._process.join(10.0)
        code = self._process.exitcode
        self.close()
        self.deaths += 1
        if code is None:
            return "the process that measured it closed its connection"
        if code >= 0:
            return f"the process that measured it ended with exit code {code}"
        name = signal.Signals(-code).name if -code in {int(one) for one in signal.Signals} else str(-code)
        why = ": often the system's answer to too little memory" if name == "SIGKILL" else ""
        return f"the process that measured it was killed by {name}{why}"


def _serve(connection: Connection, devices: int | None, calibrate_s: float | None) -> None:
    """The worker: takes the devices, then answers one job after another until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks decides when to stop
    runner = LocalRunner(devices)
    try:
        reply: tuple[str, Any] = ("facts", runner.start(calibrate_s))
    except PlanError as error:
        reply = ("refused", (error.code, error.message, error.hint))
    except Exception as error:  # whatever keeps JAX from its devices
        reply = ("failed", cause_of(error))
    while True:
        try:
            connection.send(reply)
            if runner.loop is None:  # it did not reach the devices, and said so
                return
            job, runs_s = connection.recv()
        except (EOFError, OSError):
            return
        except Exception as error:  # a job that cannot be unpickled here
            reply = ("failed", cause_of(error))
            continue
        try:
            reply = ("done", runner.run(job, runs_s))
        except Exception as error:  # anything that a device, driver or compiler throws
            reply = ("failed", cause_of(error))

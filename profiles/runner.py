"""Running jobs on the devices attached to this process; `worker.py` does the same in a process of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jaxlib
from jax import export

from costmodel.device_kind import DeviceKind
from costmodel.errors import ProfileError
from profiles.catalogue import kind_for_jax_name
from profiles.device_loop import CALIBRATION_S, DeviceLoop, calibrate
from profiles.device_memory import usable_memory_bytes
from profiles.devices import assumed_kind
from profiles.jobs import Job
from profiles.records import Record
from profiles.schema import Sample


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What the devices say of themselves, and what running anything on them costs.

    Attributes:
        kind: the catalogue's, or assumed facts where it has none.
        count: devices that run together.
        memory_bytes: what a program may use of each; None if unknown.
        software: versions by name.
        export_platform: for what programs must be exported to run here.
        launch: shortest time of an op; None with the `problem` where it could not be measured, or was not asked for.
    """

    kind: DeviceKind
    jax_device_kind: str
    count: int
    memory_bytes: int | None
    software: dict[str, str]
    export_platform: str
    launch: Sample | None = None
    problem: str = ""


class Runner(Protocol):
    """Where measurements are made."""

    def start(self, calibrate_s: float | None) -> DeviceFacts:
        """Takes the devices; measures what calling them costs for so many seconds, unless None.

        Raises:
            ProfileError: MP306 fewer devices are attached than were asked for; MP307 they cannot be used.
        """
        ...

    def run(self, job: Job, runs_s: float) -> Record:
        """Makes one measurement, or raises whatever a device, driver or compiler throws; the next one can still be
        made."""
        ...

    def close(self) -> None:
        """Leaves the devices."""
        ...


class LocalRunner:
    """Measures in this process: a crash of a driver ends it."""

    def __init__(self, devices: int | None = None) -> None:
        self.wanted = devices
        self.loop: DeviceLoop | None = None

    def start(self, calibrate_s: float | None) -> DeviceFacts:
        chosen = _choose(self.wanted)
        memory_bytes = usable_memory_bytes(chosen)
        self.loop = DeviceLoop(devices=chosen, memory_bytes=memory_bytes)
        launch, problem = None, ""
        if calibrate_s is not None:
            try:
                self.loop, launch = calibrate(self.loop, max(calibrate_s, CALIBRATION_S))
            except Exception as error:  # anything that a device, driver or compiler throws: a gap of the profile
                problem = cause_of(error)
        return DeviceFacts(
            kind=kind_for_jax_name(chosen[0].device_kind) or assumed_kind(chosen[0]),
            jax_device_kind=chosen[0].device_kind,
            count=len(chosen),
            memory_bytes=memory_bytes,
            software=_software(chosen[0]),
            export_platform=export.default_export_platform(),
            launch=launch,
            problem=problem,
        )

    def run(self, job: Job, runs_s: float) -> Record:
        assert self.loop is not None, "start() comes first"
        return job.measure(self.loop, runs_s)

    def close(self) -> None:
        self.loop = None


class ReportedError(RuntimeError):
    """What went wrong in another process: the text is the cause, with the name of the error that it was there."""


def cause_of(error: BaseException) -> str:
    """One line for a gap."""
    text = str(error).strip().splitlines()
    first = text[0] if text else ""
    return first if isinstance(error, ReportedError) else f"{type(error).__name__}: {first}".rstrip(": ")


def _choose(count: int | None) -> tuple[Any, ...]:
    """Devices of the first one's kind."""
    attached: Sequence[Any] = jax.local_devices()
    equal = tuple(one for one in attached if one.device_kind == attached[0].device_kind)
    if count is not None and not 1 <= count <= len(equal):
        message = f"{count} devices were asked for, {len(equal)} of kind {equal[0].device_kind!r} are attached"
        raise ProfileError("MP306", message, "ask for fewer, or use --fake-devices")
    return equal[:count]


def _software(device: Any) -> dict[str, str]:
    runtime = str(device.client.platform_version).strip().splitlines()
    return {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "runtime": runtime[0][:80] if runtime else ""}

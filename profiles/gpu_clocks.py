"""What NVIDIA's driver says while something runs: the clock, and whether it holds the device back.

`nvidia-smi` is asked from outside, so that the devices stay with whoever measures. Without it nothing is known.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

REASONS = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
"""Bits of the driver's mask that hold a busy device back; others say that it is idle or that somebody set its clock."""

_EVERY_MS = 100


@dataclass(frozen=True)
class Clocks:
    """Attributes:
    sm_clock_hz: the highest that was seen; None where nobody says.
    held_back: why the driver held the device back at some time, in words.
    """

    sm_clock_hz: float | None = None
    held_back: tuple[str, ...] = ()


def while_running(run: Callable[[], T], platform: str) -> tuple[T, Clocks]:
    """The result of `run`, and the clocks while it ran: unknown unless the platform is ``gpu`` and has the tool."""
    command = shutil.which("nvidia-smi") if platform == "gpu" else None
    if command is None:
        return run(), Clocks()
    query = [command, "--query-gpu=clocks.sm,clocks_throttle_reasons.active", "--format=csv,noheader,nounits"]
    handle, name = tempfile.mkstemp(prefix="meshplan-clocks-")
    try:
        with os.fdopen(handle, "wb") as file:
            watcher = subprocess.Popen([*query, f"--loop-ms={_EVERY_MS}"], stdout=file, stderr=subprocess.DEVNULL)
            try:
                result = run()
            finally:
                watcher.terminate()
                watcher.wait()
        return result, read_clocks(Path(name).read_text(errors="replace").splitlines())
    finally:
        Path(name).unlink(missing_ok=True)


def read_clocks(lines: Sequence[str]) -> Clocks:
    """From lines ``1980, 0x0000000000000004``: a clock in MHz and a mask. Lines of another form are passed over."""
    clocks, mask = [], 0
    for line in lines:
        clock, _, reasons = line.partition(",")
        try:
            clocks.append(float(clock) * 1e6)
            mask |= int(reasons.strip(), 16)
        except ValueError:  # "[N/A]" of devices that do not say, or a line that was cut off
            continue
    held_back = tuple(words for bit, words in REASONS.items() if mask & bit)
    return Clocks(max(clocks, default=None), held_back)

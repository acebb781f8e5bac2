"""Clocks are read beside a measurement where the driver's tool is there, and never in its way."""

import os
import time
from pathlib import Path

import pytest

from profiles.gpu_clocks import Clocks, read_clocks, while_running
from profiles.schema import Pulse
from profiles.steadiness import steadiness
from tests.small_profiles import small_profile


def tool(folder: Path, text: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_lines_of_the_driver_are_read_and_others_passed_over() -> None:
    assert read_clocks(["1410, 0x0000000000000004", "1395, 0x0000000000000060", "210, 0x1"]) == Clocks(
        1.41e9, ("power limit", "temperature (software)", "temperature (hardware)")
    )
    assert read_clocks(["[N/A], [N/A]", "", "14"]).held_back == ()
    assert read_clocks([]) == Clocks()


def test_the_tool_runs_beside_and_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, f'echo $$ > {tmp_path}/pid; echo "1980, 0x4"; exec sleep 60')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def run() -> str:
        for _ in range(200):
            if (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text().strip():
                time.sleep(0.1)
                return "done"
            time.sleep(0.02)
        raise AssertionError("the tool did not start")

    assert while_running(run, "gpu") == ("done", Clocks(1.98e9, ("power limit",)))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert while_running(lambda: 1, "cpu") == (1, Clocks())


def test_no_tool_and_a_broken_one_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert while_running(lambda: 1, "gpu") == (1, Clocks())
    tool(tmp_path, "exit 9")
    assert while_running(lambda: 1, "gpu") == (1, Clocks())


def test_a_device_that_is_held_back_is_reported() -> None:
    pulses = (
        Pulse(after_s=0.0, time_s=1.0, sm_clock_hz=1.98e9),
        Pulse(after_s=60.0, time_s=1.0, sm_clock_hz=1.4e9, held_back=("power limit",)),
    )
    assert steadiness(small_profile(pulses=pulses)) == (
        "the driver held the device back while it was measured: power limit; its clock fell from 1980 to 1400 MHz",
    )

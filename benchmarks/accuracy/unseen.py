"""A stack that no fit has seen: torchtitan, in PyTorch like llm-foundry, whose times stand in for its own.

Its tables state peak memory, which gives the one constant that is its own: what its allocator holds over what is in
use.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.accuracy.predict import Predictor
from benchmarks.accuracy.spec import STATE
from benchmarks.accuracy.tables.fsdp import torchtitan
from costmodel.device_kind import DeviceKind
from costmodel.stack import Stack
from profiles.calibrate import half_width

NAME, LIKE = "torchtitan", "llm-foundry"


def memory_errors(folder: Path, predictor: Predictor) -> list[float]:
    """Of each row's memory, with what the other rows' allocators hold in the median."""
    over = _held_over_used(folder, predictor)
    others = [over[:i] + over[i + 1 :] for i in range(len(over))]
    return [float(np.median(rest)) / own - 1.0 for own, rest in zip(over, others, strict=True) if rest]


def time_errors(folder: Path, predictor: Predictor, kinds: Mapping[str, DeviceKind], like: Stack) -> list[float]:
    """Logarithms of predicted over measured step times, with the constants of another stack."""
    return [
        math.log(predictor.step(case, kinds, like).step_s / case.measured_s)
        for case in torchtitan(folder)
        if case.measured_s
    ]


def unseen_stack(folder: Path, predictor: Predictor, kinds: Mapping[str, DeviceKind], like: Stack) -> Stack | None:
    """The stack with the times of `like`; None without its table."""
    over, errors = _held_over_used(folder, predictor), time_errors(folder, predictor, kinds, like)
    if not over:
        return None
    return msgspec.structs.replace(
        like,
        name=NAME,
        **STATE[NAME],
        fragmentation=float(np.median(over)),
        error=half_width(errors),
        fitted_on=f"times of {LIKE}; memory of Llama 3.1 under torchtitan on H100s, {len(over)} rows",
    )


def unseen_report(folder: Path, predictor: Predictor, kinds: Mapping[str, DeviceKind], like: Stack) -> str:
    """Both errors in a line each; '' without the table."""
    memory, times = np.array(memory_errors(folder, predictor)), time_errors(folder, predictor, kinds, like)
    if not len(memory):
        return ""
    apart = np.expm1(times)
    return (
        f"{NAME:22} {len(memory):4} rows, mean error {100 * np.abs(memory).mean():.1f}%, worst "
        f"{100 * memory[np.abs(memory).argmax()]:+.1f}%; each by the other rows\n"
        f"{NAME}'s step times by {LIKE}'s constants: {len(apart)} rows, mean error {100 * np.abs(apart).mean():.1f}%, "
        f"worst {100 * apart[np.abs(apart).argmax()]:+.1f}%"
    )


def _held_over_used(folder: Path, predictor: Predictor) -> list[float]:
    """Of each row, measured memory over what is predicted to be in use."""
    stack = Stack(name=NAME, reserve_bytes=0, **STATE[NAME])
    return [
        case.memory_bytes / case.measured_stage_bytes([s.peak_bytes for s in predictor.memory(case, {}, stack)])
        for case in torchtitan(folder)
        if case.memory_bytes
    ]

"""Predicted memory of devices against what was measured there."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.accuracy.cases import Case
from benchmarks.accuracy.fit import EPOCHS
from benchmarks.accuracy.predict import Predictor
from benchmarks.accuracy.spec import STATE
from benchmarks.accuracy.tables.fsdp import llm_foundry
from benchmarks.accuracy.tables.megatron_a100 import bloom
from costmodel.stack import Stack
from profiles.constants import shipped_stacks


def memory_cases(folder: Path) -> Iterator[Case]:
    """Cases whose memory was measured, or that are known to have fitted or not."""
    for case in (*bloom(folder), *llm_foundry(folder)):
        if case.memory_bytes or case.fits is not None:
            yield case


MEASURED = ("jeanzay",)
"""Stacks whose devices' memory was measured, and so what they hold back; others leave it to their device kinds."""


def with_memory(stacks: Mapping[str, Stack], folder: Path, predictor: Predictor) -> dict[str, Stack]:
    """The stacks with how they keep state, and with the bytes that they hold beside what is planned: the median of what
    was measured over what is predicted without."""
    own = {n: msgspec.structs.replace(s, reserve_bytes=0) for n, s in stacks.items() if STATE.get(n)}
    out = dict(stacks)
    for source in [name for name in MEASURED if name in own]:
        beside = [
            case.memory_bytes
            - case.measured_stage_bytes([s.peak_bytes for s in predictor.memory(case, {}, own[source])])
            for case in memory_cases(folder)
            if case.memory_bytes and EPOCHS.get(case.stack, case.stack) == source
        ]
        reserve = round(float(np.median(beside)), -8) if beside else None
        kept = int(reserve) if reserve is not None and reserve > 0 else None
        out[source] = msgspec.structs.replace(own[source], reserve_bytes=kept)
    for epoch, base in EPOCHS.items():
        if epoch in out and base in out:
            fields = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "reserve_bytes", "pooled", "saves", "reruns")
            out[epoch] = msgspec.structs.replace(out[epoch], **{name: getattr(out[base], name) for name in fields})
    return out


def memory_report(folder: Path, predictor: Predictor) -> str:
    """Errors by table, and how many rows that ran, and that did not fit, are predicted so."""
    stacks = shipped_stacks()
    errors: dict[str, list[float]] = defaultdict(list)
    verdicts: dict[str, list[bool]] = defaultdict(list)
    for case in memory_cases(folder):
        if case.stack not in stacks:
            continue
        stages = predictor.memory(case, {}, stacks[case.stack])
        peak = case.measured_stage_bytes([stage.peak_bytes for stage in stages])
        if case.memory_bytes:
            errors[case.table].append(peak / case.memory_bytes - 1.0)
        if case.fits is not None:
            verdicts[case.table].append(all(stage.fits for stage in stages) == case.fits)
    lines = ["Memory of devices"]
    for name in dict.fromkeys([*errors, *verdicts]):
        e, v = np.array(errors[name]), verdicts[name]
        size = (
            f"{len(e):4} rows, mean error {100 * np.abs(e).mean():.1f}%, worst {100 * e[np.abs(e).argmax()]:+.1f}%"
            if len(e)
            else ""
        )
        fits = f"{sum(v)} of {len(v)} rows predicted to fit or not as they did" if v else ""
        lines.append(f"{name:22} {'; '.join(filter(None, (size, fits)))}")
    return "\n".join(lines) if len(lines) > 1 else ""

"""How far predictions are from published measurements.

    python -m benchmarks.accuracy FOLDER                       rows predicted with the constants that ship
    python -m benchmarks.accuracy FOLDER --cross-validate 2    fitted to one half, the other predicted; so often
    python -m benchmarks.accuracy FOLDER --uncalibrated        catalogue figures and one assumed stack
    python -m benchmarks.accuracy FOLDER --ship FILE           fits all rows and writes the document that ships

FOLDER holds the tables as CSV files; tables that it lacks are left out. `--group NAME` takes one group of tables alone
(with `--ship`, constants of the others stay as they ship), `--rows` prints each row.
"""

import argparse
import math
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.accuracy.cases import Case
from benchmarks.accuracy.fit import ALIKE, EPOCHS, FAMILIES, bind, fit, fitted_kinds
from benchmarks.accuracy.memory import memory_report, with_memory
from benchmarks.accuracy.predict import Predictor
from benchmarks.accuracy.scores import Scores, score
from benchmarks.accuracy.spec import GROUPS, STATE, Group, groups
from benchmarks.accuracy.unseen import LIKE, unseen_report, unseen_stack
from costmodel.device_kind import DeviceKind
from costmodel.stack import Stack
from profiles.calibrate import half_width
from profiles.constants import SHARES, Constants, FittedKinds, shipped, shipped_stacks, write_constants
from profiles.datasheets import datasheet_kinds

ASSUMED = Stack(
    name="assumed",
    traffic=0.7,
    start_s=25e-6,
    inter_start_s=60e-6,
    tier_share=0.78,
    inter_share=0.5,
    gradient_overlap=0.6,
    parameter_overlap=0.8,
    tensor_overlap=0.3,
    send_exposed=0.4,
    microbatch_s=2e-3,
    step_s=0.1,
    skew=0.005,
)
"""What would be assumed of any framework before a row was seen: about the middle of what others were fitted to."""


def assumed(case: Case) -> Stack:
    """`ASSUMED`, with what is known of the case's software: what its remat runs again."""
    return msgspec.structs.replace(ASSUMED, reruns=STATE[case.stack].get("reruns", ASSUMED.reruns))


SPLITS = 2
"""Splits into halves whose held-out rows give the shipped error bars."""

ENOUGH = 12
"""Rows from which on a stack's error bar is its own."""

POOLED = {
    "vtrain_multi_node": "vtrain_multi_node",
    "megatron_lm_a100": "Selene",
    "korthikanti_2022": "Selene",
    "bigscience_bloom_a100": "bigscience_bloom",
    "amp_t4": "16 x T4",
    "amp_het_cluster": "V100 + T4",
    "megatron_core_h100": "H100 pooled",
    "mlperf_gpt3": "H100 pooled",
    "mlperf_llama31_405b": "H100 pooled",
    "megatron_bridge_bf16": "H100 pooled",
    "nemo_fp8": "NeMo, FP8",
    "llm_foundry_mpt": "llm_foundry",
    "tpu_recipes": "TPU recipes",
    "mlperf_gpt3_tpu": "TPU, MLPerf",
}
Predictions = dict[str, list[tuple[Case, float]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cross-validate", type=int, default=0, metavar="TIMES")
    parser.add_argument("--uncalibrated", action="store_true")
    parser.add_argument("--ship", type=Path, metavar="FILE")
    parser.add_argument("--group", action="append", default=[], choices=[g.name for g in GROUPS])
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--evaluations", type=int, default=20)
    given = parser.parse_args()
    if not given.folder.is_dir() or not list(given.folder.glob("*.csv")):
        print(f"skipped: {given.folder} holds no CSV tables of published measurements")
        return 0
    predictor = Predictor()
    if given.ship:
        ship(given.folder, given.ship, predictor, given.evaluations, given.group)
        return 0
    found: Predictions = defaultdict(list)
    for group in groups(given.group):
        cases = group.cases(given.folder)
        if given.cross_validate:
            rows = cross_validated(group, cases, predictor, given.cross_validate, given.evaluations)
        elif given.uncalibrated:
            kinds = {name: datasheet_kinds()[name] for c in cases for name in [f.device for f, _ in c.fabrics]}
            rows = [(c, predictor.step(c, kinds, assumed(c)).step_s) for c in cases]
        else:
            stacks = shipped_stacks()
            rows = [(c, predictor.step(c, {}, stacks[c.stack]).step_s) for c in cases if c.stack in stacks]
        for case, time_s in rows:
            found[POOLED[case.table]].append((case, time_s))
    how = (
        f"cross-validated, {given.cross_validate} x 2 halves"
        if given.cross_validate
        else "uncalibrated: datasheets and one assumed stack"
        if given.uncalibrated
        else "shipped constants"
    )
    print(f"Step time ({how})")
    print(table(found))
    if given.rows:
        print(row_lines(found))
    if not given.uncalibrated:
        print(bars(found, shipped=not given.cross_validate))
    print(memory_report(given.folder, predictor))
    print(unseen_report(given.folder, predictor, {}, shipped_stacks()[LIKE]))
    return 0


def cross_validated(
    group: Group, cases: Sequence[Case], predictor: Predictor, times: int, evaluations: int
) -> list[tuple[Case, float]]:
    """Every row predicted by constants that were fitted to the half without it, `times` times over."""
    out = []
    for salt in range(times):
        for fold in (0, 1):
            begun = time.time()
            known = [c for c in cases if c.fold(salt) != fold]
            held = [c for c in cases if c.fold(salt) == fold]
            stacks = group.stack_records()
            found = fit(known, group.free, stacks, predictor, evaluations=evaluations)
            kinds, own = bind(found.values, fitted_kinds(group.free, stacks), stacks)
            out += [(c, predictor.step(c, kinds, own[c.stack]).step_s) for c in held]
            print(f"{group.name}: half {fold} of split {salt} in {time.time() - begun:.0f} s", file=sys.stderr)
    return out


def table(found: Mapping[str, Sequence[tuple[Case, float]]]) -> str:
    lines = [
        f"{'table':22} {'rows':>5} {'mean':>6} {'median':>6} {'worst':>7} {'bias':>6} {'rank':>5} {'regret':>7} "
        f"{'worst':>6} groups"
    ]
    for name in dict.fromkeys(POOLED.values()):
        if name in found:
            s: Scores = score([c for c, _ in found[name]], [t for _, t in found[name]])
            lines.append(
                f"{name:22} {s.rows:5} {100 * s.mean:5.1f}% {100 * s.median:5.1f}% {100 * s.worst:+6.1f}% "
                f"{100 * s.bias:+5.1f}% {s.rank:5.3f} {_share(s.regret):>7} {_share(s.worst_regret):>6} "
                f"{s.regret_groups:5}"
            )
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def row_lines(found: Mapping[str, Sequence[tuple[Case, float]]]) -> str:
    lines = []
    for rows in found.values():
        for case, time_s in rows:
            words = ",".join(f"{k}={v}" for k, v in case.strategy.items() if v not in (None, False))
            dims = dict(case.model[1])
            size = f"{dims['hidden']}x{dims['layers']} heads {dims['heads']} seq {dims['seq']}"
            error = time_s / (case.measured_s or math.nan) - 1
            lines.append(
                f"{case.table}:{case.row} {size} batch {case.global_batch} {words}: measured {case.measured_s:.3g} s, "
                f"predicted {time_s:.3g} s, {100 * error:+.1f}%"
            )
    return "\n".join(lines)


def bars(found: Mapping[str, Sequence[tuple[Case, float]]], *, shipped: bool) -> str:
    """How many rows lie inside their stack's error bar, and how wide these are."""
    stacks = shipped_stacks()
    inside, widths, count = 0, [], 0
    for rows in found.values():
        for case, time_s in rows:
            if case.stack in stacks:
                width = stacks[case.stack].error
                inside += abs(math.log(time_s / (case.measured_s or math.nan))) <= width
                widths.append(width)
                count += 1
    if not count:
        return ""
    what = "fitted rows" if shipped else "rows that the fit did not see"
    return (
        f"error bars: {inside} of {count} {what} inside ({100 * inside / count:.0f}%), "
        f"median half-width {100 * (math.exp(float(np.median(widths))) - 1):.1f}%"
    )


def ship(folder: Path, target: Path, predictor: Predictor, evaluations: int, names: Sequence[str]) -> None:
    """Fits groups (every one if none is named) to all of their rows; error bars come from rows that a fit to half of
    them did not see."""
    before = shipped() if names else Constants()
    stacks: dict[str, Stack] = {}
    fitted = {one.kinds[0]: one for one in before.fitted}
    every_kind: dict[str, DeviceKind] = {}
    for group in groups(names):
        cases = group.cases(folder)
        held = cross_validated(group, cases, predictor, SPLITS, evaluations)
        records = group.stack_records()
        found = fit(cases, group.free, records, predictor, evaluations=evaluations)
        kinds, own = bind(found.values, fitted_kinds(group.free, records), records)
        every_kind |= kinds
        every = [math.log(t / (c.measured_s or math.nan)) for c, t in held]
        for name, stack in own.items():
            errors = [math.log(t / (c.measured_s or math.nan)) for c, t in held if c.stack in (name, EPOCHS.get(name))]
            if len(errors) < ENOUGH:  # too few to know nine of ten by: those of like stacks stand in, if wider
                errors = errors if half_width(errors) > half_width(every) else every
            rows = sum(c.stack == name for c in cases)
            on = f"{group.stacks[name]}; {rows} rows"
            stacks[name] = msgspec.structs.replace(stack, error=half_width(errors), fitted_on=on)
        for one in group.free:
            if one.of in group.stacks or one.of in FAMILIES:
                continue
            alike = (one.of, *(name for name, base in ALIKE.items() if base == one.of))
            names = {constant.name for constant in one.constants}
            shares = {name: getattr(kinds[one.of], name) for name in SHARES if name in names}
            ran = {case.stack for case in cases for fabric, _ in case.fabrics if fabric.device in alike}
            on = "; ".join(name for name in group.stacks if name in ran)
            fitted[one.of] = FittedKinds(kinds=alike, fitted_on=on, **shares)
    stacks = with_memory(stacks, folder, predictor)
    unseen = unseen_stack(folder, predictor, every_kind, stacks[LIKE]) if LIKE in stacks else None
    stacks |= {unseen.name: unseen} if unseen is not None else {}
    stacks = {one.name: one for one in before.stacks} | stacks
    write_constants(target, Constants(stacks=tuple(stacks.values()), fitted=tuple(fitted.values())))
    print(f"wrote {target}: {len(stacks)} stacks, {len(fitted)} kinds")


if __name__ == "__main__":
    sys.exit(main())

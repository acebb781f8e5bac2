"""Shipped profiles from published measurements: lines of collectives and rates of matrix products.

    python benchmarks/fit_published.py FOLDER [--write]

FOLDER holds `collectives.csv` and `matmul_peak.csv`, tables of published single-op measurements that are no part of
this project. Without --write the profiles in `profiles/measured` are compared with what FOLDER gives; with it they are
written. Few constants are fitted: two of a collective, one of products.

    S1  line of a collective     least squares of the relative error (F1) over all published sizes of one group
    S2  rate of products         0.9 of the best published shape's, as in the catalogue: that shape was searched for

Rows are used where the source names the device (of A100s behind NVSwitch either size of memory will do) and the message
size means what it means here. Left out: collectives between nodes, `broadcast` and `reduce`, which no plan has, rates
printed with one digit, and all-gathers and reduce-scatters of MI200, whose message sizes contradict the all-reduces of
the same file.
"""

import argparse
import csv
import sys
from collections import defaultdict
from pathlib import Path

from profiles.catalogue import device_kind
from profiles.fitting import fitted
from profiles.schema import CollectiveSample, Fit, Profile, Rates
from profiles.store import decode_profile, encode_profile
from profiles.timing import rounded

SHIPPED = Path(__file__).parents[1] / "profiles" / "measured"

DEVICES = {
    "A100-SXM4-40GB (8x, NVSwitch)": "A100-SXM4-40GB",
    "A100 (8x, NVLink3 NVSwitch)": "A100-SXM4-80GB",
    "H200 (8x, NVLink4, NVLS from 2 MiB)": "H200-SXM-141GB",
    "H200": "H200-SXM-141GB",
    "B200 (AWS P6-B200, NVLink5)": "B200-SXM",
    "B200": "B200-SXM",
    "MI200 (intra-node)": "MI250X-GCD",
}
ACCELERATORS = {
    "NVIDIA A100 SXM": ("A100-SXM4-40GB", "A100-SXM4-80GB"),
    "NVIDIA A100 PCIe": ("A100-PCIe-40GB", "A100-PCIe-80GB"),
    "NVIDIA H100 SXM": ("H100-SXM5-80GB",),
    "NVIDIA H200 SXM": ("H200-SXM-141GB",),
    "NVIDIA GH200 SXM": ("GH200-96GB",),
    "NVIDIA B200 SXM": ("B200-SXM",),
    "NVIDIA B300 SXM": ("B300-SXM",),
    "NVIDIA GB200 SXM": ("GB200",),
    "AMD MI300X": ("MI300X",),
    "AMD MI325X": ("MI325X",),
    "AMD MI355X": ("MI355X",),
}
KINDS = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
FASTEST_SHAPE, FEWEST_DIGITS = 0.9, 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help="write the shipped profiles")
    arguments = parser.parse_args()
    if not (arguments.folder / "collectives.csv").is_file():
        print(f"skipped: {arguments.folder} has no collectives.csv")
        return 0
    differ = []
    for name, profile in sorted(profiles(arguments.folder).items()):
        path = SHIPPED / f"{name}.profile.json"
        lines = ", ".join(f"{one.kind} of {one.size} ({one.error:.0%})" for one in profile.collective_lines)
        rates = ", ".join(
            f"{key} {fit.value / 1e12:.0f} TFLOP/s" for key, fit in profile.rates.matmul_flops_per_s.items()
        )
        print(f"{name}: {'; '.join(filter(None, (rates, lines)))}")
        if arguments.write:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(encode_profile(profile))
        elif not path.is_file() or decode_profile(path.read_bytes()) != profile:
            differ.append(name)
    print(f"differ from what is shipped: {', '.join(differ)}" if differ else "as shipped")
    return 1 if differ else 0


def profiles(folder: Path) -> dict[str, Profile]:
    """The profile of each device kind that the tables have something of."""
    samples, sources = _collectives(folder / "collectives.csv")
    rates, more = _rates(folder / "matmul_peak.csv")
    found = {}
    for name in {*samples, *rates}:
        kind = device_kind(name)
        mine = tuple(sorted(samples[name], key=lambda one: (one.kind, one.size, one.full_bytes)))
        found[name] = fitted(
            Profile(
                device_kind=name,
                jax_device_kind=kind.jax_names[0],
                platform=kind.platform,
                devices=max((one.size for one in mine), default=1),
                rates=Rates(matmul_flops_per_s=dict(sorted(rates[name].items()))),
                collectives=mine,
                sources=tuple(sorted({*sources[name], *more[name]})),
            )
        )
    return found


def _collectives(path: Path) -> tuple[dict[str, list[CollectiveSample]], dict[str, set[str]]]:
    samples: dict[str, list[CollectiveSample]] = defaultdict(list)
    sources: dict[str, set[str]] = defaultdict(set)
    seen = set()
    for row in _rows(path):
        name, kind, size = DEVICES.get(row["gpu"]), row["collective"], int(row["num_gpus"])
        if name is None or kind not in KINDS or row["num_nodes"] != "1":
            continue
        if name == "MI250X-GCD" and kind in ("all_gather", "reduce_scatter"):
            continue
        full_bytes = int(row["message_bytes"])
        time_s = _time_s(row, kind, size, full_bytes)
        if time_s is None or (name, kind, size, full_bytes) in seen:
            continue
        seen.add((name, kind, size, full_bytes))
        samples[name].append(
            CollectiveSample(kind=kind, size=size, stride=1, full_bytes=full_bytes, time_s=rounded(time_s))  # type: ignore[arg-type]
        )
        sources[name].add(f"collectives: {row['source']} ({row['tool']})")
    return samples, sources


def _time_s(row: dict[str, str], kind: str, size: int, full_bytes: int) -> float | None:
    """As printed, else from the bus bandwidth; None where that has too few digits."""
    if row["time_us"]:
        return float(row["time_us"]) * 1e-6
    if float(row["busbw_GBps"]) < FEWEST_DIGITS:
        return None
    turns = 2 if kind == "all_reduce" else 1
    return turns * (size - 1) / size * full_bytes / (float(row["busbw_GBps"]) * 1e9)


def _rates(path: Path) -> tuple[dict[str, dict[str, Fit]], dict[str, set[str]]]:
    rates: dict[str, dict[str, Fit]] = defaultdict(dict)
    sources: dict[str, set[str]] = defaultdict(set)
    for row in _rows(path):
        for name in ACCELERATORS.get(row["accelerator"], ()):
            # The table's column of dtypes says FP8 in every row: the rate that it is compared with tells which it is.
            peaks = device_kind(name).peak_flops_per_s
            near = [key for key in ("bfloat16", "float8") if key in peaks]
            spec = float(row["spec_tflops"]) * 1e12
            dtype = min(near, key=lambda key: abs(peaks[key] / spec - 1))
            rates[name][dtype] = Fit(value=rounded(FASTEST_SHAPE * float(row["achieved_tflops"]) * 1e12))
            shape = "x".join(row[side] for side in ("best_M", "best_K", "best_N"))
            sources[name].add(f"{dtype} products, best of {shape}: {row['source']} ({row['software']})")
    return rates, sources


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    sys.exit(main())

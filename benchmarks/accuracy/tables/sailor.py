"""Sailor's whole plans on GH200 nodes, predicted from its own layer times: step time and peak memory.

    python -m benchmarks.accuracy.tables.sailor FOLDER

FOLDER holds `sailor_validation.csv` and `sailor_layer_profiles.csv`. Each row is predicted with constants fitted to the
others: one for time (the achieved share of the network) and two for memory. None depends on the row or the model. What
is not stated with the rows and assumed: Megatron's unfused layers with their softmax in one kernel, float16 activations
and gradients, no remat, Adam with float32 state, a network card of 200 Gbit/s for each device.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.accuracy.cases import Case, Fabric, gpt, padded, read, whole
from benchmarks.accuracy.predict import Predictor
from costmodel.stack import Stack
from planner.strategy.estimator import StrategyEstimator
from planner.strategy.layer_table import LayerTable
from profiles.calibrate import Calibration, Constant, calibrate
from profiles.catalogue import device_kind
from profiles.import_layers import import_layers
from profiles.tables import read_table

KIND = "GH200-96GB"
NODE = Fabric(KIND, 4, 150e9, 100e9, nics=4)
GPU, TP = "GH-96", 4
STACK = Stack(name="sailor", pooled=True, saves="inputs", reruns="whole_layers")

TIME = (Constant("inter_share", 0.3, 1.7, 0.0, 1.0),)
MEMORY = (Constant("reserve_bytes", 3e9, 2.0), Constant("fragmentation", 1.1, 1.2))

MODELS = {
    "OPT-350": gpt(1024, 24, 16, 2048, padded(50272, TP), dtype="float16", activation="relu"),
    "GPT-Neo-2.7": gpt(2560, 32, 20, 2048, padded(50257, TP), dtype="float16"),
}
"""By the layer table's name. OPT-350m's layers normalise after adding; that costs the same."""

_CALLED = {"OPT-350": "OPT-350", "GPT-NEO": "GPT-Neo-2.7"}
_ENTRIES = {26: "OPT-350", 34: "GPT-Neo-2.7"}


def sailor(folder: Path) -> Iterator[Case]:
    """Plans with one pipeline of equal stages."""
    for i, r in enumerate(read(folder, "sailor_validation")):
        (stages,), (degrees,) = json.loads(r["layers_per_stage"]), json.loads(r["dp_per_stage"])
        entries = sum(len(stage) for stage in stages)
        model, note = _ENTRIES[entries], ""
        if model != _CALLED[r["model"]]:
            note = f"said to be {r['model']}, its {entries} layers are those of {model}"
        layers = [len(stage) for stage in stages]
        layers[0] -= 1  # the embedding and the head are entries of the layer table
        layers[-1] -= 1
        strategy = {
            "dp": degrees[0],
            "tp": TP,
            "pp": len(stages),
            "microbatch": whole(r, "micro_batch_seqs"),
            "attention": "fused",
            "gradient_dtype": "float16",
        }
        yield Case(
            table="sailor_validation",
            row=i,
            model=MODELS[model],
            fabrics=((NODE, whole(r, "num_nodes")),),
            stack=STACK.name,
            strategy=strategy | ({"partition": tuple(layers)} if len(stages) > 1 else {}),
            global_batch=whole(r, "global_batch_seqs"),
            measured_s=float(r["iteration_time_s"]),
            memory_bytes=float(r["max_memory_bytes"]),
            note=note,
            layer_model=model,
        )


class LayerPredictor:
    """Predictions of cases whose stages' times come from a layer table."""

    def __init__(self, folder: Path):
        text = read_table(folder / "sailor_layer_profiles.csv")
        kind = device_kind(KIND)
        self.tables = {
            name: LayerTable(
                profile=import_layers(text, source="sailor_layer_profiles.csv", model=name, kind=kind, gpu=GPU),
                model=name,
                kind=KIND,
            )
            for name in MODELS
        }
        self.plain = Predictor()

    def _estimator(self, case: Case, stack: Stack) -> StrategyEstimator:
        one = self.plain.estimator(case, {}, stack)
        one.layers = self.tables[case.layer_model]
        return one

    def step_s(self, cases: Sequence[Case], values: Mapping[str, float]) -> np.ndarray:
        stack = msgspec.structs.replace(STACK, **values)
        return np.array([self._estimator(c, stack).step(self.plain.strategy(c), c.global_batch).step_s for c in cases])

    def peak_bytes(self, cases: Sequence[Case], values: Mapping[str, float]) -> np.ndarray:
        reserve = round(values["reserve_bytes"])
        stack = msgspec.structs.replace(STACK, reserve_bytes=reserve, fragmentation=values["fragmentation"])
        found = [self._estimator(c, stack).memory(self.plain.strategy(c), c.global_batch) for c in cases]
        return np.array([float(max(stage.peak_bytes for stage in stages)) for stages in found])


def left_out(
    cases: Sequence[Case],
    constants: Sequence[Constant],
    predict: Callable[[Sequence[Case], Mapping[str, float]], np.ndarray],
    measured: np.ndarray,
) -> tuple[Calibration, np.ndarray]:
    """Constants fitted to all cases, and each case's relative error under those fitted to the others."""
    everything = calibrate(constants, lambda values: predict(cases, values), measured)
    off = []
    for i, case in enumerate(cases):
        others = [j for j in range(len(cases)) if j != i]
        rest = [cases[j] for j in others]
        values = calibrate(constants, lambda v, rest=rest: predict(rest, v), measured[others]).values
        off.append(float(predict([case], values)[0]) / measured[i] - 1.0)
    return everything, np.array(off)


def main(folder: Path) -> int:
    cases = list(sailor(folder))
    if not cases or not (folder / "sailor_layer_profiles.csv").exists():
        print(f"skipped: {folder} has no sailor_validation.csv and sailor_layer_profiles.csv")
        return 0
    predictor = LayerPredictor(folder)
    time_s = np.array([case.measured_s for case in cases])
    memory = np.array([case.memory_bytes for case in cases])
    of_time, time_off = left_out(cases, TIME, predictor.step_s, time_s)
    of_memory, memory_off = left_out(cases, MEMORY, predictor.peak_bytes, memory)
    print("row  model        nodes  pp  dp  mbs  measured  time off    measured  memory off")
    for at, case in enumerate(cases):
        s, nodes = case.strategy, case.fabrics[0][1]
        time_words, memory_words = f"{100 * time_off[at]:+7.1f}%", f"{100 * memory_off[at]:+9.1f}%"
        print(
            f"{case.row:3}  {case.layer_model:11}  {nodes:5}  {s['pp']:2}  {s['dp']:2}  {s['microbatch']:3}"
            f"  {case.measured_s:6.3f} s  {time_words}  {memory[at] / 1e9:7.1f} GB  {memory_words}"
            + (f"  ({case.note})" if case.note else "")
        )
    for words, fitted, off in (("time", of_time, time_off), ("memory", of_memory, memory_off)):
        inside = np.abs(np.expm1(fitted.residuals)).mean()
        values = ", ".join(f"{name} {value:.3g}" for name, value in fitted.values.items())
        sizes = np.abs(off)
        print(
            f"{words}: left out, mean {100 * sizes.mean():.1f}%, median {100 * np.median(sizes):.1f}%, worst "
            f"{100 * sizes.max():.1f}%; fitted to all rows {100 * inside:.1f}% with {values}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

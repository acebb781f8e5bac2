"""Megatron on A100s: vTrain's validation, Selene, and the search for BLOOM's configuration on Jean Zay."""

import math
from collections.abc import Iterator
from pathlib import Path

from benchmarks.accuracy.cases import Case, Fabric, Row, gpt, number, padded, read, whole

A100_VTRAIN = Fabric("A100-SXM4-80GB", 8, 300e9, 100e9)
A100_SELENE = Fabric("A100-SXM4-80GB", 8, 300e9, 200e9)
A100_JEANZAY = Fabric("A100-SXM4-80GB", 8, 300e9, 50e9, nics=4)


def vtrain(folder: Path) -> Iterator[Case]:
    """Megatron-DeepSpeed on 8 to 512 A100s (vTrain's multi-node validation)."""
    for i, r in enumerate(read(folder, "vtrain_multi_node")):
        tp, gpus = whole(r, "tp"), whole(r, "num_gpus")
        hidden, layers = whole(r, "hidden"), whole(r, "layers")
        yield Case(
            table="vtrain_multi_node",
            row=i,
            model=gpt(hidden, layers, whole(r, "heads"), whole(r, "seq_len"), padded(50257, tp)),
            fabrics=((A100_VTRAIN, math.ceil(gpus / 8)),),
            stack="vtrain",
            strategy={
                "dp": whole(r, "dp"),
                "tp": tp,
                "pp": whole(r, "pp"),
                "microbatch": whole(r, "micro_batch_seqs"),
                "remat": "full",
                "attention": "fused",
                "gradient_dtype": "float16",
                "scatter_gather": True,
            },
            global_batch=whole(r, "global_batch_seqs"),
            measured_s=float(r["iteration_time_ms"]) / 1e3,
            group=(hidden, layers, gpus, whole(r, "global_batch_seqs")),
        )


def selene(folder: Path) -> Iterator[Case]:
    """Megatron-LM on Selene: SC21 tables 1 and 2, and table 5 of Korthikanti et al. 2022."""
    for i, r in enumerate(read(folder, "megatron_lm_a100")):
        stated = r["table"] in ("SC21_Table1_weak_scaling", "SC21_Table2") and r["tp"] and r["micro_batch_seqs"]
        if not stated or "ZeRO" in r["scheme"]:
            continue
        hidden, layers, seq = whole(r, "hidden"), whole(r, "layers"), whole(r, "seq_len")
        tp, pp, dp = whole(r, "tp"), whole(r, "pp"), whole(r, "dp")
        vocab, batch = whole(r, "vocab", 51200), whole(r, "global_batch_seqs")
        flops = 96 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
        each = r["layers_per_virtual_stage"]
        interleave = (
            layers // pp // int(float(each))
            if each
            else 2
            if r["table"] == "SC21_Table2" and "175" in r["model"]
            else 1
        )
        yield Case(
            table="megatron_lm_a100",
            row=i,
            model=gpt(hidden, layers, whole(r, "heads"), seq, padded(vocab, tp)),
            fabrics=((A100_SELENE, math.ceil(dp * tp * pp / 8)),),
            stack="selene",
            strategy={
                "dp": dp,
                "tp": tp,
                "pp": pp,
                "interleave": interleave if pp > 1 else 1,
                "microbatch": whole(r, "micro_batch_seqs"),
                "remat": "full",
                "attention": "fused",
                "gradient_dtype": "float16",
                "scatter_gather": True,
            },
            global_batch=batch,
            measured_s=flops / (float(r["tflops_per_gpu_hw"]) * 1e12 * dp * tp * pp),
        )
    for i, r in enumerate(read(folder, "korthikanti_2022")):
        if not r["table"].startswith("Table5_end") or not r["iteration_time_s"]:
            continue
        tp, pp = whole(r, "tp"), whole(r, "pp")
        full = r["mode"].startswith("full")
        yield Case(
            table="korthikanti_2022",
            row=i,
            model=gpt(
                whole(r, "hidden"), whole(r, "layers"), whole(r, "heads"), whole(r, "seq_len"), padded(51200, tp)
            ),
            fabrics=((A100_SELENE, math.ceil(whole(r, "num_gpus") / 8)),),
            stack="selene-2022",
            strategy={
                "dp": whole(r, "dp", 1),
                "tp": tp,
                "pp": pp,
                "interleave": whole(r, "vp_interleave", 1),
                "microbatch": whole(r, "micro_batch_seqs"),
                "remat": "full" if full else "selective",
                "sp": not full,
                "attention": "fused",
                "gradient_dtype": "float16",
                "scatter_gather": True,
            },
            global_batch=whole(r, "global_batch_seqs"),
            measured_s=float(r["iteration_time_s"]),
        )


_NUMA_FIXED = 765
"""Line of the log from which on the nodes' NUMA settings were right: configurations that were run on both sides of it
(134.0 and 128.8 s, 123.8 and 117.1 s, 120.9 and 114.0 s) took 4 to 6% less after it, on 25 February 2022."""

# Layers are not stated with some early rows: those that make the stated number of parameters at this width.
_BLOOM_HEADS = {12288: 96, 13312: 64, 13824: 96, 14336: 64, 14400: 96}


def bloom(folder: Path) -> Iterator[Case]:
    """Megatron-DeepSpeed on Jean Zay, the search for BLOOM's configuration."""
    for i, r in enumerate(read(folder, "bigscience_bloom_a100")):
        if not r["hidden"] or not r["tp"] or not r["pp"]:
            continue
        hidden, tp, pp = whole(r, "hidden"), whole(r, "tp"), whole(r, "pp")
        gpus = whole(r, "num_gpus")
        dp = whole(r, "dp", max(1, gpus // tp // pp))
        batch, micro = whole(r, "global_batch_seqs"), whole(r, "micro_batch_seqs", 1)
        note = []
        layers = whole(r, "layers", 0)
        if not layers:
            size = float(r["model_size"].rstrip("B") or 0) * 1e9
            layers = max(1, round((size - 250_880 * hidden) / (12 * hidden**2) / pp)) * pp
            note.append("layers inferred from the number of parameters")
        heads = whole(r, "heads", 0)
        if not heads:
            heads = _BLOOM_HEADS.get(hidden, hidden // 128)
            note.append("heads inferred from neighbouring rows")
        if hidden % heads or dp * tp * pp != gpus or batch % (dp * micro):
            continue
        late = int(r["line"]) >= _NUMA_FIXED
        seconds = float(r["sec_per_iteration"]) if number(r["sec_per_iteration"]) else None
        memory = r["max_gpu_memory_GB"]
        contradicts = seconds is not None and number(r["tflops_per_gpu"]) and not _agrees(r, seconds, layers, batch)
        if contradicts:
            note.append("the row's TFLOP/s are those of another batch than it states")
        zero = 0 if r["zero_stage"].startswith("0") else 1
        yield Case(
            table="bigscience_bloom_a100",
            row=i,
            model=gpt(hidden, layers, heads, 2048, padded(250_680, tp)),
            fabrics=((A100_JEANZAY, math.ceil(gpus / 8)),),
            stack="jeanzay" if late else "jeanzay-before-numa",
            strategy={
                "dp": dp,
                "tp": tp,
                "pp": pp,
                "microbatch": micro,
                "remat": "full",
                "attention": "fused",
                "zero": zero,
                "scatter_gather": True,
                "gradient_dtype": "float32" if r["precision"].startswith("bf") else "float16",
            },
            global_batch=batch,
            measured_s=seconds,
            memory_bytes=float(memory) * 1e9 if number(memory) else None,
            fits=False if "OOM" in (memory, r["sec_per_iteration"]) else True if seconds or number(memory) else None,
            group=(hidden, layers, heads, gpus, batch, late),
            note="; ".join(note),
            scored=not contradicts,
            first_stage_measured=True,
        )


def _agrees(row: Row, seconds: float, layers: int, batch: int) -> bool:
    """Whether a row's seconds and TFLOP/s are of the same work (Narayanan et al. 2021, equation 3), within 25%."""
    hidden, seq, gpus = whole(row, "hidden"), 2048, whole(row, "num_gpus")
    flops = 96 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + 250_680 / (16 * layers * hidden))
    return abs(math.log(flops / (seconds * gpus * float(row["tflops_per_gpu"]) * 1e12))) < 0.25

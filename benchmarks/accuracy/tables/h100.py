"""Megatron-Core and NeMo on H100s: its own scaling table, and MLPerf's GPT-3 and Llama 3.1 405B."""

import math
from collections.abc import Iterator
from pathlib import Path

from benchmarks.accuracy.cases import Case, Fabric, gpt, number, padded, read, whole

DGX_H100 = Fabric("H100-SXM5-80GB", 8, 450e9, 400e9)
_OVERLAPPED = {
    "attention": "flash",
    "sp": True,
    "zero": 1,
    "overlap_gradients": True,
    "overlap_tensor": True,
    "scatter_gather": True,
}


def megatron_core(folder: Path) -> Iterator[Case]:
    """Megatron-Core r0.8.0. The microbatch is not stated: 1 is assumed. TFLOP/s count the model's FLOPs."""
    for i, r in enumerate(read(folder, "megatron_core_h100")):
        if not r["tp"] or not r["pp"] or not number(r["model_tflops_per_gpu"]):
            continue
        hidden, layers, seq, vocab = (whole(r, name) for name in ("hidden", "layers", "seq_len", "vocab"))
        tp, pp, dp, batch = whole(r, "tp"), whole(r, "pp"), whole(r, "dp"), whole(r, "global_batch_seqs")
        flops = 72 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))
        yield Case(
            table="megatron_core_h100",
            row=i,
            model=gpt(hidden, layers, whole(r, "heads"), seq, vocab),
            fabrics=((DGX_H100, math.ceil(dp * tp * pp / 8)),),
            stack="megatron-core",
            strategy=dict(dp=dp, tp=tp, pp=pp, microbatch=1, gradient_dtype="bfloat16", **_OVERLAPPED),
            global_batch=batch,
            measured_s=flops / (float(r["model_tflops_per_gpu"]) * 1e12 * dp * tp * pp),
            note="microbatch 1 and no recomputation assumed",
        )


def mlperf(folder: Path) -> Iterator[Case]:
    """GPT-3 175B and Llama 3.1 405B in FP8 on H100 and H200; parts of two layers take turns."""
    for i, r in enumerate(read(folder, "mlperf_llm_training")):
        kind = "H200-SXM-141GB" if "H200" in r["accelerator"] else "H100-SXM5-80GB"
        if "H100" not in r["accelerator"] and "H200" not in r["accelerator"]:
            continue
        if r["benchmark"] not in ("gpt3", "llama31_405b") or not number(r["derived_step_time_s"]):
            continue
        big = r["benchmark"] == "llama31_405b"
        tp, pp, cp = whole(r, "tp", 4), whole(r, "pp", 8), whole(r, "cp", 1)
        micro, gpus, batch = (
            whole(r, "micro_batch_seqs", 1),
            whole(r, "num_accelerators"),
            whole(r, "global_batch_seqs"),
        )
        dp = gpus // (tp * pp * cp)
        layers = 126 if big else 96
        if batch % (dp * micro):
            continue
        if big:
            dims = {
                "hidden": 16384,
                "layers": layers,
                "heads": 128,
                "kv_heads": 8,
                "ffn": 53248,
                "seq": 8192,
                "vocab": padded(128256, tp),
            }
            model = ("llama", tuple(sorted(dims.items())))
        else:
            model = gpt(12288, layers, 96, 2048, padded(50257, tp))
        yield Case(
            table="mlperf_" + r["benchmark"],
            row=i,
            model=model,
            fabrics=((Fabric(kind, 8, 450e9, 400e9), math.ceil(gpus / 8)),),
            stack="nemo-fp8",
            strategy=dict(
                dp=dp,
                tp=tp,
                pp=pp,
                cp=cp,
                microbatch=micro,
                interleave=max(1, round(layers / pp / 2)),
                gradient_dtype="bfloat16",
                matmul_dtype="float8",
                **_OVERLAPPED,
            ),
            global_batch=batch,
            measured_s=float(r["derived_step_time_s"]),
            note="" if r["tp"] else "tp 4, pp 8 assumed",
        )

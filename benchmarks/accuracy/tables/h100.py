"""Megatron-Core and NeMo on H100s: its own scaling table, MLPerf's GPT-3 and Llama 3.1 405B, Megatron-Bridge's
mixture of experts in BF16, and dense models of NeMo's and Megatron-Bridge's tables in FP8."""

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


_LLAMAS = {
    "LLAMA2-7B": {"hidden": 4096, "layers": 32, "heads": 32, "ffn": 11008, "vocab": 32000},
    "LLAMA2-13B": {"hidden": 5120, "layers": 40, "heads": 40, "ffn": 13824, "vocab": 32000},
    "LLAMA2-70B": {"hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 32000},
    "LLAMA3-8B": {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256},
    "LLAMA3-70B": {"hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256},
    "LLAMA3.1-405B": {"hidden": 16384, "layers": 126, "heads": 128, "kv_heads": 8, "ffn": 53248, "vocab": 128256},
}
_GPT_OSS = {
    "hidden": 2880,
    "layers": 36,
    "heads": 64,
    "head_dim": 64,
    "kv_heads": 8,
    "ffn": 2880,
    "experts": 128,
    "top_k": 4,
    "capacity_factor": 1.0,  # as many tokens an expert as with none dropped
    "vocab": 201088,
}


def megatron_bridge(folder: Path) -> Iterator[Case]:
    """GPT-OSS 120B in BF16 (Megatron-Bridge runs on Megatron-Core)."""
    for i, r in enumerate(read(folder, "megatron_bridge_nemo")):
        if r["system"] != "DGX-H100" or r["precision"] != "BF16" or r["model"] != "GPT OSS 120B":
            continue
        gpus, pp, tp, seq = whole(r, "num_gpus"), whole(r, "pp"), whole(r, "tp"), whole(r, "seq_len")
        yield Case(
            table="megatron_bridge_bf16",
            row=i,
            model=("moe", tuple(sorted({**_GPT_OSS, "seq": seq}.items()))),
            fabrics=((DGX_H100, math.ceil(gpus / 8)),),
            stack="nemo",
            strategy=dict(
                dp=gpus // pp // tp,
                tp=tp,
                pp=pp,
                ep=whole(r, "ep"),
                microbatch=whole(r, "micro_batch_seqs"),
                gradient_dtype="bfloat16",
                **{**_OVERLAPPED, "sp": tp > 1},
            ),
            global_batch=whole(r, "global_batch_seqs"),
            measured_s=float(r["derived_iteration_time_s"]),
            note="every layer attends to all positions, half of them do to 128; no recomputation assumed",
        )


def nemo(folder: Path) -> Iterator[Case]:
    """Dense models trained from scratch in FP8, of NeMo 24's tables and Megatron-Bridge's, where all is stated."""
    rows = [("nemo_h100_2024", i, r) for i, r in enumerate(read(folder, "nemo_h100_2024")) if r["task"] == "Pretrain"]
    rows += [("megatron_bridge_nemo", i, r) for i, r in enumerate(read(folder, "megatron_bridge_nemo"))]
    for table, i, r in rows:
        name = r["model"].replace("_", "-")
        if r["system"] != "DGX-H100" or not r["precision"].startswith("FP8") or " " in r["precision"]:
            continue
        if name not in _LLAMAS and name != "GPT3-175B":
            continue
        gpus, seq, batch = whole(r, "num_gpus"), whole(r, "seq_len"), whole(r, "global_batch_seqs")
        tp, pp, cp = whole(r, "tp"), whole(r, "pp"), whole(r, "cp", 1)
        dims = dict(_LLAMAS.get(name, {}))
        vocab = padded(int(dims.pop("vocab", 50257)), tp)
        model = ("llama", tuple(sorted({**dims, "seq": seq, "vocab": vocab}.items()))) if dims else None
        yield Case(
            table="nemo_fp8",
            row=i,
            model=model or gpt(12288, 96, 96, seq, vocab),
            fabrics=((DGX_H100, math.ceil(gpus / 8)),),
            stack="nemo",
            strategy=dict(
                dp=gpus // (tp * pp * cp),
                tp=tp,
                pp=pp,
                cp=cp,
                microbatch=whole(r, "micro_batch_seqs"),
                interleave=whole(r, "vp", 1),
                gradient_dtype="bfloat16",
                matmul_dtype="float8",
                **{**_OVERLAPPED, "sp": tp > 1},
            ),
            global_batch=batch,
            measured_s=batch * seq / (float(r["tokens_per_s_per_gpu"]) * gpus),
            note=table,
        )


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

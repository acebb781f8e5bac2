"""Fully sharded training in PyTorch: llm-foundry's throughput of MPT models, torchtitan's memory."""

import math
from collections.abc import Iterator
from pathlib import Path

from benchmarks.accuracy.cases import Case, Fabric, gpt, number, read, whole

_MPT = {
    "MPT-125m": (768, 12, 12),
    "MPT-350m": (1024, 24, 16),
    "MPT-760m": (1536, 24, 12),
    "MPT-1b": (2048, 24, 16),
    "MPT-3b": (2560, 32, 20),
    "MPT-7b": (4096, 32, 32),
    "MPT-13b": (5120, 40, 40),
    "MPT-30b": (7168, 48, 56),
    "MPT-70b": (8192, 80, 64),
}
_NODES = {
    "h100_80gb": Fabric("H100-SXM5-80GB", 8, 450e9, 400e9),
    "a100_80gb": Fabric("A100-SXM4-80GB", 8, 300e9, 200e9),
    "a100_40gb": Fabric("A100-SXM4-40GB", 8, 300e9, 200e9),
}


def llm_foundry(folder: Path) -> Iterator[Case]:
    """MPT models under FSDP; flash attention, learned positions, tied embeddings."""
    for i, r in enumerate(read(folder, "llm_foundry_mpt")):
        if r["model"] not in _MPT or r["gpu"] not in _NODES or r["activation_cpu_offload"] == "True":
            continue
        hidden, layers, heads = _MPT[r["model"]]
        gpus, seq, batch, micro = (
            whole(r, name) for name in ("num_gpus", "seq_len", "global_batch_seqs", "micro_batch_seqs")
        )
        if batch % (gpus * micro) or not number(r["throughput_tokens_per_s_per_gpu"]):
            continue
        fp8 = "fp8" in r["precision"]
        yield Case(
            table="llm_foundry_mpt",
            row=i,
            model=gpt(hidden, layers, heads, seq, 50368),
            fabrics=((_NODES[r["gpu"]], math.ceil(gpus / 8)),),
            stack="llm-foundry",
            strategy={
                "dp": gpus,
                "microbatch": micro,
                "zero": 3 if r["sharding_strategy"] == "FULL_SHARD" else 2,
                "remat": "full" if r["activation_checkpointing"] == "True" else "none",
                "attention": "flash",
                "gradient_dtype": "bfloat16",
                "overlap_gradients": True,
                "overlap_parameters": True,
                "matmul_dtype": "float8" if fp8 else None,
            },
            global_batch=batch,
            measured_s=batch * seq / (float(r["throughput_tokens_per_s_per_gpu"]) * gpus),
            fits=True,
            group=("mpt", r["model"], r["gpu"], gpus, seq),
        )


_LLAMA = {
    "Llama3.1-8B": {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256},
    "Llama3-8B": {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256},
    "Llama3.1-70B": {"hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256},
    "Llama3.1-405B": {"hidden": 16384, "layers": 126, "heads": 128, "kv_heads": 8, "ffn": 53248, "vocab": 128256},
}
H100_96 = Fabric("H100-SXM5-80GB", 8, 450e9, 400e9)


def torchtitan(folder: Path) -> Iterator[Case]:
    """Llama 3.1 under torchtitan on H100s, where peak memory and all of the strategy are stated: rows under full remat.
    What its selective remat keeps (results of every other product) no strategy says.

    In a pipeline torchtitan gathers parameters once and reduces gradients once a step, so that values and gradients are
    whole while microbatches pass: ZeRO-1."""
    for i, r in enumerate(read(folder, "torchtitan")):
        dims = _LLAMA.get(r["model"])
        if dims is None or not number(r["peak_memory_GiB"]) or not number(r["dp_shard"]) or "H100" not in r["gpu"]:
            continue
        if r["activation_checkpoint"] != "full":
            continue
        dp, tp, pp, cp = (whole(r, name, 1) for name in ("dp_shard", "tp", "pp", "cp"))
        seq, local = whole(r, "seq_len", 8192), whole(r, "local_batch_seqs", 1)
        micro = max(1, local // (2 * pp)) if pp > 1 else local
        interleave = 2 if "Interleaved" in r["technique"] else 1
        yield Case(
            table="torchtitan",
            row=i,
            model=("llama", tuple(sorted({**dims, "seq": seq}.items()))),
            fabrics=((H100_96, math.ceil(dp * tp * pp * cp / 8)),),
            stack="torchtitan",
            strategy={
                "dp": dp,
                "tp": tp,
                "pp": pp,
                "cp": cp,
                "sp": tp > 1,
                "microbatch": micro,
                "interleave": interleave,
                "zero": 1 if pp > 1 else 3,
                "remat": "full",
                "attention": "flash",
                "gradient_dtype": "float32",
                "overlap_gradients": True,
                "overlap_parameters": True,
                "matmul_dtype": "float8" if "loat8" in r["technique"] else None,
            },
            global_batch=dp * local,
            memory_bytes=float(r["peak_memory_GiB"]) * 2**30,
            measured_s=dp * local * seq / (float(r["tokens_per_s_per_gpu"]) * dp * tp * pp * cp),
        )

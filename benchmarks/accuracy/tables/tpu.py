"""MaxText on TPUs: published recipes, and MLPerf's GPT-3 175B."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.accuracy.cases import Case, Fabric, gpt, number, read, whole

_LLAMA3 = {"vocab": 128256, "kv_heads": 8}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt3-175b": ("gpt", {"hidden": 12288, "layers": 96, "heads": 96, "vocab": 50304}),
    "llama3.1-8b": ("llama", dict(hidden=4096, layers=32, heads=32, ffn=14336, **_LLAMA3)),
    "llama3.1-70b": ("llama", dict(hidden=8192, layers=80, heads=64, ffn=28672, **_LLAMA3)),
    "llama3.1-405b": ("llama", dict(hidden=16384, layers=126, heads=128, ffn=53248, **_LLAMA3)),
    "llama2-70b": ("llama", {"hidden": 8192, "layers": 80, "heads": 64, "ffn": 28672, "vocab": 32000, "kv_heads": 8}),
}
# (catalogue name, devices of a slice, bytes/s a device, bytes/s between slices a device): ICI is the inside of a node
_PODS = {
    "v5e": ("TPU-v5e", 256, 100e9, 3.1e9),
    "v5p": ("TPU-v5p", 8192, 300e9, 6.2e9),
    "v6e": ("TPU-v6e", 256, 200e9, 6.2e9),
    "7x": ("TPU7x-core", 9216, 300e9, 6.2e9),
}


def _model(name: str, seq: int) -> tuple[str, tuple[tuple[str, Any], ...]] | None:
    word = name.lower().replace("-maxtext", "").replace(" ", "")
    found = next((m for key, m in _MODELS.items() if word == key), None)
    return None if found is None else (found[0], tuple(sorted({**found[1], "seq": seq}.items())))


def _pod(text: str) -> str | None:
    word = text.lower()
    names = {"v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "trillium": "v6e", "tpu7x": "7x"}
    return next((pod for key, pod in names.items() if key in word), None)


def _case(
    table: str,
    row: int,
    model: Any,
    pod: str,
    chips: int,
    slices: int,
    batch: int,
    seconds: float,
    remat: str,
    note: str,
    matmul_dtype: str | None = None,
) -> Case | None:
    kind, size, ici, dcn = _PODS[pod]
    cores = 2 if pod == "7x" else 1
    devices = chips * cores
    per = min(size * cores, devices // slices)
    if batch % devices and devices % batch:
        return None
    dp = min(devices, batch)
    tp = devices // dp
    fabric = Fabric(kind, per, ici / cores, dcn * per, nics=per, intra_latency_s=1e-6, inter_latency_s=2e-5)
    return Case(
        table=table,
        row=row,
        model=model,
        fabrics=((fabric, max(1, devices // per)),),
        stack="maxtext",
        strategy={
            "dp": dp,
            "tp": tp,
            "sp": tp > 1,
            "microbatch": max(1, batch // dp),
            "zero": 3,
            "remat": remat,
            "attention": "flash",
            "gradient_dtype": "bfloat16",
            "overlap_gradients": True,
            "overlap_parameters": True,
            "matmul_dtype": matmul_dtype,
        },
        global_batch=batch,
        measured_s=seconds,
        group=(table, model, pod, chips),
        note=note,
    )


def tpu(folder: Path) -> Iterator[Case]:
    """Llama 3.1 and GPT-3 in bf16, FSDP over all devices (what more devices than sequences there are split a sequence's
    tensors)."""
    for i, r in enumerate(read(folder, "tpu_recipes")):
        seq = whole(r, "seq_len", 2048)
        model, pod = _model(r["model"], seq), _pod(r["device_type"])
        if model is None or pod is None or "fp8" in r["precision"] or not number(r["step_time_s"]):
            continue
        chips = whole(r, "devices_implied") if r["devices_implied"] else 0
        slices = whole(r, "num_slices", 1)
        per_device = whole(r, "per_device_batch", 0)
        batch = whole(r, "global_batch_seqs", 0) or per_device * chips
        if not chips or not batch:
            continue
        case = _case(
            "tpu_recipes",
            i,
            model,
            pod,
            chips,
            slices,
            batch,
            float(r["step_time_s"]),
            "full",
            "" if r["remat_policy"] == "full" else "full remat assumed",
        )
        if case is not None:
            yield case
    for i, r in enumerate(read(folder, "mlperf_llm_training")):
        pod = _pod(r["accelerator"])
        if pod is None or r["benchmark"] != "gpt3" or not number(r["derived_step_time_s"]):
            continue
        chips, batch = whole(r, "num_accelerators"), whole(r, "global_batch_seqs")
        model = gpt(12288, 96, 96, 2048, 50304)
        slices = max(1, chips // min(chips, 256 if pod == "v6e" else chips))
        case = _case(
            "mlperf_gpt3_tpu",
            i,
            model,
            pod,
            chips,
            slices,
            batch,
            float(r["derived_step_time_s"]),
            "full",
            "degrees, remat and int8 products on v5p assumed",
            "int8" if pod == "v5p" else None,
        )
        if case is not None:
            yield case

"""Which constants are fitted to which tables: priors, ranges, and what every shipped constant was fitted on.

Constants of a device kind are shared by all tables of that kind; those of a stack by all tables that it ran. Priors of
kinds are physical (half a wave of tiles: multiprocessors times half a tile), those of stacks what such systems are
known for; their spreads are what we would be surprised to see exceeded.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.cases import Case
from benchmarks.accuracy.fit import Free
from benchmarks.accuracy.tables.amp import amp
from benchmarks.accuracy.tables.fsdp import llm_foundry
from benchmarks.accuracy.tables.h100 import megatron_bridge, megatron_core, mlperf, nemo
from benchmarks.accuracy.tables.megatron_a100 import bloom, selene, vtrain
from benchmarks.accuracy.tables.tpu import tpu
from costmodel.stack import Stack
from profiles.calibrate import Constant

Row = tuple[float, ...]  # prior, spread, low, high

_KIND: dict[str, Row] = {
    "matmul_efficiency": (0.82, 1.06, 0.3, 0.99),
    "matmul_half_depth": (130.0, 1.5, 5.0, 600.0),
    "matmul_half_area": (1.8e6, 1.7, 1e4, 3e7),
    "bandwidth_efficiency": (0.82, 1.1, 0.4, 1.0),
}
_STACK: dict[str, Row] = {
    "traffic": (1.0, 1.4),
    "start_s": (25e-6, 1.6),
    "inter_start_s": (40e-6, 2.0),
    "tier_share": (0.78, 1.15, 0.2, 1.0),
    "inter_share": (0.5, 1.6, 0.05, 1.0),
    "microbatch_s": (5e-3, 3.0),
    "step_s": (0.1, 2.5),
    "skew": (0.005, 2.5),
}
_SOFTWARE: dict[str, Row] = {
    name: _STACK[name] for name in ("traffic", "start_s", "tier_share", "microbatch_s", "skew")
}
"""What a piece of software brings to each fabric that it runs on (NVLink and NVSwitch are one fabric here)."""
_FABRIC: dict[str, Row] = {name: row for name, row in _STACK.items() if name not in _SOFTWARE}
_PIPELINE: dict[str, Row] = {"send_exposed": (0.5, 2.0, 0.01, 1.0)}
_HOST: dict[str, Row] = {"host_launch_s": (2e-5, 2.0)}
_SLOW_HOST: dict[str, Row] = {"host_launch_s": (2e-4, 2.0)}
"""AMP measured 4 to 5 ms for the forward pass of a layer of nine kernels, whether 1, 2 or 4 devices shared it."""
_AMP_FABRIC: dict[str, Row] = {"tier_share": _STACK["tier_share"], "inter_share": (0.5, 1.5, 0.05, 1.0)}
_AMP: dict[str, Row] = {name: row for name, row in _STACK.items() if name not in _AMP_FABRIC}
_OVERLAP: dict[str, Row] = {"gradient_overlap": (0.6, 1.6, 0.01, 1.5)}
_T4_KIND: dict[str, Row] = {
    "matmul_efficiency": (0.45, 1.2, 0.1, 0.95),
    "matmul_half_area": (3.3e5, 1.5, 1e4, 3e6),
    "bandwidth_efficiency": (0.69, 1.1, 0.3, 1.0),
}
"""220 of 320 GB/s (Jia et al., "Dissecting the NVIDIA Turing T4 GPU via microbenchmarking", 2019)."""
_JEANZAY: dict[str, Row] = {"inter_share": (0.25, 1.6, 0.05, 1.0), "misaligned_efficiency": (0.11, 1.6, 0.02, 1.0)}
_FLASH_A100: dict[str, Row] = {"attention_efficiency": (0.58, 1.1, 0.05, 0.95)}
_FLASH_H100: dict[str, Row] = {"attention_efficiency": (0.37, 1.1, 0.05, 0.95)}
"""FlashAttention-2 (Dao 2023; Shah et al. 2024); older and newer kernels are a stack's `attention`."""
_SHARDED: dict[str, Row] = {**_OVERLAP, "attention": (1.0, 1.5), "parameter_overlap": (0.7, 1.3, 0.01, 1.5)}
_H100_STACK: dict[str, Row] = {
    **_OVERLAP,
    "attention": (1.0, 1.5),
    "tensor_overlap": (0.1, 2.0, 0.001, 1.0),
    "microbatch_s": (1e-3, 3.0),
    "step_s": (0.02, 2.5),
    "inter_share": (0.8, 1.2, 0.05, 1.0),
}
_H100_SYSTEM: dict[str, Row] = {"step_s": _H100_STACK["step_s"]}
_H100_SOFTWARE: dict[str, Row] = {
    name: row for name, row in {**_STACK, **_PIPELINE, **_H100_STACK}.items() if name not in _H100_SYSTEM
}
"""NeMo runs on Megatron-Core, and both were measured on DGX H100s with InfiniBand: one fabric."""


def _deviating(*parts: dict[str, Row]) -> dict[str, Row]:
    """What a family's member deviates by: versions differ, and what else the systems do."""
    return {name: (1.0, 1.15) for part in parts for name in part}


def _free(owner: str, *parts: dict[str, Row]) -> Free:
    rows: dict[str, Row] = {}
    for part in parts:
        rows.update(part)
    return Free(owner, tuple(Constant(name, *row) for name, row in rows.items()))


A100, H100, T4, V100, TPU = "A100-SXM4-80GB", "H100-SXM5-80GB", "T4", "V100-SXM2-16GB", "TPU-v6e"


MIXED = {"weight_bytes": 2.0, "optimizer_bytes": 12.0, "pooled": True, "saves": "inputs", "reruns": "whole_layers"}
"""Mixed precision as Megatron and DeepSpeed keep it: weights in 16 bits, float32 master weights and Adam's moments; in
PyTorch's caching allocator."""

STATE: dict[str, dict[str, Any]] = {
    "jeanzay": MIXED,
    "vtrain": MIXED,
    "selene": MIXED,
    "selene-2022": MIXED,
    "megatron-core": MIXED,
    "nemo-fp8": MIXED,
    "nemo": MIXED,
    "amp-t4": MIXED,
    "amp-mixed": {**MIXED, "stall_bytes": 3e6},
    "jeanzay-before-numa": MIXED,
    "llm-foundry": {"pooled": True, "saves": "inputs", "reruns": "layers"},
    "torchtitan": {**MIXED, "gradient_bytes": 4.0, "optimizer_bytes": 10.0, "reruns": "layers"},
    "maxtext": {"reruns": "layers"},
}


@dataclass(frozen=True)
class Group:
    """Tables that share constants and are fitted together.

    Attributes:
        stacks: name -> what it was fitted on.
    """

    name: str
    sources: tuple[Callable[[Path], Iterable[Case]], ...]
    free: tuple[Free, ...]
    stacks: dict[str, str]

    def cases(self, folder: Path) -> list[Case]:
        """Cases with a measured time that are scored."""
        return [c for source in self.sources for c in source(folder) if c.measured_s and c.scored]

    def stack_records(self) -> dict[str, Stack]:
        return {name: Stack(name=name, fitted_on=on, **STATE.get(name, {})) for name, on in self.stacks.items()}


GPU = Group(
    name="A100 and H100",
    sources=(vtrain, selene, bloom, megatron_core, mlperf, megatron_bridge, nemo, llm_foundry),
    free=(
        _free(A100, _KIND, _FLASH_A100),
        _free(
            H100,
            _KIND,
            _FLASH_H100,
            {"matmul_efficiency": (0.72, 1.1, 0.3, 0.99), "matmul_half_area": (2.2e6, 1.7, 1e4, 3e7)},
        ),
        _free("megatron-a100", _SOFTWARE, _PIPELINE, _HOST),
        _free("vtrain", _FABRIC, _deviating(_SOFTWARE, _PIPELINE)),
        _free("selene", _FABRIC, _deviating(_SOFTWARE, _PIPELINE)),
        _free("selene-2022", {"slowdown": (0.97, 1.04)}),
        _free("jeanzay", _FABRIC, _JEANZAY, _deviating(_SOFTWARE, _PIPELINE)),
        _free("jeanzay-before-numa", {"slowdown": (1.05, 1.05)}),
        _free("megatron-h100", _H100_SOFTWARE),
        _free("megatron-core", _H100_SYSTEM, _deviating(_H100_SOFTWARE)),
        _free("nemo-fp8", _H100_SYSTEM, _deviating(_H100_SOFTWARE)),
        _free("nemo", _H100_SYSTEM, _deviating(_H100_SOFTWARE)),
        _free("llm-foundry", _STACK, _HOST, _SHARDED),
    ),
    stacks={
        "vtrain": "Megatron-DeepSpeed on 8 to 512 A100s, 1F1B, full remat (vTrain's multi-node validation)",
        "selene": "Megatron-LM on Selene's A100s (Narayanan et al. 2021, tables 1 and 2)",
        "selene-2022": "Megatron-LM on Selene's A100s (Korthikanti et al. 2022, table 5)",
        "jeanzay": "Megatron-DeepSpeed on Jean Zay's A100s, Omni-Path (log of BLOOM-176B's configuration)",
        "jeanzay-before-numa": "the same before the nodes' NUMA settings were right",
        "megatron-core": "Megatron-Core r0.8.0 on DGX H100s (its scaling table)",
        "nemo-fp8": "NeMo in FP8 on DGX H100s and H200s (MLPerf training 3.1 to 5.0, GPT-3 and Llama 3.1 405B)",
        "nemo": "NeMo 24 and Megatron-Bridge on DGX H100s: dense models in FP8, GPT-OSS 120B in BF16",
        "llm-foundry": "PyTorch FSDP with flash attention on A100s and H100s (MosaicML llm-foundry's MPT tables)",
    },
)

MIXED = Group(
    name="T4 and V100",
    sources=(amp,),
    free=(
        _free(T4, _KIND, _T4_KIND),
        _free(V100, _KIND, {"matmul_efficiency": (0.6, 1.2, 0.2, 0.95), "matmul_half_area": (6.5e5, 1.5, 1e4, 6e6)}),
        _free("amp", _AMP, _PIPELINE, _SLOW_HOST),
        _free("amp-t4", _AMP_FABRIC),
        _free("amp-mixed", _AMP_FABRIC, {"send_share": (0.7, 1.3, 0.05, 1.0), "stall_s": (0.05, 2.0)}),
    ),
    stacks={
        "amp-t4": "DeepSpeed and Megatron-LM 1.1.5 on four nodes of four T4s (AMP, homogeneous trials)",
        "amp-mixed": "the same on twelve V100s and four T4s at 10 Gbit/s (AMP, trials on the mixed cluster)",
    },
)

TPUS = Group(
    name="TPU",
    sources=(tpu,),
    free=(
        _free(TPU, _KIND, {"matmul_efficiency": (0.6, 1.2, 0.3, 0.98)}),
        _free("maxtext", _STACK, _SHARDED),
    ),
    stacks={"maxtext": "MaxText on TPU v5p, v6e and 7x (Google's recipes), and MLPerf's GPT-3 on v5p and v6e"},
)

GROUPS = (GPU, MIXED, TPUS)


def groups(names: Iterable[str] = ()) -> Iterator[Group]:
    """Groups by name; all if none is named."""
    wanted = set(names)
    for group in GROUPS:
        if not wanted or group.name in wanted:
            yield group

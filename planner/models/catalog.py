"""Built-in models at their published sizes, by name.

Dimensions are those of the published configurations. `seq` is a pre-training length: models that take longer sequences
(Llama 3.1, Qwen2, Mixtral) are listed at 4096 or 8192. Anything else that a family takes keeps its default.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from planner.frontend.task import TrainingTask
from planner.models.attention import RopeScaling
from planner.models.families.bert import bert
from planner.models.families.gpt import gpt
from planner.models.families.llama import llama
from planner.models.families.moe import moe
from planner.models.families.t5 import t5
from planner.models.families.vit import vit
from planner.models.families.wide_resnet import wide_resnet

FAMILIES: dict[str, Callable[..., TrainingTask]] = {
    "gpt": gpt,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "moe": moe,
    "wide_resnet": wide_resnet,
}

_GPT2 = {"vocab": 50257, "seq": 1024, "positions": 1024}
_GPT3 = {"vocab": 50257, "seq": 2048, "positions": 2048}
_LLAMA2 = {"vocab": 32000, "seq": 4096}
_LLAMA3 = {"vocab": 128256, "seq": 8192, "rope_base": 5e5}
_LLAMA31 = _LLAMA3 | {"rope_scaling": RopeScaling(kind="llama3", factor=8.0)}
_QWEN2 = {"qkv_bias": True, "rope_base": 1e6, "norm_eps": 1e-6, "seq": 8192}
_BERT = {"vocab": 30522, "seq": 512, "positions": 512}
_T5 = {"vocab": 32128, "seq": 512}

BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt", {"hidden": 768, "layers": 12, "heads": 12, **_GPT2}),
    "gpt2-medium": ("gpt", {"hidden": 1024, "layers": 24, "heads": 16, **_GPT2}),
    "gpt2-large": ("gpt", {"hidden": 1280, "layers": 36, "heads": 20, **_GPT2}),
    "gpt2-xl": ("gpt", {"hidden": 1600, "layers": 48, "heads": 25, **_GPT2}),
    "gpt3-2.7b": ("gpt", {"hidden": 2560, "layers": 32, "heads": 32, **_GPT3}),
    "gpt3-6.7b": ("gpt", {"hidden": 4096, "layers": 32, "heads": 32, **_GPT3}),
    "gpt3-13b": ("gpt", {"hidden": 5120, "layers": 40, "heads": 40, **_GPT3}),
    "gpt3-175b": ("gpt", {"hidden": 12288, "layers": 96, "heads": 96, **_GPT3}),
    "gpt-neox-20b": (
        "gpt",
        {
            "hidden": 6144,
            "layers": 44,
            "heads": 64,
            "vocab": 50432,
            "seq": 2048,
            "rotary_fraction": 0.25,
            "parallel": True,
            "tied": False,
        },
    ),
    "llama2-7b": ("llama", {"hidden": 4096, "layers": 32, "heads": 32, "ffn": 11008, **_LLAMA2}),
    "llama2-13b": ("llama", {"hidden": 5120, "layers": 40, "heads": 40, "ffn": 13824, **_LLAMA2}),
    "llama2-70b": ("llama", {"hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn": 28672, **_LLAMA2}),
    "llama3-8b": ("llama", {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336, **_LLAMA3}),
    "llama3-70b": ("llama", {"hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn": 28672, **_LLAMA3}),
    "llama3.1-405b": ("llama", {"hidden": 16384, "layers": 126, "heads": 128, "kv_heads": 8, "ffn": 53248, **_LLAMA31}),
    "llama3.2-1b": (
        "llama",
        {
            "hidden": 2048,
            "layers": 16,
            "heads": 32,
            "kv_heads": 8,
            "ffn": 8192,
            "tied": True,
            **_LLAMA3,
            "rope_scaling": RopeScaling(kind="llama3", factor=32.0),
        },
    ),
    "mistral-7b": (
        "llama",
        {
            "hidden": 4096,
            "layers": 32,
            "heads": 32,
            "kv_heads": 8,
            "ffn": 14336,
            "vocab": 32000,
            "seq": 4096,
            "sliding_window": 4096,
        },
    ),
    "qwen2-7b": (
        "llama",
        {"hidden": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "ffn": 18944, "vocab": 152064, **_QWEN2},
    ),
    "mixtral-8x7b": (
        "moe",
        {
            "hidden": 4096,
            "layers": 32,
            "heads": 32,
            "kv_heads": 8,
            "ffn": 14336,
            "experts": 8,
            "vocab": 32000,
            "seq": 4096,
        },
    ),
    "mixtral-8x22b": (
        "moe",
        {
            "hidden": 6144,
            "layers": 56,
            "heads": 48,
            "kv_heads": 8,
            "ffn": 16384,
            "experts": 8,
            "vocab": 32000,
            "seq": 4096,
        },
    ),
    "bert-base": ("bert", {"hidden": 768, "layers": 12, "heads": 12, **_BERT}),
    "bert-large": ("bert", {"hidden": 1024, "layers": 24, "heads": 16, **_BERT}),
    "t5-base": ("t5", {"hidden": 768, "layers": 12, "heads": 12, "ffn": 3072, **_T5}),
    "t5-3b": ("t5", {"hidden": 1024, "layers": 24, "heads": 32, "head_dim": 128, "ffn": 16384, **_T5}),
    "t5-11b": ("t5", {"hidden": 1024, "layers": 24, "heads": 128, "head_dim": 128, "ffn": 65536, **_T5}),
    "vit-b16": ("vit", {"hidden": 768, "layers": 12, "heads": 12, "patch": 16}),
    "vit-l16": ("vit", {"hidden": 1024, "layers": 24, "heads": 16, "patch": 16}),
    "vit-h14": ("vit", {"hidden": 1280, "layers": 32, "heads": 16, "patch": 14}),
    "resnet-50": ("wide_resnet", {"depth": 50, "wide": 1}),
    "wide-resnet-50-2": ("wide_resnet", {"depth": 50, "wide": 2}),
    "wide-resnet-101-2": ("wide_resnet", {"depth": 101, "wide": 2}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """One line of `list_models`.

    Args:
        name: what `load_model` takes.
        family: the function of this package that builds it.
        parameters: number of trained parameters.
        dims: the dimensions that differ from the family's defaults, as ``key=value`` text.
        seq: sequence length; None for models of images.
    """

    name: str
    family: str
    parameters: int
    dims: str
    seq: int | None


def build(name: str, **overrides: Any) -> TrainingTask:
    """The built-in model `name`, with some dimensions changed."""
    family, dims = BUILT_IN[name]
    return FAMILIES[family](**{"name": name, **dims, **overrides})


def list_models() -> tuple[ModelRow, ...]:
    """Every built-in model, in the order of the catalogue."""
    return tuple(
        ModelRow(
            name=name,
            family=family,
            parameters=parameter_count(build(name).params),
            dims=" ".join(f"{key}={value}" for key, value in dims.items() if key not in ("seq", "rope_scaling")),
            seq=dims.get("seq"),
        )
        for name, (family, dims) in BUILT_IN.items()
    )


def parameter_count(params: Any) -> int:
    """Number of elements in a pytree of arrays or ShapeDtypeStructs."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))

"""Training tasks from published transformer configurations (``config.json``), without downloading anything.

Fields that change shapes or arithmetic are read. Fields that would change them in ways that are not built must have
their neutral value, else MP123 names the field. Dropout rates and initialisation are not imported.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.errors import InputError
from planner.frontend.task import TrainingTask
from planner.models.attention import RopeScaling
from planner.models.families.bert import bert
from planner.models.families.gpt import gpt
from planner.models.families.llama import llama
from planner.models.families.moe import moe
from planner.models.families.t5 import t5

# Where the configuration allows longer sequences and none is asked for, plan for this length: scores grow with its
# square, and few models are pre-trained at their longest length.
LONGEST_DEFAULT_SEQ = 8192

LARGEST = 10**9
"""Of any number in a configuration; larger ones are slips of the pen, and overflow."""

ACTIVATION_NAMES = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Heads that train the loss that we build. A configuration without the field, or of the bare model, is taken as such.
LOSS_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForPreTraining", "ForConditionalGeneration", "Model")

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Fields:
    """A configuration file's fields, read with errors that name file and field."""

    path: Path
    values: dict[str, Any]
    table: str = ""  # path of the table inside the file, such as ``rope_scaling.``

    def bad(self, field: str, legal: str) -> InputError:
        name, value = f"{self.table}{field}", self.values.get(field)
        if field not in self.values:
            return InputError("MP123", f"{self.path}: {name} is missing", f"legal: {legal}")
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return InputError("MP123", f"{self.path}: {name}={shown} is not understood", f"legal: {legal}")

    def integer(self, field: str, default: Any = _ABSENT) -> Any:
        """An integer; a null counts as absent."""
        value = self.values.get(field)
        if value is None and default is not _ABSENT:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > LARGEST:
            raise self.bad(field, "an integer")
        return value

    def number(self, field: str, default: float) -> float:
        value = self.values.get(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
            raise self.bad(field, "a number")
        return float(value)

    def boolean(self, field: str, default: bool) -> bool:
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.bad(field, "true or false")
        return value

    def activation(self, field: str, default: str) -> str:
        return ACTIVATION_NAMES[self.choice(field, default, ACTIVATION_NAMES)]

    def choice(self, field: str, default: Any, legal: Iterable[str]) -> str:
        """One of some words; a null counts as absent."""
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, str) or value not in legal:
            raise self.bad(field, ", ".join(legal))
        return value

    def text(self, field: str) -> str | None:
        value = self.values.get(field)
        if value is not None and not isinstance(value, str):
            raise self.bad(field, "a text")
        return value

    def neutral(self, **fields: Any) -> None:
        """Each field, where present and not null, must have the value that is built."""
        for field, only in fields.items():
            value = self.values.get(field)
            if value is not None and value != only:
                raise self.bad(field, f"{json.dumps(only)}, or leave the field out")

    def sequence(self, field: str, default: int, *limits: int | None) -> int:
        """The default sequence length: the longest that the model takes, up to `LONGEST_DEFAULT_SEQ`."""
        longest = self.integer(field, default)
        if longest < 1:
            raise self.bad(field, "an integer of at least 1")
        return min(longest, LONGEST_DEFAULT_SEQ, *(limit for limit in limits if limit is not None))

    def rope(self) -> dict[str, Any]:
        """``rope_base`` and ``rope_scaling``, in the older or the newer spelling of the fields."""
        field = "rope_parameters" if self.values.get("rope_parameters") else "rope_scaling"
        table = self.values.get(field)
        table = {} if table is None else table
        if not isinstance(table, dict):
            raise self.bad(field, "a table of rope parameters")
        inner = Fields(self.path, table, f"{field}.")
        kind = table.get("rope_type", table.get("type", "default"))
        scaling = None
        if kind == "linear":
            scaling = RopeScaling(kind="linear", factor=inner.number("factor", 1.0))
        elif kind == "llama3":
            scaling = RopeScaling(
                kind="llama3",
                factor=inner.number("factor", 8.0),
                low_frequency_factor=inner.number("low_freq_factor", 1.0),
                high_frequency_factor=inner.number("high_freq_factor", 4.0),
                original_seq=inner.integer("original_max_position_embeddings", 8192),
            )
        elif kind != "default":
            raise self.bad(field, "rope_type default, linear or llama3")
        return {"rope_base": inner.number("rope_theta", self.number("rope_theta", 10000.0)), "rope_scaling": scaling}


def import_config(path: Path, *, seq: int | None = None, batch: int | None = None) -> TrainingTask:
    """The training task of a published configuration.

    Args:
        path: a ``config.json``.
        seq: sequence length; default the longest that the model takes, up to `LONGEST_DEFAULT_SEQ`.
        batch: examples in the abstract batch.
    """
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise InputError("MP125", f"cannot read {path}: {error.strerror}", "give the path of a config.json") from error
    except ValueError as error:
        raise InputError("MP125", f"{path} is not JSON: {error}", "give a published model's config.json") from error
    if not isinstance(values, dict):
        raise InputError("MP125", f"{path} holds a {type(values).__name__}, not a table", "give a model's config.json")
    fields = Fields(path, values)
    kind = fields.choice("model_type", "", IMPORTERS)
    architectures = values.get("architectures")
    if not isinstance(architectures, list | None):
        raise fields.bad("architectures", "a list of names")
    for architecture in architectures or []:
        if not isinstance(architecture, str) or not architecture.endswith(LOSS_SUFFIXES):
            raise fields.bad("architectures", f"a name that ends in {', '.join(LOSS_SUFFIXES)}")
    if values.get("quantization_config"):
        raise fields.bad("quantization_config", "none: quantised weights cannot be trained")
    family, dims = IMPORTERS[kind](fields)
    changes = {name: value for name, value in (("seq", seq), ("batch", batch)) if value is not None}
    try:
        return family(**{"name": _name(fields, kind), **dims, **changes})
    except InputError as error:
        raise InputError(error.code, f"{path}: {error.message}", error.hint) from error


def _name(fields: Fields, kind: str) -> str:
    published = fields.text("_name_or_path")
    return published.rsplit("/", 1)[-1] if published else f"{kind}:{fields.path}"


def _decoder(fields: Fields, default_activation: str = "silu") -> dict[str, Any]:
    """What Llama, Mistral, Qwen2 and Mixtral share."""
    heads = fields.integer("num_attention_heads")
    window = fields.integer("sliding_window", None) if fields.boolean("use_sliding_window", True) else None
    return {
        "hidden": fields.integer("hidden_size"),
        "layers": fields.integer("num_hidden_layers"),
        "heads": heads,
        "kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": fields.integer("head_dim", None),
        "ffn": fields.integer("intermediate_size"),
        "vocab": fields.integer("vocab_size"),
        "seq": fields.sequence("max_position_embeddings", 2048, window),
        "sliding_window": window,
        "activation": fields.activation("hidden_act", default_activation),
        "tied": fields.boolean("tie_word_embeddings", False),
        **fields.rope(),
    }


def _llama(fields: Fields) -> tuple[Callable[..., TrainingTask], dict[str, Any]]:
    fields.neutral(attention_bias=False, mlp_bias=False)
    return llama, _decoder(fields) | {"norm_eps": fields.number("rms_norm_eps", 1e-6)}


def _qwen2(fields: Fields) -> tuple[Callable[..., TrainingTask], dict[str, Any]]:
    # Qwen2 turns its window on by a flag whose default is off, the others by the window's presence.
    values = {"use_sliding_window": False, **fields.values}
    dims = _decoder(Fields(fields.path, values))
    return llama, dims | {"qkv_bias": True, "norm_eps": fields.number("rms_norm_eps", 1e-6)}


def _mixtral(fields: Fields) -> tuple[Callable[..., TrainingTask], dict[str, Any]]:
    fields.neutral(router_jitter_noise=0.0)
    balance = fields.number("router_aux_loss_coef", 0.001) if fields.boolean("output_router_logits", False) else 0.0
    return moe, _decoder(fields) | {
        "experts": fields.integer("num_local_experts", 8),
        "top_k": fields.integer("num_experts_per_tok", 2),
        "balance_weight": balance,
        "norm_eps": fields.number("rms_norm_eps", 1e-5),
    }


def _gpt2(fields: Fields) -> tuple[Callable[..., TrainingTask], dict[str, Any]]:
    fields.neutral(add_cross_attention=False, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    return gpt, {
        "hidden": fields.integer("n_embd"),
        "layers": fields.integer("n_layer"),
        "heads": fields.integer("n_head"),
        "vocab": fields.integer("vocab_size"),
        "seq": fields.sequence("n_positions", 1024),
        "positions": fields.integer("n_positions", 1024),
        "ffn": fields.integer("n_inner", None),
        "activation": fields.activation("activation_function", "gelu_new"),
        "tied": fields.boolean("tie_word_embeddings", True),
        "norm_eps": fields.number("layer_norm_epsilon", 1e-5),
    }


def _gpt_neox(fields: Fields) -> tuple[Callable[..., TrainingTask], dict[str, Any]]:
    fields.neutral(attention_bias=True, rope_scaling=None)
    return gpt, {
        "hidden": fields.integer("hidden_size"),
        "layers": fields.integer("num_hidden_layers"),
        "heads": fields.integer("num_attention_heads"),
        "vocab": fields.integer("vocab_size"),
        "seq": fields.sequence("max_position_embeddings", 2048),
        "ffn": fields.integer("intermediate_size"),
        "rotary_fraction": fields.number("rotary_pct", 0.25),
        "rope_base": fields.number("rotary_emb_base", 10000.0),
        "parallel": fields.boolean("use_parallel_residual", True),
        "activation": fields.activation("hidden_act", "gelu"),
        "tied": fields.boolean("tie_word_embeddings", False),
        "norm_eps": fields.number("layer_norm_eps", 1e-5),
    }


def _bert(fields: Fields) -> tuple[Callable[..., TrainingTask], dict[str, Any]]:
    fields.neutral(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    fields.neutral(tie_word_embeddings=True)
    return bert, {
        "hidden": fields.integer("hidden_size"),
        "layers": fields.integer("num_hidden_layers"),
        "heads": fields.integer("num_attention_heads"),
        "vocab": fields.integer("vocab_size"),
        "seq": fields.sequence("max_position_embeddings", 512),
        "positions": fields.integer("max_position_embeddings", 512),
        "ffn": fields.integer("intermediate_size"),
        "types": fields.integer("type_vocab_size", 2),
        "activation": fields.activation("hidden_act", "gelu"),
        "norm_eps": fields.number("layer_norm_eps", 1e-12),
    }


def _t5(fields: Fields) -> tuple[Callable[..., TrainingTask], dict[str, Any]]:
    kinds = {"relu": ("relu", False), "gated-gelu": ("gelu_tanh", True), "gated-silu": ("silu", True)}
    activation, gated = kinds[fields.choice("feed_forward_proj", "relu", kinds)]
    layers = fields.integer("num_layers")
    return t5, {
        "hidden": fields.integer("d_model"),
        "layers": layers,
        "decoder_layers": fields.integer("num_decoder_layers", layers),
        "heads": fields.integer("num_heads"),
        "head_dim": fields.integer("d_kv"),
        "ffn": fields.integer("d_ff"),
        "vocab": fields.integer("vocab_size"),
        "seq": fields.sequence("n_positions", 512),
        "buckets": fields.integer("relative_attention_num_buckets", 32),
        "max_distance": fields.integer("relative_attention_max_distance", 128),
        "activation": activation,
        "gated": gated,
        "tied": fields.boolean("tie_word_embeddings", True),
        "norm_eps": fields.number("layer_norm_epsilon", 1e-6),
    }


IMPORTERS: dict[str, Callable[[Fields], tuple[Callable[..., TrainingTask], dict[str, Any]]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen2,
    "mixtral": _mixtral,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "bert": _bert,
    "t5": _t5,
}

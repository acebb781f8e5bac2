"""Published configuration files become the models that they describe, or are refused by field."""

import json

import pytest

from costmodel.errors import InputError
from planner.models import RopeScaling, load_model, parameter_count

# Abridged from the published files; parameter counts are those of the checkpoints.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
MISTRAL = LLAMA | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "rope_theta": 10000.0,
    "vocab_size": 32000,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 131072,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "vocab_size": 32000,
}
GPT2 = {
    "_name_or_path": "openai-community/gpt2",
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
NEOX = {
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "hidden_act": "gelu",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
BERT = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
T5 = {
    "architectures": ["T5WithLMHeadModel"],
    "model_type": "t5",
    "d_ff": 16384,
    "d_kv": 128,
    "d_model": 1024,
    "n_positions": 512,
    "num_heads": 32,
    "num_layers": 24,
    "relative_attention_num_buckets": 32,
    "vocab_size": 32128,
}
FLAN = T5 | {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 2048,
    "d_kv": 64,
    "d_model": 768,
    "feed_forward_proj": "gated-gelu",
    "num_heads": 12,
    "num_layers": 12,
    "num_decoder_layers": 12,
    "tie_word_embeddings": False,
}
COUNTS = [
    (LLAMA, 8_030_261_248),
    (MISTRAL, 7_241_732_096),
    (QWEN2, 494_032_768),
    (MIXTRAL, 46_702_792_704),
    (GPT2, 124_439_808),
    (NEOX, 70_426_624),
    (BERT, 335_174_458),
    (T5, 2_851_598_336),
    (FLAN, 247_577_856),
]


@pytest.fixture
def load(tmp_path):
    def load(values, **changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(values))
        return load_model(str(path), **changes)

    return load


@pytest.mark.parametrize(("config", "count"), COUNTS, ids=lambda x: x["model_type"] if isinstance(x, dict) else "")
def test_published_configurations(load, config, count):
    assert parameter_count(load(config).params) == count


def test_settings_that_change_no_shape(load):
    settings = load(LLAMA | {"rope_scaling": LLAMA3_SCALING, "max_position_embeddings": 131072}).loss_fn.keywords
    assert settings["rope_base"] == 500000.0
    assert settings["rope_scaling"] == RopeScaling(kind="llama3", factor=8.0)
    newer = {key: value for key, value in LLAMA.items() if key not in ("rope_theta", "rope_scaling")}
    settings = load(newer | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}).loss_fn.keywords
    assert settings["rope_base"] == 1e6 and settings["rope_scaling"] is None
    assert load(GPT2).loss_fn.keywords["activation"] == "gelu_tanh"
    assert load(NEOX).loss_fn.keywords["rotary_dim"] == 16
    assert load(MIXTRAL).loss_fn.keywords["balance_weight"] == 0.0
    assert load(MIXTRAL | {"output_router_logits": True}).loss_fn.keywords["balance_weight"] == 0.02


def test_sequence_length(load, tmp_path):
    assert load(LLAMA).tokens_per_example == 8192
    assert load(QWEN2).tokens_per_example == 8192  # of 131072: see LONGEST_DEFAULT_SEQ
    assert load(QWEN2, seq=16384).tokens_per_example == 16384
    assert load(MISTRAL).tokens_per_example == 4096
    assert load(GPT2, seq=128, batch=2).batch["tokens"].shape == (2, 128)
    assert load_model(str(tmp_path)).name == "gpt2"  # the folder that holds config.json
    with pytest.raises(InputError, match=r"config.json: llama: seq=8192 exceeds sliding_window=4096"):
        load(MISTRAL, seq=8192)


@pytest.mark.parametrize(
    ("config", "fragments"),
    [
        ({"model_type": "mamba"}, ["model_type='mamba'", "llama, mistral, qwen2, mixtral, gpt2, gpt_neox, bert, t5"]),
        ({"hidden_size": 4096}, ["model_type is missing"]),
        (LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling=", "yarn", "llama3"]),
        (LLAMA | {"rope_scaling": "linear"}, ["rope_scaling='linear'"]),
        (LLAMA | {"hidden_act": "mish"}, ["hidden_act='mish'", "silu"]),
        (LLAMA | {"attention_bias": True}, ["attention_bias=True", "false"]),
        (LLAMA | {"quantization_config": {"bits": 4}}, ["quantization_config"]),
        (
            LLAMA | {"architectures": ["LlamaForSequenceClassification"]},
            ["LlamaForSequenceClassification", "ForCausalLM"],
        ),
        (LLAMA | {"hidden_size": "4096"}, ["hidden_size='4096'", "integer"]),
        ({k: v for k, v in LLAMA.items() if k != "num_hidden_layers"}, ["num_hidden_layers is missing"]),
        (LLAMA | {"tie_word_embeddings": "yes"}, ["tie_word_embeddings='yes'", "true or false"]),
        (LLAMA | {"rms_norm_eps": "small"}, ["rms_norm_eps='small'", "a number"]),
        (BERT | {"position_embedding_type": "relative_key"}, ["position_embedding_type='relative_key'"]),
        (T5 | {"feed_forward_proj": "gated-relu"}, ["feed_forward_proj='gated-relu'", "gated-gelu"]),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx=True"]),
    ],
)
def test_what_is_not_understood_is_named(load, config, fragments):
    with pytest.raises(InputError) as error:
        load(config)
    assert error.value.code == "MP123" and error.value.hint
    for fragment in [*fragments, "config.json"]:
        assert fragment in str(error.value)


def test_dims_that_do_not_fit_name_the_file(load):
    with pytest.raises(InputError, match=r"config.json: gpt: hidden=770 is not divisible by heads=12") as error:
        load(GPT2 | {"n_embd": 770})
    assert error.value.code == "MP122"


@pytest.mark.parametrize("text", ["{", "[1, 2]", "3"])
def test_files_that_are_not_configurations(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        load_model(str(path))
    assert error.value.code == "MP125" and "other.json" in str(error.value)


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*nothing\.json") as error:
        load_model(str(tmp_path / "nothing.json"))
    assert error.value.code == "MP125"


WRONG = (["gpt2"], {"a": 1}, "many", True, -1, 0, 1.5, 10**30, float("nan"), None)


@pytest.mark.parametrize("config", [LLAMA, QWEN2, MIXTRAL, GPT2, NEOX, BERT, FLAN], ids=lambda c: c["model_type"])
def test_a_field_of_any_other_type_is_named_or_taken(tmp_path, config):
    path = tmp_path / "config.json"
    config = {"_name_or_path": "x", "rope_scaling": None, **config}
    for field in config:
        for value in WRONG:
            path.write_text(json.dumps(config | {field: value}))
            try:
                load_model(str(path))
            except InputError as error:
                assert error.code in ("MP122", "MP123") and str(path) in error.message and error.hint
                assert error.code == "MP122" or field in error.message


@pytest.mark.parametrize("field", sorted(LLAMA3_SCALING))
def test_a_field_of_the_rope_table_is_named_with_its_path(tmp_path, field):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"rope_scaling": LLAMA3_SCALING | {field: ["x"]}}))
    with pytest.raises(InputError, match=r"MP123.*rope_scaling"):
        load_model(str(path))


def test_a_missing_field_is_said_to_be_missing(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}")
    with pytest.raises(InputError, match=r"config\.json: model_type is missing\nhint: legal: llama"):
        load_model(str(path))

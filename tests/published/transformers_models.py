"""Hugging Face transformers' Flax models, built from tiny configurations; no weights are loaded."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.published.functions import BATCH, Published, classes, cross_entropy, make, normal, published, tokens

LENGTH, VOCABULARY = 16, 64


def _init(model: Any, shape: Any) -> Callable[[], Any]:
    return lambda: model.init_weights(jax.random.key(0), shape)


def _language_model(model: Any, **mode: Any) -> Published:
    """Next-token prediction with dropout."""
    mode = mode or {"train": True}

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        ids = batch["input_ids"]
        logits = model(ids, params=params, dropout_rng=rng, **mode).logits
        return cross_entropy(logits[:, :-1], ids[:, 1:])

    return make(loss, _init(model, (1, LENGTH)), {"input_ids": tokens(LENGTH, VOCABULARY)}, rng=True)


def _masked_language_model(model: Any, *more_keys: str) -> Published:
    """Masked positions only: the loss is a weighted mean."""

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        keys = {name: jax.random.fold_in(rng, i) for i, name in enumerate(more_keys)}
        logits = model(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            params=params,
            train=True,
            dropout_rng=rng,
            **keys,
        ).logits
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return (each * batch["masked"]).sum(), batch["masked"].sum()

    ids = tokens(LENGTH, VOCABULARY)
    masked = (np.random.default_rng(3).random((BATCH, LENGTH)) < 0.25).astype(np.float32)
    mask = np.arange(LENGTH) < np.random.default_rng(4).integers(8, LENGTH + 1, (BATCH, 1))
    batch = {"input_ids": ids, "labels": ids, "masked": masked, "attention_mask": mask.astype(np.int32)}
    return make(loss, _init(model, (1, LENGTH)), batch, reduction="weighted", rng=True)


def _seq2seq(model: Any, **inputs: np.ndarray) -> Published:
    def loss(params: Any, batch: Any, rng: Any) -> Any:
        fed = {k: v for k, v in batch.items() if k != "labels"}
        out = model(**fed, params=params, train=True, dropout_rng=rng)
        return cross_entropy(out.logits, batch["labels"])

    batch = {**inputs, "decoder_input_ids": tokens(12, VOCABULARY, 5), "labels": tokens(12, VOCABULARY, 6)}
    shape = next(iter(inputs.values())).shape[1:]
    return make(loss, _init(model, (1, *shape)), batch, rng=True)


@published("transformers", "flax")
def hf_gpt2() -> Published:
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=VOCABULARY, n_positions=32)
    return _language_model(FlaxGPT2LMHeadModel(config, _do_init=False))


@published("transformers", "flax")
def hf_gpt_neo() -> Published:
    from transformers import FlaxGPTNeoForCausalLM, GPTNeoConfig

    config = GPTNeoConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
    )
    return _language_model(FlaxGPTNeoForCausalLM(config, _do_init=False))


@published("transformers", "flax")
def hf_gptj() -> Published:
    from transformers import FlaxGPTJForCausalLM, GPTJConfig

    config = GPTJConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=32, rotary_dim=4)
    return _language_model(FlaxGPTJForCausalLM(config, _do_init=False))


@published("transformers", "flax")
def hf_llama() -> Published:
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
    )
    return _language_model(FlaxLlamaForCausalLM(config, _do_init=False))


@published("transformers", "flax")
def hf_mistral() -> Published:
    from transformers import FlaxMistralForCausalLM, MistralConfig

    config = MistralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        sliding_window=8,
    )
    return _language_model(FlaxMistralForCausalLM(config, _do_init=False))


@published("transformers", "flax")
def hf_opt() -> Published:
    from transformers import FlaxOPTForCausalLM, OPTConfig

    config = OPTConfig(
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        word_embed_proj_dim=32,
    )
    return _language_model(FlaxOPTForCausalLM(config, _do_init=False), deterministic=False)


@published("transformers", "flax")
def hf_bloom() -> Published:
    from transformers import BloomConfig, FlaxBloomForCausalLM

    config = BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=VOCABULARY)
    return _language_model(FlaxBloomForCausalLM(config, _do_init=False))


@published("transformers", "flax")
def hf_bert() -> Published:
    from transformers import BertConfig, FlaxBertForMaskedLM

    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
    )
    return _masked_language_model(FlaxBertForMaskedLM(config, _do_init=False))


@published("transformers", "flax")
def hf_roberta() -> Published:
    from transformers import FlaxRobertaForMaskedLM, RobertaConfig

    config = RobertaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
    )
    return _masked_language_model(FlaxRobertaForMaskedLM(config, _do_init=False))


@published("transformers", "flax")
def hf_big_bird() -> Published:
    from transformers import BigBirdConfig, FlaxBigBirdForMaskedLM

    config = BigBirdConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        block_size=2,
        num_random_blocks=1,
    )
    return _masked_language_model(FlaxBigBirdForMaskedLM(config, _do_init=False), "indices_rng")


@published("transformers", "flax")
def hf_bart() -> Published:
    from transformers import BartConfig, FlaxBartForConditionalGeneration

    config = BartConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
    )
    model = FlaxBartForConditionalGeneration(config, _do_init=False)
    return _seq2seq(model, input_ids=tokens(LENGTH, VOCABULARY))


@published("transformers", "flax")
def hf_whisper() -> Published:
    from transformers import FlaxWhisperForConditionalGeneration, WhisperConfig

    config = WhisperConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=1,
    )
    model = FlaxWhisperForConditionalGeneration(config, _do_init=False)
    return _seq2seq(model, input_features=normal(8, 32))


@published("transformers", "flax")
def hf_vit() -> Published:
    from transformers import FlaxViTForImageClassification, ViTConfig

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=8,
    )
    model = FlaxViTForImageClassification(config, _do_init=False)

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        logits = model(batch["image"], params=params, train=True, dropout_rng=rng).logits
        return cross_entropy(logits, batch["label"])

    return make(loss, _init(model, (1, 16, 16, 3)), {"image": normal(3, 16, 16), "label": classes(8)}, rng=True)


@published("transformers", "flax")
def hf_resnet() -> Published:
    from transformers import FlaxResNetForImageClassification, ResNetConfig

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=8)
    model = FlaxResNetForImageClassification(config, _do_init=False)

    def variables() -> Any:
        return model.init_weights(jax.random.key(0), (1, 16, 16, 3))

    def loss(params: Any, batch: Any, state: Any) -> Any:
        out, new = model(batch["image"], params={"params": params, "batch_stats": state}, train=True)
        return cross_entropy(out.logits, batch["label"]), new["batch_stats"]

    return make(
        loss,
        lambda: variables()["params"],
        {"image": normal(3, 16, 16), "label": classes(8)},
        state=lambda: variables()["batch_stats"],
        independent_microbatches=True,
    )


@published("transformers", "flax")
def hf_clip() -> Published:
    """Contrastive: every example meets every other."""
    from transformers import CLIPConfig, CLIPTextConfig, CLIPVisionConfig, FlaxCLIPModel

    text = CLIPTextConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        projection_dim=16,
    )
    vision = CLIPVisionConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=8,
        projection_dim=16,
    )
    config = CLIPConfig.from_text_vision_configs(text, vision, projection_dim=16)
    model = FlaxCLIPModel(config, _do_init=False)

    def loss(params: Any, batch: Any) -> Any:
        out = model(batch["ids"], batch["image"], params=params, train=False)
        labels = jnp.arange(out.logits_per_text.shape[0])
        return (cross_entropy(out.logits_per_text, labels) + cross_entropy(out.logits_per_image, labels)) / 2

    shape = ((1, LENGTH), (1, 16, 16, 3))
    batch = {"ids": tokens(LENGTH, VOCABULARY), "image": normal(3, 16, 16)}
    return make(loss, _init(model, shape), batch, independent_microbatches=True)


@published("transformers", "flax")
def hf_wav2vec2() -> Published:
    from transformers import FlaxWav2Vec2ForCTC, Wav2Vec2Config

    config = Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=VOCABULARY,
        conv_dim=(16, 16),
        conv_kernel=(4, 3),
        conv_stride=(2, 2),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        layerdrop=0.0,
    )
    model = FlaxWav2Vec2ForCTC(config, _do_init=False)

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        logits = model(batch["audio"], params=params, train=True, dropout_rng=rng).logits
        padding = jnp.zeros(logits.shape[:2])
        return optax.ctc_loss(logits, padding, batch["text"], jnp.zeros(batch["text"].shape)).mean()

    return make(loss, _init(model, (1, 64)), {"audio": normal(64), "text": tokens(6, VOCABULARY)}, rng=True)

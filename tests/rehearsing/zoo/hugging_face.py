"""Models of Hugging Face, made from configurations: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from rehearsing.zoo.kind import Kind


def _small(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 32,
        **more,
    }


def _text(n: int, length: int = 8) -> dict[str, torch.Tensor]:
    ids = torch.arange(n * length).reshape(n, length) % 50
    return {"input_ids": ids, "labels": ids}


def _loss(model: Any, batch: Any) -> Any:
    return model(**batch).loss


def transformers_models() -> Iterator[tuple[str, Kind]]:
    """Of Hugging Face, made from configurations: nothing is downloaded."""
    import transformers as t

    def causal(config: Any, **options: Any) -> Callable[[], Any]:
        return lambda: t.AutoModelForCausalLM.from_config(config, **options)

    bert = t.BertConfig(**_small(num_labels=2))

    def classified(n: int) -> dict[str, torch.Tensor]:
        return {**_text(n), "labels": torch.zeros(n, dtype=torch.long)}

    for attention in ("eager", "sdpa"):
        yield (
            f"bert {attention}",
            Kind(
                partial(
                    t.AutoModelForSequenceClassification.from_config,
                    bert,
                    attn_implementation=attention,
                ),
                classified,
                _loss,
                has_blocks=True,
            ),
        )
    gpt2 = t.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    yield "gpt2", Kind(causal(gpt2), _text, _loss, has_blocks=True)
    llama = t.LlamaConfig(**_small(num_attention_heads=4, num_key_value_heads=2))
    yield "llama", Kind(causal(llama), _text, _loss, has_blocks=True)
    t5 = t.T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        use_cache=False,
    )
    yield "t5", Kind(lambda: t.T5ForConditionalGeneration(t5), _text, _loss, has_blocks=True)


def more_transformers_models() -> Iterator[tuple[str, Kind]]:
    """Of Hugging Face, too: only rehearsed."""
    import transformers as t

    def causal(config: Any) -> Callable[[], Any]:
        return lambda: t.AutoModelForCausalLM.from_config(config)

    def pictures(size: int = 32) -> Callable[[int], dict[str, torch.Tensor]]:
        return lambda n: {
            "pixel_values": torch.rand(n, 3, size, size),
            "labels": torch.zeros(n, dtype=torch.long),
        }

    def heard(n: int) -> dict[str, torch.Tensor]:
        return {"input_features": torch.rand(n, 8, 64), "labels": _text(n)["labels"]}

    def pairs(n: int) -> dict[str, torch.Tensor]:
        return {"input_ids": _text(n)["input_ids"], "pixel_values": torch.rand(n, 3, 32, 32)}

    few = {"num_attention_heads": 2, "num_key_value_heads": 1}
    yield "mistral", Kind(causal(t.MistralConfig(**_small(**few))), _text, _loss, True)
    yield "qwen2", Kind(causal(t.Qwen2Config(**_small(**few))), _text, _loss, True)
    gemma = t.Gemma2Config(**_small(**few, head_dim=8, query_pre_attn_scalar=8, use_cache=False))
    yield "gemma2", Kind(causal(gemma), _text, _loss, True)
    yield (
        "roberta",
        Kind(
            lambda: t.RobertaForMaskedLM(t.RobertaConfig(**_small(max_position_embeddings=40))),
            _text,
            _loss,
            True,
        ),
    )
    distil = t.DistilBertConfig(vocab_size=64, dim=16, n_layers=2, n_heads=2, hidden_dim=32)
    yield "distilbert", Kind(lambda: t.DistilBertForMaskedLM(distil), _text, _loss, True)
    bart = t.BartConfig(
        vocab_size=64,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=32,
        use_cache=False,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
    )
    yield "bart", Kind(lambda: t.BartForConditionalGeneration(bart), _text, _loss, True)
    whisper = t.WhisperConfig(
        vocab_size=64,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=32,
        max_target_positions=16,
        use_cache=False,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
    )
    yield "whisper", Kind(lambda: t.WhisperForConditionalGeneration(whisper), heard, _loss, True)
    swin = t.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4
    )
    yield "swin", Kind(lambda: t.SwinForImageClassification(swin), pictures(), _loss, True)
    segformer = t.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
    )
    segments = t.SegformerForImageClassification
    yield "segformer", Kind(lambda: segments(segformer), pictures(), _loss, True)
    resnet = t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    yield "hf resnet", Kind(lambda: t.ResNetForImageClassification(resnet), pictures(), _loss, True)
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    clip = t.CLIPConfig(
        text_config=_small(eos_token_id=2),
        vision_config={**vision, "image_size": 32, "patch_size": 16},
        projection_dim=8,
    )
    contrast: Callable[[Any, Any], Any] = lambda m, b: m(**b, return_loss=True).loss  # noqa: E731
    yield "clip", Kind(lambda: t.CLIPModel(clip), pairs, contrast, True)
    mixtral = t.MixtralConfig(**_small(**few, num_local_experts=4, num_experts_per_tok=2))
    yield "mixtral", Kind(causal(mixtral), _text, _loss, True)
    mamba = t.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4)
    yield "mamba", Kind(causal(mamba), _text, _loss, True)
    wav = t.Wav2Vec2Config(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(5, 4),
        conv_kernel=(10, 4),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        layerdrop=0.0,
    )
    yield (
        "wav2vec2",
        Kind(
            lambda: t.Wav2Vec2ForCTC(wav),
            lambda n: {
                "input_values": torch.rand(n, 400),
                "labels": torch.ones(n, 4, dtype=torch.long),
            },
            _loss,
            True,
        ),
    )

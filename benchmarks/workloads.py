"""The models that plans are timed on, from one GPU to a thousand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    ResNetConfig,
    ResNetForImageClassification,
)

import oomph


def _of_language(
    config: PreTrainedConfig, *, length: int, batch_size: int
) -> Callable[[], oomph.Workload]:
    def batch(num: int) -> dict[str, Any]:
        tokens = torch.zeros(num, length, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    return lambda: oomph.Workload(
        model=lambda: AutoModelForCausalLM.from_config(config),
        batch=batch,
        loss=lambda model, inputs: model(**inputs, use_cache=False).loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-5),
        batch_size=batch_size,
        clip_grad_norm=1.0,
    )


def _llama(width: int, inner: int, num_layers: int, num_heads: int) -> LlamaConfig:
    """Return a model of the Llama 3 family."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )


_GPT2_XL = GPT2Config(n_embd=1600, n_layer=48, n_head=25)

gpt2_xl = _of_language(_GPT2_XL, length=1024, batch_size=32)
llama_8b = _of_language(_llama(4096, 14_336, 32, 32), length=2048, batch_size=16)
llama_70b = _of_language(_llama(8192, 28_672, 80, 64), length=2048, batch_size=64)
llama_405b = _of_language(_llama(16_384, 53_248, 126, 128), length=4096, batch_size=1024)

resnet_50 = oomph.Workload(
    model=lambda: ResNetForImageClassification(ResNetConfig(num_labels=1000)),
    batch=lambda num: {
        "pixel_values": torch.zeros(num, 3, 224, 224),
        "labels": torch.zeros(num, dtype=torch.long),
    },
    loss=lambda model, inputs: model(**inputs).loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    batch_size=256,
)

"""Small language models of Hugging Face, and real steps of them on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def gpt2(**options: Any) -> Any:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=96,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=32,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return seeded(
        lambda: transformers.AutoModelForCausalLM.from_config(config, **options), torch.float64
    )


def llama(**options: Any) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        use_cache=False,
        tie_word_embeddings=False,
    )
    return seeded(
        lambda: transformers.AutoModelForCausalLM.from_config(config, **options), torch.float64
    )


def seeded(make: Callable[[], Any], dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    return make().to(dtype).train()


def text(num_examples: int = 3, length: int = 11) -> dict[str, torch.Tensor]:
    """Some tokens, the last ones of each example without a label."""
    ids = torch.arange(num_examples * length).reshape(num_examples, length) * 7 % 96
    labels = ids.clone()
    labels[:, -3:] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def assert_same(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], within: float = 1e-9
) -> None:
    assert one.keys() == other.keys()
    for name in one:
        difference = (one[name] - other[name]).norm()
        assert difference <= within * one[name].norm() + 1e-12, name

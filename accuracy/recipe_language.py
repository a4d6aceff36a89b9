"""Models of transformers that recipes were published for, by their figures and with no download.

Most are trained by transformers' Trainer: fp32 weights, mixed precision as the recipe says, AdamW,
and gradients clipped to a norm of 1. What is frozen and quantised follows peft's
prepare_model_for_kbit_training: all that has no four bits is fp32. "old" in a tuning is torch
before 2.0, where gradients were zeroed and kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from accuracy import adapters
from accuracy.dtypes import made_in
from accuracy.nf4 import Linear4bit
from oomph.records.workload import Workload

if TYPE_CHECKING:
    from accuracy.recipe_workloads import Built

# The layers that get an adapter, by the word in a recipe's tuning.
_LLAMA_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_STARCODER_LINEARS = ("c_attn", "c_proj", "c_fc")
_ON = {"qv": ("q_proj", "v_proj"), "all": (*_LLAMA_LINEARS, *_STARCODER_LINEARS)}


def _causal(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config)


def _llama(**figures: Any) -> Any:
    from transformers import LlamaConfig

    return _causal(LlamaConfig(max_position_embeddings=2048, **figures))


def _gpt2(layers: int, width: int, heads: int, vocabulary: int = 50257) -> Any:
    from transformers import GPT2Config

    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        vocab_size=vocabulary,
        attn_implementation="eager",
    )
    return _causal(config)


def _gpt_neo() -> Any:
    from transformers import GPTNeoConfig

    config = GPTNeoConfig(
        hidden_size=2560,
        num_layers=32,
        num_heads=20,
        attention_types=[[["global", "local"], 16]],
        attn_implementation="eager",
    )
    return _causal(config)


def _starcoder() -> Any:
    from transformers import GPTBigCodeConfig

    config = GPTBigCodeConfig(
        vocab_size=49152,
        n_positions=8192,
        n_embd=6144,
        n_layer=40,
        n_head=48,
        n_inner=24576,
        multi_query=True,
    )
    return _causal(config)


def _t5(width: int, heads: int, ffn: int, per_head: int) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=width,
        d_kv=per_head,
        d_ff=ffn,
        num_heads=heads,
        num_layers=24,
        decoder_start_token_id=0,
        attn_implementation="eager",
    )
    return T5ForConditionalGeneration(config)


def _deberta() -> Any:
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    config = DebertaV2Config(
        vocab_size=128100,
        hidden_size=1536,
        num_hidden_layers=24,
        num_attention_heads=24,
        intermediate_size=6144,
        relative_attention=True,
        position_buckets=256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        conv_kernel_size=3,
        conv_act="gelu",
        type_vocab_size=0,
        attention_head_size=64,
        max_relative_positions=-1,
        pooler_hidden_size=1536,
        num_labels=2,
    )
    return DebertaV2ForSequenceClassification(config)


def _blenderbot() -> Any:
    from transformers import BlenderbotConfig, BlenderbotForConditionalGeneration

    config = BlenderbotConfig(
        vocab_size=8008,
        d_model=1280,
        encoder_layers=2,
        decoder_layers=12,
        encoder_attention_heads=32,
        decoder_attention_heads=32,
        encoder_ffn_dim=5120,
        decoder_ffn_dim=5120,
        max_position_embeddings=128,
        attn_implementation="eager",
    )
    return BlenderbotForConditionalGeneration(config)


_MAKE: dict[str, Callable[[], Any]] = {
    "llama-7b": lambda: _llama(),
    "llama-13b": lambda: _llama(
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
    ),
    "llama-3.2-1b": lambda: _llama(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "gpt2-large": lambda: _gpt2(36, 1280, 20),
    "gpt2-xl": lambda: _gpt2(48, 1600, 25),
    # DeepSpeed's tutorial: 48 layers, 1600 wide, 16 heads; its vocabulary is padded.
    "megatron-1.5b": lambda: _gpt2(48, 1600, 16, 50304),
    "gpt-neo-2.7b": _gpt_neo,
    "starcoder": _starcoder,
    # Its positions are slopes in the attention's mask instead of turned queries and keys.
    "baichuan2-13b": lambda: _llama(
        vocab_size=125696,
        hidden_size=5120,
        intermediate_size=13696,
        num_hidden_layers=40,
        num_attention_heads=40,
    ),
    "t5-large": lambda: _t5(1024, 16, 4096, 64),
    "t5-3b": lambda: _t5(1024, 32, 16384, 128),
    "deberta-v2-xlarge": _deberta,
    "blenderbot-400m": _blenderbot,
}
_WITH_TARGET = {"t5-large": 128, "t5-3b": 128, "blenderbot-400m": 64}  # tokens of the answer


def model(name: str, tuning: str) -> Any:
    """Return a model, with adapters in fp32 beside frozen layers if the tuning says so."""
    kind, *words = tuning.split("-")
    if kind == "full":
        return _MAKE[name]() if "bf16" not in words else made_in(torch.bfloat16, _MAKE[name])
    rank, layers = int(words[0]), _ON[words[1]]
    is_quantised = "nf4" in words
    dtype = torch.float32 if is_quantised else torch.bfloat16
    made = made_in(dtype, _MAKE[name])
    compute = torch.float16 if "fp16" in words else torch.bfloat16
    adapters.put_beside(
        made,
        layers,
        lambda base: adapters.Lora(
            _in_four_bits(base, compute, is_double="dq" in words) if is_quantised else base,
            rank,
            dropout=0.05,
            dtype=torch.bfloat16 if "bf16" in words else None,
        ),
    )
    if is_quantised:  # and what has no adapter
        _quantise_rest(made, compute, is_double="dq" in words)
    made.enable_input_require_grads()
    return made


def _in_four_bits(base: Any, compute: Any, *, is_double: bool) -> Any:
    is_transposed = type(base).__name__ == "Conv1D"
    shape = base.weight.shape
    width, out = shape if is_transposed else reversed(shape)
    return Linear4bit(
        width, out, bias=base.bias is not None, double=is_double, compute_dtype=compute
    )


def _quantise_rest(made: Any, compute: Any, *, is_double: bool) -> None:
    for module in list(made.modules()):
        for name, child in list(module.named_children()):
            is_linear = type(child) is torch.nn.Linear
            if is_linear and name not in ("lm_head", "lora_A", "lora_B"):
                setattr(module, name, _in_four_bits(child, compute, is_double=is_double))


def workload(built: Built) -> Workload:
    names = ("input_ids", "labels")

    def batch(n: int) -> dict[str, Any]:
        lengths = dict.fromkeys(names, built.size)
        if built.model in _WITH_TARGET:
            lengths["labels"] = _WITH_TARGET[built.model]
        found = {key: torch.zeros(n, length, dtype=torch.long) for key, length in lengths.items()}
        if built.model.startswith("deberta"):
            found["labels"] = torch.zeros(n, dtype=torch.long)
        return found

    return Workload(
        model=lambda: model(built.model, built.tuning),
        batch=batch,
        loss=lambda made, of: made(**of).loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        batch_size=built.batch_size,
        clip_grad_norm=1.0,
        zero_grad_to_none="old" not in built.tuning.split("-"),
    )

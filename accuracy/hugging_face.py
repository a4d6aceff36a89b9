"""Decoders of transformers, fine-tuned by two scripts: peft's comparison, and a trainer of Phi-3.

huggingface/peft method_comparison/MetaMathQA/run.py: `outputs` lives until the next forward has
returned, with the logits and the cache of keys and values in it; batches are padded, so that
attention has a mask. ljm565/universal-llm-trainer src/models/phi3.py, src/trainer/trainer.py: the
logits but the last are copied for the loss, which is in their type; every layer is checkpointed.
transformers is the installed version, not the one that ran (5.13.1 and 4.49.0).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from accuracy import adapters
from accuracy.dtypes import made_in
from accuracy.nf4 import Linear4bit
from accuracy.shapes import Shape
from oomph.records.workload import Workload

ADAPTERS: dict[str, Any] = {
    "LoRA": lambda base: adapters.Lora(base, 32),
    "AdaLoRA": lambda base: adapters.AdaLora(base, 64),
    "DeLoRA": lambda base: adapters.DeLora(base, 32),
    "GraLoRA": lambda base: adapters.GraLora(base, 32),
}


# ---- peft's comparison -----------------------------------------------------------------------


def llama(shape: Shape, adapter: str) -> Any:
    """The base in bf16, adapters in fp32; without an adapter everything is trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model = made_in(torch.bfloat16, lambda: LlamaForCausalLM(config))
    if adapter:
        adapters.put_beside(model, ("q_proj", "v_proj"), ADAPTERS[adapter])
    return model


class MetaMath:
    """The names of run.py's loop."""

    outputs: Any = None

    def loss(self, model: Any, batch: Any) -> Any:
        tokens, labels = batch["input_ids"], batch["labels"]
        n, length = tokens.shape
        # What transformers makes of a padded batch: who may look at whom.
        mask = torch.ones(n, 1, length, length, dtype=torch.bool, device=tokens.device)
        self.outputs = model(
            input_ids=tokens, attention_mask=mask, labels=labels, num_items_in_batch=n * length
        )
        loss = self.outputs.loss
        extra = [m.regularisation() for m in model.modules() if isinstance(m, adapters.AdaLora)]
        return loss + 0.5 * sum(extra[1:], extra[0]) if extra else loss


def metamath(shape: Shape, adapter: str, length: int, batch_size: int) -> Workload:
    return Workload(
        model=lambda: llama(shape, adapter),
        batch=lambda n: _tokens(n, length, ("input_ids", "labels")),
        loss=MetaMath().loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        batch_size=batch_size,
        clip_grad_norm=1.0,
    )


# ---- the trainer of Phi-3 --------------------------------------------------------------------

_PHI3_LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def phi3(shape: Shape, tuning: str) -> Any:
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=False,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    # What is not quantised is loaded in fp32 where the weights have 4 bits.
    dtype = torch.float32 if tuning == "QLoRA" else torch.bfloat16
    model: Any = made_in(dtype, lambda: Phi3ForCausalLM(config))
    model.gradient_checkpointing_enable()
    if tuning:
        is_quantised = tuning == "QLoRA"
        adapters.put_beside(model, _PHI3_LINEARS, lambda base: _phi3_lora(base, is_quantised))
        model.enable_input_require_grads()
    return model


def _phi3_lora(base: Any, is_quantised: bool) -> Any:
    if is_quantised:
        out, width = base.weight.shape
        base = Linear4bit(width, out, bias=False, double=True, compute_dtype=torch.bfloat16)
    return adapters.Lora(base, 8, dropout=0.05)


def phi3_loss(model: Any, batch: Any) -> Any:
    output = model(input_ids=batch["src"], attention_mask=batch["mask"])
    logits = output.logits[:, :-1, :].reshape(-1, output.logits.size(-1))
    return F.cross_entropy(logits, batch["label"][:, 1:].reshape(-1), ignore_index=-100)


def universal(shape: Shape, tuning: str, length: int, batch_size: int) -> Workload:
    return Workload(
        model=lambda: phi3(shape, tuning),
        batch=lambda n: _tokens(n, length, ("src", "mask", "label")),
        loss=phi3_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-5),
        batch_size=batch_size,
        clip_grad_norm=10.0,
    )


def _tokens(num_examples: int, length: int, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: torch.zeros(num_examples, length, dtype=torch.long) for name in names}

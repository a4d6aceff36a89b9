"""BART-large as NVIDIA's DeepLearningExamples pretrains it: as many tokens in as out, FusedLAMB.

The model is that of the installed transformers; theirs is a copy of version 3.
"""

from __future__ import annotations

from typing import Any

import torch

from accuracy import apex, by_tensor
from oomph.records.workload import Workload


def workload(length: int, batch_size: int) -> Workload:
    def make() -> Any:
        from transformers import BartConfig, BartForConditionalGeneration

        # The defaults are those of bart-large.
        return BartForConditionalGeneration(BartConfig(attn_implementation="eager"))

    return Workload(
        model=make,
        batch=lambda n: {
            name: torch.zeros(n, length, dtype=torch.long)
            for name in ("input_ids", "attention_mask", "decoder_input_ids", "labels")
        },
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda parameters: by_tensor.Plain(parameters, _fused_lamb),
        batch_size=batch_size,
    )


def _fused_lamb(parameters: list[Any], gradients: list[Any], states: list[dict[str, Any]]) -> None:
    """Norms of gradients, parameters and updates, beside what Adam moves."""
    apex.clip(gradients)
    apex.fused_adam(parameters, gradients, states)
    torch._foreach_norm(parameters)
    torch._foreach_norm(gradients)

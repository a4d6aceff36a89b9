"""Possible: what a model and its optimizer are, as far as the choice of tricks asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Possible:
    """What can be put on a model. Found by looking at it: nothing was run."""

    block_names: tuple[str, ...]  # that can be recomputed in backward
    # "sdpa" needs no exchange; "none": none was seen; "unknown": the model does not say.
    attention_is: Literal["eager", "sdpa", "none", "unknown"]
    has_causal_head: bool  # its loss can be computed in pieces
    why_no_chunks: str | None  # where it cannot
    num_adaptable: int  # linear layers inside the blocks, that can have adapters
    optimizer_class: str  # "torch.optim.adamw.AdamW"
    batch_norm_names: tuple[str, ...]  # whose statistics a smaller micro-batch changes
    has_dropout: bool
    num_parameters: int
    num_trainable: int
    parameter_bytes: int

    @property
    def num_blocks(self) -> int:
        return len(self.block_names)

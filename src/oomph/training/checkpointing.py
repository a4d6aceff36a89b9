"""Blocks of a model -> the same blocks, recomputed in backward instead of kept."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from oomph.errors import UsageError
from oomph.records.checkpointing import recomputed_blocks
from oomph.training.blocks import find_blocks


def checkpoint_blocks(model: Any, checkpointing: str) -> None:
    """Recompute blocks in backward; the keys of the state dict stay as they are."""
    blocks = find_blocks(model)
    if not blocks:
        raise UsageError(
            "this model has no repeated blocks to checkpoint",
            because="no nn.ModuleList or nn.Sequential in it holds two modules of one class",
            attempt="checkpointing inside the model, with torch.utils.checkpoint",
        )
    for number in recomputed_blocks(checkpointing, len(blocks)):
        blocks[number].forward = _Recomputed(blocks[number].forward)


class _Recomputed:
    """A block's forward, checkpointed without reentrance: keyword arguments and hooks work."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)

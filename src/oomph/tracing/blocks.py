"""The repeated blocks of a model, and recomputing every k-th of them in backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from oomph.errors import UsageError


def find_blocks(model: Any) -> list[Any]:
    """The blocks that a model is a stack of: the list with the most parameters in it.

    A list is an nn.ModuleList or nn.Sequential of two or more modules of which the most common
    class makes up the bulk.
    """
    lists = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) and len(module) > 1
    ]
    stacks = [blocks for blocks in map(_of_one_class, lists) if len(blocks) > 1]
    if not stacks:
        return []
    return max(stacks, key=lambda blocks: sum(_num_parameters(block) for block in blocks))


def _of_one_class(modules: Any) -> list[Any]:
    most_common, _ = Counter(type(module) for module in modules).most_common(1)[0]
    return [module for module in modules if type(module) is most_common and list(module.children())]


def _num_parameters(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def checkpoint_blocks(model: Any, every: int) -> None:
    """Recompute every k-th block in backward instead of keeping what it saves."""
    from torch.utils.checkpoint import checkpoint

    blocks = find_blocks(model)
    if not blocks:
        raise UsageError(
            "this model has no repeated blocks to checkpoint",
            because="no nn.ModuleList or nn.Sequential in it holds two modules of one class",
            attempt="checkpointing inside the model, with torch.utils.checkpoint",
        )
    for block in blocks[::every]:
        block.forward = _Recomputed(block.forward, checkpoint)


class _Recomputed:
    """A block's forward, checkpointed without reentrance: keyword arguments and hooks work."""

    def __init__(self, forward: Any, checkpoint: Any) -> None:
        self._forward, self._checkpoint = forward, checkpoint

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return self._checkpoint(self._forward, *args, use_reentrant=False, **kwargs)

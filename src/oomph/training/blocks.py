"""A model -> the repeated blocks that it is a stack of."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch


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

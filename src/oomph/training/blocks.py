"""A model -> the repeated blocks that it is a stack of, by name, in the order of registration.

A model of transformers says itself what its blocks are. In others, blocks are what is repeated in
an nn.ModuleList, nn.Sequential or nn.ModuleDict (layers of a transformer, residual blocks of all
stages, both ways of a U-Net), else what is repeated among the attributes of a module. A module
with a single matrix, such as a convolution with its norm, is a block only where nothing larger is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

# The class of transformers (modeling_layers.py) whose instances can be recomputed one by one.
_OWN_CLASS = "GradientCheckpointingLayer"
_LISTS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)


def find_blocks(model: Any) -> list[Any]:
    """The blocks of a model. None, if nothing in it is repeated."""
    return [block for _, block in named_blocks(model)]


def named_blocks(model: Any) -> list[tuple[str, Any]]:
    """The blocks of a model, with the names that its state dict has for them."""
    chosen = _own_blocks(model)
    for among, least in ((_LISTS, 2), (torch.nn.Module, 2), (_LISTS, 1)):
        chosen = chosen or _repeated_in(model, among, least)
    alike = {_kind(block) for block in chosen}
    ids = {id(block) for block in chosen}
    return list(_outermost(model, lambda module: id(module) in ids or _kind(module) in alike))


def _own_blocks(model: Any) -> list[Any]:
    """What the model calls its blocks: the innermost, where a stage is one, too."""
    own = [module for module in model.modules() if _is_own(module)]
    return [module for module in own if not any(map(_is_own, _below(module)))]


def _is_own(module: Any) -> bool:
    return any(kind.__name__ == _OWN_CLASS for kind in type(module).__mro__)


def _repeated_in(module: Any, among: Any, least: int) -> list[Any]:
    """The blocks in the lists of a module: a stage is no block, the blocks in it are."""
    inside = [_repeated_in(child, among, least) for child in module.children()]
    found = [block for blocks in inside for block in blocks]
    if not isinstance(module, among):
        return found
    members = _repeated(module, least)
    is_stages = found and not (members and _is_uniform(members))
    return found if is_stages or not members else members


def _repeated(module: Any, least: int) -> list[Any]:
    """Children of a class that another one has, too: of parts, and of `least` matrices or more."""
    composed = [
        child
        for child in module.children()
        if list(child.children()) and _can_be_called(child) and _matrices(child) >= least
    ]
    counts = Counter(map(_kind, composed))
    return [child for child in composed if counts[_kind(child)] > 1]


def _is_uniform(modules: list[Any]) -> bool:
    """Are most of one size? So are layers, experts in each or not; stages become wider."""
    shapes = Counter(tuple(weight.shape for weight in module.parameters()) for module in modules)
    _, count = shapes.most_common(1)[0]
    return count > 1 and 2 * count >= len(modules)


def _kind(module: Any) -> tuple[type, ...]:
    """The class of a module; of one without a class of its own, what it is made of."""
    is_plain = type(module) in _LISTS
    return (type(module), *(type(child) for child in module.children() if is_plain))


def _outermost(module: Any, is_block: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Blocks that are in no other block, each once."""
    seen: set[int] = set()

    def visit(one: Any, path: str) -> Iterator[tuple[str, Any]]:
        if id(one) in seen:
            return
        seen.add(id(one))
        if path and is_block(one):
            yield path, one
            return
        for key, child in one.named_children():
            yield from visit(child, f"{path}.{key}" if path else key)

    return visit(module, name)


def _below(module: Any) -> Iterator[Any]:
    return (one for one in module.modules() if one is not module)


def _matrices(module: Any) -> int:
    return sum(weight.dim() > 1 for weight in module.parameters())


def _can_be_called(module: Any) -> bool:
    return type(module).forward is not torch.nn.Module.forward

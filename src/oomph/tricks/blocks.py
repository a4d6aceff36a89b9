"""A model -> its repeated blocks, by name, in the order of registration.

Transformers models declare their blocks. In other models, and in parts of a model that declare
none (the U-Net beside a text encoder), blocks are what repeats in an
nn.ModuleList, nn.Sequential or nn.ModuleDict (transformer layers, residual blocks of all stages,
both halves of a U-Net), else what repeats among a module's attributes. A module with a single
matrix, such as a convolution with its norm, is a block only if nothing larger is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

# The class in transformers (modeling_layers.py) whose instances can be recomputed one by one.
_OWN_CLASS = "GradientCheckpointingLayer"
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: an empty list if nothing in it is repeated."""
    return [block for _, block in named_blocks(model)]


def named_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks of a model that are in no other block, with their names in it."""
    chosen = _own_blocks(model)
    if chosen:  # of a part of the model, as the text encoder beside a U-Net
        others = [_repeated_in(part, _LISTS, 2) for part in _parts_without_own(model)]
        chosen += [block for blocks in others for block in blocks]
    for among, least in ((_LISTS, 2), ((nn.Module,), 2), (_LISTS, 1)):
        chosen = chosen or _repeated_in(model, among, least)
    alike = {_kind(block) for block in chosen}
    ids = {id(block) for block in chosen}
    seen: set[int] = set()

    def outermost(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if path and (id(module) in ids or _kind(module) in alike):
            yield path, module
            return
        for key, child in module.named_children():
            yield from outermost(child, f"{path}.{key}" if path else key)

    return list(outermost(model, ""))


def _own_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that the model declares: the innermost ones if a stage is declared, too."""
    own = [module for module in model.modules() if _is_own(module)]
    # A module's own modules begin with itself.
    return [module for module in own if sum(map(_is_own, module.modules())) == 1]


def _parts_without_own(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest parts of a model in which no block is declared.

    A model of transformers declares all of its blocks, so that others in it are none.
    """
    if hasattr(type(module), "gradient_checkpointing_enable"):
        return
    for child in module.children():
        if not any(map(_is_own, child.modules())):
            yield child
        elif not _is_own(child):
            yield from _parts_without_own(child)


def _is_own(module: nn.Module) -> bool:
    return any(kind.__name__ == _OWN_CLASS for kind in type(module).__mro__)


def _repeated_in(
    module: nn.Module, among: tuple[type[nn.Module], ...], least: int
) -> list[nn.Module]:
    """Return the blocks in a module's lists: not the stages, but the blocks inside them."""
    inside = [_repeated_in(child, among, least) for child in module.children()]
    found = [block for blocks in inside for block in blocks]
    members = _repeated(module, least) if isinstance(module, among) else []
    is_stages = found and not (members and _is_uniform(members))
    return found if is_stages or not members else members


def _repeated(module: nn.Module, least: int) -> list[nn.Module]:
    """Return children that share their class, have submodules and at least `least` matrices."""
    composed = [
        child
        for child in module.children()
        if list(child.children())
        and type(child).forward is not nn.Module.forward  # it can be called
        and sum(weight.dim() > 1 for weight in child.parameters()) >= least
    ]
    counts = Counter(map(_kind, composed))
    return [child for child in composed if counts[_kind(child)] > 1]


def _is_uniform(modules: list[nn.Module]) -> bool:
    """Return whether most have equal shapes, as layers do, even those with experts; not stages."""
    shapes = Counter(tuple(weight.shape for weight in module.parameters()) for module in modules)
    _, count = shapes.most_common(1)[0]
    return count > 1 and 2 * count >= len(modules)


def _kind(module: nn.Module) -> tuple[type, ...]:
    """Return the class of a module; for a plain container, also the classes of its children."""
    is_plain = type(module) in _LISTS
    return (type(module), *(type(child) for child in module.children() if is_plain))

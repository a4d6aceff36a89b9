"""A batch function, or one batch as an example -> a batch of n examples on the pretended GPU."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from oomph.errors import UsageError


def make_batch(batch: Any, num_examples: int, dtype: Any = None) -> Any:
    """The batch on the GPU: every tensor of it is an allocation.

    `dtype` is that of floating tensors where the model is all in it.
    """
    if callable(batch):
        made = batch(num_examples)
    else:
        made = _mapped(batch, lambda tensor: _resized(tensor, num_examples))
    sizes: list[int] = []

    def moved(tensor: Any) -> Any:
        sizes.append(_examples(tensor))
        tensor = tensor.to("cuda")
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    on_gpu = _mapped(made, moved)
    if not sizes:
        raise UsageError(
            "the workload's batch has no tensors",
            because=f"batch({num_examples}) returned {' '.join(repr(made).split()):.80}",
            attempt='batch=lambda n: {"x": torch.zeros(n, 3, 224, 224), "y": ...}',
        )
    if num_examples not in sizes:
        raise UsageError(
            f"batch({num_examples}) does not have {num_examples} examples",
            because=f"the first dimensions of its tensors are {sizes[:5]}",
            attempt="using n as the first dimension: torch.zeros(n, ...)",
        )
    return on_gpu


def _examples(tensor: Any) -> int:
    return int(tensor.shape[0]) if tensor.dim() else 0


def _resized(tensor: Any, num_examples: int) -> Any:
    """An example batch, cut or repeated to a size: only its shape matters."""
    if not tensor.dim():
        return tensor
    return tensor[:1].expand(num_examples, *tensor.shape[1:]).contiguous()


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A tree of any kind with its tensors changed; what has none is passed on."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return _like(tree, {key: _mapped(value, change) for key, value in tree.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_mapped(value, change) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(value, change) for value in tree)
    return tree if isinstance(tree, type) or callable(tree) else _object_like(tree, change)


def _like(tree: Mapping[Any, Any], content: dict[Any, Any]) -> Any:
    """The same kind of mapping: batches of transformers are asked for their attributes, too."""
    if type(tree) is dict or not isinstance(tree, MutableMapping):
        return content
    made = copy.copy(tree)
    made.update(content)
    return made


def _object_like(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A dataclass, or another object whose attributes are tensors; a number is passed on."""
    is_record = dataclasses.is_dataclass(tree)
    names = [field.name for field in dataclasses.fields(tree)] if is_record else []
    attributes = {name: getattr(tree, name) for name in names} or getattr(tree, "__dict__", {})
    if not attributes:
        return tree
    made = copy.copy(tree)
    for name, value in attributes.items():
        object.__setattr__(made, name, _mapped(value, change))  # a frozen one takes no other way
    return made

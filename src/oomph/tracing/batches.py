"""A batch function, or one batch as an example -> a batch of n examples on the pretended GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
            because=f"batch({num_examples}) returned {made!r:.80}",
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
    """A tree of dicts, lists and tuples with its tensors changed; what is none is passed on."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: _mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_mapped(value, change) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(value, change) for value in tree)
    return tree

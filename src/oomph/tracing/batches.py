"""A batch function, or one batch as an example -> a batch of n examples on the pretended GPU.

A function is asked for n examples, and what it makes of them is its own affair: graphs have a row
for each node, images may be a list. One batch as an example has to show where its examples are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from oomph.errors import UsageError


def make_batch(batch: Any, num_examples: int, dtype: Any = None, *, batch_size: int) -> Any:
    """The batch on the GPU: every tensor of it is an allocation.

    `dtype` is that of floating tensors where the model is all in it, `batch_size` the workload's.
    """
    if callable(batch):
        made = batch(num_examples)
    else:
        num_given = _examples_of(batch, batch_size)
        made = _mapped(batch, lambda tensor: _resized(tensor, num_given, num_examples))
    sizes: list[int] = []

    def moved(tensor: Any) -> Any:
        sizes.append(_rows(tensor))
        tensor = tensor.to("cuda")
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    on_gpu = _mapped(made, moved)
    if not sizes:
        raise UsageError(
            "the workload's batch has no tensors",
            because=f"batch({num_examples}) returned {' '.join(repr(made).split()):.80}",
            attempt='batch=lambda n: {"x": torch.zeros(n, 3, 224, 224), "y": ...}',
        )
    if callable(batch) and num_examples not in sizes:
        _check_it_grows(batch, made, num_examples, sizes)
    return on_gpu


def _rows(tensor: Any) -> int:
    return int(tensor.shape[0]) if tensor.dim() else 0


def _check_it_grows(batch: Any, made: Any, num_examples: int, sizes: list[int]) -> None:
    """Raises UsageError where twice as many examples are no more, nor less, than these."""
    if _shapes(made) == _shapes(batch(2 * num_examples)):
        raise UsageError(
            f"batch({num_examples}) does not have {num_examples} examples",
            because=f"batch({2 * num_examples}) is no larger; the first dimensions of its tensors"
            f" are {sizes[:5]}",
            attempt="making n examples: torch.zeros(n, ...), or a list of n",
        )


def _shapes(tree: Any) -> list[Any]:
    found: list[Any] = []

    def noted(tensor: Any) -> Any:
        found.append(tensor.shape)
        return tensor

    _mapped(tree, noted)
    return found


# ---- one batch as an example ---------------------------------------------------------------------


def _examples_of(batch: Any, batch_size: int) -> int:
    """How many an example batch has: the first dimension of its tensors. Raises UsageError."""
    sizes = {path: _rows(tensor) for path, tensor in _tensors(batch, "batch") if tensor.dim()}
    counts = Counter(sizes.values())
    if not counts:
        return 0
    num = batch_size if batch_size in counts else counts.most_common(1)[0][0]
    is_list = num != batch_size and _has_list_of(batch, batch_size)
    others = [path for path, size in sizes.items() if size not in (num, 1)]
    if not is_list and not others:
        return num
    because = f"it has a list of {batch_size}, as many as the batch"
    if others:
        because = f"{others[0]} has {sizes[others[0]]} rows, and other tensors have {num}"
    raise UsageError(
        "oomph cannot tell where the examples are in the workload's batch",
        because=because,
        attempt="a function that makes n examples: batch=lambda n: ...",
    )


def _tensors(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every tensor with its place, as one would write it."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _tensors(value, f"{path}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _tensors(value, f"{path}[{number}]")
    elif not isinstance(tree, type) and not callable(tree):
        for name, value in _attributes(tree).items():
            yield from _tensors(value, f"{path}.{name}")


def _has_list_of(tree: Any, num: int) -> bool:
    """Whether there is a list with a tensor for each of so many examples."""
    parts: list[Any] = []
    if isinstance(tree, Mapping):
        parts = list(tree.values())
    elif isinstance(tree, list | tuple):
        parts = list(tree)
        if num > 1 and len(parts) == num and all(isinstance(p, torch.Tensor) for p in parts):
            return True
    return any(_has_list_of(part, num) for part in parts)


def _resized(tensor: Any, num_given: int, num_examples: int) -> Any:
    """An example batch, cut or repeated to a size: only its shape matters."""
    if not tensor.dim() or tensor.shape[0] != num_given:
        return tensor
    return tensor[:1].expand(num_examples, *tensor.shape[1:]).contiguous()


# ---- trees of any kind ---------------------------------------------------------------------------


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
    attributes = _attributes(tree)
    if not attributes:
        return tree
    made = copy.copy(tree)
    for name, value in attributes.items():
        object.__setattr__(made, name, _mapped(value, change))  # a frozen one takes no other way
    return made


def _attributes(tree: Any) -> dict[str, Any]:
    is_record = dataclasses.is_dataclass(tree) and not isinstance(tree, type)
    names = [field.name for field in dataclasses.fields(tree)] if is_record else []
    return {name: getattr(tree, name) for name in names} or getattr(tree, "__dict__", {})

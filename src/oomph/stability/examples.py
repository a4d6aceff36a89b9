"""A workload's batch -> a few real examples, and any of them as a smaller batch.

What belongs to an example is found by asking for batches of two sizes: the dimension that grows
with them is the examples', wherever it is. Of one batch that is given as an example, it is the
first dimension. A batch that is only a shape (all its examples alike, as torch.zeros gives it) is
filled with made-up values, which is said.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from oomph.errors import UsageError

_SHAPES_ONLY = "the batch's examples are all alike: made-up values were used instead"


@dataclasses.dataclass(frozen=True)
class Axis:
    """Where the examples are in a tensor, and how many rows each of them has there."""

    dimension: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Examples:
    """A batch that can be divided."""

    whole: Any
    num: int
    axes: Mapping[str, Axis | None]  # by path; None: a list with an item for each example
    notes: tuple[str, ...] = ()
    cannot_split: str | None = None  # why it cannot be divided

    def piece(self, start: int, stop: int) -> Any:
        """The examples from `start` to `stop`, as a batch."""

        def cut(path: str, leaf: Any) -> Any:
            axis = self.axes.get(path, _NONE)
            if axis is _NONE:
                return leaf
            if axis is None:
                return leaf[start:stop]
            return leaf.narrow(axis.dimension, start * axis.rows, (stop - start) * axis.rows)

        return mapped(self.whole, cut, self._is_leaf)

    def _is_leaf(self, path: str, _: Any) -> bool:
        return path in self.axes


_NONE: Any = object()


class _NotInProportion(Exception):
    """A part of the batch that goes with its examples, though not in proportion."""


def take(batch: Any, num: int, seed: int = 0) -> Examples:
    """`num` examples, or as many as a given batch has. Raises UsageError."""
    if not callable(batch):
        return _given(batch, num)
    whole, fewer = (_made(batch, size, seed) for size in (num, num - 2))
    try:
        axes = _compared(whole, fewer, num)
    except _NotInProportion as error:
        return Examples(whole, num, {}, cannot_split=str(error))
    if not axes:
        raise UsageError(
            f"batch({num}) does not have {num} examples",
            because="nothing in it grows with the number of examples",
            attempt='batch=lambda n: {"x": torch.randn(n, 3, 224, 224), "y": ...}',
        )
    return Examples(whole, num, axes)


def _made(batch: Any, num: int, seed: int) -> Any:
    torch.manual_seed(seed)
    return batch(num)


def _compared(whole: Any, fewer: Any, num: int) -> dict[str, Axis | None]:
    """The axes of examples, from a batch of `num` and one of two less."""
    axes: dict[str, Axis | None] = {}
    others = dict(leaves(fewer))

    def is_list(path: str, node: Any) -> bool:
        """Does it have an item for each example?"""
        is_so = isinstance(node, list | tuple) and len(node) == num
        is_so = is_so and _length_at(fewer, path) == num - 2
        if is_so:
            axes[path] = None
        return is_so

    for path, leaf in leaves(whole, is_list):
        other = others.get(path)
        if isinstance(leaf, torch.Tensor) and isinstance(other, torch.Tensor):
            axis = _grown(path, leaf.shape, other.shape, num)
            if axis is not None:
                axes[path] = axis
    return axes


def _grown(path: str, shape: Any, other: Any, num: int) -> Axis | None:
    """The dimension in which two batches differ."""
    grown = [d for d, (a, b) in enumerate(zip(shape, other, strict=False)) if a != b]
    if not grown and len(shape) == len(other):
        return None
    rows = shape[grown[0]] // num if grown else 0
    is_in_proportion = (
        len(grown) == 1
        and shape[grown[0]] == rows * num
        and other[grown[0]] == rows * (num - 2)
        and rows > 0
    )
    if not is_in_proportion:
        raise _NotInProportion(f"batch{path} has shape {list(shape)} for {num} examples")
    return Axis(grown[0], rows)


def _given(batch: Any, num: int) -> Examples:
    """One batch as an example: its first rows."""
    sizes = [
        leaf.shape[0]
        for _, leaf in leaves(batch)
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0
    ]
    if not sizes:
        raise UsageError("the workload's batch has no tensors", because=f"it is {batch!r:.80}")
    has = max(set(sizes), key=sizes.count)
    axes: dict[str, Axis | None] = {}

    def is_list(path: str, node: Any) -> bool:
        is_so = isinstance(node, list | tuple) and len(node) == has
        is_so = is_so and not any(isinstance(item, torch.Tensor) and item.dim() for item in node)
        if is_so:
            axes[path] = None
        return is_so

    for path, leaf in leaves(batch, is_list):
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == has:
            axes[path] = Axis(0, 1)
    num = min(num, has)
    return Examples(Examples(batch, has, axes).piece(0, num), num, axes)


# ---- batches that are only shapes ------------------------------------------------------------


def with_values(examples: Examples, *, integers: bool) -> Examples:
    """The same with made-up values where a tensor is constant; as it is, if examples differ.

    `integers`: zeros become 0 and 1, too, which are a token and a class in nearly every model.
    """
    if not _are_alike(examples):
        return examples
    generator = torch.Generator().manual_seed(0)

    def filled(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or path not in examples.axes or not leaf.numel():
            return leaf
        if leaf.is_floating_point() and bool((leaf == leaf.flatten()[0]).all()):
            return torch.randn(leaf.shape, generator=generator).to(leaf.dtype)
        if integers and leaf.dtype in (torch.int64, torch.int32) and not leaf.any():
            return torch.randint(0, 2, leaf.shape, generator=generator).to(leaf.dtype)
        return leaf

    whole = mapped(examples.whole, filled, examples._is_leaf)
    return dataclasses.replace(examples, whole=whole, notes=(_SHAPES_ONLY,))


def _are_alike(examples: Examples) -> bool:
    """Is every example the first one once more?"""
    found = dict(leaves(examples.whole, examples._is_leaf))
    first, last = (
        dict(leaves(examples.piece(place, place + 1))) for place in (0, examples.num - 1)
    )
    tensors = [path for path in found if isinstance(first.get(path), torch.Tensor)]
    return bool(tensors) and all(torch.equal(first[path], last[path]) for path in tensors)


# ---- trees of dicts, lists, tuples and dataclasses ---------------------------------------------

IsLeaf = Callable[[str, Any], bool]


def mapped(
    tree: Any, change: Callable[[str, Any], Any], is_leaf: IsLeaf | None = None, path: str = ""
) -> Any:
    """A tree with its leaves changed, of the same types."""
    if isinstance(tree, torch.Tensor) or (is_leaf is not None and is_leaf(path, tree)):
        return change(path, tree)
    children = dict(_children(tree, path))
    if not children:
        return change(path, tree)
    new = {key: mapped(value, change, is_leaf, at) for key, (at, value) in children.items()}
    return _rebuilt(tree, new)


def leaves(tree: Any, is_leaf: IsLeaf | None = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path: `["x"][0].labels`."""
    is_one = isinstance(tree, torch.Tensor) or (is_leaf is not None and is_leaf(path, tree))
    children = {} if is_one else dict(_children(tree, path))
    if not children:
        yield path, tree
    for at, child in children.values():
        yield from leaves(child, is_leaf, at)


def _children(tree: Any, path: str) -> Iterator[tuple[Any, tuple[str, Any]]]:
    """(key, (path, child)) of each child."""
    if isinstance(tree, Mapping):
        yield from ((key, (f"{path}[{key!r}]", value)) for key, value in tree.items())
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        yield from ((name, (f"{path}.{name}", getattr(tree, name))) for name in tree._fields)
    elif isinstance(tree, list | tuple):
        yield from ((i, (f"{path}[{i}]", value)) for i, value in enumerate(tree))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree)]
        yield from ((name, (f"{path}.{name}", getattr(tree, name))) for name in names)


def _rebuilt(tree: Any, children: dict[Any, Any]) -> Any:
    if isinstance(tree, Mapping):
        new: Any = copy.copy(tree)  # a BatchEncoding stays one
        for key, value in children.items():
            new[key] = value
        return new
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(**children)
    if isinstance(tree, list | tuple):
        return type(tree)(children.values())
    return dataclasses.replace(tree, **children)


def _length_at(tree: Any, path: str) -> int | None:
    """The length of the list at a path."""
    found: list[int] = []

    def look(at: str, node: Any) -> bool:
        if at == path and isinstance(node, list | tuple):
            found.append(len(node))
        return at == path

    for _ in leaves(tree, look):
        pass
    return found[0] if found else None

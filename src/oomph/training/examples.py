"""A batch, any tree of tensors -> how many examples it has, and how large one of them is.

Counted are the rows of the first tensor that is in no list, and has more than one; else the entries
of a list of examples; else the rows of tensors in lists.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils import rnn

from oomph.errors import UsageError

WHOLE = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.device, torch.dtype)


def num_examples(batch: Any, whole: Collection[str] = ()) -> int:
    """How many examples a batch has, without what is named in `whole`. Raises UsageError."""
    rest = _counted(batch, whole)
    found = _first_size(rest) or _length_of_list(rest) or _size_in_list(rest)
    if found is not None:
        return found
    raise UsageError(
        f"a batch of {type(batch).__name__} cannot be split",
        because="no tensor or list of examples was found in it",
        attempt="a dict, tuple or dataclass of tensors; or split=function, count=function",
    )


def are_entries_of_lists(batch: Any, whole: Collection[str] = ()) -> bool:
    """Whether the examples are counted by lists: then these are cut, whatever is in them."""
    rest = _counted(batch, whole)
    return not _first_size(rest) and _length_of_list(rest) is not None


def elements_per_example(batch: Any, num: int) -> int:
    """How large an example is: what sequences of more tokens, or larger images, have more of.

    What has one number for each example (a class, an index, a length) says nothing of that.
    """
    each = [tensor.numel() // max(num, 1) for tensor in tensors(batch)]
    return sum(size for size in each if size > 1) or sum(each)


def _counted(batch: Any, whole: Collection[str]) -> Any:
    return _without(batch, frozenset(whole), "") if whole else batch


def has_examples(part: Any, num: int) -> bool:
    if isinstance(part, torch.Tensor):
        return part.dim() > 0 and part.size(0) == num
    shape: Any = getattr(part, "shape", None)
    return isinstance(shape, tuple) and shape[:1] == (num,)


def _first_size(part: Any) -> int | None:
    """Of the first tensor that is in no list: lists may have one tensor for each example."""
    if isinstance(part, torch.Tensor):
        return part.size(0) if part.dim() else None
    if isinstance(part, dict):  # the commonest by far
        return _first_of(map(_first_size, part.values()))
    if isinstance(part, rnn.PackedSequence):
        return int(part.batch_sizes[0])
    shape: Any = getattr(part, "shape", None)
    if hasattr(part, "__array__") and shape:
        return int(shape[0])
    return _first_of(map(_first_size, _columns(part)))


def _first_of(sizes: Iterator[int | None]) -> int | None:
    """What has one row is for all examples, unless everything has one."""
    found = None
    for size in sizes:
        if size and size > 1:
            return size
        found = found or size
    return found


def _length_of_list(part: Any) -> int | None:
    """Of the first list of what are no tensors: texts, dicts, pairs; or of unlike tensors.

    Tensors that are alike are columns in [x, y], which is what default_collate makes; they are
    examples in {"x": [...], "y": [...]} and in ([...], [...]), which it never makes.
    """
    if isinstance(part, list | tuple) and part and not hasattr(part, "_fields"):
        tensors = [each for each in part if isinstance(each, torch.Tensor)]
        is_unlike = len({each.shape[:1] for each in tensors}) > 1
        if isinstance(part, list) and (is_unlike or all(map(_is_one_example, part))):
            return len(part)
    inside = part if isinstance(part, list | tuple) else _columns(part)
    found = next(filter(None, map(_length_of_list, inside)), None)
    return found if found or isinstance(part, list) else _length_of_lists(inside)


def _length_of_lists(columns: Sequence[Any]) -> int | None:
    """Two or more lists of tensors that are as long."""
    lists = [each for each in columns if isinstance(each, list) and each]
    lengths = {len(each) for each in lists}
    is_each_of_tensors = all(isinstance(one, torch.Tensor) for each in lists for one in each)
    return lengths.pop() if len(lists) > 1 and len(lengths) == 1 and is_each_of_tensors else None


def _is_one_example(part: Any) -> bool:
    """A text, a number, a dict, a pair, an object."""
    if isinstance(part, str | int | float | Mapping):
        return True
    is_column = isinstance(part, torch.Tensor | list | rnn.PackedSequence)
    return not (is_column or part is None or hasattr(part, "__array__"))


def _size_in_list(part: Any) -> int | None:
    """Of tensors in a list that all have as many: what default_collate makes of pairs."""
    inside = part if isinstance(part, list | tuple) else _columns(part)
    for each in inside:
        found = _first_size(each) if not isinstance(each, list) else None
        found = found or _size_in_list(each)
        if found is not None:
            return found
    return None


def _without(part: Any, whole: frozenset[str], path: str) -> Any:
    """What is left to count by; a dict, whatever it was, if it has named parts."""
    names: dict[Any, Any] = {}
    if isinstance(part, Mapping):
        names = dict(part)
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        names = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    elif not isinstance(part, (*WHOLE, torch.Tensor, list, tuple)):
        names = dict(getattr(part, "__dict__", {}))
    prefix = f"{path}." if path else ""
    left = {name: each for name, each in names.items() if f"{prefix}{name}" not in whole}
    if not names:
        return part
    return {name: _without(each, whole, f"{prefix}{name}") for name, each in left.items()}


def _columns(part: Any) -> list[Any]:
    """The parts of what has named parts, or is a tuple."""
    if isinstance(part, Mapping):
        return list(part.values())
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return [getattr(part, field.name) for field in dataclasses.fields(part)]
    if isinstance(part, tuple):
        return list(part)
    is_plain = isinstance(part, (*WHOLE, list)) or not hasattr(part, "__dict__")
    return [] if is_plain else list(vars(part).values())


def tensors(part: Any) -> Iterator[Any]:
    if isinstance(part, torch.Tensor):
        yield part
        return
    for each in part if isinstance(part, list) else _columns(part):
        yield from tensors(each)

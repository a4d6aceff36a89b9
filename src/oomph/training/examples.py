"""A batch, any tree of tensors -> how many examples it has, how large one is, and where they are.

Counted are the rows of the first tensor that is in no list, and has more than one; else the entries
of a list of examples; else the rows of tensors in lists. The dimension of the examples is the first
one, unless it is given, or found by trying (split_check.py): `layouts` are the ways to try.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils import rnn

from oomph.errors import UsageError

WHOLE = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.device, torch.dtype)

# The dimension of the examples: of all tensors, or by name; None: every piece is given all of it.
BatchDim = int | Mapping[str, int | None]


@dataclass(frozen=True, slots=True)
class Dims:
    """The dimension of the examples in each tensor of a batch, by name."""

    named: Mapping[str, int | None] = field(default_factory=dict)
    others: int = 0

    def of(self, path: str, num_dims: int) -> int | None:
        """None: every piece is given all of it."""
        if path in self.named:
            dim = self.named[path]
            return dim if dim is None or dim >= 0 else dim + num_dims
        return self.others if -num_dims <= self.others < num_dims else 0


FIRST = Dims()


def dims_given(batch_dim: BatchDim | None) -> Dims:
    """Of what a user said. Raises UsageError."""
    if batch_dim is None:
        return FIRST
    if isinstance(batch_dim, int) and not isinstance(batch_dim, bool):
        return Dims(others=batch_dim)
    if isinstance(batch_dim, Mapping):
        named = {str(name): dim for name, dim in batch_dim.items()}
        if all(dim is None or isinstance(dim, int) for dim in named.values()):
            return Dims(named)
    raise UsageError(
        f"batch_dim={batch_dim!r:.60} is not a dimension",
        attempt='batch_dim=1, or by name: {"source": 1, "mask": None}, where None means not split',
    )


def num_examples(batch: Any, whole: Collection[str] = (), dims: Dims = FIRST) -> int:
    """How many examples a batch has, without what is named in `whole`. Raises UsageError."""
    if dims is not FIRST:
        found = _size_by(batch, whole, dims)
        if found is not None:
            return found
        whole = {*whole, *(path for path, dim in dims.named.items() if dim is None)}
    rest = _counted(batch, whole)
    found = _first_size(rest) or _length_of_list(rest) or _size_in_list(rest)
    if found is not None:
        return found
    raise UsageError(
        f"a batch of {type(batch).__name__} cannot be split",
        because="no tensor or list of examples was found in it",
        attempt="a dict, tuple or dataclass of tensors; or split=function, count=function",
    )


def _size_by(batch: Any, whole: Collection[str], dims: Dims) -> int | None:
    """The rows of the first tensor whose dimension was given. Raises UsageError."""
    found = dict(named_tensors(batch, whole))
    for path, dim in dims.named.items():
        if dim is None or path in whole:
            continue
        tensor = found.get(path)
        if tensor is not None and -tensor.dim() <= dim < tensor.dim():
            return int(tensor.size(dim))
    if dims.named or not dims.others:
        return None
    return next((int(t.size(dims.others)) for t in found.values() if _has(t, dims.others)), None)


def _has(tensor: Any, dim: int) -> bool:
    return bool(-tensor.dim() <= dim < tensor.dim())


def named_tensors(
    part: Any, whole: Collection[str] = (), path: str = "", listed: int | None = None
) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of every dense tensor, by the names that `whole` and `batch_dim` have.

    listed: lists that are as long have an entry for each example, and are left out.
    """
    if path in whole and path:
        return
    is_listed = listed is not None and isinstance(part, list) and len(part) == listed
    if is_listed and not all(has_examples(each, len(part)) for each in part):
        return
    if isinstance(part, torch.Tensor):
        if part.layout is torch.strided and not part.is_nested:
            yield path, part
        return
    if isinstance(part, (*WHOLE, rnn.PackedSequence)):
        return
    prefix = f"{path}." if path else ""
    for name, each in _named_parts(part).items():
        yield from named_tensors(each, whole, f"{prefix}{name}", listed)


def _named_parts(part: Any) -> Mapping[Any, Any]:
    if isinstance(part, Mapping):
        return part
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}
    if isinstance(part, list | tuple):
        return dict(enumerate(part))
    return dict(getattr(part, "__dict__", {}))


# ---- where the examples may be -----------------------------------------------------------------

_MOST_LAYOUTS = 12


def layouts(batch: Any, whole: Collection[str] = ()) -> list[tuple[Dims, int]]:
    """Ways in which a batch may be divided, with its examples; the likeliest first.

    A number of examples explains a tensor that has a dimension of that size. Tensors of integers
    are never given whole by guessing: they may be indices of what is divided.
    """
    first = num_examples(batch, whole)
    named = named_tensors(batch, whole, listed=first)
    found = {path: tensor for path, tensor in named if tensor.dim() and tensor.shape != (1,)}
    if are_entries_of_lists(batch, whole) or not found:
        return [(FIRST, first)]
    sizes = dict.fromkeys(size for t in found.values() for size in t.shape[:2] if size > 1)
    others = sorted(sizes.keys() - {first}, key=lambda num: _num_unexplained(found, num))
    made = [(named, num) for num in (first, *others) for named in _named_dims(found, num)]
    return [
        (FIRST if set(named.values()) == {0} else Dims(named), num)
        for named, num in made[:_MOST_LAYOUTS]
    ]


def _num_unexplained(found: Mapping[str, Any], num: int) -> int:
    return sum(num not in tensor.shape[:3] and tensor.size(0) != 1 for tensor in found.values())


def _named_dims(found: Mapping[str, Any], num: int) -> Iterator[dict[str, int | None]]:
    """Tensors of one shape and dtype are divided alike."""
    kinds: dict[Any, list[str]] = {}
    for path, tensor in found.items():
        kinds.setdefault((tensor.shape, tensor.dtype), []).append(path)
    choices = [_choices(shape, dtype, num) for shape, dtype in kinds]
    if not all(choices):
        return
    ranked = sorted(
        itertools.product(*(range(len(each)) for each in choices)), key=lambda at: (sum(at), at)
    )
    for places in ranked[: 4 * _MOST_LAYOUTS]:
        dims = [each[place] for each, place in zip(choices, places, strict=True)]
        if any(dim is not None for dim in dims):
            yield {p: dim for dim, paths in zip(dims, kinds.values(), strict=True) for p in paths}


def _choices(shape: Any, dtype: Any, num: int) -> list[int | None]:
    dims: list[int | None] = [dim for dim, size in enumerate(shape[:3]) if size == num]
    may_be_indices = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
    if shape[0] == 1:
        return [None, *dims]
    # Masks and weights have one or two dimensions; with more it is what is trained on.
    is_input = bool(dims) and len(shape) > 2
    return dims if may_be_indices or is_input else [*dims, None]


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
    elif isinstance(part, list | tuple):
        at = f"{path}." if path else ""
        if any(f"{at}{number}" in whole for number in range(len(part))):
            names = dict(enumerate(part))
    elif not isinstance(part, (*WHOLE, torch.Tensor)):
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

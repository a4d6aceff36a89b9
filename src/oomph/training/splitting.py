"""A batch, any tree of tensors -> micro-batches of the same kind of tree, in order.

Split are tensors, arrays and lists that have one entry for each example, in their first dimension
unless another one is given: dense, sparse and nested
tensors, packed sequences, lists of texts or of tensors of unlike shapes, in dicts, tuples,
dataclasses, objects and what transformers makes. Numbers, texts and tensors without a dimension of
examples go whole to every piece. What could be either is an error that names it: a batch is never
repeated by mistake.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.nn.utils import rnn

from oomph.errors import UsageError
from oomph.training import examples
from oomph.training.examples import FIRST, WHOLE, Dims


def piece_sizes(num: int, limit: int) -> list[int]:
    """As few pieces of at most `limit` as there can be, and as equal as can be."""
    count = -(-num // max(limit, 1))
    least, more = divmod(num, count)
    return [least + 1] * more + [least] * (count - more)


def split(
    batch: Any, sizes: Sequence[int], whole: Collection[str] = (), dims: Dims = FIRST
) -> Sequence[Any]:
    """The pieces of a batch, one for each of `sizes`, which add up to its examples.

    `whole` names what every piece is given whole: "mask", or "inputs.mask". Raises UsageError.
    """
    if len(sizes) == 1:
        return [batch]
    splitting = _Splitting(sizes, frozenset(whole), dims)
    splitting.counts_lists = examples.are_entries_of_lists(batch, splitting.whole)
    return splitting.pieces(batch, "")


def moved(part: Any, device: Any) -> Any:
    """A piece on another device; copies from pinned memory are not waited for."""
    if hasattr(part, "to"):  # tensors, packed sequences, what transformers' tokenizers return
        return part.to(device, non_blocking=True)
    if isinstance(part, list):
        return [moved(each, device) for each in part]
    if isinstance(part, tuple):
        parts = [moved(each, device) for each in part]
        return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
    if isinstance(part, Mapping):
        content = {name: moved(each, device) for name, each in part.items()}
        return content if type(part) is dict else _mapping_like(part, content)
    if isinstance(part, WHOLE) or not hasattr(part, "__dict__"):
        return part
    return _object_like(part, {name: moved(each, device) for name, each in vars(part).items()})


class _Splitting:
    """One batch into pieces of given sizes."""

    def __init__(self, sizes: Sequence[int], whole: frozenset[str], dims: Dims) -> None:
        self.sizes, self.num, self.whole, self.dims = list(sizes), sum(sizes), whole, dims
        self.ends = list(accumulate(sizes))
        self.counts_lists = False  # the examples are the entries of lists, whatever is in these

    def pieces(self, part: Any, path: str) -> Sequence[Any]:
        if path in self.whole:
            return [part] * len(self.sizes)
        if isinstance(part, torch.Tensor):
            return self._of_tensor(part, path)
        if isinstance(part, WHOLE):
            return [part] * len(self.sizes)
        if isinstance(part, rnn.PackedSequence):
            return self._packed(part, path)
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            names = [field.name for field in dataclasses.fields(part) if field.init]
            fields = self._each({name: getattr(part, name) for name in names}, path)
            return [dataclasses.replace(part, **each) for each in fields]
        if isinstance(part, Mapping):
            each = self._each(part, path)
            return each if type(part) is dict else [_mapping_like(part, one) for one in each]
        if isinstance(part, list | tuple):
            return self._of_sequence(part, path)
        return self._of_object(part, path)

    def _each(self, parts: Mapping[Any, Any], path: str) -> list[dict[Any, Any]]:
        """What has parts, piece by piece."""
        prefix = f"{path}." if path else ""
        columns = [self.pieces(part, f"{prefix}{name}") for name, part in parts.items()]
        if not columns:
            return [{} for _ in self.sizes]
        return [dict(zip(parts, row, strict=True)) for row in zip(*columns, strict=True)]

    def _of_tensor(self, tensor: Any, path: str) -> Sequence[Any]:
        dim = self.dims.of(path, tensor.dim())
        if dim is None or tensor.dim() == 0:
            return [tensor] * len(self.sizes)
        if dim >= tensor.dim() or tensor.size(dim) != self.num:
            return self._broadcast(tensor, path, list(tensor.shape))
        if tensor.is_nested:
            parts = self._sliced(tensor.unbind())
            return [torch.nested.as_nested_tensor(p, layout=tensor.layout) for p in parts]
        if tensor.layout is not torch.strided:
            return [torch.narrow_copy(tensor, dim, at, end - at) for at, end in self._spans()]
        pieces: Sequence[Any] = torch.split_with_sizes(tensor, self.sizes, dim)
        return pieces

    def _broadcast(self, part: Any, path: str, shape: list[int]) -> list[Any]:
        dim = self.dims.of(path, len(shape))
        if dim is None or (dim < len(shape) and shape[dim] == 1):
            return [part] * len(self.sizes)
        name = path or type(part).__name__
        raise UsageError(
            f"{name} of the batch cannot be split",
            because=f"its shape is {shape}, and the batch has {self.num} examples",
            attempt=f"whole=({name!r},), if every piece needs all of it; batch_dim="
            f"{{{name!r}: 1}}, if its examples are in another dimension; or split=function and"
            " count=function",
        )

    def _packed(self, part: Any, path: str) -> list[Any]:
        sequences = rnn.unpack_sequence(part)
        if len(sequences) != self.num:
            return self._broadcast(part, path, [len(sequences)])
        return [rnn.pack_sequence(p, enforce_sorted=False) for p in self._sliced(sequences)]

    def _of_sequence(self, part: Any, path: str) -> list[Any]:
        if self._is_of_examples(part, path):
            return [type(part)(each) for each in self._sliced(part)]
        rows = [list(one.values()) for one in self._each(dict(enumerate(part)), path)]
        if hasattr(part, "_fields"):  # a named tuple
            return [type(part)(*row) for row in rows]
        return [type(part)(row) for row in rows]

    def _is_of_examples(self, part: Any, path: str) -> bool:
        """One entry for each example, and not columns that have one each."""
        if hasattr(part, "_fields") or len(part) != self.num:
            return False
        prefix = f"{path}." if path else ""
        if any(f"{prefix}{number}" in self.dims.named for number in range(len(part))):
            return False
        return self.counts_lists or not all(self._is_column(each) for each in part)

    def _is_column(self, part: Any) -> bool:
        dim = self.dims.others
        if dim and isinstance(part, torch.Tensor) and -part.dim() <= dim < part.dim():
            return bool(part.size(dim) == self.num)
        return examples.has_examples(part, self.num)

    def _of_object(self, part: Any, path: str) -> list[Any]:
        shape = getattr(part, "shape", None)  # an array of numpy
        if isinstance(shape, tuple) and hasattr(part, "__array__"):
            if not shape:
                return [part] * len(self.sizes)
            dim = self.dims.of(path, len(shape))
            if dim is None or dim >= len(shape) or shape[dim] != self.num:
                return self._broadcast(part, path, list(shape))
            return [part[(slice(None),) * dim + (slice(*span),)] for span in self._spans()]
        attributes = getattr(part, "__dict__", None)
        if attributes is None or next(examples.tensors(attributes), None) is None:
            raise UsageError(
                f"{path or 'the batch'} of type {type(part).__name__} cannot be split",
                because="it is no tensor, and no tree of tensors that could be looked into",
                attempt=f"whole=({path!r},) or split=function in the Stepper",
            )
        return [_object_like(part, one) for one in self._each(attributes, path)]

    def _sliced(self, part: Any) -> list[Any]:
        return [part[start:end] for start, end in self._spans()]

    def _spans(self) -> Iterator[tuple[int, int]]:
        return zip([0, *self.ends[:-1]], self.ends, strict=True)


def _mapping_like(like: Mapping[Any, Any], content: dict[Any, Any]) -> Any:
    """A UserDict of transformers, an OrderedDict: the same kind with other content."""
    made = copy.copy(like)
    if hasattr(made, "data") and isinstance(made.data, dict):
        made.data = content
        return made
    return type(like)(content)  # type: ignore[call-arg]


def _object_like(like: Any, attributes: dict[str, Any]) -> Any:
    made = copy.copy(like)
    made.__dict__.update(attributes)
    return made

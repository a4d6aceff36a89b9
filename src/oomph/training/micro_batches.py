"""A batch -> its micro-batches, and the weight of each one's loss in the loss of the batch.

A batch is any tree of tensors, arrays and lists with one entry per example, in the first dimension
unless another is given: dense, sparse and nested tensors, packed sequences, lists of texts or of
tensors of different shapes, in dicts, tuples, dataclasses, objects and transformers' containers.
Every piece gets numbers, texts and tensors without an example dimension whole. Ambiguous entries
raise an error that names them, so nothing is repeated by mistake.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
from torch.nn.utils import rnn

from oomph.errors import UsageError
from oomph.stability import examples
from oomph.stability.examples import FIRST, WHOLE, BatchDim, Dims, dims_given
from oomph.stability.normalisers import shares

Batch = Any  # whatever the user's loader yields, or any part of it; there is no common type
Split = Callable[[Batch, Sequence[int]], Sequence[Batch]]
Count = Callable[[Batch], int]
Weight = Literal["mean", "sum", "tokens", "next-tokens"] | Callable[[Batch], Any]

# ---- splitting ---------------------------------------------------------------------------------


def piece_sizes(num: int, limit: int) -> list[int]:
    """Return the fewest sizes of at most `limit` that add up to `num`, as equal as possible."""
    count = -(-num // max(limit, 1))
    least, more = divmod(num, count)
    return [least + 1] * more + [least] * (count - more)


def split(
    batch: Batch, sizes: Sequence[int], whole: Collection[str] = (), dims: Dims = FIRST
) -> Sequence[Batch]:
    """Return the pieces of a batch, one per entry of `sizes`, which add up to its examples.

    `whole` names entries that every piece gets whole: "mask", or "inputs.mask". Raises UsageError.
    """
    if len(sizes) == 1:
        return [batch]
    splitting = _Splitting(sizes, frozenset(whole), dims)
    splitting.counts_lists = examples.are_entries_of_lists(batch, splitting.whole)
    return splitting.pieces(batch, "")


def moved(part: Batch, device: torch.device | str | int) -> Batch:
    """Return a piece on another device, without waiting for copies from pinned memory."""
    if hasattr(part, "to"):  # tensors, packed sequences, the output of transformers' tokenizers
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
    """Splits one batch into pieces of given sizes."""

    def __init__(self, sizes: Sequence[int], whole: frozenset[str], dims: Dims) -> None:
        self.sizes, self.num, self.whole, self.dims = list(sizes), sum(sizes), whole, dims
        ends = list(accumulate(sizes))
        self.spans = list(zip([0, *ends[:-1]], ends, strict=True))
        self.counts_lists = False  # the examples are the entries of lists, whatever these contain

    def pieces(self, part: Batch, path: str) -> Sequence[Batch]:
        if path in self.whole:
            return self._repeated(part)
        if isinstance(part, torch.Tensor):
            return self._of_tensor(part, path)
        if isinstance(part, WHOLE):
            return self._repeated(part)
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

    def _repeated(self, part: Batch) -> list[Batch]:
        return [part] * len(self.sizes)

    def _each(self, parts: Mapping[Any, Batch], path: str) -> list[dict[Any, Batch]]:
        """Split the parts of a container, each under its own path."""
        columns = [self.pieces(part, _inside(path, name)) for name, part in parts.items()]
        if not columns:
            return [{} for _ in self.sizes]
        return [dict(zip(parts, row, strict=True)) for row in zip(*columns, strict=True)]

    def _of_tensor(self, tensor: torch.Tensor, path: str) -> Sequence[torch.Tensor]:
        dim = self.dims.of(path, tensor.dim())
        if dim is None or tensor.dim() == 0:
            return self._repeated(tensor)
        if dim >= tensor.dim() or tensor.size(dim) != self.num:
            return self._broadcast(tensor, path, list(tensor.shape))
        if tensor.is_nested:
            parts = self._sliced(tensor.unbind())
            return [torch.nested.as_nested_tensor(p, layout=tensor.layout) for p in parts]
        if tensor.layout is not torch.strided:
            return [torch.narrow_copy(tensor, dim, at, end - at) for at, end in self.spans]
        return torch.split_with_sizes(tensor, self.sizes, dim)

    def _broadcast(self, part: Batch, path: str, shape: list[int]) -> list[Batch]:
        dim = self.dims.of(path, len(shape))
        if dim is None or (dim < len(shape) and shape[dim] == 1):
            return self._repeated(part)
        name = path or type(part).__name__
        raise UsageError(
            f"{name} of the batch cannot be split",
            because=f"its shape is {shape}, and the batch has {self.num} examples",
            attempt=f"whole=({name!r},), if every piece needs all of it; batch_dim="
            f"{{{name!r}: 1}}, if its examples are in another dimension; or split=function and"
            " count=function",
        )

    def _packed(self, part: rnn.PackedSequence, path: str) -> list[Batch]:
        sequences = rnn.unpack_sequence(part)
        if len(sequences) != self.num:
            return self._broadcast(part, path, [len(sequences)])
        return [rnn.pack_sequence(p, enforce_sorted=False) for p in self._sliced(sequences)]

    def _of_sequence(self, part: Any, path: str) -> list[Batch]:
        if self._is_of_examples(part, path):
            return [type(part)(each) for each in self._sliced(part)]
        rows = [list(one.values()) for one in self._each(dict(enumerate(part)), path)]
        if hasattr(part, "_fields"):  # a named tuple
            return [type(part)(*row) for row in rows]
        return [type(part)(row) for row in rows]

    def _is_of_examples(self, part: Any, path: str) -> bool:
        """Return whether the sequence has one entry per example, rather than columns."""
        if hasattr(part, "_fields") or len(part) != self.num:
            return False
        if any(_inside(path, number) in self.dims.named for number in range(len(part))):
            return False
        return self.counts_lists or not all(self._is_column(each) for each in part)

    def _is_column(self, part: Batch) -> bool:
        dim = self.dims.others
        if dim and isinstance(part, torch.Tensor) and -part.dim() <= dim < part.dim():
            return part.size(dim) == self.num
        return examples.has_examples(part, self.num)

    def _of_object(self, part: Any, path: str) -> list[Batch]:
        shape = getattr(part, "shape", None)  # a numpy array
        if isinstance(shape, tuple) and hasattr(part, "__array__"):
            if not shape:
                return self._repeated(part)
            dim = self.dims.of(path, len(shape))
            if dim is None or dim >= len(shape) or shape[dim] != self.num:
                return self._broadcast(part, path, list(shape))
            return [part[(slice(None),) * dim + (slice(*span),)] for span in self.spans]
        attributes = getattr(part, "__dict__", None)
        if attributes is None or next(examples.tensors(attributes), None) is None:
            raise UsageError(
                f"{path or 'the batch'} of type {type(part).__name__} cannot be split",
                because="it is neither a tensor nor a container of tensors that oomph can open",
                attempt=f"whole=({path!r},) or split=function in the Stepper",
            )
        return [_object_like(part, one) for one in self._each(attributes, path)]

    def _sliced(self, part: Any) -> list[Any]:
        return [part[start:end] for start, end in self.spans]


def _inside(path: str, name: object) -> str:
    return f"{path}.{name}" if path else f"{name}"


def _mapping_like(like: Mapping[Any, Any], content: dict[Any, Any]) -> Any:
    """Return the same kind of mapping (transformers' UserDict, OrderedDict) with other content."""
    made = copy.copy(like)
    if hasattr(made, "data") and isinstance(made.data, dict):
        made.data = content
        return made
    return type(like)(content)  # type: ignore[call-arg]


def _object_like(like: Any, attributes: dict[str, Any]) -> Any:
    made = copy.copy(like)
    made.__dict__.update(attributes)
    return made


# ---- weights -----------------------------------------------------------------------------------
# A mean over examples is weighted by examples, a mean over tokens by tokens, and the pieces of a
# sum are added. Uneven pieces then give the gradient of the whole batch, up to the order of
# summation. A piece of weight 0 (every label ignored) must not run: its mean is 0 / 0.

NAMES = ("mean", "sum", "tokens", "next-tokens")
IGNORED = -100  # ignore_index of torch's cross_entropy, also used in transformers' labels
_LABELS = ("labels", "label", "targets", "target")
SAME_SHARE = 1e-9  # shares are ratios of integers: smaller differences are fp64 rounding


def weigher(weight: Weight) -> Callable[[Batch, int], Any]:
    """Return a function: (piece, number of its examples) -> its weight. Raises UsageError.

    "mean" counts examples; "tokens" counts labels that are not -100; "next-tokens" does too, but
    skips the first label of each row, which causal language models drop when they shift labels.
    """
    if callable(weight):
        return lambda piece, _: weight(piece)
    if weight == "mean":
        return lambda _, num: num
    if weight == "sum":
        return lambda *_: 1  # and the result is not divided by the total
    if weight in ("tokens", "next-tokens"):
        first = int(weight == "next-tokens")
        return lambda piece, _: (labels_of(piece)[..., first:] != IGNORED).sum()
    raise UsageError(
        f"weight={weight!r:.40} is unknown",
        because=f"it is one of {', '.join(NAMES)}, or a function of a batch",
        attempt='"mean", where the loss is a mean over examples',
    )


def labels_of(batch: Batch) -> torch.Tensor:
    """Return the labels of a batch: by name, or the last entry of a tuple. Raises UsageError."""
    found: Any = None
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in _LABELS if name in batch), None)
    elif isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        found = batch[-1] if batch else None
    else:
        found = next((getattr(batch, n) for n in _LABELS if hasattr(batch, n)), None)
    if isinstance(found, torch.Tensor) and not found.is_floating_point():
        return found
    raise UsageError(
        f"no labels were found in a batch of {type(batch).__name__}",
        because=f"they are looked for as {', '.join(_LABELS)}, or as the last item of a tuple",
        attempt="weight=function, which counts what the loss is a mean of",
    )


def weights_of(
    pieces: Sequence[Batch], sizes: list[int], weigh: Callable[[Batch, int], Any]
) -> list[float]:
    """Return the weight of each piece. Raises UsageError if all of them are 0."""
    found = [weigh(piece, size) for piece, size in zip(pieces, sizes, strict=True)]
    if any(isinstance(each, torch.Tensor) for each in found):
        # Synchronise with the GPU once rather than per piece, if the labels are there.
        found = torch.stack([torch.as_tensor(each) for each in found]).tolist()
    if min(found) < 0 or not sum(found) > 0:
        raise UsageError(
            f"the pieces of a batch have the weights {', '.join(f'{each:g}' for each in found)}",
            because="weights must not be negative, and their sum must be above 0",
            attempt="skipping batches in which nothing counts for the loss",
        )
    return found


def neighbours_apart(mine: Weight, rival: Weight, singles: Sequence[Any]) -> list[float]:
    """Return how differently a rival weights each pair of neighbours; 0 if one counts nothing."""
    ours, theirs = (
        [float(weigher(weight)(each, 1)) for each in singles] for weight in (mine, rival)
    )
    return [
        abs(theirs[at] * ours[at + 1] - theirs[at + 1] * ours[at])
        * (min(*ours[at : at + 2], *theirs[at : at + 2]) > 0)
        for at in range(len(singles) - 1)
    ]


def counts_otherwise(
    mine: Sequence[float], rival: Weight, pieces: Sequence[Any], sizes: list[int]
) -> bool:
    """Return whether a rival gives the pieces other shares than `mine`."""
    try:
        theirs = shares(weights_of(pieces, sizes, weigher(rival)))
    except (UsageError, KeyError):  # nothing here for it to count
        return True
    return any(abs(a - b) > SAME_SHARE for a, b in zip(mine, theirs, strict=True))


def named_by(weight: Weight | None, counted: str) -> str:
    """Return the name of a weight, or of what its function counts."""
    if weight is None:
        return "mean"
    return weight if isinstance(weight, str) else counted


class Division:
    """How batches are split, and how much each piece counts.

    If the user gives no example dimension or weight, the likeliest is assumed. When the first batch
    is split, split_check.py finds the right one and sets it here.

    weight: None while unknown; "mean" is used until then.
    """

    def __init__(
        self,
        weight: Weight | None = None,
        *,
        whole: Collection[str] = (),
        split: Split | None = None,
        count: Count | None = None,
        batch_dim: BatchDim | None = None,
    ) -> None:
        self.whole, self.dims = frozenset(whole), dims_given(batch_dim)
        # Whether the example dimension may be found by trial.
        self.is_free = split is None and count is None and batch_dim is None
        self._split, self._count = split, count
        self.is_given = weight is not None
        self.by_before: str | None = None  # the weight used before a checkpoint
        self.set_weight(weight)

    def set_weight(self, weight: Weight | None, counted: str = "a function") -> None:
        """counted: what a weight function counts."""
        self.weight, self._weigh = weight, weigher("mean" if weight is None else weight)
        self.is_sum, self.by = weight == "sum", named_by(weight, counted)

    def num(self, batch: Batch) -> int:
        """Return how many examples a batch has. Raises UsageError."""
        if self._count is not None:
            return self._count(batch)
        return examples.num_examples(batch, self.whole, self.dims)

    def pieces(
        self, batch: Batch, sizes: Sequence[int], dims: Dims | None = None
    ) -> Sequence[Batch]:
        """Split by `sizes`, along `dims` if given, to try them. Raises UsageError."""
        if self._split is not None and len(sizes) > 1:
            return self._split(batch, sizes)
        return split(batch, sizes, self.whole, self.dims if dims is None else dims)

    def weights(self, pieces: Sequence[Batch], sizes: list[int]) -> list[float]:
        """Return the weight of each piece; those of a sum are not divided by the total."""
        return weights_of(pieces, sizes, self._weigh)


# ---- one piece ---------------------------------------------------------------------------------


class Runner(Protocol):
    """What a piece needs from its runner: Attempts, or a Trial of the first split."""

    def forward_context(self) -> AbstractContextManager[Any] | None: ...
    def backward(self, loss: torch.Tensor, share: float) -> None: ...
    def catches(self, error: BaseException) -> bool: ...


@dataclass(slots=True, eq=False, repr=False)
class Micro:
    """A piece. `with micro:` holds its forward and backward and catches out-of-memory errors."""

    runner: Runner
    data: Batch  # the piece of the batch
    num: int  # examples in it
    share: float  # weight of its loss in that of the whole batch
    is_first: bool  # first piece of an attempt: discard results of the one before
    arguments: Any = None  # that a library passed with this batch
    is_again: bool = False  # the library already has the loss of this batch
    # There is no memory for backward: call only `micro.backward(loss)`, which records the loss.
    is_forward_only: bool = False
    is_done: bool = False
    has_failed: bool = False
    _context: AbstractContextManager[Any] | None = None

    def __enter__(self) -> Micro:
        self._context = self.runner.forward_context()
        if self._context is not None:
            self._context.__enter__()
        return self

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward on the piece's loss, weighted by its share. The optimizer steps later."""
        kind = loss.device.type
        if torch.is_autocast_enabled(kind):  # forward has already fixed the dtypes of backward
            with torch.autocast(kind, enabled=False):
                self.runner.backward(loss, self.share)
        else:
            self.runner.backward(loss, self.share)
        self.is_done = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if self._context is not None:
            self._context.__exit__(kind, error, trace)
        if error is None:
            return False
        del trace  # it holds the frames of forward, which hold the activations
        self.has_failed = self.runner.catches(error)
        return self.has_failed


def left_out() -> UsageError:
    """Return the error for a skipped backward, without which the gradient would be wrong."""
    return UsageError(
        "a piece of the batch was left out",
        because="micro.backward(loss) was not called for it",
        attempt="with micro: micro.backward(loss)",
    )


def no_scalar(loss: object) -> UsageError:
    """Return the error for a loss that is not a scalar tensor."""
    what, attempt = f"of type {type(loss).__name__}", 'outputs.loss, or outputs["loss"]'
    if isinstance(loss, torch.Tensor):
        what, attempt = f"a tensor of {list(loss.shape)}", "loss.mean()"
    return UsageError(
        f"the loss is {what}", because="backward starts from a single number", attempt=attempt
    )

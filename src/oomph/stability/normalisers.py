"""The weights that a split batch needs -> what its loss divides by.

torch's own cross-entropy says what it divided by: its second result is the sum of the weights of
the targets that count. Where the loss is written by hand, the batch is counted: labels that are
not ignored, ones of a mask, lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oomph.records.check import Normaliser
from oomph.stability.examples import leaves
from oomph.stability.modes import EveryOp, name_of

_IGNORED = -100  # torch's own ignore_index, and that of transformers
_LOSSES = ("nll_loss_forward", "nll_loss2d_forward")
_TARGET, _WEIGHT, _REDUCTION, _IGNORE_INDEX = 1, 2, 3, 4  # places among their arguments
_MEAN = 1  # at::Reduction::Mean
_AS_CLOSE = 1e-4  # weights are as close as that to what they are, fitted in fp32, too


@dataclass(frozen=True)
class Divisor:
    """What one call of a loss divided by."""

    total: float
    target: Any  # what it counted in
    ignored: int
    class_weights: Any = None

    @property
    def is_weighted(self) -> bool:
        """Have classes weights?"""
        return self.class_weights is not None


class Divisors(EveryOp):
    """Reads off what torch's losses divide by."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Divisor] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if name_of(op) in _LOSSES and args[_REDUCTION] == _MEAN:
            target, weights = args[_TARGET].detach().clone(), args[_WEIGHT]
            self.found.append(Divisor(float(out[1]), target, args[_IGNORE_INDEX], weights))
        return out


@dataclass(frozen=True)
class Piece:
    """One part of the batch, what its gradient counts for, and what its losses divided by."""

    batch: Any
    num: int
    weight: float
    divisors: Sequence[Divisor]


def name_normaliser(pieces: Sequence[Piece]) -> tuple[Normaliser, str]:
    """What the fitted weights are, and that in words."""
    weights = [piece.weight for piece in pieces]
    if _is_close(weights, [1.0] * len(pieces)):
        return "sum", "the loss is a sum over examples: add the pieces up as they are"
    divided = _divided_by(pieces)
    if _is_close(weights, shares([piece.num for piece in pieces])):
        return "mean", _mean_in_words(pieces)
    if divided is not None and _is_close(weights, shares(divided)):
        if any(d.is_weighted for d in pieces[0].divisors):
            return "class weights", (
                "the loss is a mean weighted by class: weight each piece by the sum of the class"
                " weights of its targets"
            )
        return "targets", (
            "the loss is a mean over the targets that count (tokens or pixels that are not"
            f" ignored): weight each piece by its own number of them, here {_listed(divided)}"
        )
    for counted, counts in _counts(pieces):
        if _is_close(weights, shares(counts)):
            return "targets", (
                f"the loss is a mean over {counted}: weight each piece by its own number of them,"
                f" here {_listed(counts)}"
            )
    return "other", (
        f"pieces of {_listed([p.num for p in pieces])} examples need the weights"
        f" {', '.join(f'{w:.4g}' for w in weights)}: the loss divides by something that"
        " differs between examples"
    )


def _mean_in_words(pieces: Sequence[Piece]) -> str:
    said = "the loss is a mean over examples: weight each piece by its share of the examples"
    divided = _divided_by(pieces)
    if divided is not None and abs(divided[0] - pieces[0].num) > _AS_CLOSE:
        said += (
            f"; all have {divided[0] / pieces[0].num:.4g} targets here, and where that differs"
            " (padding, ignored labels) weight by targets"
        )
    return said


def _divided_by(pieces: Sequence[Piece]) -> list[float] | None:
    """What the losses of each piece divided by; None: there was none, or they do not agree."""
    totals = [piece.divisors[0].total for piece in pieces if piece.divisors]
    if len(totals) < len(pieces) or not sum(totals):
        return None
    for piece in pieces:
        ratios = [d.total / piece.divisors[0].total for d in piece.divisors]
        first = [d.total / pieces[0].divisors[0].total for d in pieces[0].divisors]
        if not _is_close(ratios, first):
            return None  # two losses that divide by different things
    return totals


def _counts(pieces: Sequence[Piece]) -> Iterator[tuple[str, list[float]]]:
    """Whatever can be counted in the batch, in words and for each piece."""
    found = [dict(leaves(piece.batch)) for piece in pieces]
    for counted, count in _WAYS:
        for path in found[0]:
            tensors = [each.get(path) for each in found]
            if all(isinstance(t, torch.Tensor) and not t.is_complex() for t in tensors):
                yield counted.format(f"batch{path}"), [float(count(t)) for t in tensors]


def _after_the_first(tensor: Any) -> Any:
    """Targets of a language model: every token but the first."""
    return tensor[..., 1:] if tensor.dim() > 1 else tensor[:0]


_WAYS = (
    (f"the values of {{}} that are not {_IGNORED}", lambda t: (t != _IGNORED).sum()),
    ("the values of {} that are not 0", lambda t: (t != 0).sum()),
    ("the sum of {}", lambda t: t.double().sum()),
    (
        f"the values of {{}} after the first that are not {_IGNORED}",
        lambda t: (_after_the_first(t) != _IGNORED).sum(),
    ),
    (
        "the values of {} after the first that are not 0",
        lambda t: (_after_the_first(t) != 0).sum(),
    ),
)


# ---- how to weigh other batches, too -----------------------------------------------------------


@dataclass(frozen=True)
class Weighing:
    """Something in a batch that a loss may divide by."""

    said: str  # "the values of batch['labels'] that are not -100"
    count: Callable[[Any], Any]  # in a batch
    is_read: bool = False  # off the loss itself, and not guessed
    is_of_labels: bool = False  # of several labels for each example, or of a mask


def weighings(batch: Any, divisors: Sequence[Divisor]) -> Iterator[Weighing]:
    """What the loss of a batch may divide by, the likeliest first.

    Where torch's own loss divides, its targets are looked for in the batch: they tell what counts,
    which values are ignored, and the weights of classes.
    """
    # Labels first: where nothing is ignored in a batch, its inputs may be the same numbers. In a
    # tuple they come after the inputs.
    tensors = [(path, t) for path, t in leaves(batch) if isinstance(t, torch.Tensor)]
    tensors.sort(key=lambda each: _is_called_labels(each[0]))
    found = dict(reversed(tensors))
    if divisors and all(d.ignored == divisors[0].ignored for d in divisors):
        yield from _weighings_read(found, divisors[0])
    for counted, count in _WAYS:
        for path, tensor in found.items():
            if tensor.dim() and not tensor.is_complex():
                said, of_labels = counted.format(f"batch{path}"), is_of_labels(tensor)
                yield Weighing(said, _counting(path, count), is_of_labels=of_labels)


def _weighings_read(found: Mapping[str, Any], divisor: Divisor) -> Iterator[Weighing]:
    target = divisor.target.flatten()
    for path, tensor in found.items():
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
            continue
        for after, is_there in (("", _is_same), (" after the first", _is_shifted)):
            if not is_there(tensor, target, divisor.ignored):
                continue
            name, shift = f"batch{path}{after}", bool(after)
            if divisor.is_weighted:
                said = f"the class weights of {name}"
            else:
                said = f"the values of {name} that are not {divisor.ignored}"
            count = _counter(path, divisor, _weights_in(found, divisor), shift=shift)
            yield Weighing(said, count, is_read=True, is_of_labels=tensor.dim() > 1)


def _is_called_labels(path: str) -> bool:
    return any(name in path.lower() for name in ("label", "target"))


def _weights_in(found: Mapping[str, Any], divisor: Divisor) -> str | None:
    """Where the weights of classes are in the batch; None if they come from elsewhere."""
    weights = divisor.class_weights
    if weights is None:
        return None
    alike = (path for path, t in found.items() if t.shape == weights.shape)
    return next((path for path in alike if torch.equal(found[path].to(weights), weights)), None)


def _counter(
    path: str, divisor: Divisor, weights_path: str | None, *, shift: bool
) -> Callable[[Any], Any]:
    ignored, weights = divisor.ignored, divisor.class_weights

    def count(batch: Any) -> Any:
        found = dict(leaves(batch))
        targets = found[path][..., 1:] if shift else found[path]
        counts = targets != ignored
        if weights is None:
            return counts.sum()
        of_class = weights if weights_path is None else found[weights_path]
        return of_class.to(targets.device)[targets[counts].long()].double().sum()

    return count


def is_of_labels(tensor: Any) -> bool:
    """Several integers for each example, or a mask of 0 and 1."""
    if not tensor.is_floating_point():
        return bool(tensor.dim() > 1)
    return bool(((tensor == 0) | (tensor == 1)).all())


def _is_same(tensor: Any, target: Any, _: int) -> bool:
    is_as_long = tensor.numel() == target.numel()
    return is_as_long and bool(torch.equal(tensor.flatten().to(target), target))


def _is_shifted(tensor: Any, target: Any, ignored: int) -> bool:
    """The next tokens: without the first, or with one that is ignored at the end instead."""
    if tensor.dim() < 2:
        return False
    rest = tensor[..., 1:]
    padded = torch.nn.functional.pad(rest, (0, 1), value=ignored)
    return _is_same(rest, target, ignored) or _is_same(padded, target, ignored)


def _counting(path: str, count: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda batch: count(dict(leaves(batch))[path])


def shares(counts: Sequence[float]) -> list[float]:
    whole = sum(counts)
    return [count / whole for count in counts] if whole else [0.0] * len(counts)


def _is_close(some: Sequence[float], others: Sequence[float]) -> bool:
    return len(some) == len(others) and all(
        abs(a - b) <= _AS_CLOSE * max(1.0, abs(b)) for a, b in zip(some, others, strict=True)
    )


def _listed(numbers: Sequence[float]) -> str:
    return " and ".join(f"{number:.6g}" for number in numbers)

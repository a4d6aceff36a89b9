"""The weights that a split batch needs -> what its loss divides by.

torch's own cross-entropy returns its divisor: its second result is the total weight of the targets
that count. For hand-written losses, the batch is counted instead: labels that are not ignored, ones
in a mask, lengths. A `Weighing` can count other batches too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from oomph.records.check import Normaliser
from oomph.stability.examples import leaves
from oomph.stability.randomness import EveryOp, name_of

_IGNORED = -100  # ignore_index of torch's cross_entropy and of transformers
_LOSSES = ("nll_loss_forward", "nll_loss2d_forward")
_TARGET, _WEIGHT, _REDUCTION, _IGNORE_INDEX = 1, 2, 3, 4  # positions of their arguments
_MEAN = 1  # at::Reduction::Mean
_AS_CLOSE = 1e-4  # judgement: for fitted weights; fp32 rounds to between 1e-7 and 1e-5


@dataclass(frozen=True)
class Divisor:
    """The divisor of one call of a loss."""

    total: float
    target: Tensor  # the targets it counted
    ignored: int
    class_weights: Tensor | None = None


class Divisors(EveryOp):
    """Records what torch's losses divide by."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Divisor] = []

    def run(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = op(*args, **kwargs)
        if name_of(op) in _LOSSES and args[_REDUCTION] == _MEAN:
            target, weights = args[_TARGET].detach().clone(), args[_WEIGHT]
            self.found.append(Divisor(float(out[1]), target, args[_IGNORE_INDEX], weights))
        return out


@dataclass(frozen=True)
class Piece:
    """One piece of the batch, the weight of its gradient, and the divisors of its losses."""

    batch: Any
    num: int
    weight: float
    divisors: Sequence[Divisor]


def name_normaliser(pieces: Sequence[Piece]) -> tuple[Normaliser, str]:
    """Return the name of the divisor that the fitted weights show, and a description."""
    weights = [piece.weight for piece in pieces]
    if _is_close(weights, [1.0] * len(pieces)):
        return "sum", "the loss is a sum over examples: add the pieces up as they are"
    divided = _divided_by(pieces)
    if _is_close(weights, shares([piece.num for piece in pieces])):
        return "mean", _mean_in_words(pieces)
    if divided is not None and _is_close(weights, shares(divided)):
        if any(d.class_weights is not None for d in pieces[0].divisors):
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
    text = "the loss is a mean over examples: weight each piece by its share of the examples"
    divided = _divided_by(pieces)
    if divided is not None and abs(divided[0] - pieces[0].num) > _AS_CLOSE:
        text += (
            f"; all have {divided[0] / pieces[0].num:.4g} targets here, and where that differs"
            " (padding, ignored labels) weight by targets"
        )
    return text


def _divided_by(pieces: Sequence[Piece]) -> list[float] | None:
    """Return the divisor of each piece's losses; None if there is none or they disagree."""
    totals = [piece.divisors[0].total for piece in pieces if piece.divisors]
    if len(totals) < len(pieces) or not sum(totals):
        return None
    for piece in pieces:
        ratios = [d.total / piece.divisors[0].total for d in piece.divisors]
        first = [d.total / pieces[0].divisors[0].total for d in pieces[0].divisors]
        if not _is_close(ratios, first):
            return None  # two losses with different divisors
    return totals


def _counts(pieces: Sequence[Piece]) -> Iterator[tuple[str, list[float]]]:
    """Yield everything that can be counted in the batch: a description, and counts per piece."""
    for each in weighings(pieces[0].batch, ()):
        with suppress(KeyError):  # an item of a list that another piece does not have
            counts = [float(each.count(piece.batch)) for piece in pieces]
            yield each.counted, counts


def _after_the_first(tensor: Tensor) -> Tensor:
    """Return the targets of a language model: every token but the first."""
    return tensor[..., 1:] if tensor.dim() > 1 else tensor[:0]


_COUNTS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
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


@dataclass(frozen=True)
class Weighing:
    """Something in a batch that a loss may divide by."""

    counted: str  # "the values of batch['labels'] that are not -100"
    count: Callable[[Any], Tensor]  # of a batch
    is_read: bool = False  # read off the loss, not guessed
    is_of_labels: bool = False  # several labels per example, or a mask


def weighings(batch: Any, divisors: Sequence[Divisor]) -> Iterator[Weighing]:
    """Yield what the loss of a batch may divide by, the likeliest first.

    If torch's own loss divides, its targets are looked up in the batch: they show what counts,
    which values are ignored, and the class weights.
    """
    # Labels first: if a batch ignores nothing, its inputs may be the same numbers. In a tuple,
    # labels come after the inputs.
    tensors = [(path, t) for path, t in leaves(batch) if isinstance(t, Tensor)]
    tensors.sort(key=lambda each: "label" in each[0].lower() or "target" in each[0].lower())
    found = dict(reversed(tensors))
    if divisors and all(d.ignored == divisors[0].ignored for d in divisors):
        yield from _weighings_read(found, divisors[0])
    for pattern, count in _COUNTS:
        for path, tensor in found.items():
            if tensor.dim() and not tensor.is_complex():
                counted, of_labels = pattern.format(f"batch{path}"), is_of_labels(tensor)
                yield Weighing(counted, _counting(path, count), is_of_labels=of_labels)


def _weighings_read(found: Mapping[str, Tensor], divisor: Divisor) -> Iterator[Weighing]:
    target = divisor.target.flatten()
    for path, tensor in found.items():
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
            continue
        for after, is_there in (("", _is_same), (" after the first", _is_shifted)):
            if not is_there(tensor, target, divisor.ignored):
                continue
            name, shift = f"batch{path}{after}", bool(after)
            counted = f"the values of {name} that are not {divisor.ignored}"
            if divisor.class_weights is not None:
                counted = f"the class weights of {name}"
            count = _counter(path, divisor, _weights_in(found, divisor), shift=shift)
            yield Weighing(counted, count, is_read=True, is_of_labels=tensor.dim() > 1)


def _weights_in(found: Mapping[str, Tensor], divisor: Divisor) -> str | None:
    """Return the path of the class weights in the batch; None if they come from elsewhere."""
    weights = divisor.class_weights
    if weights is None:
        return None
    alike = (path for path, t in found.items() if t.shape == weights.shape)
    return next((path for path in alike if torch.equal(found[path].to(weights), weights)), None)


def _counter(
    path: str, divisor: Divisor, weights_path: str | None, *, shift: bool
) -> Callable[[Any], Tensor]:
    ignored, weights = divisor.ignored, divisor.class_weights

    def count(batch: Any) -> Tensor:
        found = dict(leaves(batch))
        targets = found[path][..., 1:] if shift else found[path]
        counts: Tensor = targets != ignored
        if weights is None:
            return counts.sum()
        of_class: Tensor = weights if weights_path is None else found[weights_path]
        return of_class.to(targets.device)[targets[counts].long()].double().sum()

    return count


def is_of_labels(tensor: Tensor) -> bool:
    """Return whether it has several integers per example, or is a mask of 0 and 1."""
    if not tensor.is_floating_point():
        return tensor.dim() > 1
    return bool(((tensor == 0) | (tensor == 1)).all())


def _is_same(tensor: Tensor, target: Tensor, _: int) -> bool:
    is_as_long = tensor.numel() == target.numel()
    return is_as_long and torch.equal(tensor.flatten().to(target), target)


def _is_shifted(tensor: Tensor, target: Tensor, ignored: int) -> bool:
    """Return whether targets are the next tokens, padded with `ignored` or not."""
    if tensor.dim() < 2:
        return False
    rest = tensor[..., 1:]
    padded = torch.nn.functional.pad(rest, (0, 1), value=ignored)
    return _is_same(rest, target, ignored) or _is_same(padded, target, ignored)


def _counting(path: str, count: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
    return lambda batch: count(dict(leaves(batch))[path])


def shares(counts: Sequence[float]) -> list[float]:
    """Return each count divided by their sum; 0 if the sum is 0."""
    whole = sum(counts)
    return [count / whole for count in counts] if whole else [0.0] * len(counts)


def _is_close(some: Sequence[float], others: Sequence[float]) -> bool:
    return len(some) == len(others) and all(
        abs(a - b) <= _AS_CLOSE * max(1.0, abs(b)) for a, b in zip(some, others, strict=True)
    )


def _listed(numbers: Sequence[float]) -> str:
    return " and ".join(f"{number:.6g}" for number in numbers)

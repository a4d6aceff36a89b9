"""A number that is evaluated -> what it is a mean of, read off three small batches.

Two examples and both together: a sum over examples or tokens gives the sum of the two losses, a
mean their mean, weighted by what it counts. Forward only, without dropout. The two are taken from
where the candidates differ most. What BatchNorm does in training is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from oomph.errors import UsageError
from oomph.training.weights import IGNORED, Weight, labels_of, weigher

# Relative to the losses: what cannot be told apart, and what is too far off to be it. fp32 is good
# to 1e-7, TF32 to 1e-3 in each product; bf16 has 8 bits, and rounds in each layer.
_NOISE, _WITHIN = 1e-6, 1e-3
_NOISE_ROUNDED, _WITHIN_ROUNDED = 4e-3, 2e-2


def find_weight(
    loss_of: Callable[[Any], float],
    batch: Any,
    num: int,
    split: Callable[[Sequence[int]], Sequence[Any]],
    *,
    is_rounded: bool = False,
    is_shifted: bool = False,
) -> Weight:
    """What pieces of a batch count by. Raises UsageError if it is nothing known.

    is_rounded: in half precision. is_shifted: labels are known to be those of the next token.
    """
    first, second, both = telling_pieces(batch, num, split)
    return weight_in(first, second, both, loss_of, is_rounded, is_shifted)


def weight_in(
    first: Any,
    second: Any,
    both: Any,
    loss_of: Callable[[Any], float],
    is_rounded: bool = False,
    is_shifted: bool = False,
) -> Weight:
    """The same of two examples, and of both together. Raises UsageError."""
    losses, together = (loss_of(first), loss_of(second)), loss_of(both)
    scale = max(map(abs, losses))
    noise = (_NOISE_ROUNDED if is_rounded else _NOISE) * scale
    within = (_WITHIN_ROUNDED if is_rounded else _WITHIN) * scale
    off: dict[Weight, float] = {
        weight: abs(together - expected)
        for weight, expected in _expected(first, second, losses, is_shifted=is_shifted)
    }
    fits = [weight for weight, difference in off.items() if difference <= within]
    if not fits or ("sum" in fits and len(fits) > 1):
        raise _cannot_tell(losses, together)
    return min(fits, key=lambda weight: off[weight] // noise)  # the first of equals


def _cannot_tell(losses: tuple[float, float], together: float) -> UsageError:
    return UsageError(
        "oomph cannot tell what the loss is a mean of, and so not how to weight parts of a batch",
        because=f"two examples have losses of {losses[0]:.6g} and {losses[1]:.6g}, together"
        f" {together:.6g}: neither a sum nor a mean over examples or labels",
        attempt="weight=function, where function(batch) returns what the loss divides by; or"
        ' weight="mean" to count examples anyway',
    )


def _expected(
    first: Any, second: Any, losses: tuple[float, float], *, is_shifted: bool
) -> Iterator[tuple[Weight, float]]:
    """Each kind of loss, and what it would give for both; those that count labels first."""
    yield "sum", sum(losses)
    kinds: tuple[Weight, ...] = ("tokens", "next-tokens", "mean")
    for kind in ("next-tokens", *kinds) if is_shifted else kinds:
        weigh = weigher(kind)
        try:
            counts = int(weigh(first, 1)), int(weigh(second, 1))
        except UsageError:  # there are no labels to be counted
            continue
        if all(counts):
            total = sum(n * loss for n, loss in zip(counts, losses, strict=True))
            yield kind, total / sum(counts)


def telling_pieces(
    batch: Any, num: int, split: Callable[[Sequence[int]], Sequence[Any]]
) -> tuple[Any, Any, Any]:
    """Two neighbours, alone and together."""
    at = _telling_pair(batch, num)
    before, after = [at] * (at > 0), [num - at - 2] * (num > at + 2)
    first, second = split([*before, 1, 1, *after])[len(before) :][:2]
    return first, second, split([*before, 2, *after])[len(before)]


def _telling_pair(batch: Any, num: int) -> int:
    """The first of two neighbours that differ most in how many labels count, or else in class."""
    try:
        labels = labels_of(batch)
    except UsageError:
        return 0
    if labels.dim() == 0 or labels.size(0) != num:
        return 0
    counts = (labels != IGNORED).reshape(num, -1).sum(1)
    if labels.dim() > 1:
        apart = (counts[1:] - counts[:-1]).abs()
    else:
        apart = (labels[1:] != labels[:-1]).long()
    is_empty = (counts[1:] == 0) | (counts[:-1] == 0)  # the mean of nothing
    return int(torch.where(is_empty, -1, apart).argmax())

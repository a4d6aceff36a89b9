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


def weights_in(
    first: Any,
    second: Any,
    losses: tuple[float, float],
    together: float,
    *,
    read: Sequence[Weight] = (),
    others: Sequence[Weight] = (),
    is_rounded: bool = False,
) -> list[Weight]:
    """What the loss of two examples may be a mean of: the likeliest, then what fits as well.

    read: what the loss itself was seen to divide by. others: what else it may. is_rounded: in half
    precision. Raises UsageError if it is nothing known.
    """
    scale = max(map(abs, losses))
    noise = (_NOISE_ROUNDED if is_rounded else _NOISE) * scale
    within = (_WITHIN_ROUNDED if is_rounded else _WITHIN) * scale
    kinds: list[Weight] = [*read, "tokens", "next-tokens", "mean", *others]
    off: dict[Weight, float] = {
        weight: abs(together - expected)
        for weight, expected in _expected(first, second, losses, kinds)
    }
    fits = [weight for weight, difference in off.items() if difference <= within]
    if not fits or ("sum" in fits and len(fits) > 1):
        raise _cannot_tell(losses, together)
    best = min(off[weight] // noise for weight in fits)
    return [weight for weight in fits if off[weight] // noise == best]


def _cannot_tell(losses: tuple[float, float], together: float) -> UsageError:
    return UsageError(
        "oomph cannot tell what the loss is a mean of, and so not how to weight parts of a batch",
        because=f"two examples have losses of {losses[0]:.6g} and {losses[1]:.6g}, together"
        f" {together:.6g}: neither a sum nor a mean over examples or labels",
        attempt="weight=function, where function(batch) returns what the loss divides by; or"
        ' weight="mean" to count examples anyway',
    )


def _expected(
    first: Any, second: Any, losses: tuple[float, float], kinds: Sequence[Weight]
) -> Iterator[tuple[Weight, float]]:
    """Each kind of loss, and what it would give for both."""
    yield "sum", sum(losses)
    for kind in kinds:
        weigh = weigher(kind)
        try:
            counts = float(weigh(first, 1)), float(weigh(second, 1))
        except UsageError:  # there are no labels to be counted
            continue
        if min(counts) > 0:
            total = sum(n * loss for n, loss in zip(counts, losses, strict=True))
            yield kind, total / sum(counts)


def telling_pieces(
    batch: Any,
    num: int,
    split: Callable[[Sequence[int]], Sequence[Any]],
    at: int | None = None,
) -> tuple[Any, Any, Any]:
    """Two neighbours, alone and together. at: the first of them, where somebody knows better."""
    at = _telling_pair(batch, num) if at is None else at
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

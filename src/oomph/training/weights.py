"""What a loss is a mean of -> the share of each piece, so that the pieces add up to the whole.

A mean over examples counts by examples, one over tokens by tokens, a sum counts once: then uneven
pieces give the gradient of the whole batch up to the order of summation. A piece that counts
nothing (every label ignored) is not to be run: its mean is 0 / 0, and no part of the whole's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from oomph.errors import UsageError

Weight = Literal["mean", "sum", "tokens", "next-tokens"] | Callable[[Any], Any]
NAMES = ("mean", "sum", "tokens", "next-tokens")
IGNORED = -100  # ignore_index of torch's cross_entropy, which transformers' labels have, too
_LABELS = ("labels", "label", "targets", "target")


def weigher(weight: Weight) -> Callable[[Any, int], Any]:
    """(piece, number of its examples) -> how much it counts. Raises UsageError.

    "mean": by examples; "tokens": by labels that are not -100; "next-tokens": the same without
    the first of each row, which a causal language model drops when it shifts its labels.
    """
    if callable(weight):
        return lambda piece, _: weight(piece)
    if weight == "mean":
        return lambda _, num: num
    if weight == "sum":
        return lambda *_: 1  # and they are not divided by what all count
    if weight in ("tokens", "next-tokens"):
        first = int(weight == "next-tokens")
        return lambda piece, _: (labels_of(piece)[..., first:] != IGNORED).sum()
    raise UsageError(
        f"{weight!r:.40} is nothing that pieces can be weighted by",
        because=f"it is one of {', '.join(NAMES)}, or a function of a batch",
        attempt='"mean", where the loss is a mean over examples',
    )


def labels_of(batch: Any) -> Any:
    """The labels in a batch: by name, or the last of a tuple. Raises UsageError."""
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
        f"no labels are found in a batch of {type(batch).__name__}",
        because=f"they are looked for as {', '.join(_LABELS)}, or as the last of a tuple",
        attempt="weight=function, which counts what the loss is a mean of",
    )


def weights_of(
    pieces: Sequence[Any], sizes: list[int], weigh: Callable[[Any, int], Any]
) -> list[float]:
    """How much each piece counts, as numbers. Raises UsageError where all of them count nothing."""
    found = [weigh(piece, size) for piece, size in zip(pieces, sizes, strict=True)]
    if any(isinstance(each, torch.Tensor) for each in found):
        # One wait for the GPU, if the labels are there, and not one for each piece.
        found = torch.stack([torch.as_tensor(each) for each in found]).tolist()
    if min(found) < 0 or not sum(found) > 0:
        raise UsageError(
            f"the pieces of a batch weigh {', '.join(f'{each:g}' for each in found)}",
            because="each counts 0 or more, and together more than 0",
            attempt="leaving batches out in which nothing counts for the loss",
        )
    return found

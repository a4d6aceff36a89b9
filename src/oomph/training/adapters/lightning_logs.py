"""What a module logs of each piece of a batch -> one log of the whole batch.

`self.log` of a piece that is run again would count twice in the mean of an epoch, and that of the
last piece would stand for the whole. So calls are recorded, and made once when all pieces are done.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from oomph.training.adapters.pieces import Evaluated, Piece

Part = Piece | Evaluated

_SUMS, _MOST, _LEAST = ("sum", torch.sum), ("max", torch.max), ("min", torch.min)


@dataclass(frozen=True, slots=True)
class Logged:
    """One call of `self.log`."""

    hook: str | None  # in which it was made
    name: str
    value: Any
    others: tuple[Any, ...]
    keywords: dict[str, Any]


@contextmanager
def recorded(module: Any) -> Iterator[list[Logged]]:
    """What a module logs in here is kept, and not logged."""
    calls: list[Logged] = []

    def log(name: str, value: Any, *others: Any, **keywords: Any) -> None:
        kept = value.detach() if isinstance(value, torch.Tensor) else value
        calls.append(Logged(module._current_fx_name, name, kept, others, keywords))

    before = vars(module).get("log")  # somebody else may have done the same
    vars(module)["log"] = log
    try:
        yield calls
    finally:
        del vars(module)["log"]
        if before is not None:
            vars(module)["log"] = before


def log_once(module: Any, done: Sequence[tuple[Part, Any, list[Logged]]]) -> None:
    """Log for a whole batch what its pieces logged: each with its loss and its calls."""
    for calls in itertools.zip_longest(*(logged for _, __, logged in done)):
        made = [(p, loss, c) for (p, loss, _), c in zip(done, calls, strict=True) if c is not None]
        _log(module, made)


def _log(module: Any, made: Sequence[tuple[Part, Any, Logged]]) -> None:
    last = made[-1][2]
    keywords = dict(last.keywords)
    if keywords.get("batch_size") is not None:
        keywords["batch_size"] = sum(call.keywords["batch_size"] for *_, call in made)
    before = module._current_fx_name
    module._current_fx_name = last.hook
    try:
        module.log(last.name, _of_whole(made), *last.others, **keywords)
    finally:
        module._current_fx_name = before


def _of_whole(made: Sequence[tuple[Part, Any, Logged]]) -> Any:
    values = [call.value for *_, call in made]
    if len(values) == 1 or not all(map(_is_number, values)):
        return values[-1]  # a metric, which has counted all of them
    how = made[-1][2].keywords.get("reduce_fx", "mean")
    if how in _SUMS:
        return sum(values)
    if how in _MOST or how in _LEAST:
        return max(values) if how in _MOST else min(values)
    return sum(v * part for v, part in zip(values, _parts(made), strict=True))


def _parts(made: Sequence[tuple[Part, Any, Logged]]) -> list[float]:
    """What each value counts: as its loss does, but that a sum over examples is the loss's own."""
    shares = [piece.share for piece, *_ in made]
    is_sum = len(made) > 1 and all(share == 1 for share in shares)
    if not is_sum or all(loss is not None and float(c.value) == float(loss) for _, loss, c in made):
        return shares
    num = sum(piece.num for piece, *_ in made)
    return [piece.num / num for piece, *_ in made]


def joined(extras: Sequence[tuple[Part, dict[str, Any]]]) -> dict[str, Any]:
    """What training_step returned beside the loss: rows of all pieces; of the rest the last's."""
    whole: dict[str, Any] = {}
    for name, last in extras[-1][1].items():
        found = [(piece, each.get(name)) for piece, each in extras]
        is_rows = all(
            isinstance(v, torch.Tensor) and v.dim() and v.size(0) == p.num for p, v in found
        )
        whole[name] = torch.cat([v.detach() for _, v in found]) if is_rows else last  # type: ignore[union-attr]
    return whole


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    )

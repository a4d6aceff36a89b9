"""One seed for every generator; and the same random numbers for the same example, in any batch.

Dropout, noise and sampled time steps draw for all examples of a batch at once, so a piece of the
batch would draw other numbers than the whole did. What the whole drew is kept, call by call, and
a piece gets its rows of it: then a difference between the two is the model's and not the dice's.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from oomph.stability.modes import EveryOp, name_of

# They draw from the number of examples itself: a piece cannot have rows of what the whole drew.
_OF_ALL = "randperm"


def seed_everything(seed: int) -> None:
    """torch, Python and, where it is loaded, numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def outside_state() -> tuple[Any, ...]:
    """The state of the generators that torch.utils.checkpoint does not put back."""
    numpy = sys.modules.get("numpy")
    state = () if numpy is None else numpy.random.get_state()[1:3]
    return (
        hash(random.getstate()),
        *(str(part.tobytes() if hasattr(part, "tobytes") else part) for part in state),
    )


def is_random(op: Any) -> bool:
    """Does it draw? Attention is tagged as if it did, for the dropout that it may have."""
    return torch.Tag.nondeterministic_seeded in op.tags and "attention" not in str(op)


class WithoutHiddenDropout(EveryOp):
    """Kernels that drop inside of themselves (fused attention, cuDNN's recurrent layers) drop none.

    What they draw is nowhere to be seen, so that a piece could not be given its rows of it.
    """

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        for place, argument in enumerate(op._schema.arguments):
            is_rnn = argument.name == "dropout" and "rnn" in str(op)
            if argument.name == "dropout_p" or is_rnn:
                if place < len(args):
                    args = (*args[:place], 0.0, *args[place + 1 :])
                elif argument.name in kwargs:
                    kwargs[argument.name] = 0.0
        return op(*args, **kwargs)


class Draws:
    """What one run drew, in order."""

    def __init__(self) -> None:
        self.drawn: list[tuple[str, Any, Any]] = []  # op, its arguments that are no tensors, values
        self.mixing: set[str] = set()  # ops that draw among the examples of a batch


class Drawing(EveryOp):
    """Keeps what is drawn in here."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if is_random(op):
            self._draws.drawn.append((str(op), _bounds(op, args), _copied(out)))
        return out


class Redrawing(EveryOp):
    """Draws again what the whole batch drew: of each call, the rows from `start` to `stop`."""

    def __init__(self, draws: Draws, start: int, stop: int, num: int) -> None:
        super().__init__()
        self._draws, self._start, self._stop, self._num = draws, start, stop, num
        self._place = 0
        self.is_aligned = True

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        return self._redrawn(op, args, out) if is_random(op) else out

    def _redrawn(self, op: Any, args: Any, out: Any) -> Any:
        place, self._place = self._place, self._place + 1
        if place >= len(self._draws.drawn) or self._draws.drawn[place][0] != str(op):
            self.is_aligned = False
            return out
        _, bounds, values = self._draws.drawn[place]
        if _OF_ALL in str(op) or bounds != _bounds(op, args):
            if _OF_ALL in str(op) or self._num in bounds:
                self._draws.mixing.add(name_of(op))
            return out
        outs, kept = _as_list(out), _as_list(values)
        for mine, theirs in zip(outs, kept, strict=True):
            self._copy_rows(mine, theirs)
        return out

    def _copy_rows(self, mine: Any, theirs: Any) -> None:
        rows = self._rows(mine.shape, theirs.shape)
        if rows is None:
            self.is_aligned = False
            return
        dimension, rows_each = rows
        if dimension is not None:
            first, count = self._start * rows_each, (self._stop - self._start) * rows_each
            theirs = theirs.narrow(dimension, first, count)
        mine.copy_(theirs)

    def _rows(self, mine: Any, theirs: Any) -> tuple[int | None, int] | None:
        """The dimension of the examples and the rows of each; None: the shapes do not match."""
        if mine == theirs:
            return None, 0
        if len(mine) != len(theirs):
            return None
        different = [d for d, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b]
        rows_each = theirs[different[0]] // self._num
        is_of_examples = (
            len(different) == 1
            and theirs[different[0]] == rows_each * self._num
            and mine[different[0]] == rows_each * (self._stop - self._start)
        )
        return (different[0], rows_each) if is_of_examples else None


def _bounds(op: Any, args: Any) -> tuple[Any, ...]:
    """The numbers among the arguments: from where to where is drawn, with which probability."""
    return tuple(a for a in args if isinstance(a, int | float)) if "rand" in str(op) else ()


def _copied(out: Any) -> Any:
    return [part.clone() for part in _as_list(out)]


def _as_list(out: Any) -> list[Any]:
    return list(out) if isinstance(out, list | tuple) else [out]

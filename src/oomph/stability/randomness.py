"""Seed every generator, and give each example the same random numbers in any batch.

Dropout, noise and sampled time steps draw for all examples of a batch at once, so a piece would
draw other numbers than the whole batch. The draws of the whole are recorded, call by call, and a
piece gets its rows of them. Any difference between the two then comes from the model alone.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.stability.examples import grown


class EveryOp(TorchDispatchMode):
    """Sees every op below autograd and autocast, with its true dtypes, including backward."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's own method imports the compiler, which takes seconds

    def __torch_dispatch__(
        self, op: OpOverload, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.run(op, args, kwargs or {})

    def run(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op and return its result."""
        return op(*args, **kwargs)


def name_of(op: OpOverload) -> str:
    """Return "mm" for aten::mm.default."""
    return str(op._schema.name).partition("::")[2]


def seed_everything(seed: int) -> None:
    """Seed torch, Python and, if it is loaded, numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def outside_state() -> tuple[Any, ...]:
    """Return the state of the generators that torch.utils.checkpoint does not restore."""
    numpy = sys.modules.get("numpy")
    state = () if numpy is None else numpy.random.get_state()[1:3]
    return (
        hash(random.getstate()),
        *(str(part.tobytes() if hasattr(part, "tobytes") else part) for part in state),
    )


def is_random(op: OpOverload) -> bool:
    """Return whether it draws. Attention is tagged so for its optional dropout, but is excluded."""
    return torch.Tag.nondeterministic_seeded in op.tags and "attention" not in str(op)


class WithoutHiddenDropout(EveryOp):
    """Switches off dropout inside kernels (fused attention, cuDNN's recurrent layers).

    Their draws cannot be seen, so a piece could not be given its rows of them.
    """

    def run(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for place, argument in enumerate(op._schema.arguments):
            is_rnn = argument.name == "dropout" and "rnn" in str(op)
            if argument.name == "dropout_p" or is_rnn:
                if place < len(args):
                    args = (*args[:place], 0.0, *args[place + 1 :])
                elif argument.name in kwargs:
                    kwargs = {**kwargs, argument.name: 0.0}
        return op(*args, **kwargs)


class Draws:
    """The random draws of one run, in order."""

    def __init__(self) -> None:
        # The op, its numeric arguments, and the values drawn.
        self.drawn: list[tuple[str, tuple[float, ...], list[torch.Tensor]]] = []
        self.mixing: set[str] = set()  # ops that draw among the examples of a batch


class Drawing(EveryOp):
    """Records what is drawn."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws

    def run(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = op(*args, **kwargs)
        if is_random(op):
            values = [part.clone() for part in _as_list(out)]
            self._draws.drawn.append((str(op), _bounds(op, args), values))
        return out


class Redrawing(EveryOp):
    """Repeats the draws of the whole batch: for each call, the rows from `start` to `stop`."""

    def __init__(self, draws: Draws, start: int, stop: int, num: int) -> None:
        super().__init__()
        self._draws, self._start, self._stop, self._num = draws, start, stop, num
        self._place = 0
        self.is_aligned = True  # every call so far was also made by the whole batch

    def run(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = op(*args, **kwargs)
        if is_random(op):
            self._redraw(op, args, out)
        return out

    def _redraw(self, op: OpOverload, args: tuple[Any, ...], out: Any) -> None:
        place, self._place = self._place, self._place + 1
        if place >= len(self._draws.drawn) or self._draws.drawn[place][0] != str(op):
            self.is_aligned = False
            return
        _, bounds, values = self._draws.drawn[place]
        # It draws from the number of examples, so the whole has no rows for a piece.
        is_of_all = "randperm" in str(op)
        if is_of_all or bounds != _bounds(op, args):
            if is_of_all or self._num in bounds:
                self._draws.mixing.add(name_of(op))
            return
        for mine, theirs in zip(_as_list(out), values, strict=True):
            self._copy_rows(mine, theirs)

    def _copy_rows(self, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        if mine.shape != theirs.shape:
            rows = grown(mine.shape, self._stop - self._start, theirs.shape, self._num)
            if rows is None:
                self.is_aligned = False
                return
            dim, rows_each = rows
            first, count = self._start * rows_each, (self._stop - self._start) * rows_each
            theirs = theirs.narrow(dim, first, count)
        mine.copy_(theirs)


def _bounds(op: OpOverload, args: tuple[Any, ...]) -> tuple[float, ...]:
    """Return the numeric arguments: the range to draw from, the probability."""
    return tuple(a for a in args if isinstance(a, int | float)) if "rand" in str(op) else ()


def _as_list(out: Any) -> list[torch.Tensor]:
    return list(out) if isinstance(out, list | tuple) else [out]

"""An optimizer that a library steps -> the same, whose step is whole or did not happen.

The library calls `optimizer.step` wherever it likes, with a closure or without, before or after a
schedule has put its own around it. An out-of-memory error in it is handled as a Stepper's: set
back, if the weights were copied, and tried again parameter by parameter. On several ranks all of
them step or none does.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from oomph.training.ranks import Ranks
from oomph.training.stepper_update import Copies, Update

_MARK = "_whole_or_not_at_all"


def make_whole(optimizer: Any, copies: Copies = "first", ranks: Ranks | None = None) -> None:
    """Put the guard around an optimizer's step, once; not around one that evaluates as it goes.

    ranks: that take each step together; they may be known only later, in a second call.
    """
    step = optimizer.step
    if hasattr(step, _MARK):
        getattr(step, _MARK).ranks = ranks
        return
    if not _computes_first(optimizer):
        return
    guard = _LibrarysUpdate(optimizer, copies, ranks)

    # Its attributes, too: schedules look for theirs.
    @functools.wraps(getattr(step, "__func__", step))
    def whole(_: Any, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        result = closure() if closure is not None else None
        guard.step_by(functools.partial(step, **options))
        return result

    setattr(whole, _MARK, guard)
    optimizer.step = types.MethodType(whole, optimizer)  # schedules want a method


def _computes_first(optimizer: Any) -> bool:
    """Does it call its closure once, and then step? Of others' optimizers nobody knows."""
    is_known = type(optimizer).__module__.startswith(("torch.optim.", "transformers.optimization"))
    return is_known and not isinstance(optimizer, torch.optim.LBFGS)


class _LibrarysUpdate(Update):
    """One optimizer; what is scaled, clipped and scheduled is the library's."""

    def __init__(self, optimizer: Any, copies: Copies, ranks: Ranks | None) -> None:
        super().__init__(None, [optimizer], (), copies=copies, ranks=ranks)
        self._library_step: Callable[[], Any] = lambda: None

    def step_by(self, step: Callable[[], Any]) -> None:
        self._library_step = step
        try:
            self._step()
        except BaseException:
            if self.ranks is not None:
                self.ranks.leave()
            raise

    def _step_each(self) -> None:
        self._library_step()

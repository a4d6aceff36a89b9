"""Micro: one piece of a batch, for a forward that the user writes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

import torch

from oomph.errors import UsageError


class Runs(Protocol):
    """The side of a Stepper that a piece needs."""

    def forward_context(self) -> AbstractContextManager[Any] | None: ...
    def backward(self, loss: Any, share: float) -> None: ...
    def catches(self, error: BaseException) -> bool: ...


def left_out() -> UsageError:
    """A piece whose backward was not run: the gradient would not be that of the batch."""
    return UsageError(
        "a piece of the batch was left out",
        because="micro.backward(loss) was not called for it",
        attempt="with micro: micro.backward(loss)",
    )


class Micro:
    """`with micro:` is where its forward and backward go; an out-of-memory error ends there."""

    __slots__ = (
        "_context",
        "_share",
        "_stepper",
        "data",
        "has_failed",
        "is_done",
        "is_first",
        "num",
    )

    def __init__(self, stepper: Runs, data: Any, num: int, share: float, *, is_first: bool) -> None:
        self._stepper, self._share = stepper, share
        self.data, self.num = data, num  # the piece of the batch, and how many examples it has
        self.is_first = is_first  # of an attempt: what was counted in one before is void
        self.is_done = self.has_failed = False

    def __enter__(self) -> Micro:
        self._context = self._stepper.forward_context()
        if self._context is not None:
            self._context.__enter__()
        return self

    def backward(self, loss: Any) -> None:
        """Backward of the piece's loss, which is weighted here. The optimizer steps later."""
        kind = loss.device.type
        if torch.is_autocast_enabled(kind):  # what backward computes in was decided in forward
            with torch.autocast(kind, enabled=False):
                self._stepper.backward(loss, self._share)
        else:
            self._stepper.backward(loss, self._share)
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
        del trace  # it holds the forward's frames, and these the activations
        self.has_failed = self._stepper.catches(error)
        return self.has_failed

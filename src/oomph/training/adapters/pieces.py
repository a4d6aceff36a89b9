"""A batch of a library, and the pieces of it that are run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from oomph.training.rollback import Rngs
from oomph.training.stepper_micro import Micro, Runs


@dataclass(slots=True)
class Opened:
    """One batch of the library, kept until its optimizer steps: it may be run again."""

    data: Any
    num: int
    elements: int  # of one example
    said: Any  # by the library, to know the batch by when it is run again
    rngs: Rngs
    size: int = 0  # examples at a time; 0: not run yet


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A piece of a batch that was evaluated, as those that are trained say it of themselves."""

    num: int
    share: float


class Issues(Runs, Protocol):
    """The side of a Window that a piece needs."""

    newest: Opened | None


class Piece(Micro):
    """`with piece:` is where its forward and backward go; an out-of-memory error ends there."""

    __slots__ = ("is_again", "is_forward_only", "said")

    def __init__(
        self,
        window: Issues,
        opened: Opened,
        data: Any,
        num: int,
        share: float,
        *,
        is_first: bool,
    ) -> None:
        super().__init__(window, data, num, share, is_first=is_first)
        self.said = opened.said
        self.is_again = opened is not window.newest  # the library has its loss already
        # There is no memory for backward: `piece.backward(loss)` is all that is to be done.
        self.is_forward_only: bool = getattr(window, "is_forward_only", False)

    @property
    def share(self) -> float:
        """What the piece's loss counts for in that of its batch."""
        return self._share


def total_loss(done: Sequence[tuple[Piece, Any]]) -> Any:
    """The loss of a batch from those of its pieces, which have no graph."""
    if len(done) == 1:
        return done[0][1]
    return sum(loss * piece.share for piece, loss in done)

"""Batches that a library trains on -> their pieces, run again in smaller ones where memory ran out.

The library has the loader, the update, the loss scaler and the schedule. What it runs between two
steps of its optimizer, one batch or several, is a window: after an out-of-memory error everything
is set back to the beginning of the window, and its batches are run again, each with the random
numbers that it had, the one that failed in smaller pieces. A piece counts by its share of its own
batch, so that the library's own arithmetic over batches stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

from oomph.errors import OomphError, UsageError
from oomph.records.plan import Plan
from oomph.records.workload import How
from oomph.training import apply, examples, splitting
from oomph.training.adapters.limits import tell_of_norms
from oomph.training.adapters.pieces import Opened, Piece
from oomph.training.out_of_memory import is_out_of_memory
from oomph.training.ranks import At, Ranks, no_way
from oomph.training.recovery import release, said_by, tried_twice
from oomph.training.recovery_of_model import recovery_for
from oomph.training.recovery_tricks import NAMES
from oomph.training.rollback import Rollback, restore_rngs, rng_states
from oomph.training.stepper_batches import Count, Split
from oomph.training.stepper_micro import left_out
from oomph.training.stepper_options import device_kind
from oomph.training.stepper_signals import SignalsHeld
from oomph.training.weights import Weight, weigher, weights_of

# (batch, sizes -> its pieces) -> what its loss is a mean of
FindWeight = Callable[[Opened, Callable[[Sequence[int]], Sequence[Any]]], Weight]


class Window:
    """The batches since the last step of the library's optimizer, and how to run them in pieces.

    plan: what fits by it is the first to be tried, and grows to what fits by measurement; its
        tricks are put on by its exports (to_hf, to_lightning, to_accelerate). micro_batch: without.
    weight: what the loss is a mean of, as for a Stepper; None: `find_weight` finds it out.
    whole, split, count, last_resorts, keeps_other_rngs, beside: as for a Stepper.
    backward: (loss, share) -> backward of a piece, where a piece is told to do it.
    is_zeroed_later: gradients that are there when a window begins are those of the last step.
    ranks: that the model is replicated on; in `close` they vote and average gradients.
    """

    def __init__(
        self,
        model: Any,
        optimizers: Sequence[Any],
        say: Callable[[str], None],
        *,
        plan: Plan | None = None,
        micro_batch: int | None = None,
        weight: Weight | None = None,
        whole: Collection[str] = (),
        split: Split | None = None,
        count: Count | None = None,
        last_resorts: Sequence[str] = NAMES,
        keeps_other_rngs: bool = False,
        beside: Sequence[Any] = (),
        find_weight: FindWeight | None = None,
        backward: Callable[[Any, float], None] | None = None,
        rollback: Rollback | None = None,
        is_zeroed_later: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self._recovery = recovery_for(
            model, How(), plan, micro_batch=micro_batch, last_resorts=last_resorts, say=say
        )
        self._model, self._say, self._is_zeroed_later = model, say, is_zeroed_later
        self._ranks = ranks
        self._keeps_other_rngs = keeps_other_rngs
        self._rollback = rollback or Rollback(
            model, optimizers, keeps_other_rngs=keeps_other_rngs, beside=beside
        )
        self._device_kind = device_kind(model)
        self._weight, self._find_weight, self._backward = weight, find_weight, backward
        self._weigh = weigher(weight) if weight is not None else None
        self._whole, self._split, self._count = frozenset(whole), split, count
        self._opened: list[Opened] = []
        self._running: Opened | None = None
        self._has_looked_for_norms = False
        self.micro_batch: int | None = None  # examples at a time, of the last batch
        self.newest: Opened | None = None

    @property
    def num_ooms(self) -> int:
        """Out-of-memory errors that were recovered from."""
        return self._recovery.num_ooms

    # ---- what adapters call --------------------------------------------------------------------

    def uses(self, function: Any) -> None:
        """The modules that it names are set back, too."""
        self._rollback.loss = function

    def run(self, data: Any, work: Callable[[Piece], Any], said: Any = None) -> list[Any]:
        """Forward and backward of a batch: `work` of each piece, as (piece, result)."""
        done: list[Any] = []
        for piece in self.pieces(data, said):
            with piece:
                result = work(piece)
                piece.is_done = True
                if not piece.is_again:
                    done.append((piece, result))
            if piece.has_failed:
                done.clear()
        return done

    def pieces(self, data: Any, said: Any = None) -> Iterator[Piece]:
        """The pieces of a batch; after an error those of the window, from its beginning."""
        try:
            todo, is_again = [self._open(data, said)], False
            while not (yield from self._issue(todo, is_again=is_again)):
                todo, is_again = self._opened, True
            self._rollback.pause()
        except BaseException:
            self._give_up()
            raise
        self.micro_batch = self._opened[-1].size
        if self.micro_batch < self._opened[-1].num and not self._has_looked_for_norms:
            self._has_looked_for_norms = True
            tell_of_norms(self._model, self._say)

    def close(self) -> None:
        """The library's optimizer steps: nothing of this window is run again."""
        if self._ranks is not None:
            try:
                with SignalsHeld():
                    self._ranks.ready()
                    self._ranks.settle(At.LAST_BATCH, True, self._recovery)
                    self._ranks.average()
                    self._ranks.end()
            except BaseException:
                self._give_up()
                raise
        for opened in self._opened:
            self._recovery.sizes.fitted(opened.num, opened.elements, opened.size)
        self._clear()

    def forget_sizes(self) -> None:
        """Try the first size again: somebody else has given memory back."""
        self._recovery.sizes.forget()

    # ---- one attempt ---------------------------------------------------------------------------

    def _open(self, data: Any, said: Any) -> Opened:
        if self._opened and not self._has_gradients():
            self._clear()  # the library has dropped what was accumulated
        if self._ranks is not None:
            self._ranks.begin()
        if not self._opened:
            tried_twice(lambda: self._rollback.take(keeps_gradients=not self._is_zeroed_later))
            self._recovery.num_ooms_before = self.num_ooms
        else:
            self._rollback.resume()
        num = self._count(data) if self._count else examples.num_examples(data, self._whole)
        rngs = rng_states(self._device_kind, self._keeps_other_rngs)
        self.newest = Opened(data, num, examples.elements_per_example(data, num), said, rngs)
        self._opened.append(self.newest)
        return self.newest

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._model.parameters())

    def _issue(self, todo: list[Opened], *, is_again: bool) -> Generator[Piece, None, bool]:
        """All pieces of some batches. False if memory ran out, and all is as before the window."""
        with nullcontext() if self._ranks is None else self._ranks.quiet():
            for opened in todo:
                if is_again:
                    restore_rngs(opened.rngs)
                is_first = opened is todo[0]
                if not (yield from self._issue_one(opened, is_first=is_first)):
                    return False
        try:
            self._rollback.observe()
        except OomphError as error:
            self._refuse(error)
        return True

    def _issue_one(self, opened: Opened, *, is_first: bool) -> Generator[Piece, None, bool]:
        parts, measured = self._tried_parts(opened), self._recovery.measured
        if parts is None:
            return False
        if measured is not None:
            measured.begin(opened.elements, opened.size)
        for number, (data, num, share) in enumerate(parts):
            piece = Piece(self, opened, data, num, share, is_first=is_first and number == 0)
            yield piece
            if piece.has_failed:
                return False
            if not piece.is_done:
                raise left_out()
        if measured is not None:
            measured.end(opened.elements, opened.size, opened.num)
        return True

    def _tried_parts(self, opened: Opened) -> list[tuple[Any, int, float]] | None:
        """None if memory ran out: to find out what parts count, the model is run."""
        try:
            return self._parts(opened)
        except BaseException as error:
            if not self.catches(error):
                raise
            return None

    def _parts(self, opened: Opened) -> list[tuple[Any, int, float]]:
        """What to run of a batch: each part, its examples, and its share."""
        self._running = opened
        sizes = self._recovery.sizes
        opened.size = opened.size or sizes.size_for(opened.num, opened.elements)
        nums = splitting.piece_sizes(opened.num, opened.size)
        if len(nums) == 1:
            return [(opened.data, opened.num, 1.0)]  # as the library would run it
        return self._weighted(opened, self._split_up(opened.data, nums), nums)

    def _split_up(self, data: Any, nums: Sequence[int]) -> Sequence[Any]:
        if self._split is not None and len(nums) > 1:
            return self._split(data, nums)
        return splitting.split(data, nums, self._whole)

    def _weighted(
        self, opened: Opened, parts: Sequence[Any], nums: list[int]
    ) -> list[tuple[Any, int, float]]:
        weigh = self._weigh or self._found_weigher(opened)
        weights = weights_of(parts, nums, weigh)
        total = 1.0 if self._weight == "sum" else sum(weights)
        shares = [weight / total for weight in weights]
        return [each for each in zip(parts, nums, shares, strict=True) if each[2]]

    def _found_weigher(self, opened: Opened) -> Callable[[Any, int], Any]:
        """Once, when a batch is split for the first time."""
        find, split = self._find_weight, partial(self._split_up, opened.data)
        self._weight = find(opened, split) if find else "mean"
        self._weigh = weigher(self._weight)
        restore_rngs(opened.rngs)
        return self._weigh

    # ---- what a piece calls --------------------------------------------------------------------

    def forward_context(self) -> AbstractContextManager[Any] | None:
        how = self._recovery.resorts.how
        return apply.around_forward(how) if how.offload_activations else None

    def backward(self, loss: Any, share: float) -> None:
        if self._backward is None:
            raise UsageError("the library does the backward of this piece")
        self._backward(loss, share)

    def catches(self, error: BaseException) -> bool:
        """Undo the window so far. True if its examples are to be run again."""
        try:
            return self._is_caught(error)
        except BaseException:
            self._give_up()
            raise

    def _is_caught(self, error: BaseException) -> bool:
        failed = self._running
        if failed is None or not is_out_of_memory(error):
            self._give_up()
            return False
        text = said_by(error)
        release(error)
        self._undo_or_refuse()  # first: a trick that is switched on is not to be undone
        failed.size = self._recovery.after(error, failed.num, failed.elements, failed.size)
        if not failed.size:
            self._clear()
            raise no_way(self._ranks, self._recovery, text) from None
        return True

    def _undo(self) -> None:
        with SignalsHeld():
            self._rollback.undo()

    def _give_up(self) -> None:
        """Back to the last whole step, for good; other ranks are told of it."""
        try:
            if self._opened:
                self._undo()
        except OomphError as error:  # beside the one that is raised
            self._say(error.in_one_line())
        finally:
            self._clear()
            if self._ranks is not None:
                with SignalsHeld():
                    self._ranks.leave()

    def _undo_or_refuse(self) -> None:
        try:
            self._undo()
        except OomphError as error:
            self._refuse(error)

    def _refuse(self, error: OomphError) -> NoReturn:
        self._clear()
        no_way(self._ranks, self._recovery, error.what)  # the others are to hear of it
        raise error

    def _clear(self) -> None:
        self._opened, self._running, self.newest = [], None, None

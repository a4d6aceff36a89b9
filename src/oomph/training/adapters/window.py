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
from typing import Any, NoReturn

from oomph.errors import OomphError, UsageError
from oomph.records.plan import Plan
from oomph.records.workload import How
from oomph.training import apply, examples, splitting
from oomph.training.adapters.pieces import Opened, Piece
from oomph.training.division import Count, Division, Split
from oomph.training.examples import BatchDim
from oomph.training.out_of_memory import is_out_of_memory
from oomph.training.ranks import At, Ranks, no_way
from oomph.training.recovery import release, said_by, tried_twice
from oomph.training.recovery_of_model import recovery_for
from oomph.training.recovery_tricks import NAMES
from oomph.training.rollback import Rollback, restore_rngs, rng_states
from oomph.training.split_check import OnDifference, SplitCheck
from oomph.training.stepper_micro import left_out
from oomph.training.stepper_options import device_kind
from oomph.training.stepper_signals import SignalsHeld
from oomph.training.weights import Weight


class Window:
    """The batches since the last step of the library's optimizer, and how to run them in pieces.

    plan: what fits by it is the first to be tried, and grows to what fits by measurement; its
        tricks are put on by its exports (to_hf, to_lightning, to_accelerate). micro_batch: without.
    weight, on_difference, whole, batch_dim, split, count, last_resorts, keeps_other_rngs, beside:
        as for a Stepper.
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
        on_difference: OnDifference = "raise",
        whole: Collection[str] = (),
        batch_dim: BatchDim | None = None,
        split: Split | None = None,
        count: Count | None = None,
        last_resorts: Sequence[str] = NAMES,
        keeps_other_rngs: bool = False,
        beside: Sequence[Any] = (),
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
        self._backward = backward
        self._division = Division(
            weight, whole=whole, split=split, count=count, batch_dim=batch_dim
        )
        self._check = SplitCheck(
            model,
            self._division,
            self._rollback,
            say,
            on_difference=on_difference,
            around=self.forward_context,
        )
        self._opened: list[Opened] = []
        self._running: Opened | None = None
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
        num = self._division.num(data)
        rngs = rng_states(self._device_kind, self._keeps_other_rngs)
        self.newest = Opened(data, num, examples.elements_per_example(data, num), said, rngs)
        self._opened.append(self.newest)
        return self.newest

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._model.parameters())

    def _issue(self, todo: list[Opened], *, is_again: bool) -> Generator[Piece, None, bool]:
        """All pieces of some batches. False if memory ran out, and all is as before the window."""
        with nullcontext() if self._ranks is None else self._ranks.quiet():
            if (yield from self._issue_check(todo, is_known_to_fit=False)):
                todo, is_again = self._opened, True
            if not (yield from self._issue_all(todo, is_again=is_again)):
                return False
            if (
                self._check.is_postponed
                and (yield from self._issue_check(todo, is_known_to_fit=True))
                and not (yield from self._issue_all(self._opened, is_again=True))
            ):
                return False
        try:
            self._rollback.observe()
        except OomphError as error:
            self._refuse(error)
        return True

    def _issue_all(self, todo: list[Opened], *, is_again: bool) -> Generator[Piece, None, bool]:
        for opened in todo:
            if is_again:
                restore_rngs(opened.rngs)
            if not (yield from self._issue_one(opened, is_first=opened is todo[0])):
                return False
        return True

    def _issue_check(
        self, todo: list[Opened], *, is_known_to_fit: bool
    ) -> Generator[Piece, None, bool]:
        """A few examples of the first batch that is split, to be run like pieces.

        True if that was done: then the window begins again.
        """
        opened = self._first_split(todo)
        if opened is None:
            return False
        self._running = None  # what runs out of memory here is the check's
        trials = self._check.trials(
            opened.data, opened.num, opened.size, is_known_to_fit=is_known_to_fit
        )
        for trial in trials:
            piece = Piece(trial, opened, trial.data, trial.num, 1.0, is_first=True)
            yield piece
            if not (piece.is_done or piece.has_failed):
                raise left_out()
        self._undo_or_refuse()
        for each in self._opened:
            each.num = self._division.num(each.data)
            each.elements = examples.elements_per_example(each.data, each.num)
        return True

    def _first_split(self, todo: list[Opened]) -> Opened | None:
        for opened in todo:
            if not self._check.is_due(opened.data):
                continue
            self._set_size(opened)
            sizes = splitting.piece_sizes(opened.num, opened.size)
            if len(sizes) > 1 and self._check.is_due_for(opened.data, sizes):
                return opened
        return None

    def _set_size(self, opened: Opened) -> None:
        sizes = self._recovery.sizes
        opened.size = opened.size or sizes.size_for(opened.num, opened.elements)

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
        """None if memory ran out: to count what parts weigh takes some."""
        try:
            return self._parts(opened)
        except BaseException as error:
            if not self.catches(error):
                raise
            return None

    def _parts(self, opened: Opened) -> list[tuple[Any, int, float]]:
        """What to run of a batch: each part, its examples, and its share."""
        self._running, division = opened, self._division
        self._set_size(opened)
        nums = splitting.piece_sizes(opened.num, opened.size)
        if len(nums) == 1:
            return [(opened.data, opened.num, 1.0)]  # as the library would run it
        parts = division.pieces(opened.data, nums)
        weights = division.weights(parts, nums)
        total = 1.0 if division.is_sum else sum(weights)
        shares = [weight / total for weight in weights]
        return [each for each in zip(parts, nums, shares, strict=True) if each[2]]

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

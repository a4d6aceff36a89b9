"""The batches of one optimizer step -> their gradients and the update, or all as it was before.

A batch is run until its pieces have gone well: after an out-of-memory error everything is set back
to the last whole step, and the batches since are run again, smaller. On several ranks a rank that
has its gradients waits here for those that have not.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from oomph.training.out_of_memory import is_out_of_memory
from oomph.training.ranks import At, Ranks, no_way
from oomph.training.recovery import Recovery, half_updated, release, said_by, tried_twice
from oomph.training.rollback import Rollback
from oomph.training.stepper_batches import Batch, Batches
from oomph.training.stepper_micro import Micro, left_out
from oomph.training.stepper_passes import Passes
from oomph.training.stepper_result import Result
from oomph.training.stepper_signals import SignalsHeld
from oomph.training.stepper_update import Update

_ALONE: AbstractContextManager[None] = nullcontext()


class Attempts:
    """Runs the batches of a step, as often as is needed; the inner side of a Stepper."""

    def __init__(
        self,
        batches: Batches,
        rollback: Rollback,
        recovery: Recovery,
        passes: Passes,
        update: Update,
        ranks: Ranks | None,
    ) -> None:
        self._batches, self._rollback, self._recovery = batches, rollback, recovery
        self._passes, self.update, self._ranks = passes, update, ranks
        self._running: Batch | None = None
        self.result: Result | None = None  # of the last batch

    def train(self, data: Any) -> Result:
        """A batch, by the loss that the passes have."""
        try:
            todo = [self._open(data)]
            while True:
                is_done = self._run(todo)
                with self._held():
                    if self._is_settled(is_done):
                        return self._close()
                todo = self._batches.opened
        except BaseException:
            self._give_up()
            raise

    def issue(self, data: Any) -> Iterator[Micro]:
        """The same, where somebody else runs the pieces."""
        try:
            todo = [self._open(data)]
            while True:
                is_done = yield from self._issue(todo)
                with self._held():
                    if self._is_settled(is_done):
                        self._close()
                        return
                todo = self._batches.opened
        except BaseException:  # the loop was left: GeneratorExit
            self._give_up()
            raise

    def flush(self) -> Result | None:
        """Step with the batches so far; None if there are none, which has to hold for all ranks."""
        if self._ranks is None:
            return self._close(is_last=True) if self._batches.opened else None
        try:
            self._ranks.begin()
            with SignalsHeld():
                at = At.FLUSH if self._batches.opened else At.NOTHING_TO_FLUSH
                if self._batches.opened:
                    self.update.scale(self._batches.factor)
                self._ranks.settle(at, True, self._recovery)
                if self._batches.opened:
                    return self._close(is_last=True)
                self._ranks.end()
                return None
        except BaseException:
            self._give_up()
            raise

    # ---- one attempt ---------------------------------------------------------------------------

    def _open(self, data: Any) -> Batch:
        if self._ranks is not None:
            self._ranks.begin()
        if not self._batches.opened:
            tried_twice(self._rollback.take)
            self._passes.losses = []
            self._recovery.num_ooms_before = self._recovery.num_ooms
        return self._batches.open(data)

    def _run(self, todo: list[Batch]) -> bool:
        """Run batches. False after an out-of-memory error, when all is as before the first."""
        run = self._passes.run
        try:
            with self._quiet():
                for batch in todo:
                    for data, _, share in self._pieces(batch):
                        run(data, share)
                    self._measure(batch)
        except BaseException as error:
            if not self.catches(error):
                raise
            return False
        return True

    def _issue(self, todo: list[Batch]) -> Generator[Micro, None, bool]:
        with self._quiet():
            for batch in todo:
                for data, num, share in self._pieces(batch):
                    micro = Micro(self, data, num, share, is_first=not self._passes.losses)
                    yield micro
                    if micro.has_failed:
                        return False
                    if not micro.is_done:
                        raise left_out()
                self._measure(batch)
        return True

    def _quiet(self) -> AbstractContextManager[None]:
        return _ALONE if self._ranks is None else self._ranks.quiet()

    def _held(self) -> AbstractContextManager[None]:
        """A rank that has voted does what all have voted for: it is not to be interrupted."""
        return _ALONE if self._ranks is None else SignalsHeld()

    def _pieces(self, batch: Batch) -> Iterator[tuple[Any, int, float]]:
        self._running = batch
        batch.size = batch.num
        if self._recovery.splits:
            batch.size = self._recovery.sizes.size_for(batch.num, batch.elements)
        if self._recovery.measured is not None:
            self._recovery.measured.begin(batch.elements, batch.size)
        return self._batches.pieces(batch)

    def _measure(self, batch: Batch) -> None:
        """What the pieces of a batch took, when they are all done."""
        if self._recovery.measured is not None:
            self._recovery.measured.end(batch.elements, batch.size, batch.num)

    # ---- what a piece calls --------------------------------------------------------------------

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """What each forward runs in: autocast, offloaded activations; None for nothing."""
        return self._passes.forward_context()

    def backward(self, loss: Any, share: float) -> None:
        """Backward of a piece that counts `share`."""
        self._passes.backward(loss, share)

    def catches(self, error: BaseException) -> bool:
        """Undo what was done of a step. True if the same examples are to be run again."""
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
        if self._passes.is_half_updated:
            release(error)
            self._give_up()
            raise half_updated(text) from None
        failed.size = self._recovery.after(error, failed.num, failed.elements, failed.size)
        self._undo()
        if not failed.size:
            self._batches.clear()
            raise no_way(self._ranks, self._recovery, text) from None
        return True

    # ---- when something fails ------------------------------------------------------------------

    def _is_settled(self, is_done: bool) -> bool:
        """Have all ranks run all of their pieces? False if this one is to run its own again."""
        if self._ranks is None:
            return is_done
        is_whole = self._batches.is_whole
        at = At.LAST_BATCH if is_whole else At.BATCH
        is_ready = is_done and (not is_whole or self._is_ready())
        return self._ranks.settle(at, is_ready, self._recovery)

    def _is_ready(self) -> bool:
        """Are gradients ready to be sent? False if there was no memory, as with a piece."""
        try:
            self.update.scale(self._batches.factor)
        except BaseException as error:
            if not self.catches(error):
                raise
            return False
        return True

    def _undo(self) -> None:
        with SignalsHeld():
            self._rollback.undo()
            self._passes.begin_again()
            self._batches.begin_again()

    def _give_up(self) -> None:
        """Back to the last whole step, for good; nothing, if there is nothing since."""
        try:
            if self._batches.opened:
                self._undo()
        finally:
            self._batches.clear()
            if self._ranks is not None:
                with SignalsHeld():
                    self._ranks.leave()

    # ---- when nothing failed -------------------------------------------------------------------

    def _close(self, *, is_last: bool = False) -> Result:
        """Step, if these are all batches of a step. Ctrl-C is heard when all of it is done."""
        with SignalsHeld():
            is_whole = is_last or self._batches.is_whole
            factor = self._batches.factor if is_whole else 1.0
            size = self._batches.opened[-1].size
            self.result = Result(
                self._passes.losses,
                factor=factor,
                has_stepped=is_whole,
                micro_batch=size,
                num_ooms=self._recovery.num_ooms - self._recovery.num_ooms_before,
                grad_norm=self._step(factor) if is_whole else None,
            )
            if self._ranks is not None:
                self._ranks.end()
        return self.result

    def _step(self, factor: float) -> Any:
        try:
            norm = self.update(factor)
        except BaseException:
            self._give_up()
            raise
        for batch in self._batches.opened:
            self._recovery.sizes.fitted(batch.num, batch.elements, batch.size)
        self._batches.clear()
        self._passes.is_half_updated = False
        return norm

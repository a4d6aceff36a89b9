"""One effective batch in, one optimizer step out, whatever the micro-batch.

step = oomph.Stepper(model, optimizer, loss, plan=plan)
for batch in loader:
    step(batch)

A step is whole or did not happen: after an out-of-memory error, gradients, generators and buffers
are set back and the same examples are run again in smaller pieces; after Ctrl-C or any other error
the state is that of the last whole step. Several processes are not divided over from here: `agree`
is where their agreement goes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from oomph.errors import UsageError
from oomph.records.plan import Plan
from oomph.records.workload import Precision
from oomph.training import apply, recovery_tricks, stepper_options
from oomph.training.out_of_memory import is_out_of_memory
from oomph.training.recovery import (
    half_updated,
    recovery_for,
    release,
    said_by,
    tried_twice,
)
from oomph.training.rollback import Rollback
from oomph.training.stepper_batches import Batch, Batches, Split
from oomph.training.stepper_micro import Micro, left_out
from oomph.training.stepper_passes import Passes
from oomph.training.stepper_result import Result
from oomph.training.stepper_signals import SignalsHeld
from oomph.training.stepper_update import Copies, Update
from oomph.training.weights import Weight

_log = logging.getLogger("oomph")


class Stepper:
    """Trains one batch at a time, in as many pieces as its memory needs.

    loss: (model, batch) -> a scalar, as in a Workload; without one, use `micro`.
    plan: of oomph.plan; its tricks are put on, and its micro-batch is the first to be tried.
    weight: what the loss is a mean of: "mean" over examples, "sum", "tokens" (labels that are not
        -100), "next-tokens" (those of a causal language model), or a function of a batch.
    accumulate: batches of the loader to one step of the optimizer; `flush` ends it early.
    clip_grad_norm: once, after the last piece. scheduler: goes on with each step.
    precision, scaler, micro_batch: where there is no plan. device: where pieces are moved to.
    whole: names in the batch that every piece is given whole. split: (batch, sizes) -> pieces.
    last_resorts: what may be switched on when a single example does not fit.
    copies: of weights and states on the host, before the "first" update, "always" or "never".
    keeps_other_rngs: set Python's and numpy's generators back, too, which costs each step.
    agree: on several ranks: this rank's size, 0 for none -> the smallest of all ranks.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loss: Callable[[Any, Any], Any] | None = None,
        plan: Plan | None = None,
        *,
        weight: Weight = "mean",
        scheduler: Any = None,
        clip_grad_norm: float | None = None,
        precision: Precision | None = None,
        scaler: Any = None,
        micro_batch: int | None = None,
        accumulate: int = 1,
        device: Any = None,
        whole: Collection[str] = (),
        split: Split | None = None,
        last_resorts: Sequence[str] = recovery_tricks.NAMES,
        copies: Copies = "first",
        keeps_other_rngs: bool = False,
        agree: Callable[[int], int] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        how = stepper_options.how_to_train(plan, precision)
        stepper_options.check(
            model,
            how,
            accumulate=accumulate,
            clip_grad_norm=clip_grad_norm,
            is_alone=agree is None,
        )
        optimizers = stepper_options.several(optimizer)
        if plan is not None:
            apply.put_on_made(model, optimizers, how)
        apply.set_precision(how)
        self.model, self._agree = model, agree
        self._batches = Batches(weight, accumulate, whole, split)
        self._rollback = Rollback(model, optimizers, keeps_other_rngs=keeps_other_rngs)
        self._recovery = recovery = recovery_for(
            recovery_tricks.LastResorts(model, how, last_resorts),
            plan,
            micro_batch,
            say or _log.warning,
            measured=stepper_options.measured(model, plan) if agree is None else None,
            may_grow=lambda: not stepper_options.has_batch_norm(model),
        )
        self._passes = Passes(
            model,
            loss or stepper_options.no_loss,
            recovery.resorts,
            kind=stepper_options.device_kind(model),
            device=device,
            scaler=scaler,
            steps_in_backward=not recovery.splits,
        )
        self._update = Update(
            model,
            optimizers,
            stepper_options.several(scheduler),
            scaler=self._passes.scaler,
            clip_grad_norm=clip_grad_norm,
            copies=copies if recovery.splits else "never",
        )
        self._running: Batch | None = None
        self.result: Result | None = None  # of the last batch

    # ---- what users call -----------------------------------------------------------------------

    def __call__(self, batch: Any) -> Result:
        """Train on a batch. Raises OomphError if not even one example of it fits."""
        if self._recovery.splits:
            return self._train(batch)
        with SignalsHeld():  # backward is the update: it is not to be left in the middle
            return self._train(batch)

    def micro(self, batch: Any) -> Iterator[Micro]:
        """The pieces of a batch, for a forward of one's own.

        for micro in step.micro(batch):
            with micro:
                micro.backward(model(**micro.data).loss)

        After an out-of-memory error the batch begins again, in smaller pieces: `micro.is_first`.
        The optimizer steps after the last piece; `step.result` then has what was done.
        """
        if not self._recovery.splits:
            raise UsageError(
                "an optimizer that steps in backward has no pieces to wait for",
                attempt="step(batch)",
            )
        todo = [self._open(batch)]
        while not self._agrees((yield from self._issue(todo))):
            todo = self._batches.opened
        self._close()

    def flush(self) -> Result | None:
        """Step with what has been accumulated, at the end of an epoch; None if that is nothing."""
        if not self._batches.opened:
            return None
        return self._close(is_last=True)

    def forget_sizes(self) -> None:
        """Try the first size again: somebody else has given memory back."""
        self._recovery.sizes.forget()

    @property
    def micro_batch(self) -> int | None:
        """Examples at a time, in the last step; None before the first."""
        return self.result.micro_batch if self.result else None

    @property
    def num_ooms(self) -> int:
        """Out-of-memory errors that were recovered from."""
        return self._recovery.num_ooms

    def _train(self, batch: Any) -> Result:
        todo = [self._open(batch)]
        while not self._agrees(self._attempt(todo)):
            todo = self._batches.opened
        return self._close()

    # ---- one attempt ---------------------------------------------------------------------------

    def _open(self, data: Any) -> Batch:
        if not self._batches.opened:
            tried_twice(self._rollback.take)
            self._passes.losses = []
            self._recovery.num_ooms_before = self.num_ooms
        return self._batches.open(data)

    def _attempt(self, todo: list[Batch]) -> bool:
        """Run batches. False after an out-of-memory error, when all is as before the first."""
        run = self._passes.run
        try:
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
        """The same, where somebody else runs the pieces."""
        for batch in todo:
            for data, num, share in self._pieces(batch):
                micro = Micro(self, data, num, share, is_first=not self._passes.losses)
                try:
                    yield micro
                except BaseException as left:  # the loop was left: GeneratorExit
                    self.catches(left)
                    raise
                if micro.has_failed:
                    return False
                if not micro.is_done:
                    self._give_up()
                    raise left_out()
            self._measure(batch)
        return True

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

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """What each forward runs in: autocast, offloaded activations; None for nothing."""
        return self._passes.forward_context()

    def backward(self, loss: Any, share: float) -> None:
        """Backward of a piece that counts `share`."""
        self._passes.backward(loss, share)

    # ---- when something fails ------------------------------------------------------------------

    def catches(self, error: BaseException) -> bool:
        """Undo what was done of a step. True if the same examples are to be run again."""
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
        if not failed.size and self._agree is None:
            self._batches.clear()
            raise self._recovery.nothing_left(text) from None
        return True

    def _agrees(self, is_done: bool) -> bool:
        """Did all ranks run all of their pieces? If not, this one is set back, too."""
        if self._agree is None or self._running is None:
            return is_done
        mine = self._running.size
        agreed = self._agree(mine)
        if is_done and agreed == mine:
            return True
        self._undo()
        if not agreed:
            self._batches.clear()
            raise self._recovery.nothing_left("another rank has none that fits")
        self._recovery.sizes.cap(self._running.elements, agreed)
        return False

    def _undo(self) -> None:
        with SignalsHeld():
            self._rollback.undo()
            self._passes.begin_again()
            self._batches.begin_again()

    def _give_up(self) -> None:
        """Back to the last whole step, for good."""
        self._undo()
        self._batches.clear()

    # ---- when nothing failed -------------------------------------------------------------------

    def _close(self, *, is_last: bool = False) -> Result:
        """Step, if these are all batches of a step. Ctrl-C is heard when all of it is done."""
        with SignalsHeld():
            is_whole = is_last or self._batches.is_whole
            factor = self._batches.factor if is_whole else 1.0
            self.result = Result(
                self._passes.losses,
                factor=factor,
                has_stepped=is_whole,
                micro_batch=self._batches.opened[-1].size,
                num_ooms=self.num_ooms - self._recovery.num_ooms_before,
                grad_norm=self._step(factor) if is_whole else None,
            )
        return self.result

    def _step(self, factor: float) -> Any:
        try:
            norm = self._update(factor)
        except BaseException:
            self._give_up()
            raise
        for batch in self._batches.opened:
            self._recovery.sizes.fitted(batch.num, batch.elements, batch.size)
        self._batches.clear()
        self._passes.is_half_updated = False
        return norm

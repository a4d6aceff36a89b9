"""The batches of one optimizer step -> their gradients and the update, or all as it was before.

A batch is run until its pieces have gone well: after an out-of-memory error everything is set back
to the last whole step, and the batches since are run again, smaller. On several ranks a rank that
has its gradients waits here for those that have not.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, fields
from typing import Any, NoReturn

from oomph.errors import OomphError, UsageError
from oomph.training import splitting
from oomph.training.out_of_memory import is_out_of_memory
from oomph.training.ranks import At, Ranks, no_way
from oomph.training.recovery import Recovery, half_updated, release, said_by, tried_twice
from oomph.training.rollback import OwnRollback, on_host
from oomph.training.split_check import SplitCheck
from oomph.training.stepper_batches import Batch, Batches, Carried
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
        rollback: OwnRollback,
        recovery: Recovery,
        passes: Passes,
        update: Update,
        ranks: Ranks | None,
        check: SplitCheck,
    ) -> None:
        self._check = check
        self._batches, self._rollback, self._recovery = batches, rollback, recovery
        self._passes, self.update, self._ranks = passes, update, ranks
        self._running: Batch | None = None
        self._is_inside = False  # a batch has been begun, and not ended
        self.result: Result | None = None  # of the last batch

    def train(self, data: Any) -> Result:
        """A batch, by the loss that the passes have."""
        self._go_inside()
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
        finally:
            self._go_outside()

    def issue(self, data: Any) -> Iterator[Micro]:
        """The same, where somebody else runs the pieces."""
        self._go_inside()
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
        finally:
            self._go_outside()

    def flush(self) -> Result | None:
        """Step with the batches so far; None if there are none, which has to hold for all ranks."""
        if self._ranks is None and not self.is_begun:
            return None
        self._go_inside()
        try:
            with SignalsHeld():
                self._rollback.enter()
                return self._flushed()
        except BaseException:
            self._give_up()
            raise
        finally:
            self._go_outside()

    def _go_inside(self) -> None:
        """Raises UsageError where a batch is run within another: each would step with both."""
        if self._is_inside:
            raise UsageError(
                "a batch is begun while another one is being run",
                because="the pieces of step.micro(batch) have not all been run, nor has its loop"
                " been left",
                attempt="running it to its end, or closing it: pieces = step.micro(batch); ...;"
                " pieces.close()",
            )
        self._is_inside = True

    def _go_outside(self) -> None:
        self._running, self._is_inside = None, False
        self._rollback.leave()

    def _flushed(self) -> Result | None:
        if self._ranks is not None:
            self._ranks.begin()
            if self.is_begun:
                self.update.scale(self._batches.factor)
            at = At.FLUSH if self.is_begun else At.NOTHING_TO_FLUSH
            self._ranks.settle(at, True, self._recovery)
            if not self.is_begun:
                self._ranks.end()
                return None
        return self._close(is_last=True)

    # ---- one attempt ---------------------------------------------------------------------------

    def _open(self, data: Any) -> Batch:
        self._rollback.enter()
        if self._ranks is not None:
            self._ranks.begin()
        if not self._batches.opened:
            keeps = self._batches.carried.num > 0
            tried_twice(lambda: self._rollback.take(keeps_gradients=keeps))
            self._passes.losses = [*self._passes.carried]
            self._recovery.num_ooms_before = self._recovery.num_ooms
        else:
            self._rollback.resume()
        return self._batches.open(data)

    def _run(self, todo: list[Batch]) -> bool:
        """Run batches. False after an out-of-memory error, when all is as before the first."""
        try:
            with self._quiet():
                todo = self._run_check(todo, is_known_to_fit=False)
                self._run_pieces(todo)
                if self._check.is_postponed and self._first_split(todo):
                    self._run_pieces(self._run_check(todo, is_known_to_fit=True))
            self._observe()
        except BaseException as error:
            if not self.catches(error):
                raise
            return False
        return True

    def _run_pieces(self, todo: list[Batch]) -> None:
        run = self._passes.run
        for batch in todo:
            for data, _, share in self._pieces(batch):
                run(data, share)
            self._measure(batch)

    def _issue(self, todo: list[Batch]) -> Generator[Micro, None, bool]:
        with self._quiet():
            todo = yield from self._issue_check(todo, is_known_to_fit=False)
            if not (yield from self._issue_pieces(todo)):
                return False
            if self._check.is_postponed and self._first_split(todo):
                todo = yield from self._issue_check(todo, is_known_to_fit=True)
                if not (yield from self._issue_pieces(todo)):
                    return False
        self._observe()
        return True

    def _issue_pieces(self, todo: list[Batch]) -> Generator[Micro, None, bool]:
        for batch in todo:
            try:  # to count what pieces weigh takes memory
                pieces = list(self._pieces(batch))
            except BaseException as error:
                if not self.catches(error):
                    raise
                return False
            for data, num, share in pieces:
                micro = Micro(self, data, num, share, is_first=not self._passes.losses)
                yield micro
                if micro.has_failed:
                    return False
                if not micro.is_done:
                    raise left_out()
            self._measure(batch)
        return True

    # ---- the first split -----------------------------------------------------------------------

    def _run_check(self, todo: list[Batch], *, is_known_to_fit: bool) -> list[Batch]:
        """The batches to run: all of the step, where a check has undone what was run of it."""
        if self._first_split(todo) is None:
            return todo
        trials = self._issue_check(todo, is_known_to_fit=is_known_to_fit)
        while True:
            try:
                micro = next(trials)
            except StopIteration as ended:
                batches: list[Batch] = ended.value
                return batches
            with micro:
                micro.backward(self._passes.loss_of(micro.data))

    def _issue_check(
        self, todo: list[Batch], *, is_known_to_fit: bool
    ) -> Generator[Micro, None, list[Batch]]:
        """A few examples of the first batch that is split, to be run like pieces."""
        batch = self._first_split(todo)
        if batch is None:
            return todo
        self._running = None  # what runs out of memory here is the check's
        trials = self._check.trials(
            batch.data, batch.num, batch.size, is_known_to_fit=is_known_to_fit
        )
        for trial in trials:
            micro = Micro(trial, trial.data, trial.num, 1.0, is_first=True)
            yield micro
            if not (micro.is_done or micro.has_failed):
                raise left_out()
        self._undo_or_refuse()
        self._batches.count_again()
        others = [(b.data, b.num) for b in self._batches.opened if b is not batch]
        sizes = splitting.piece_sizes(batch.num, batch.size)
        self._check.tell_of_doubt(batch.data, sizes, others)
        if self._batches.carried.num:
            self._check.tell_of_carried()
        return self._batches.opened

    def _first_split(self, todo: list[Batch]) -> Batch | None:
        """The first batch to check: not run by itself, as a whole, and not of a known kind."""
        for batch in todo:
            if not self._check.is_due(batch.data):
                continue
            self._running = batch
            self._set_size(batch)
            sizes = splitting.piece_sizes(batch.num, batch.size)
            is_split = len(sizes) > 1 or self._batches.accumulates
            others = [(b.data, b.num) for b in self._batches.opened if b is not batch]
            if is_split and self._check.is_due_for(batch.data, sizes, others):
                return batch
        return None

    def _quiet(self) -> AbstractContextManager[None]:
        return _ALONE if self._ranks is None else self._ranks.quiet()

    def _held(self) -> AbstractContextManager[None]:
        """A rank that has voted does what all have voted for: it is not to be interrupted."""
        return _ALONE if self._ranks is None else SignalsHeld()

    def _set_size(self, batch: Batch) -> None:
        batch.size = batch.num
        if self._recovery.splits:
            batch.size = self._recovery.sizes.size_for(batch.num, batch.elements)

    def _pieces(self, batch: Batch) -> Iterator[tuple[Any, int, float]]:
        self._running = batch
        self._set_size(batch)
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
        release(error)
        self._undo_or_refuse()  # first: a trick that is switched on is not to be undone
        failed.size = self._recovery.after(error, failed.num, failed.elements, failed.size)
        if not failed.size:
            self._end()
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

    def _observe(self) -> None:
        """What the attempt has written, where that has to be learnt."""
        try:
            self._rollback.observe()
        except OomphError as error:
            self._refuse(error)

    def _undo_or_refuse(self) -> None:
        try:
            self._undo()
        except OomphError as error:
            self._refuse(error)

    def _refuse(self, error: OomphError) -> NoReturn:
        self._end()
        no_way(self._ranks, self._recovery, error.what)  # the others are to hear of it
        raise error

    def _give_up(self) -> None:
        """Back to the last whole step, for good; nothing, if there is nothing since."""
        try:
            if self._batches.opened:
                self._undo()
        except OomphError as error:  # beside the one that is raised
            self._recovery.say(error.in_one_line())
        finally:
            self._end()
            if self._ranks is not None:
                with SignalsHeld():
                    self._ranks.leave()

    def _end(self) -> None:
        """What came with a checkpoint is of the step that is given up, too."""
        if self._batches.carried.num:
            self._rollback.drop_gradients()
        self._passes.carried = []
        self._batches.clear()
        self._rollback.end()

    # ---- when nothing failed -------------------------------------------------------------------

    def _close(self, *, is_last: bool = False) -> Result:
        """Step, if these are all batches of a step. Ctrl-C is heard when all of it is done."""
        with SignalsHeld():
            is_whole = is_last or self._batches.is_whole
            factor = self._batches.factor if is_whole else 1.0
            size = self._batches.so_far.size
            self.result = Result(
                self._passes.losses,
                factor=factor,
                has_stepped=is_whole,
                micro_batch=size,
                num_ooms=self._recovery.num_ooms - self._recovery.num_ooms_before,
                grad_norm=self._step(factor) if is_whole else None,
            )
            if not is_whole:
                self._rollback.pause()
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
        self._rollback.end()
        self._passes.is_half_updated, self._passes.carried = False, []
        self.update.finish()  # the step is whole: what fails in here undoes nothing of it
        return norm

    # ---- a checkpoint --------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """What has been accumulated; None between two steps. Raises UsageError within a batch."""
        if self._is_inside:
            raise UsageError(
                "a Stepper has no state to save in the middle of a batch",
                attempt="saving after the last piece",
            )
        if not self.is_begun:
            return None
        parameters = self._rollback.own_parameters()
        return {
            **asdict(self._batches.so_far),
            "gradients": [None if p.grad is None else on_host(p.grad) for p in parameters],
            "losses": [(on_host(loss), share) for loss, share in self._passes.losses],
        }

    def load(self, state: dict[str, Any] | None) -> None:
        """Raises ValueError if it is another model's."""
        if self._is_inside:
            raise UsageError(
                "a batch is being run: no state can be loaded", attempt="loading it between batches"
            )
        self._give_up()
        if state is None:
            return
        parameters = self._rollback.own_parameters()
        pairs = list(zip(parameters, state["gradients"], strict=True))
        if any(gradient is not None and p.shape != gradient.shape for p, gradient in pairs):
            raise ValueError("its gradients have other shapes than the parameters")
        for parameter, gradient in pairs:
            if gradient is not None:  # a copy: the state may be loaded again
                gradient = gradient.to(parameter.device, parameter.dtype, copy=True)
            parameter.grad = gradient
        self._batches.carry(Carried(*(state[each.name] for each in fields(Carried))))
        self._passes.carried = [(loss, float(share)) for loss, share in state["losses"]]
        self._passes.losses = [*self._passes.carried]
        self._rollback.begin()

    @property
    def is_begun(self) -> bool:
        """Have batches been run since the last step?"""
        return self._batches.so_far.num > 0

"""The batches of one update -> their gradients and the update, or the state before it.

A batch is run until all its pieces succeed. After an out-of-memory error, everything is restored to
the last complete update, and the batches since then are rerun in smaller pieces. With several
ranks, a rank that has its gradients waits here for the others.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn

from oomph.errors import OomphError
from oomph.out_of_memory import is_out_of_memory
from oomph.stability import examples
from oomph.training.micro_batches import Batch, Division, Micro, left_out, piece_sizes
from oomph.training.noise_meter import NoiseMeter
from oomph.training.ranks import FellShortElsewhere, Next, Ranks
from oomph.training.recovery import Recovery, half_updated, release, text_of, tried_twice
from oomph.training.restarting import NotRecovered, RestartFile
from oomph.training.rollback import Rngs, Rollback, restore_rngs
from oomph.training.split_check import OnDifference, SplitCheck
from oomph.training.update import SignalsHeld

Part = tuple[Batch, int, float]  # a piece of a batch, its number of examples, and its weight


@dataclass(slots=True)
class OpenBatch:
    """A batch from the loader, kept until the optimizer has stepped, since it may be rerun."""

    data: Batch
    arguments: Any = None  # passed by a library's loop
    num: int = 0
    elements: int = 0  # per example
    size: int = 0  # examples at a time in the last attempt; 0 if not run yet
    total: float = 0  # total weight of its pieces
    rngs: Rngs = field(default_factory=list)  # generator states to start from when it is rerun


class Attempts:
    """Runs the batches since the last update in pieces; reruns them all if memory runs out.

    A Stepper (step.py) and a library's loop (adapters/window.py) override what differs.
    """

    def __init__(
        self,
        model: nn.Module,
        division: Division,
        rollback: Rollback,
        recovery: Recovery,
        ranks: Ranks,
        *,
        on_difference: OnDifference,
        accumulate: int = 1,
        meter: NoiseMeter,
    ) -> None:
        """accumulate: batches that count as one; 1 for a library that accumulates by itself."""
        self._accumulate = accumulate
        self._model, self._division, self._rollback = model, division, rollback
        self._recovery, self._ranks, self._meter = recovery, ranks, meter
        self._check = SplitCheck(
            model,
            division,
            rollback,
            recovery.say,
            on_difference=on_difference,
            around=self.forward_context,
            is_sharded=ranks.is_sharded,
        )
        self.restart_file, self._size = RestartFile(None), 0  # what to note there: the last size
        self._opened: list[OpenBatch] = []  # since the last update
        self._running: OpenBatch | None = None  # the one an out-of-memory error would belong to

    def pieces(self, data: Batch, arguments: Any = None) -> Generator[Micro, None, None]:
        """Yield the pieces of a batch; after an error, those of all batches since the update."""
        try:
            self._open(data, arguments)
            is_again = False
            while not self._settle((yield from self._attempt(is_again=is_again))):
                is_again = True
        except BaseException as error:  # including GeneratorExit, when the caller leaves the loop
            self._note(error)
            self._give_up()
            raise

    # ---- methods to override -------------------------------------------------------------------

    def _keeps_gradients(self) -> bool:
        """Return whether gradients that exist before the first batch belong to the update."""
        raise NotImplementedError

    def _set_size(self, batch: OpenBatch) -> None:
        raise NotImplementedError

    def _parts(self, batch: OpenBatch) -> list[Part]:
        """Return the pieces of a batch to run, by its size."""
        raise NotImplementedError

    def _settle(self, is_done: bool) -> bool:
        """Finish an attempt; return False if it must be repeated."""
        raise NotImplementedError

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """Return the context of each forward (autocast, offloaded activations), or None."""
        raise NotImplementedError

    def backward(self, loss: torch.Tensor, share: float) -> None:
        """Run backward on the loss of a piece, weighted by `share`."""
        raise NotImplementedError

    def _note_check(self, batch: OpenBatch) -> None:
        """Called after a batch has been checked."""

    def _continues(self) -> bool:
        """Return whether the next pieces continue an attempt that already has others."""
        return False

    def _has_all_gradients(self) -> bool:
        """Return whether all gradients of the update come from the batches since the last one."""
        return True

    def _is_half_updated(self) -> bool:
        return False

    # ---- one attempt ---------------------------------------------------------------------------

    def _open(self, data: Batch, arguments: Any) -> OpenBatch:
        self._ranks.begin()
        if self._opened:
            self._rollback.resume()
        else:
            keeps = self._keeps_gradients()
            tried_twice(lambda: self._rollback.take(keeps_gradients=keeps))
            self._recovery.num_ooms_before = self._recovery.num_ooms
        batch = OpenBatch(data, arguments)
        self._count(batch)
        self._opened.append(batch)
        return batch

    def _count(self, batch: OpenBatch) -> None:
        batch.num = self._division.num(batch.data)
        batch.elements = examples.elements_per_example(batch.data, batch.num)

    def _attempt(self, *, is_again: bool) -> Generator[Micro, None, bool]:
        """Yield the pieces of the newest batch, or of all batches since the update if `is_again`.

        Return False after an out-of-memory error, with everything as before the first batch.
        """
        try:
            with self._ranks.quiet():
                has_checked = yield from self._issue_check(is_again=is_again)
                if has_checked and not is_again and self._ranks.is_sharded and self._opened[1:]:
                    # The check has undone the batches before this one, to which every rank added.
                    self._ranks.fell_short(self._recovery)
                    return False
                is_again |= has_checked
                if not (yield from self._issue_pieces(is_again=is_again)):
                    return False
                if (
                    self._check.is_postponed
                    and (yield from self._issue_check(is_again=is_again, is_known_to_fit=True))
                    and not (yield from self._issue_pieces(is_again=True))
                ):
                    return False
            self._observe()
        except BaseException as error:
            if not self.catches(error):
                raise
            return False
        return True

    def _issue_pieces(self, *, is_again: bool) -> Generator[Micro, None, bool]:
        is_first = not self._continues()
        if is_again or len(self._opened) == 1:
            self._meter.begin(may_measure=self._has_all_gradients())
        for batch in self._opened if is_again else self._opened[-1:]:
            if is_again:
                restore_rngs(batch.rngs)
            self._running, measured = batch, self._recovery.measured
            self._set_size(batch)
            self._size = batch.size
            parts = self._parts(batch)
            if measured is not None:
                measured.begin(batch.elements, batch.size)
            is_old = batch is not self._opened[-1]
            for data, num, share in parts:
                self._ranks.next_pass(self._recovery)
                micro = Micro(
                    self, data, num, share, is_first, arguments=batch.arguments, is_again=is_old
                )
                self._meter.piece(num, num if self._division.is_sum else share)
                yield micro
                self._meter.end_piece()
                is_first = False
                if micro.has_failed:
                    return False
                if not micro.is_done:
                    raise left_out()
            self._ranks.next_pass(self._recovery, Next.NOTHING)
            if measured is not None:
                measured.end(batch.elements, batch.size, batch.num)
        return True

    def _issue_check(
        self, *, is_again: bool, is_known_to_fit: bool = False
    ) -> Generator[Micro, None, bool]:
        """Yield a few examples of the first batch that is split, to be run like pieces.

        Return True if this was done; all batches since the update must then be rerun.
        """
        batch = self._first_split(self._opened if is_again else self._opened[-1:])
        if batch is None:
            return False
        self._running = None  # out-of-memory errors from here on belong to the check
        # The ranks of a sharded model cannot come back to a check once they have run their pieces.
        is_known_to_fit |= self._ranks.is_sharded
        trials = self._check.trials(
            batch.data, batch.num, batch.size, is_known_to_fit=is_known_to_fit
        )
        with closing(trials):
            for trial in trials:
                self._ranks.next_pass(self._recovery, Next.FORWARD)
                micro = Micro(
                    trial,
                    trial.data,
                    trial.num,
                    share=1.0,
                    is_first=True,
                    arguments=batch.arguments,
                    is_again=True,
                    is_forward_only=trial.is_forward_only,
                )
                yield micro
                self._ranks.end_pass(has_failed=micro.has_failed)
                if not (micro.is_done or micro.has_failed):
                    raise left_out()
        self._undo_or_refuse()
        for each in self._opened:  # the example dimension may have changed
            self._count(each)
        self._note_check(batch)
        return True

    def _first_split(self, todo: Sequence[OpenBatch]) -> OpenBatch | None:
        """Return the first batch that will be split and still needs a check."""
        for batch in todo:
            if not self._check.is_due(batch.data):
                continue
            self._running = batch
            self._set_size(batch)
            sizes = piece_sizes(batch.num, batch.size)
            is_split = len(sizes) > 1 or self._accumulate > 1
            if is_split and self._check.is_due_for(batch.data, sizes, self._others(batch)):
                return batch
        return None

    def _others(self, batch: OpenBatch) -> list[tuple[Batch, int]]:
        """Return the other batches accumulated with this one, and their numbers of examples."""
        others = self._opened if self._accumulate > 1 else ()
        return [(each.data, each.num) for each in others if each is not batch]

    def _observe(self) -> None:
        """Let the rollback learn what the attempt wrote, if it needs to."""
        try:
            self._rollback.observe()
        except OomphError as error:
            self._refuse(error)

    # ---- when something fails ------------------------------------------------------------------

    def catches(self, error: BaseException) -> bool:
        """Undo everything since the update; return True if the same examples must be rerun."""
        try:
            return self._is_caught(error)
        except BaseException as found:
            self._note(found)
            self._give_up()
            raise

    def _is_caught(self, error: BaseException) -> bool:
        if isinstance(error, FellShortElsewhere):
            self._undo_or_refuse()
            return True
        failed = self._running
        is_final = isinstance(error, NotRecovered)  # though memory may have been its cause
        if failed is None or is_final or not is_out_of_memory(error):
            self._give_up()
            return False
        text = text_of(error)
        release(error)
        if self._is_half_updated():
            raise half_updated(text) from None
        self._undo_or_refuse()  # before a trick is switched on, which must not be undone
        failed.size = self._recovery.after(error, failed.num, failed.elements, failed.size)
        if not failed.size:
            self._end()
            raise self._ranks.does_not_fit(self._recovery, text) from None
        self._ranks.fell_short(self._recovery)
        return True

    def _undo(self) -> None:
        with SignalsHeld():
            self._ranks.end_pass(has_failed=True)
            self._rollback.undo()

    def _undo_or_refuse(self) -> None:
        try:
            self._undo()
        except OomphError as error:
            self._refuse(error)

    def _note(self, error: BaseException) -> None:
        """Note a smaller size for the next start, if this one cannot go on."""
        if isinstance(error, NotRecovered):
            self.restart_file.note(self._size)

    def _refuse(self, error: OomphError) -> NoReturn:
        self._end()
        self._ranks.does_not_fit(self._recovery, error.what)  # tells the other ranks
        raise error

    def _give_up(self) -> None:
        """Return to the last complete update for good, if anything was done since."""
        try:
            if self._opened:
                self._undo()
        except OomphError as error:  # in addition to the error being raised
            self._recovery.say(error.in_one_line())
        finally:
            self._end()
            with SignalsHeld():
                self._ranks.leave()

    def _end(self) -> None:
        """Forget the batches of an abandoned update."""
        self._clear()

    def _clear(self) -> None:
        self._opened, self._running = [], None


def device_kind(model: nn.Module) -> str:
    """Return the kind of device of the first parameter: "cuda", "cpu"."""
    parameter = next(iter(model.parameters()), None)
    return "cpu" if parameter is None else parameter.device.type

"""`with oomph.watching() as run:` in a training script: its steps, peaks and phases -> its run.

Nothing here raises into the training: what is wrong with the watching is told once, on standard
error, and ends the watching. A process that is forked off, as a loader's worker, tells nothing.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from oomph.records.pace import SWITCH
from oomph.running.batches import num_samples_in
from oomph.running.loops import MOST_UNTOLD, Fetched, Phase, Steps, Waiting
from oomph.running.step_clock import Step, StepClock, Tally
from oomph.verbs.harmless import Harmless, harmless
from oomph.verbs.recording import say
from oomph.verbs.script_ends import ended_by, shortage_of

if TYPE_CHECKING:
    from types import TracebackType

    from oomph.records.pace import Pace
    from oomph.verbs.script_gpus import ScriptGpus
    from oomph.verbs.script_runs import JoinedRun, OwnRun, Ranks

Batch = TypeVar("Batch")

_PEAKS_S = 5.0  # how often torch is asked: it makes a dict of all its counters each time


def watching(*, prints: bool = True, rank: int | None = None) -> Watching:
    """Watch the training of this script: how long steps take, wait for data, and hold memory.

    with oomph.watching() as run:
        for epoch in range(3):
            for batch in run.steps(loader):     # measures the wait for each batch, and its step
                ...
            with run.phase("evaluation"):
                ...

    Under `oomph watch -- python train.py` it tells that run; alone it keeps a run of its own.
    Rank 0 prints a line an epoch, unless `prints` is False. `rank` is the launcher's, or torch's.
    """
    return Watching(prints=prints, rank=rank)


class Watching(Harmless):
    """What a script tells of its training."""

    _current: Watching | None = None  # of this process
    _num_runs = 0

    _run: JoinedRun | OwnRun
    _ranks: Ranks
    _gpus: ScriptGpus

    def __init__(self, *, prints: bool = True, rank: int | None = None) -> None:
        self._prints, self._rank = prints, rank
        self._pid = os.getpid()
        self._is_owner = False  # of the run, and not a guest in one
        self._clock = StepClock()
        self._tally = Tally()
        self._at_log, self._at_line = Tally(), Tally()  # the same, when it was told last
        self._num_epochs = 0
        self.is_in_steps = self._has_begun = False
        self._ended: list[Step] = []  # and not told yet
        self.fetched: list[Fetched] = []  # by `steps`, and not looked at yet
        self.due = self._next_peaks = 0.0

    @classmethod
    def current(cls) -> Watching | None:
        """The one that is open in this process."""
        found = cls._current
        return found if found is not None and found.is_on else None

    # ---- from begin to end ---------------------------------------------------------------------

    def start(self) -> Watching:
        """As entering the block does. Where another is open in this process, it is its guest."""
        if not self.is_on and os.environ.get(SWITCH) != "off":
            self._pid = os.getpid()
            self.turn_on()
            self._open(Watching.current())
        return self

    @harmless
    def _open(self, host: Watching | None) -> None:
        if host is not None:
            self._run, self._ranks, self._gpus = host._run, host._ranks, host._gpus
            return
        from oomph.verbs.script_gpus import ScriptGpus
        from oomph.verbs.script_runs import open_run, ranks_of_environment

        told = ranks_of_environment()
        self._ranks = told if self._rank is None else replace(told, rank=self._rank)
        self._run = open_run(self._ranks, Watching._num_runs, prints=self._prints)
        self._gpus = ScriptGpus(self._run)
        self._is_owner = True
        Watching._num_runs += 1
        Watching._current = self
        atexit.register(self._finish_at_exit)
        self._run.log.event("phase", "start-up")

    def finish(self, error: BaseException | None = None) -> None:
        """As leaving the block does; with the error that ended the training, if one did."""
        self._say_last_words(error)
        self.is_on = False
        if self._is_owner and os.getpid() == self._pid:  # and not in a fork
            self._is_owner = False
            Watching._current = None
            atexit.unregister(self._finish_at_exit)
            self._close(error)

    @harmless
    def _say_last_words(self, error: BaseException | None) -> None:
        self._settle(time.monotonic())
        self._clock.reset()
        self._gpus.note_peaks()
        if self._tally.num_steps > self._at_line.num_steps:
            self._print(f"after epoch {self._num_epochs}" if self._num_epochs else "training")
        event = shortage_of(error) if error is not None and self._is_owner else None
        if event is not None:
            self._run.log.event(*event)

    def _close(self, error: BaseException | None) -> None:
        try:
            kept_as = self._run.finish(ended_by(error))
            if kept_as and self._prints and self._ranks.rank == 0:
                say(f"kept as {kept_as}: oomph report {kept_as}")
        except Exception as fault:  # noqa: BLE001 - as everywhere here: not into the training
            self.give_up(fault)

    def _finish_at_exit(self) -> None:
        """Nobody left the block: a callback whose training raised, or a script without one."""
        import sys

        # What Python has just printed as uncaught; `last_exc` since 3.12.
        self.finish(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))

    def __enter__(self) -> Watching:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.finish(error)

    # ---- steps ---------------------------------------------------------------------------------

    def steps(
        self, loader: Iterable[Batch], *, accumulate: int = 1, num_samples: int | None = None
    ) -> Steps[Batch]:
        """The batches of a loader, each a step, or `accumulate` of them; at its end, an epoch.

        `num_samples` of a batch are as many as its first tensor is long, unless told. A step that
        is left by `break` or by an error is not counted.
        """
        return Steps(self, loader, max(accumulate, 1), num_samples)

    @harmless
    def step(self, num_samples: int | None = None) -> None:
        """After each step of a loop without `steps`; the first call starts the clock."""
        if not self.is_in_steps:  # which ends them itself
            self.end_step(num_samples)
            self.resume()

    @harmless
    def end_step(
        self, num_samples: int | None = None, *, at: float | None = None, is_timed: bool = False
    ) -> None:
        """A step has ended, now or before; the next begins with the wait for its data.

        `is_timed`: somebody tells every wait, also that for batches of later steps.
        """
        now = time.monotonic() if at is None else at
        self._take_fetched()
        if is_timed:
            self._clock.all_told()
        self._end(now, num_samples)
        if now >= self.due or len(self._ended) >= MOST_UNTOLD:
            self._settle(now)

    def _end(self, now: float, num_samples: int | None = None) -> None:
        step = self._clock.end(now, num_samples)
        if step is not None:
            self._ended.append(step)

    @harmless
    def catch_up(self) -> None:
        """Tell what `steps` has fetched, and what has ended."""
        if not self._has_begun:
            self._begin()
        self._settle(time.monotonic())

    def _take_fetched(self) -> None:
        for began, ended, num_samples, is_new in self.fetched:
            if is_new:  # and the last one ended when this wait began
                self._end(began)
            self._clock.waited(began, ended, num_samples)
        self.fetched.clear()

    def _settle(self, now: float) -> None:
        """Tell what has ended: not at each step, for that costs more than to take part of it."""
        self.due = now + self._run.told_s
        self._take_fetched()
        if self._ended:
            self._tally.add(self._ended)
            self._run.log.steps(self._ended)
            self._ended.clear()
        if now >= self._next_peaks:
            self._next_peaks = now + _PEAKS_S
            self._gpus.note_peaks()

    @harmless
    def waited(self, began: float, ended: float, batch: Any = None) -> None:
        """For that batch, in times of time.monotonic(): it is of the step that is under way."""
        if not self._has_begun:
            self._begin()
        self._take_fetched()
        self._clock.waited(began, ended, num_samples_in(batch))

    @harmless
    def count(self, batch: Any) -> None:
        """The batch, whose wait is told without it, is of the step that is under way."""
        self._clock.count(num_samples_in(batch))

    def waiting(self) -> Waiting:
        """`with run.waiting(): batch = queue.get()`, in a loop without a loader."""
        return Waiting(self)

    @harmless
    def resume(self) -> None:
        """A step goes on, or begins without a wait."""
        if not self._has_begun:
            self._begin()
        self._clock.resume(time.monotonic())

    @harmless
    def pause(self) -> None:
        """What follows is of no step."""
        self._clock.pause(time.monotonic())

    def _begin(self) -> None:
        """Before the first step: what is held now does not grow with the batch."""
        self._has_begun = True
        self._gpus.note_before_steps()
        self._run.log.event("phase", "training")

    @harmless
    def drop_step(self) -> None:
        """What was under way since the last step was none."""
        self._take_fetched()
        self._clock.reset()

    # ---- epochs and phases ---------------------------------------------------------------------

    @harmless
    def epoch(self) -> None:
        """An epoch has ended. `steps` says so by itself; twice without a step counts once."""
        self._settle(time.monotonic())
        if self._tally.num_steps == self._at_line.num_steps:
            return
        self._clock.reset()
        self._gpus.note_peaks()
        self._num_epochs += 1
        self._run.log.flush()
        self._run.log.epoch_ended(self._num_epochs)
        self._print(f"epoch {self._num_epochs}")

    def _print(self, name: str) -> None:
        """Rank 0: a line on the steps since the last one."""
        tally = self._tally.since(self._at_line)
        self._at_line = self._tally.copy()
        if self._prints and self._ranks.rank == 0:
            from oomph.showing.pace_line import print_pace

            print_pace(name, self._gpus.pace(tally, "epoch"))

    def phase(self, name: str) -> Phase:
        """From now on, or within `with`: an evaluation, say, whose time is of no step."""
        return Phase(self, name)

    @harmless
    def begin_phase(self, name: str) -> bool:
        """Was a step under way?"""
        self._take_fetched()
        was_open = self._clock.is_open
        self._clock.pause(time.monotonic())
        self._run.log.event("phase", name)
        return was_open

    @harmless
    def end_phase(self, *, resumes: bool) -> None:
        self._run.log.event("phase", "training")
        if resumes:
            self._clock.resume(time.monotonic())

    # ---- figures -------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        """At most eight figures of the time since the last call, for a logger; {} without steps."""
        return self._scalars() or {}

    @harmless
    def _scalars(self) -> dict[str, float]:
        self._settle(time.monotonic())
        tally = self._tally.since(self._at_log)
        self._at_log = self._tally.copy()
        if not tally.num_steps:
            return {}
        self._gpus.note_peaks()
        pace: Pace = self._gpus.pace(tally, "log")
        return pace.scalars()

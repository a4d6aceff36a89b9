"""`with oomph.watching() as run:` in a training script: its steps, peaks and phases -> its run.

Nothing here raises into the training: a fault in oomph is reported once, on standard error, and
ends the watching. A forked process, such as a loader's worker, records nothing.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar

from oomph.monitoring.recording import say
from oomph.monitoring.script_runs import (
    JoinedRun,
    OwnRun,
    Ranks,
    ScriptGpus,
    open_run,
    ranks_of_environment,
)
from oomph.monitoring.step_log import Step, StepClock, Tally
from oomph.monitoring.wrapping import Ended
from oomph.records.run import SWITCH, EventKind
from oomph.records.stability import NoiseScale, StabilityWarning
from oomph.showing.line import print_pace
from oomph.stability import watch

# ---- methods that training code calls, and that never raise into it ----

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
Self = TypeVar("Self", bound="Harmless")


class Harmless:
    """Active in one process until switched off; a forked process starts switched off."""

    is_on = False

    def turn_on(self) -> None:
        self.is_on = True
        _turned_on.add(self)

    def give_up(self, error: Exception) -> None:
        """Switch off, with a single warning."""
        self.is_on = False
        say(f"the training is no longer watched ({type(error).__name__}: {error})")


_turned_on: weakref.WeakSet[Harmless] = weakref.WeakSet()


def _turn_off() -> None:
    for one in list(_turned_on):
        one.is_on = False


os.register_at_fork(after_in_child=_turn_off)


def harmless(
    method: Callable[Concatenate[Self, Arguments], Result],
) -> Callable[Concatenate[Self, Arguments], Result | None]:
    """Wrap a method so that it does nothing when off; an exception switches it off."""

    @functools.wraps(method)
    def guarded(
        self: Self, /, *arguments: Arguments.args, **keywords: Arguments.kwargs
    ) -> Result | None:
        if not self.is_on:
            return None
        try:
            return method(self, *arguments, **keywords)
        except Exception as error:  # noqa: BLE001 - training goes on, whatever fails here
            self.give_up(error)
            return None

    return guarded


# ---- the exception that ended a training, or none -> how it ended ----

_MAX_TEXT = 500  # torch's message, without the advice at its end


def ended_by(error: BaseException | None) -> Ended:
    """Return how Python ends if this exception is not caught."""
    if isinstance(error, KeyboardInterrupt):
        return Ended(None, signal.SIGINT)
    if isinstance(error, SystemExit):
        code = error.code
        return Ended(code if isinstance(code, int) else int(code is not None))
    return Ended(0 if error is None else 1)


def shortage_of(error: BaseException) -> tuple[EventKind, str] | None:
    """Return the event for an out-of-memory error; None for any other error."""
    memory, text = which_memory(error), " ".join(str(error).split())[:_MAX_TEXT]
    if memory == "gpu":
        return "out-of-memory", text
    return None if memory is None else ("warning", f"out of host memory: {text}")


def which_memory(error: BaseException) -> Literal["gpu", "host"] | None:
    """Return which memory ran out; None for any other error. torch may not be imported."""
    if "torch" not in sys.modules:
        return "host" if isinstance(error, MemoryError) else None
    from oomph import out_of_memory

    memory = out_of_memory.which_memory(error)
    return "host" if memory == "workers" else memory


Batch = TypeVar("Batch")

# When the wait for a batch began and ended, its samples, and whether it starts a new step. The loop
# only appends these; they are evaluated every few seconds.
Fetched = tuple[float, float, int | None, bool]
_MAX_PENDING = 128  # steps or batches; judgement: a few kilobytes

_PEAKS_S = 5.0  # how often torch is asked: each time it builds a dict of all its counters


def watching(*, prints: bool = True, rank: int | None = None) -> Watching:
    """Watch the training of this script: step times, waits for data, and memory.

    with oomph.watching() as run:
        for epoch in range(3):
            for batch in run.steps(loader):     # measures the wait for each batch, and its step
                ...
            with run.phase("evaluation"):
                ...

    Under `oomph watch -- python train.py` it adds to that run; alone it records its own.
    Rank 0 prints a line an epoch, unless `prints` is False. `rank` defaults to the launcher's or
    torch's.
    """
    return Watching(prints=prints, rank=rank)


class Watching(Harmless):
    """Record the training of a script."""

    _current: Watching | None = None  # of this process
    _num_runs = 0

    _run: JoinedRun | OwnRun
    _ranks: Ranks
    _gpus: ScriptGpus

    def __init__(self, *, prints: bool = True, rank: int | None = None) -> None:
        self._prints, self._rank = prints, rank
        self._pid = os.getpid()
        self._is_owner = False  # it opened the run, rather than joining one
        self._clock = StepClock()
        self._tally = Tally()
        self._at_log, self._at_line = Tally(), Tally()  # at the last log, and the last line
        self._num_epochs = 0
        self.is_in_steps = self._has_begun = False
        self._ended: list[Step] = []  # not written yet
        self.fetched: list[Fetched] = []  # by `steps`, not evaluated yet
        self.due = self._next_peaks = 0.0
        self._watch = watch.Watch()

    @classmethod
    def current(cls) -> Watching | None:
        """Return the one that is open in this process."""
        found = cls._current
        return found if found is not None and found.is_on else None

    @property
    def num_steps(self) -> int:
        """Return how many steps have ended."""
        return self._tally.num_steps

    # ---- from begin to end ---------------------------------------------------------------------

    def start(self) -> Watching:
        """Do what entering the block does. If another is open in this process, join its run."""
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
        ranks = ranks_of_environment()
        self._ranks = ranks if self._rank is None else replace(ranks, rank=self._rank)
        self._run = open_run(self._ranks, Watching._num_runs, prints=self._prints)
        self._gpus = ScriptGpus(self._run)
        self._is_owner = True
        Watching._num_runs += 1
        Watching._current = self
        watch.listen(self.note)
        atexit.register(self._finish_at_exit)
        self._run.log.event("phase", "start-up")

    def finish(self, error: BaseException | None = None) -> None:
        """Do what leaving the block does; `error` is what ended the training, if anything."""
        self._write_last_steps(error)
        self.is_on = False
        if self._is_owner and os.getpid() == self._pid:  # not in a fork
            self._is_owner = False
            Watching._current = None
            watch.unlisten(self.note)
            atexit.unregister(self._finish_at_exit)
            self._close(error)

    @harmless
    def _write_last_steps(self, error: BaseException | None) -> None:
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
                say(f"recorded as {kept_as}; to see it: oomph report {kept_as}")
        except Exception as fault:  # noqa: BLE001 - as everywhere here: never into the training
            self.give_up(fault)

    def _finish_at_exit(self) -> None:
        """Finish if the block was never left: a callback whose training raised, or no block."""
        # The uncaught exception that Python has just printed; `last_exc` since 3.12.
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
        """Iterate over a loader for one epoch; each batch, or `accumulate` batches, is a step.

        The samples of a batch are the length of its first tensor, unless `num_samples` is given. A
        step left by `break` or by an error is not counted.
        """
        return Steps(self, loader, max(accumulate, 1), num_samples)

    @harmless
    def step(self, num_samples: int | None = None) -> None:
        """Call after each step of a loop without `steps`; the first call starts the clock."""
        if not self.is_in_steps:  # `steps` ends them itself
            self.end_step(num_samples)
            self.resume()

    @harmless
    def end_step(
        self, num_samples: int | None = None, *, at: float | None = None, is_timed: bool = False
    ) -> None:
        """End a step, now or at an earlier time; the next begins with the wait for its data.

        `is_timed`: every wait is reported, including those for batches of later steps.
        """
        now = time.monotonic() if at is None else at
        self._take_fetched()
        if is_timed:
            self._clock.all_waits_noted()
        self._end(now, num_samples)
        if now >= self.due or len(self._ended) >= _MAX_PENDING:
            self._settle(now)

    def _end(self, now: float, num_samples: int | None = None) -> None:
        step = self._clock.end(now, num_samples)
        if step is not None:
            self._ended.append(step)

    @harmless
    def catch_up(self) -> None:
        """Write the batches `steps` has fetched, and the steps that have ended."""
        if not self._has_begun:
            self._begin()
        self._settle(time.monotonic())

    def _take_fetched(self) -> None:
        for began, ended, num_samples, is_new in self.fetched:
            if is_new:  # the previous step ended when this wait began
                self._end(began)
            self._clock.waited(began, ended, num_samples)
        self.fetched.clear()

    def _settle(self, now: float) -> None:
        """Write ended steps; not after every step, as that would cost more than measuring it."""
        self.due = now + self._run.write_every_s
        self._take_fetched()
        if self._ended:
            self._tally.add(self._ended)
            self._run.log.steps(self._ended)
            self._ended.clear()
        if now >= self._next_peaks:
            self._next_peaks = now + _PEAKS_S
            self._gpus.note_peaks()

    @harmless
    def waited(self, began: float, ended: float, batch: object = None) -> None:
        """Add a wait for a batch of the current step, in times of time.monotonic()."""
        if not self._has_begun:
            self._begin()
        self._take_fetched()
        self._clock.waited(began, ended, num_samples_in(batch))

    @harmless
    def count(self, batch: object) -> None:
        """Count a batch of the current step, whose wait was recorded without it."""
        self._clock.count(num_samples_in(batch))

    def waiting(self) -> Waiting:
        """Measure a wait in a loop without a loader: `with run.waiting(): batch = queue.get()`."""
        return Waiting(self)

    @harmless
    def resume(self) -> None:
        """Continue a step, or begin one without a wait."""
        if not self._has_begun:
            self._begin()
        self._clock.resume(time.monotonic())

    @harmless
    def pause(self) -> None:
        """Pause the step: what follows is not part of it."""
        self._clock.pause(time.monotonic())

    def _begin(self) -> None:
        """Prepare the first step: memory held now does not grow with the batch."""
        self._has_begun = True
        self._gpus.note_before_steps()
        self._run.log.event("phase", "training")

    @harmless
    def drop_step(self) -> None:
        """Discard what was measured since the last step."""
        self._take_fetched()
        self._clock.reset()

    # ---- stability -----------------------------------------------------------------------------

    @harmless
    def note(self, what: StabilityWarning | NoiseScale) -> None:
        """Write what a Stepper, or `observe`, has found out about the training."""
        kind: EventKind = "noise-scale" if isinstance(what, NoiseScale) else "unstable"
        self._run.log.event(kind, str(what))

    @harmless
    def observe(self, loss: float, grad_norm: float | None = None) -> None:
        """Watch the stability of a loop without a Stepper: call it once per step.

        Takes plain numbers, so a loss on a GPU is waited for: `run.observe(loss.item())`.
        """
        for warning in self._watch.step(float(loss), grad_norm=grad_norm):
            self.note(warning)
            say(f"step {warning.step}: {warning}")

    # ---- epochs and phases ---------------------------------------------------------------------

    @harmless
    def epoch(self) -> None:
        """End an epoch. `steps` calls it itself; two calls without a step in between count once."""
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
        """Print a line on rank 0 about the steps since the last line."""
        tally = self._tally.since(self._at_line)
        self._at_line = self._tally.copy()
        if self._prints and self._ranks.rank == 0:
            print_pace(name, self._gpus.pace(tally, "epoch"))

    def phase(self, name: str) -> Phase:
        """Begin a phase, or enter it by `with`, such as an evaluation: its time is not a step's."""
        return Phase(self, name)

    @harmless
    def begin_phase(self, name: str) -> bool:
        """Begin a phase; return whether a step was open."""
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
        """Return at most eight figures since the last call, for a logger; {} without steps."""
        return self._scalars() or {}

    @harmless
    def _scalars(self) -> dict[str, float]:
        self._settle(time.monotonic())
        tally = self._tally.since(self._at_log)
        self._at_log = self._tally.copy()
        if not tally.num_steps:
            return {}
        self._gpus.note_peaks()
        return self._gpus.pace(tally, "log").scalars()


# ---- a loader and its batches -> how many samples they have; torch is not imported ----

# Judgement: a batch is a tensor in a few containers; after 32 equal batches, few differ.
_MAX_DEPTH = 4
_MANY_ALIKE = 32
_ASKED_EVERY = 16


def num_samples_in(batch: object, depth: int = 0) -> int | None:
    """Return the first dimension of the first tensor in a batch; None if there is none.

    >>> num_samples_in({"labels": ["a", "b"]}) is None
    True
    """
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    if depth == _MAX_DEPTH:
        return None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if not isinstance(batch, list | tuple):
        return None
    found = (num_samples_in(part, depth + 1) for part in batch)
    return next((number for number in found if number is not None), None)


class BatchSizes:
    """Return the samples of each batch without inspecting every batch.

    Inspecting one costs more than everything else in a step, because torch's code has dropped out
    of the CPU caches by then. Once many batches were equal, only every sixteenth and the last are
    inspected; after a different one, each again. If the last batch is not known in advance, each is
    inspected. If the loader draws a number of samples that differs from the rows of the first batch
    (graphs, time first), the drawn number counts.
    """

    __slots__ = ("_drawn", "_last", "_num_alike", "ask_at", "size")

    def __init__(
        self, num_batches: int | None, given: int | None, num_drawn: int | None = None
    ) -> None:
        self.size, self._drawn = given, num_drawn
        self.ask_at: float = 0 if given is None else math.inf  # the next batch to inspect
        self._last = None if num_batches is None else num_batches - 1
        self._num_alike = 0

    def ask(self, number: int, batch: object) -> tuple[int | None, float]:
        """Return the size of a batch (None: unknown), and the number of the next batch to inspect.

        A batch can be any object of the user's.
        """
        try:
            size = num_samples_in(batch)
        except Exception:  # noqa: BLE001 - its shape runs the user's code
            size = None
        is_full = self._last is not None and number < self._last
        if self._drawn is not None and is_full and size != self._drawn:
            self.size, self.ask_at = self._drawn, math.inf
            return self.size, self.ask_at
        self._num_alike = self._num_alike + 1 if size == self.size else 0
        self.size = size
        self.ask_at = number + 1
        if self._num_alike >= _MANY_ALIKE and self._last is not None and number < self._last:
            self.ask_at = min(number + _ASKED_EVERY, self._last)
        return size, self.ask_at


def num_drawn_by(loader: Any) -> int | None:
    """Return the samples per batch (but the last), as a DataLoader or its batch sampler says."""
    try:
        if not hasattr(loader, "batch_sampler"):  # other loaders may count tokens
            return None
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    except Exception:  # noqa: BLE001 - any kind of user's loader: unknown
        return None
    return size if isinstance(size, int) and size > 0 else None


def num_batches_in(loader: Any) -> int | None:
    """Return how many batches the loader will give, if that is certain.

    For an iterable dataset, torch's DataLoader only estimates, and warns if asked.
    """
    try:
        return len(getattr(loader, "batch_sampler", loader))
    except Exception:  # noqa: BLE001 - any kind of user's loader: unknown
        return None


# ---- steps, waits and phases of a loop ----


class Steps(Generic[Batch]):
    """The batches of a loader, whose waits and steps go to the run."""

    def __init__(
        self, run: Watching, loader: Iterable[Batch], accumulate: int, num_samples: int | None
    ) -> None:
        self._run, self._loader = run, loader
        self._accumulate, self._num_samples = accumulate, num_samples

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # may raise, as for the loader

    def __iter__(self) -> Iterator[Batch]:
        run, number, held, iterator = self._run, 0, list[Batch](), iter(self._loader)
        loader = self._loader
        sizes = BatchSizes(num_batches_in(loader), self._num_samples, num_drawn_by(loader))
        # Most steps use only local variables of this frame: any other object would have dropped out
        # of the CPU caches since the step before.
        clock, note, size, ask_at = time.monotonic, run.fetched.append, sizes.size, sizes.ask_at
        accumulate, first_of_step, due, full_at = self._accumulate, 0, 0.0, 0
        run.is_in_steps = True
        try:
            while True:
                began = clock()
                try:
                    held.append(next(iterator))
                except StopIteration:
                    break
                ended = clock()
                if number >= ask_at:
                    size, ask_at = sizes.ask(number, held[0])
                is_new = number == first_of_step
                if is_new:
                    first_of_step += accumulate
                note((began, ended, size, is_new))
                if ended >= due or number >= full_at:
                    due, full_at = self._catch_up(), number + _MAX_PENDING
                number += 1
                yield held.pop()  # lets a loop that deletes the batch free its memory
            run.end_step(at=began)
        finally:
            run.is_in_steps = False
            run.drop_step()
        run.epoch()

    def _catch_up(self) -> float:
        """Pass on the recorded waits, or drop them if off; return when to do so again."""
        run = self._run
        run.catch_up()
        if not run.is_on:
            run.fetched.clear()
        return run.due


class Waiting:
    """Measure waits for data, one per `with` block."""

    def __init__(self, run: Watching) -> None:
        self._run, self._began = run, 0.0

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._run.waited(self._began, time.monotonic())


class Phase:
    """A phase that begins when it is created and ends with its `with` block, if there is one."""

    def __init__(self, run: Watching, name: str) -> None:
        self._run = run
        self._resumes = run.begin_phase(name)

    def end(self) -> None:
        self._run.end_phase(resumes=bool(self._resumes))

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.end()

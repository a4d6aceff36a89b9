"""Callbacks of Hugging Face's Trainer and of Lightning -> `with oomph.watching()`.

Step times, waits for data and torch's peaks go to the run, and at most eight figures to the
trainer's logger. oomph.hf.Watching and oomph.lightning.Watching combine these classes with the
framework's own Callback. Tested with transformers 5.22 and Lightning 2.6. Trainers, loops and
states are typed `Any`, because this package does not import the frameworks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from oomph.monitoring.in_script import Harmless, Phase, Watching, harmless


class _WatchingCallback(Harmless):
    _run: Watching

    def __init__(self, *, prints: bool = True) -> None:
        super().__init__()
        self._prints = prints
        self._evaluation: Phase | None = None

    def _begin_evaluation(self) -> None:
        if self._evaluation is None:
            self._evaluation = self._run.phase("evaluation")

    def _end_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.end()
            self._evaluation = None


class HfCallback(_WatchingCallback):
    """Watch a Hugging Face Trainer: Trainer(..., callbacks=[oomph.hf.Watching()]).

    prints: rank 0 prints a line an epoch.
    """

    _loader: TimedLoader

    def on_train_begin(self, args: Any, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        self._end()  # a training that raised has not called on_train_end
        self.turn_on()
        self._begin(args, train_dataloader)

    @harmless
    def _begin(self, args: Any, loader: Any) -> None:
        _go_first(self)
        self._run = Watching(prints=self._prints, rank=args.process_index).start()
        self._loader = TimedLoader(loader, self._run.waited)

    @harmless
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._run.resume()

    @harmless
    def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
        """End a step. If the loader could not be timed, samples are not counted either.

        A timed loader is one batch ahead: it fetches two in the first step of an epoch, and none in
        the last.
        """
        is_timed = self._loader.is_timed
        whole = args.train_batch_size * args.gradient_accumulation_steps
        self._run.end_step(None if is_timed else whole, is_timed=is_timed)

    @harmless
    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self._begin_evaluation()

    @harmless
    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._end_evaluation()

    @harmless
    def on_epoch_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if abs(state.epoch - round(state.epoch)) < 1e-6:  # not stopped within an epoch
            self._run.epoch()

    @harmless
    def on_log(self, _: Any, state: Any, *__: Any, **keywords: Any) -> None:
        logs = keywords.get("logs") or {}
        if "loss" in logs and state.is_world_process_zero:
            logs.update(self._run.scalars())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._end()

    @harmless
    def _end(self) -> None:
        self._loader.undo()
        self._run.finish()
        self.is_on = False


def _go_first(callback: HfCallback) -> None:
    """Move to the head of the Trainer's callback list, which callbacks do not get.

    Callbacks that report to TensorBoard and the like come before the user's and log their input at
    once, so our figures must be there first.
    """
    frame = sys._getframe(1)
    while frame is not None:
        listed = getattr(frame.f_locals.get("self"), "callbacks", None)
        if isinstance(listed, list) and callback in listed:
            listed.insert(0, listed.pop(listed.index(callback)))
            return
        frame = frame.f_back  # type: ignore[assignment]


# Called with the start and end of a wait, and its batch. It must not raise.
Waited = Callable[[float, float, Any], None]


class TimedLoader:
    """Time a torch DataLoader that other code iterates: `waited` is called per wait until `undo`.

    The loader and its iterators stay as they are, except for one attribute each. Tested with torch
    2.13; `_get_iterator` and `_next_data` exist since 1.2.
    """

    def __init__(self, loader: Any, waited: Waited) -> None:
        # accelerate wraps torch's loader; both its own and its skipping loader ask the inner one.
        while hasattr(loader, "base_dataloader"):
            loader = loader.base_dataloader
        self._loader, self._waited = loader, waited
        self.is_timed = callable(getattr(loader, "_get_iterator", None))
        if self.is_timed:
            self._get_iterator = loader._get_iterator
            loader._get_iterator = self._make

    def _make(self) -> Any:
        iterator = self._get_iterator()
        next_data = getattr(iterator, "_next_data", None)
        if next_data is not None:
            iterator._next_data = self._timed(next_data)
        return iterator

    def _timed(self, next_data: Callable[[], Any]) -> Callable[[], Any]:
        def timed() -> Any:
            began = time.monotonic()
            batch = next_data()
            self._waited(began, time.monotonic(), batch)
            return batch

        return timed

    def undo(self) -> None:
        """Stop timing, from the next iterator on."""
        if self.is_timed:
            vars(self._loader).pop("_get_iterator", None)


class LightningCallback(_WatchingCallback):
    """Watch a Lightning Trainer: Trainer(callbacks=[oomph.lightning.Watching()]).

    prints: rank 0 prints a line an epoch.
    """

    _num_steps = 0
    _is_timed = False

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.turn_on()
        self._begin(trainer)

    @harmless
    def _begin(self, trainer: Any) -> None:
        self._run = Watching(prints=self._prints, rank=trainer.global_rank).start()
        self._num_steps = trainer.global_step
        loop = trainer.fit_loop.epoch_loop
        self._is_timed = hasattr(loop, "_on_before_fetch")  # else the wait is not measured
        if self._is_timed:
            _TimedFetches(loop, self._run)

    @harmless
    def on_train_batch_start(self, *_: Any) -> None:
        self._run.resume()

    @harmless
    def on_train_batch_end(self, trainer: Any, _: Any, __: Any, batch: Any, *___: Any) -> None:
        """End a step, unless the batch is only accumulated."""
        self._run.count(batch)
        if trainer.global_step == self._num_steps:
            self._run.pause()
            return
        self._num_steps = trainer.global_step
        self._run.end_step(is_timed=self._is_timed)
        if trainer.loggers and trainer._logger_connector.should_update_logs:
            self._log(trainer)

    def _log(self, trainer: Any) -> None:
        scalars = self._run.scalars()
        for logger in trainer.loggers if scalars and trainer.is_global_zero else ():
            logger.log_metrics(scalars, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    @harmless
    def on_validation_start(self, *_: Any) -> None:
        self._begin_evaluation()

    @harmless
    def on_validation_end(self, *_: Any) -> None:
        self._end_evaluation()

    @harmless
    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:  # not stopped within an epoch
            self._run.epoch()

    @harmless
    def on_exception(self, trainer: Any, _: Any, exception: BaseException) -> None:
        self._end(trainer, exception)

    @harmless
    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self._end(trainer, None)

    def _end(self, trainer: Any, error: BaseException | None) -> None:
        for name in ("_on_before_fetch", "_on_after_fetch"):
            vars(trainer.fit_loop.epoch_loop).pop(name, None)
        self._run.finish(error)
        self.is_on = False


class _TimedFetches:
    """Time each wait for a batch, through the hooks of Lightning's profiler."""

    def __init__(self, loop: Any, run: Watching) -> None:
        self._before, self._after, self._run = loop._on_before_fetch, loop._on_after_fetch, run
        self._began = 0.0
        loop._on_before_fetch, loop._on_after_fetch = self._begin, self._end

    def _begin(self) -> None:
        self._before()
        self._began = time.monotonic()

    def _end(self) -> None:
        self._run.waited(self._began, time.monotonic())
        self._after()

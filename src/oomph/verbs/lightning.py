"""oomph.lightning: what Lightning's Trainer gets from oomph.

trainer = pytorch_lightning.Trainer(callbacks=[oomph.lightning.Guard()])       # splits batches
trainer = pytorch_lightning.Trainer(callbacks=[oomph.lightning.Watching()])    # tells its steps

The first is in oomph/training/adapters. Of the second, step times, waits for data and torch's
peaks go to the run, and at most eight figures to the Trainer's loggers, as often as it logs. Held
against 2.6.
"""

from __future__ import annotations

import time
from typing import Any

from oomph.verbs.harmless import Harmless, harmless
from oomph.verbs.in_script import Watching as _Run


class WatchingHooks(Harmless):
    """What the callback does; `Watching` is this and Lightning's Callback.

    prints: a line an epoch, by rank 0.
    """

    _run: _Run

    def __init__(self, *, prints: bool = True) -> None:
        super().__init__()
        self._prints = prints
        self._evaluation: Any = None
        self._num_steps = 0
        self._is_timed = False

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.turn_on()
        self._begin(trainer)

    @harmless
    def _begin(self, trainer: Any) -> None:
        self._run = _Run(prints=self._prints, rank=trainer.global_rank).start()
        self._num_steps = trainer.global_step
        loop = trainer.fit_loop.epoch_loop
        self._is_timed = hasattr(loop, "_on_before_fetch")  # else nobody measures the wait
        if self._is_timed:
            _Fetches(loop, self._run)

    @harmless
    def on_train_batch_start(self, *_: Any) -> None:
        self._run.resume()

    @harmless
    def on_train_batch_end(self, trainer: Any, _: Any, __: Any, batch: Any, *___: Any) -> None:
        """With accumulation, not every batch ends a step."""
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
        self._evaluation = self._run.phase("evaluation")

    @harmless
    def on_validation_end(self, *_: Any) -> None:
        if self._evaluation is not None:
            self._evaluation.end()
            self._evaluation = None

    @harmless
    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:  # and not stopped within one
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


class _Fetches:
    """Stands where Lightning's profiler is told of each wait for a batch."""

    def __init__(self, loop: Any, run: _Run) -> None:
        self._before, self._after, self._run = loop._on_before_fetch, loop._on_after_fetch, run
        self._began = 0.0
        loop._on_before_fetch, loop._on_after_fetch = self._begin, self._end

    def _begin(self) -> None:
        self._before()
        self._began = time.monotonic()

    def _end(self) -> None:
        self._run.waited(self._began, time.monotonic())
        self._after()


def __getattr__(name: str) -> Any:
    if name != "Watching":
        from oomph.training.adapters import lightning

        return getattr(lightning, name)
    from oomph.training.adapters.lightning_callback import as_callback

    made = globals()["Watching"] = as_callback("Watching", WatchingHooks, __name__)
    return made

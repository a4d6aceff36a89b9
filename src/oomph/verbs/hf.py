"""oomph.hf: what Hugging Face's Trainer gets from oomph.

trainer = oomph.hf.Trainer(model=model, args=args, train_dataset=data)      # splits batches
trainer = Trainer(..., callbacks=[oomph.hf.Watching()])                     # tells its steps

The first is in oomph/training/adapters. Of the second, step times, waits for data and torch's
peaks go to the run, and at most eight figures to wherever the Trainer reports to, beside its loss.
Held against transformers 5.22.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from oomph.running.batches import TimedLoader
from oomph.verbs.harmless import Harmless, harmless
from oomph.verbs.in_script import Watching as _Run

if TYPE_CHECKING:
    from oomph.training.adapters.hf import TrainerMixin as TrainerMixin


class WatchingHooks(Harmless):
    """What the callback does; `Watching` is this and the Trainer's own TrainerCallback.

    prints: a line an epoch, by rank 0.
    """

    _run: _Run
    _loader: TimedLoader

    def __init__(self, *, prints: bool = True) -> None:
        super().__init__()
        self._prints = prints
        self._evaluation: Any = None

    def on_train_begin(self, args: Any, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        self._end()  # a training that raised has not said so
        self.turn_on()
        self._begin(args, train_dataloader)

    @harmless
    def _begin(self, args: Any, loader: Any) -> None:
        _go_first(self)
        self._run = _Run(prints=self._prints, rank=args.process_index).start()
        self._loader = TimedLoader(loader, self._run.waited)

    @harmless
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._run.resume()

    @harmless
    def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
        """A loader that nobody could time tells no samples, either. One that is timed is a batch
        ahead: it fetches two in the first step of an epoch, and none in the last."""
        is_timed = self._loader.is_timed
        whole = args.train_batch_size * args.gradient_accumulation_steps
        self._run.end_step(None if is_timed else whole, is_timed=is_timed)

    @harmless
    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        if self._evaluation is None:
            self._evaluation = self._run.phase("evaluation")

    @harmless
    def on_evaluate(self, *_: Any, **__: Any) -> None:
        if self._evaluation is not None:
            self._evaluation.end()
            self._evaluation = None

    @harmless
    def on_epoch_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if abs(state.epoch - round(state.epoch)) < 1e-6:  # and not stopped within one
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


def _go_first(callback: WatchingHooks) -> None:
    """To the head of the Trainer's list of callbacks, which it does not hand to them.

    Those that report to TensorBoard and the like stand before the user's, and log what they are
    given at once: what is to be logged must be there before them.
    """
    frame = sys._getframe(1)
    while frame is not None:
        listed = getattr(frame.f_locals.get("self"), "callbacks", None)
        if isinstance(listed, list) and callback in listed:
            listed.insert(0, listed.pop(listed.index(callback)))
            return
        frame = frame.f_back  # type: ignore[assignment]


def __getattr__(name: str) -> Any:
    if name != "Watching":
        from oomph.training.adapters import hf

        return getattr(hf, name)
    from transformers import TrainerCallback

    made = type("Watching", (WatchingHooks, TrainerCallback), {"__doc__": WatchingHooks.__doc__})
    made.__module__ = __name__
    globals()["Watching"] = made
    return made

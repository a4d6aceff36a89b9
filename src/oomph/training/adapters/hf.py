"""Hugging Face: a Trainer -> the same Trainer, with batches that are split if memory runs out.

    trainer = oomph.hf.Trainer(model=model, args=args, train_dataset=data)      # instead of Trainer
    class MyTrainer(oomph.hf.TrainerMixin, SFTTrainer): ...                     # your own Trainer

Each batch runs through the Trainer's own `training_step`, whole or in pieces. Steps, batches, logs,
schedule, clipping, loss scaler, checkpoints and callbacks stay the Trainer's.
`auto_find_batch_size` is not needed. Tested with transformers 5.22, in one process or several with
DistributedDataParallel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from oomph.training.adapters.window import Options, Window, ranks_for, total_loss
from oomph.training.evaluation import Done, evaluation_for
from oomph.training.micro_batches import Micro
from oomph.training.rollback_state import modules_in
from oomph.training.update import make_whole

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # any Trainer, placed after the mixin


class TrainerMixin(_Trainer):  # type: ignore[misc]
    """Put it before a Trainer: `class MyTrainer(oomph.hf.TrainerMixin, Trainer)`.

    The Trainer takes these additional keywords, all as for a Stepper: plan, micro_batch, weight,
    on_difference, whole, batch_dim, split, count, last_resorts, keeps_other_rngs, beside.
    `per_device_train_batch_size` is the batch size to train with; it does not have to fit.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        own = [name for name in Options.__annotations__ if name in keywords]
        self._oomph_options: Any = {name: keywords.pop(name) for name in own}
        self._oomph_window: Window | None = None
        self._oomph_evaluation = evaluation_for(self._oomph_options, _say)
        super().__init__(*args, **keywords)

    # ---- overridden methods --------------------------------------------------------------------

    def train(self, *args: Any, **keywords: Any) -> Any:
        """Train, without the sizes learnt in a previous training."""
        self._oomph_window = None
        return super().train(*args, **keywords)

    def create_optimizer(self, *args: Any, **keywords: Any) -> Any:
        """Create the optimizer, with a step that completes or does not happen."""
        optimizer = super().create_optimizer(*args, **keywords)
        make_whole(getattr(optimizer, "optimizer", optimizer))
        return optimizer

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None, **keywords: Any
    ) -> Any:
        """Run the Trainer's training_step on each piece; return the loss of the whole batch."""
        training_step = super().training_step

        def work(piece: Micro) -> Any:
            if piece.is_forward_only:
                inputs = self._prepare_inputs(piece.data)
                with self.compute_loss_context_manager():
                    loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
                piece.backward(loss)
                return loss.detach()
            with _weighted(self.accelerator, piece.share):
                return training_step(model, piece.data, num_items_in_batch, **keywords)

        window = self._window(model)
        loss = total_loss(window.run(inputs, work, (model, num_items_in_batch)))
        if self.accelerator.sync_gradients:  # the last batch before a step
            window.close()
        return loss

    def prediction_step(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **keywords: Any,
    ) -> Any:
        """Run the Trainer's prediction_step, in pieces if an evaluation batch does not fit."""
        prediction_step = super().prediction_step

        def work(part: Any) -> Any:
            return prediction_step(
                model, part, prediction_loss_only, ignore_keys=ignore_keys, **keywords
            )

        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            return work(inputs)  # its forward waits for other ranks
        done = self._oomph_evaluation.run(inputs, work)
        return done[0].result if len(done) == 1 else self._predicted(inputs, work, done)

    def _predicted(self, inputs: Any, work: Callable[[Any], Any], done: list[Done]) -> Any:
        """Weight the losses; join predictions and labels, padding different lengths."""
        from transformers.trainer_pt_utils import nested_concat

        losses, *columns = zip(*(each.result for each in done), strict=True)
        loss = None
        if losses[0] is not None:
            loss = self._oomph_evaluation.whole_of(
                inputs,
                lambda part: work(part)[0],
                [each._replace(result=each.result[0]) for each in done],
                self._oomph_options.get("weight"),
                is_rounded=self.args.bf16 or self.args.fp16,
            )
        whole = [
            None if column[0] is None else functools.reduce(nested_concat, column)
            for column in columns
        ]
        return loss, *whole

    def log(self, logs: dict[str, float], *args: Any, **keywords: Any) -> None:
        """Also log the noise scale, if known, and the micro-batch and errors, if there were any."""
        window = self._oomph_window
        if window is not None and window.num_ooms and "loss" in logs:
            logs["micro_batch"] = float(window.micro_batch or 0)
            logs["num_ooms"] = float(window.num_ooms)
        if window is not None and "loss" in logs and (scale := window.noise_scale) is not None:
            logs["noise_scale"] = scale.examples
        super().log(logs, *args, **keywords)

    def _window(self, model: Any) -> Window:
        """Return the window of this training; the next may have another optimizer."""
        if self._oomph_window is None:
            is_engine = self.is_deepspeed_enabled or self.is_fsdp_enabled
            num = max(self.args.world_size, self.args.n_gpu)
            optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
            ranks = ranks_for(model, [optimizer], num, is_engine=is_engine, library="the Trainer")
            make_whole(optimizer, ranks=ranks)
            options = {
                "ranks": ranks,
                # compute_loss may write into any of the Trainer's modules: a teacher, an average.
                "beside": [module for each in vars(self).values() for module in modules_in(each)],
                **self._oomph_options,
            }
            self._oomph_window = Window(self.model, [self.optimizer], _say, **options)
        return self._oomph_window


@contextmanager
def _weighted(accelerator: Any, share: float) -> Iterator[None]:
    """Multiply every loss that the Trainer passes to `accelerator.backward` by `share`."""
    if share == 1:
        yield
        return
    backward, of_its_own = accelerator.backward, "backward" in vars(accelerator)

    def weighted(loss: Any, **keywords: Any) -> Any:
        return backward(loss * share, **keywords)

    accelerator.backward = weighted
    try:
        yield
    finally:
        if of_its_own:
            accelerator.backward = backward
        else:
            del accelerator.backward


def _say(text: str) -> None:
    from transformers.utils import logging

    logging.get_logger("transformers.trainer").warning(text)


def __getattr__(name: str) -> Any:
    if name != "Trainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import transformers

    class Trainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc]
        """transformers.Trainer with batches that are split if memory runs out."""

    Trainer.__qualname__ = "Trainer"
    globals()["Trainer"] = Trainer
    return Trainer

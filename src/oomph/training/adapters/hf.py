"""Hugging Face: a Trainer -> the same, whose batches are split where memory runs out.

trainer = oomph.hf.Trainer(model=model, args=args, train_dataset=data)      # instead of Trainer
class MyTrainer(oomph.hf.TrainerMixin, SFTTrainer): ...                     # one of one's own

Each batch of the loader goes through the Trainer's own `training_step`, whole or piece by piece:
steps, batches, logs, schedule, clipping, loss scaler, checkpoints and callbacks are the Trainer's.
`auto_find_batch_size` has nothing left to do. Held against transformers 5.22; one process,
or several with DistributedDataParallel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from oomph.training.adapters.limits import ranks_for
from oomph.training.adapters.options import Options
from oomph.training.adapters.pieces import Piece, total_loss
from oomph.training.adapters.update import make_whole
from oomph.training.adapters.window import Window
from oomph.training.evaluation import evaluation_for
from oomph.training.rollback_state import modules_in

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # any Trainer, which comes after it


class TrainerMixin(_Trainer):  # type: ignore[misc]
    """Put it before a Trainer: `class MyTrainer(oomph.hf.TrainerMixin, Trainer)`.

    The Trainer is made as ever, with these keywords more, all of them as for a Stepper: plan,
    micro_batch, weight, on_difference, whole, batch_dim, split, count, last_resorts,
    keeps_other_rngs, beside.

    `per_device_train_batch_size` is the batch, and not what has to fit.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        own = [name for name in Options.__annotations__ if name in keywords]
        self._oomph_options: Any = {name: keywords.pop(name) for name in own}
        self._oomph_window: Window | None = None
        self._oomph_evaluation = evaluation_for(self._oomph_options, _say)
        super().__init__(*args, **keywords)

    # ---- what the Trainer calls ----------------------------------------------------------------

    def train(self, *args: Any, **keywords: Any) -> Any:
        """The Trainer's; what was learnt of sizes in a training before is not kept."""
        self._oomph_window = None
        return super().train(*args, **keywords)

    def create_optimizer(self, *args: Any, **keywords: Any) -> Any:
        """The Trainer's, whose step is whole or did not happen."""
        optimizer = super().create_optimizer(*args, **keywords)
        make_whole(getattr(optimizer, "optimizer", optimizer))
        return optimizer

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None, **keywords: Any
    ) -> Any:
        """The Trainer's, of each piece; the loss of the whole batch."""
        training_step = super().training_step

        def work(piece: Piece) -> Any:
            if piece.is_forward_only:
                inputs = self._prepare_inputs(piece.data)
                with self.compute_loss_context_manager():
                    loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
                piece.backward(loss)
                return loss.detach()
            with _weighted(self.accelerator, piece.share):
                return training_step(model, piece.data, num_items_in_batch, **keywords)

        window = self._window(model)
        loss = total_loss(window.run(inputs, work, said=(model, num_items_in_batch)))
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
        """The Trainer's, of each piece where a batch of the evaluation does not fit."""
        prediction_step = super().prediction_step

        def work(part: Any) -> Any:
            return prediction_step(
                model, part, prediction_loss_only, ignore_keys=ignore_keys, **keywords
            )

        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            return work(inputs)  # its forward waits for other ranks
        done = self._oomph_evaluation.run(inputs, work)
        return done[0][2] if len(done) == 1 else self._predicted(inputs, work, done)

    def _predicted(
        self, inputs: Any, work: Callable[[Any], Any], done: list[tuple[Any, int, Any]]
    ) -> Any:
        """Losses are weighted, predictions and labels put together, padded where lengths differ."""
        from transformers.trainer_pt_utils import nested_concat

        losses, *columns = zip(*(result for _, _, result in done), strict=True)
        loss = None
        if losses[0] is not None:
            pieces = zip(done, losses, strict=True)
            loss = self._oomph_evaluation.whole_of(
                inputs,
                lambda part: work(part)[0],
                [(part, num, each) for (part, num, _), each in pieces],
                self._oomph_options.get("weight"),
                is_rounded=self.args.bf16 or self.args.fp16,
            )
        whole = [
            None if column[0] is None else functools.reduce(nested_concat, column)
            for column in columns
        ]
        return loss, *whole

    def log(self, logs: dict[str, float], *args: Any, **keywords: Any) -> None:
        """Beside the loss: examples at a time, and errors so far, once there was one."""
        window = self._oomph_window
        if window is not None and window.num_ooms and "loss" in logs:
            logs["micro_batch"] = float(window.micro_batch or 0)
            logs["num_ooms"] = float(window.num_ooms)
        super().log(logs, *args, **keywords)

    def _window(self, model: Any) -> Window:
        """Of this training: the next may have another optimizer."""
        if self._oomph_window is None:
            is_engine = self.is_deepspeed_enabled or self.is_fsdp_enabled
            num = max(self.args.world_size, self.args.n_gpu)
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            ranks = ranks_for(model, [optimizer], num, is_engine=is_engine, library="the Trainer")
            make_whole(optimizer, ranks=ranks)
            options = {
                "ranks": ranks,
                # A teacher, an average: what a Trainer has, its compute_loss may write into.
                "beside": [module for each in vars(self).values() for module in modules_in(each)],
                **self._oomph_options,
            }
            self._oomph_window = Window(self.model, [self.optimizer], _say, **options)
        return self._oomph_window


@contextmanager
def _weighted(accelerator: Any, share: float) -> Iterator[None]:
    """Whatever the Trainer hands to `accelerator.backward` counts so much."""
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
        """transformers.Trainer, whose batches are split where memory runs out."""

    Trainer.__qualname__ = "Trainer"
    globals()["Trainer"] = Trainer
    return Trainer

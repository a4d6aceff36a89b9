"""Hugging Face: a Trainer -> the same, whose batches are split where memory runs out.

trainer = oomph.hf.Trainer(model=model, args=args, train_dataset=data)      # instead of Trainer
class MyTrainer(oomph.hf.TrainerMixin, SFTTrainer): ...                     # one of one's own

Each batch of the loader goes through the Trainer's own `training_step`, whole or piece by piece:
steps, batches, logs, schedule, clipping, loss scaler, checkpoints and callbacks are the Trainer's.
`auto_find_batch_size` has nothing left to do. Held against transformers 5.22; one process,
or several with DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from oomph.training.adapters.limits import ranks_for
from oomph.training.adapters.options import Options
from oomph.training.adapters.pieces import Piece, total_loss
from oomph.training.adapters.update import make_whole
from oomph.training.adapters.window import Window

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # any Trainer, which comes after it


class TrainerMixin(_Trainer):  # type: ignore[misc]
    """Put it before a Trainer: `class MyTrainer(oomph.hf.TrainerMixin, Trainer)`.

    The Trainer is made as ever, with these keywords more, all of them as for a Stepper: plan,
    micro_batch, weight, on_difference, whole, batch_dim, split, count, last_resorts,
    keeps_other_rngs.

    `per_device_train_batch_size` is the batch, and not what has to fit.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        own = [name for name in Options.__annotations__ if name in keywords]
        self._oomph_options: Any = {name: keywords.pop(name) for name in own}
        self._oomph_window: Window | None = None
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
            ranks = ranks_for(model, num, is_engine=is_engine, library="the Trainer")
            self._oomph_window = Window(
                self.model, [self.optimizer], _say, ranks=ranks, **self._oomph_options
            )
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

"""accelerate: a batch in a loop of one's own -> its backward, in as many pieces as memory needs.

guard = oomph.accelerate.Guard(accelerator, model, optimizer)   # as `prepare` gave them
for batch in loader:
    with accelerator.accumulate(model):
        loss = guard.backward(batch, lambda batch: model(**batch).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

One process, or several with DistributedDataParallel, as `prepare` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from oomph.training.adapters.limits import ranks_for
from oomph.training.adapters.pieces import Piece, total_loss
from oomph.training.adapters.update import make_whole
from oomph.training.adapters.window import Window
from oomph.training.stepper_options import several

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from oomph.training.adapters.options import Options

_ENGINES = ("DEEPSPEED", "MEGATRON_LM")


class Guard:
    """Forward and backward of whole batches, by `accelerator.backward`; the rest is yours.

    model, optimizer: as `accelerator.prepare` gave them; a list, if there are several optimizers.
    options: plan, micro_batch, weight, on_difference, whole, batch_dim, split, count, last_resorts,
        keeps_other_rngs: as for a Stepper.
    """

    def __init__(
        self, accelerator: Any, model: Any, optimizer: Any, **options: Unpack[Options]
    ) -> None:
        kind = accelerator.distributed_type.name
        ranks = ranks_for(
            model, accelerator.num_processes, is_engine=kind in _ENGINES, library="accelerate"
        )
        optimizers = several(optimizer)
        for each in optimizers:
            _make_whole(each)
        self._accelerator = accelerator
        bare = accelerator.unwrap_model(model)
        say = _logger().warning
        self._window = Window(bare, optimizers, say, backward=self._run, ranks=ranks, **options)

    def backward(self, batch: Any, loss_of: Callable[[Any], Any]) -> Any:
        """Backward of a batch's loss; `loss_of` is called with pieces of it. The loss, detached."""

        def work(piece: Piece) -> Any:
            loss = loss_of(piece.data)
            piece.backward(loss)
            return loss.detach()

        done = self._window.run(batch, work)
        self._end()
        return total_loss(done)

    def micro(self, batch: Any) -> Iterator[Piece]:
        """The pieces of a batch, for a forward of one's own.

        for micro in guard.micro(batch):
            with micro:
                micro.backward(model(**micro.data).loss)

        After an out-of-memory error the batch begins again, in smaller pieces: `micro.is_first`.
        """
        yield from self._window.pieces(batch)
        self._end()

    @property
    def micro_batch(self) -> int | None:
        """Examples at a time, of the last batch; None before the first."""
        return self._window.micro_batch

    @property
    def num_ooms(self) -> int:
        """Out-of-memory errors that were recovered from."""
        return self._window.num_ooms

    def _run(self, loss: Any, share: float) -> None:
        self._accelerator.backward(loss if share == 1 else loss * share)

    def _end(self) -> None:
        """accelerate says which batch is the last before a step."""
        if self._accelerator.sync_gradients:
            self._window.close()


def _logger() -> Any:
    from accelerate.logging import get_logger

    return get_logger("oomph")


def _make_whole(optimizer: Any) -> None:
    """The torch optimizer inside; accelerate keeps its step, to see whether a scaler skipped it."""
    inside = getattr(optimizer, "optimizer", optimizer)
    make_whole(inside)
    if getattr(optimizer, "scaler", None) is not None:
        from accelerate.optimizer import patch_optimizer_step

        optimizer._optimizer_original_step_method = inside.step
        optimizer._optimizer_patched_step_method = patch_optimizer_step(optimizer, inside.step)

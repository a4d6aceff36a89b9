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
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from oomph.training.adapters.limits import ranks_for
from oomph.training.adapters.pieces import Piece, total_loss
from oomph.training.adapters.update import make_whole
from oomph.training.adapters.window import Window
from oomph.training.evaluation import Join, evaluation_for, in_eval_mode
from oomph.training.ranks import Ranks
from oomph.training.stepper_options import several

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from oomph.training.adapters.options import Options

_ENGINES = ("DEEPSPEED", "MEGATRON_LM")


class Guard:
    """Forward and backward of whole batches, by `accelerator.backward`; the rest is yours.

    model, optimizer: as `accelerator.prepare` gave them; a list, if there are several optimizers.
    options: plan, micro_batch, weight, on_difference, whole, batch_dim, split, count, last_resorts,
        keeps_other_rngs, beside: as for a Stepper.
    """

    def __init__(
        self, accelerator: Any, model: Any, optimizer: Any, **options: Unpack[Options]
    ) -> None:
        kind, optimizers = accelerator.distributed_type.name, several(optimizer)
        ranks = ranks_for(
            model,
            [_inside(each) for each in optimizers],
            accelerator.num_processes,
            is_engine=kind in _ENGINES,
            library="accelerate",
        )
        for each in optimizers:
            _make_whole(each, ranks)
        self._accelerator = accelerator
        bare = accelerator.unwrap_model(model)
        say = _logger().warning
        self._model, self._ranks = model, ranks
        self._weight = options.get("weight")
        self._evaluation = evaluation_for(options, say)
        self._window = Window(bare, optimizers, say, backward=self._run, ranks=ranks, **options)

    def backward(self, batch: Any, loss_of: Callable[[Any], Any]) -> Any:
        """Backward of a batch's loss; `loss_of` is called with pieces of it. The loss, detached."""

        def work(piece: Piece) -> Any:
            loss = loss_of(piece.data)
            piece.backward(loss)
            return loss.detach()

        self._window.uses(loss_of)
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

    def evaluate(self, batch: Any, function: Callable[[Any], Any], join: Join | None = None) -> Any:
        """What `function(batch)` gives, without gradients and in eval mode, as Stepper.evaluate.

        A batch that does not fit is run in pieces, and what they give is put together.
        """
        quiet = nullcontext() if self._ranks is None else self._ranks.quiet()
        with in_eval_mode(self._model), quiet:
            done = self._evaluation.run(batch, function)
            if join is not None and len(done) > 1:
                return join([result for _, _, result in done], [num for _, num, _ in done])
            is_rounded = self._accelerator.mixed_precision != "no"
            return self._evaluation.whole_of(
                batch, function, done, self._weight, function=function, is_rounded=is_rounded
            )

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


def _inside(optimizer: Any) -> Any:
    """The torch optimizer in one that `prepare` gave."""
    return getattr(optimizer, "optimizer", optimizer)


def _make_whole(optimizer: Any, ranks: Ranks | None) -> None:
    """accelerate keeps the step of the optimizer inside, to see whether a scaler skipped it."""
    inside = _inside(optimizer)
    make_whole(inside, ranks=ranks)
    if getattr(optimizer, "scaler", None) is not None:
        from accelerate.optimizer import patch_optimizer_step

        optimizer._optimizer_original_step_method = inside.step
        optimizer._optimizer_patched_step_method = patch_optimizer_step(optimizer, inside.step)

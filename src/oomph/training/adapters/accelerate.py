"""accelerate: a batch in your own loop -> its backward, in as many pieces as memory needs.

    guard = oomph.accelerate.Guard(accelerator, model, optimizer)   # as `prepare` returned them
    for batch in loader:
        with accelerator.accumulate(model):
            loss = guard.backward(batch, lambda batch: model(**batch).loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

Works with one process, or several with DistributedDataParallel, as set up by `prepare`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from oomph.records.stability import NoiseScale
from oomph.training.adapters.window import Window, ranks_for, total_loss
from oomph.training.evaluation import Join, evaluation_for, in_eval_mode
from oomph.training.micro_batches import Batch, Micro
from oomph.training.ranks import Ranks
from oomph.training.update import make_whole, several

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from oomph.training.adapters.window import Options

_ENGINES = ("DEEPSPEED", "MEGATRON_LM")


class Guard:
    """Runs forward and backward of whole batches with `accelerator.backward`; the rest is yours.

    model, optimizer: as `accelerator.prepare` returned them; a list for several optimizers.
    options: plan, micro_batch, weight, on_difference, whole, batch_dim, split, count, last_resorts,
        keeps_other_rngs, beside, noise_scale: as for a Stepper.
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
        from accelerate.logging import get_logger

        self._accelerator = accelerator
        bare = accelerator.unwrap_model(model)
        say = get_logger("oomph").warning
        self._model, self._ranks = model, ranks
        self._weight = options.get("weight")
        self._evaluation = evaluation_for(options, say)
        self._window = Window(bare, optimizers, say, backward=self._run, ranks=ranks, **options)

    def backward(self, batch: Batch, loss_of: Callable[[Any], Any]) -> Any:
        """Run backward on a batch; return the detached loss. `loss_of` gets pieces of it."""

        def work(piece: Micro) -> Any:
            loss = loss_of(piece.data)
            piece.backward(loss)
            return loss.detach()

        self._window.uses(loss_of)
        done = self._window.run(batch, work)
        self._end()
        return total_loss(done)

    def micro(self, batch: Batch) -> Iterator[Micro]:
        """Yield the pieces of a batch, for your own forward.

            for micro in guard.micro(batch):
                with micro:
                    micro.backward(model(**micro.data).loss)

        After an out-of-memory error the batch restarts in smaller pieces (`micro.is_first`).
        """
        yield from self._window.pieces(batch)
        self._end()

    def evaluate(
        self, batch: Batch, function: Callable[[Any], Any], join: Join | None = None
    ) -> Any:
        """Return `function(batch)`, without gradients and in eval mode, like Stepper.evaluate.

        A batch that does not fit is run in pieces, and their results are joined.
        """
        with in_eval_mode(self._model), self._ranks.quiet():
            is_rounded = self._accelerator.mixed_precision != "no"
            return self._evaluation.evaluate(
                batch, function, self._weight, function=function, join=join, is_rounded=is_rounded
            )

    @property
    def micro_batch(self) -> int | None:
        """Return the examples at a time in the last batch; None before the first."""
        return self._window.micro_batch

    @property
    def noise_scale(self) -> NoiseScale | None:
        """Return the gradient noise scale, if it is known yet."""
        return self._window.noise_scale

    @property
    def num_ooms(self) -> int:
        """Return the number of out-of-memory errors recovered from."""
        return self._window.num_ooms

    def _run(self, loss: Any, share: float) -> None:
        self._accelerator.backward(loss if share == 1 else loss * share)

    def _end(self) -> None:
        """Close the window if accelerate says that this is the last batch before a step."""
        if self._accelerator.sync_gradients:
            self._window.close()


def _inside(optimizer: Any) -> Any:
    """Return the torch optimizer inside one that `prepare` returned."""
    return getattr(optimizer, "optimizer", optimizer)


def _make_whole(optimizer: Any, ranks: Ranks) -> None:
    """Guard the step; accelerate keeps a reference to it, to see whether a scaler skipped it."""
    inside = _inside(optimizer)
    make_whole(inside, ranks=ranks)
    if getattr(optimizer, "scaler", None) is not None:
        from accelerate.optimizer import patch_optimizer_step

        optimizer._optimizer_original_step_method = inside.step
        optimizer._optimizer_patched_step_method = patch_optimizer_step(optimizer, inside.step)

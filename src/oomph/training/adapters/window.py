"""A library's batches -> their pieces, rerun in smaller ones if memory runs out.

The library owns the loader, the update, the loss scaler and the schedule. The batches between two
steps of its optimizer form a window. After an out-of-memory error, everything is restored to the
start of the window and its batches are rerun with their original random numbers, the failed one in
smaller pieces. A piece is weighted within its own batch, so the library's arithmetic is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import nn
from torch.optim import Optimizer

from oomph.errors import UsageError
from oomph.records.plan import Plan
from oomph.records.stability import NoiseScale
from oomph.records.workload import Variant
from oomph.stability.examples import BatchDim
from oomph.training.attempts import Attempts, OpenBatch, Part, device_kind
from oomph.training.micro_batches import Batch, Count, Division, Micro, Split, Weight, piece_sizes
from oomph.training.noise_meter import NoiseMeter, NoiseScaleMode
from oomph.training.ranks import At, Ranks, ranks_of
from oomph.training.recovery import NAMES, recovery_for
from oomph.training.rollback import Rollback, rng_states
from oomph.training.split_check import OnDifference
from oomph.training.update import SignalsHeld
from oomph.tricks import apply

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Splitting(TypedDict, total=False):
    """Keywords of a Division: how batches are split and pieces weighted."""

    weight: Weight | None
    whole: Collection[str]
    batch_dim: BatchDim | None
    split: Split | None
    count: Count | None


class Options(Splitting, total=False):
    """The options of every adapter, named and defined as in a Stepper."""

    plan: Plan | None
    micro_batch: int | None
    on_difference: OnDifference
    last_resorts: Sequence[str]
    keeps_other_rngs: bool
    beside: Sequence[nn.Module]
    noise_scale: NoiseScaleMode


class Window(Attempts):
    """The batches since the last step of the library's optimizer, and how to run them in pieces.

    plan: the size that it says fits is tried first and grows to what measurements allow. Its tricks
        are applied by its exports (to_hf, to_lightning, to_accelerate).
    micro_batch, on_difference, last_resorts, keeps_other_rngs, beside, noise_scale, splitting: as
        for a Stepper.
    backward: (loss, share) -> backward of a piece, if the piece is to run it.
    is_zeroed_later: gradients that exist when a window begins are those of the last step.
    ranks: where the model is replicated; in `close` they vote and average gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        say: Callable[[str], None],
        *,
        plan: Plan | None = None,
        micro_batch: int | None = None,
        on_difference: OnDifference = "raise",
        last_resorts: Sequence[str] = NAMES,
        keeps_other_rngs: bool = False,
        beside: Sequence[nn.Module] = (),
        noise_scale: NoiseScaleMode = "free",
        backward: Callable[[torch.Tensor, float], None] | None = None,
        is_zeroed_later: bool = False,
        ranks: Ranks | None = None,
        **splitting: Unpack[Splitting],
    ) -> None:
        recovery = recovery_for(model, Variant(micro_batch=1), plan, micro_batch, last_resorts, say)
        rollback = Rollback(model, optimizers, keeps_other_rngs=keeps_other_rngs, beside=beside)
        division = Division(**splitting)
        super().__init__(
            model,
            division,
            rollback,
            recovery,
            ranks or Ranks(),
            on_difference=on_difference,
            meter=NoiseMeter(rollback.parameters, noise_scale),
        )
        self._backward, self._is_zeroed_later = backward, is_zeroed_later
        self._device_kind, self._keeps_other_rngs = device_kind(model), keeps_other_rngs
        self.micro_batch: int | None = None  # examples at a time in the last batch

    @property
    def num_ooms(self) -> int:
        """Return the number of out-of-memory errors recovered from."""
        return self._recovery.num_ooms

    @property
    def noise_scale(self) -> NoiseScale | None:
        """Return the gradient noise scale, if it is known yet."""
        return self._meter.noise_scale

    # ---- what adapters call --------------------------------------------------------------------

    def uses(self, function: Callable[..., Any]) -> None:
        """Also restore the modules that a function refers to."""
        self._rollback.loss = function

    def run(
        self, data: Batch, work: Callable[[Micro], Any], arguments: Any = None
    ) -> list[tuple[Micro, Any]]:
        """Run `work`, forward and backward, on each piece; return (piece, result) pairs."""
        done: list[tuple[Micro, Any]] = []
        for micro in self.pieces(data, arguments):
            if micro.is_first:  # earlier pieces have been undone
                done.clear()
            with micro:
                result = work(micro)
                micro.is_done = True
                if not micro.is_again:
                    done.append((micro, result))
        return done

    def close(self) -> None:
        """End the window before the library's optimizer steps; its batches are not rerun."""
        try:
            with SignalsHeld():
                self._ranks.ready(self._meter.shared(self._ranks.num_ranks))
                self._ranks.settle(At.LAST_BATCH, True, self._recovery)
                self._ranks.average()
                self._meter.finish(self._ranks.shared)
                self._ranks.end()
        except BaseException:
            self._give_up()
            raise
        for batch in self._opened:
            self._recovery.sizes.fitted(batch.num, batch.elements, batch.size)
        self._clear()

    def forget_sizes(self) -> None:
        """Try the first size again, for instance after another process has released memory."""
        self._recovery.sizes.forget()

    # ---- differences from a Stepper ------------------------------------------------------------

    def _open(self, data: Batch, arguments: Any) -> OpenBatch:
        if self._opened and all(parameter.grad is None for parameter in self._model.parameters()):
            self._clear()  # the library has dropped the accumulated gradients
        batch = super()._open(data, arguments)
        batch.rngs = rng_states(self._device_kind, self._keeps_other_rngs)
        return batch

    def _keeps_gradients(self) -> bool:
        return not self._is_zeroed_later

    def _has_all_gradients(self) -> bool:
        return self._is_zeroed_later or all(p.grad is None for p in self._rollback.parameters())

    def _set_size(self, batch: OpenBatch) -> None:
        """Set the size of a batch; one that succeeded is rerun as it was."""
        sizes = self._recovery.sizes
        batch.size = batch.size or sizes.size_for(batch.num, batch.elements)

    def _parts(self, batch: OpenBatch) -> list[Part]:
        """Return the pieces of a batch, weighted by their share of that batch."""
        nums, division = piece_sizes(batch.num, batch.size), self._division
        if len(nums) == 1:
            return [(batch.data, batch.num, 1.0)]  # as the library would run it
        parts = division.pieces(batch.data, nums)
        weights = division.weights(parts, nums)
        total = 1.0 if division.is_sum else sum(weights)
        shares = [weight / total for weight in weights]
        return [each for each in zip(parts, nums, shares, strict=True) if each[2]]

    def _settle(self, is_done: bool) -> bool:
        """Finish an attempt. Other ranks are waited for once per window, in `close`."""
        if is_done:
            self._rollback.pause()
            self.micro_batch = self._opened[-1].size
        return is_done

    def forward_context(self) -> AbstractContextManager[Any] | None:
        variant = self._recovery.resorts.variant
        return apply.around_forward(variant) if variant.offload_activations else None

    def backward(self, loss: torch.Tensor, share: float) -> None:
        if self._backward is None:
            raise UsageError("the library does the backward of this piece")
        self._backward(loss, share)


def total_loss(done: Sequence[tuple[Micro, Any]]) -> Any:
    """Return the loss of a batch from the detached losses of its pieces."""
    if len(done) == 1:
        return done[0][1]
    return sum(loss * micro.share for micro, loss in done)


def ranks_for(
    model: nn.Module,
    optimizers: Iterable[Optimizer],
    num_processes: int,
    *,
    is_engine: bool,
    library: str,
) -> Ranks:
    """Return the ranks that a library's model is replicated on.

    Raises UsageError if an error in one process would leave others waiting.
    """
    ranks = Ranks() if is_engine else ranks_of(model, optimizers)
    if is_engine or (num_processes > 1 and not ranks.is_replicated):
        what = "an engine that accumulates by itself" if is_engine else f"{num_processes} processes"
        raise UsageError(
            f"oomph cannot recover from out-of-memory errors in {library} with {what}",
            because="all processes would have to agree on one's error in the middle of backward",
            attempt="DistributedDataParallel, one process, or a plan (oomph plan --gpus) that fits",
        )
    return ranks

"""Run one step of a Stepper: batches -> gradients of their pieces -> an update and its Result."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from typing import Any, NoReturn, cast

import torch
from torch import nn

from oomph.errors import UsageError
from oomph.records.workload import Precision
from oomph.training.attempts import Attempts, OpenBatch, Part, device_kind
from oomph.training.micro_batches import Batch, Division, Micro, moved, no_scalar, piece_sizes
from oomph.training.noise_meter import NoiseMeter
from oomph.training.ranks import At, Ranks
from oomph.training.recovery import Recovery, release, text_of
from oomph.training.rollback import OwnRollback, on_host, restore_rngs, rng_states
from oomph.training.split_check import OnDifference
from oomph.training.update import SignalsHeld, Update
from oomph.training.vital_signs import VitalSigns
from oomph.tricks import apply
from oomph.tricks.offload_optimizer import knows_host, optimizer_on_host, scaler_on_host

Loss = Callable[[Any, Batch], Any]  # (model, batch) -> a scalar; the user's function

_LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Result:
    """The result of one batch. `loss` covers the whole batch and does not wait for the GPU."""

    losses: tuple[tuple[torch.Tensor, float], ...]  # of pieces, with their weights
    factor: float  # multiplies all of the weights
    has_stepped: bool  # False while batches are accumulated
    micro_batch: int  # examples at a time
    num_ooms: int  # out-of-memory errors recovered from in this step
    grad_norm: torch.Tensor | None = None  # before clipping; None if gradients are not clipped

    @property
    def num_pieces(self) -> int:
        """Return the number of pieces since the last optimizer step."""
        return len(self.losses)

    @property
    def loss(self) -> torch.Tensor:
        """Return the loss since the last step, detached; float(...) waits for the GPU."""
        losses = torch.stack([loss for loss, _ in self.losses]).flatten()
        shares = [share * self.factor for _, share in self.losses]
        return (losses * losses.new_tensor(shares)).sum()

    def __repr__(self) -> str:
        return (
            f"Result(loss={float(self.loss):.6g}, has_stepped={self.has_stepped},"
            f" micro_batch={self.micro_batch}, num_pieces={self.num_pieces},"
            f" num_ooms={self.num_ooms})"
        )


@dataclass(frozen=True, slots=True)
class Accumulated:
    """The batches of a step so far, whose gradients have been computed."""

    num: int = 0
    total: float = 0.0  # their total weight
    expected: float = 0.0  # weight of all batches of the step, estimated from the first
    size: int = 0  # examples at a time in the last batch
    by: str = "mean"  # how they were weighted


def _no_loss(_: Any, __: Batch) -> NoReturn:
    raise UsageError(
        "this Stepper was given no loss",
        attempt="Stepper(model, optimizer, loss), or step.micro(batch)",
    )


def scaler_for(
    model: nn.Module,
    precision: Precision,
    given: torch.amp.GradScaler | None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> torch.amp.GradScaler | None:
    """Return the loss scaler to use: the user's, or a new one for fp16; None if none is enabled."""
    if given is None and precision == "fp16":
        is_on_host = any(map(optimizer_on_host, optimizers))
        given = (scaler_on_host if is_on_host else torch.amp.GradScaler)(device_kind(model))
    if given is None or not given.is_enabled():
        return None
    if any(map(optimizer_on_host, optimizers)) and not knows_host(given):
        raise UsageError(
            "this loss scaler finds no gradients",
            because="it looks for them in the optimizer, which is on the host",
            attempt='Stepper(...) without scaler=: with precision="fp16" it makes one',
        )
    return given


class StepAttempts(Attempts):
    """The inner part of a Stepper: its batches, and the update made from them."""

    _rollback: OwnRollback

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        division: Division,
        rollback: OwnRollback,
        recovery: Recovery,
        update: Update,
        ranks: Ranks,
        *,
        scaler: torch.amp.GradScaler | None,
        device: torch.device | str | int | None,
        accumulate: int,
        on_difference: OnDifference,
        meter: NoiseMeter,
        signs: VitalSigns,
    ) -> None:
        """device: where pieces are moved to."""
        super().__init__(
            model,
            division,
            rollback,
            recovery,
            ranks,
            on_difference=on_difference,
            accumulate=accumulate,
            meter=meter,
        )
        self._loss, self._device = loss or _no_loss, device
        self.scaler, self.update, self.signs = scaler, update, signs
        low = _LOW.get(recovery.resorts.variant.precision)
        self._autocast = None if low is None else torch.autocast(device_kind(model), dtype=low)
        self._losses: list[tuple[torch.Tensor, float]] = []  # loss of a piece, and its weight
        self._carried = Accumulated()  # from a checkpoint: these batches cannot be rerun
        self._carried_losses: list[tuple[torch.Tensor, float]] = []
        self._expected = 0.0
        self._is_inside = False  # a batch has been started but not finished
        self._has_updated = False  # some parameters, if the optimizer steps in backward
        self.result: Result | None = None  # of the last batch

    def train(self, data: Batch) -> Result:
        """Train on a batch with the Stepper's own loss."""
        self._probe(data)
        with closing(self.pieces(data)) as pieces:
            for micro in pieces:
                self._run(micro)
        return cast("Result", self.result)  # set by the last piece

    def _run(self, micro: Micro) -> None:
        if micro.runner is not self:  # a trial, whose context also covers its backward
            with micro:
                micro.backward(self._call(self._loss, micro.data))
            return
        try:
            self._forward_and_backward(micro)
        except BaseException as error:
            micro.has_failed = self.catches(error)
            if not micro.has_failed:
                raise
        micro.is_done = not micro.has_failed

    def _forward_and_backward(self, micro: Micro) -> None:
        """Run a piece in a frame of its own, which can be cleared after an error."""
        with self.forward_context() or nullcontext():
            loss = self._call(self._loss, micro.data)
        self.backward(loss, micro.share)

    # ---- the noise scale of batches that are not split -----------------------------------------

    def _probe(self, data: Batch) -> None:
        """Run two halves of a batch beside the whole, for their gradients' norms; undo both.

        They take no more memory than the batch: gradients of the first are dropped before the
        second. Whatever fails in them ends the probing, never the training.
        """
        if not self._wants_probe():
            return
        rngs = rng_states(device_kind(self._model), keeps_other_rngs=True)
        with self._inside(), self._ranks.quiet():
            self._rollback.enter()
            self._rollback.take()
            try:
                self._run_halves(data)
            except Exception as error:  # noqa: BLE001 - said; the batch itself runs next
                release(error)
                self._meter.stop_probing()
                self._recovery.say(
                    f"the gradient noise scale is not measured: halves of a batch do not run"
                    f" ({text_of(error)})"
                )
            finally:
                self._losses, self._has_updated = [], False
                self._undo()
                self._rollback.is_begun = False
                restore_rngs(rngs)

    def _wants_probe(self) -> bool:
        was_whole = self.result is not None and self.result.num_pieces == 1
        is_alone = self._accumulate == 1 and self._ranks.num_ranks == 1
        is_fresh = not (self.is_begun or self._rollback.adds_to_gradients)
        return self._meter.is_probe_due and was_whole and is_alone and is_fresh

    def _run_halves(self, data: Batch) -> None:
        num = self._division.num(data)
        if num < 2:
            return
        sizes = [num // 2, num - num // 2]
        self._meter.begin_probe()
        for half, size in zip(self._division.pieces(data, sizes), sizes, strict=True):
            self._meter.piece_of_probe(size, num)
            self._forward_and_backward(Micro(self, half, size, 1.0, is_first=True))
            self._meter.end_piece()
            self._rollback.drop_gradients()
        self._meter.end_probe()

    def _call(self, function: Loss, data: Batch) -> Any:
        if self._device is not None:
            data = moved(data, self._device)
        return function(self._model, data)

    def evaluate(self, data: Batch, function: Loss | None) -> Any:
        """Run forward on a piece, with the loss or another function."""
        with self._autocast or nullcontext():
            return self._call(function or self._loss, data)

    @property
    def is_rounded(self) -> bool:
        """Return whether anything is computed in half precision."""
        dtypes = {parameter.dtype for parameter in self._model.parameters()}
        return self._autocast is not None or bool(dtypes & {torch.float16, torch.bfloat16})

    def pieces(self, data: Batch, arguments: Any = None) -> Generator[Micro, None, None]:
        with self._inside():
            yield from super().pieces(data, arguments)

    def flush(self) -> Result | None:
        """Step with the batches so far; None if there are none, which must be so on all ranks."""
        if not (self.is_begun or self._ranks.is_joint):
            return None
        with self._inside():
            try:
                with SignalsHeld():
                    self._rollback.enter()
                    self._ranks.begin()
                    if self.is_begun:
                        self.update.scale(self._factor)
                    at = At.FLUSH if self.is_begun else At.NOTHING_TO_FLUSH
                    self._ranks.settle(at, True, self._recovery)
                    if self.is_begun:
                        return self._close(is_last=True)
                    self._ranks.end()
                    return None
            except BaseException as error:
                self._note(error)
                self._give_up()
                raise

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Raise UsageError if a batch is run inside another: each would step with both."""
        if self._is_inside:
            raise UsageError(
                "a batch is begun while another one is being run",
                because="the pieces of step.micro(batch) have not all been run, nor has its loop"
                " been left",
                attempt="running it to its end, or closing it: pieces = step.micro(batch); ...;"
                " pieces.close()",
            )
        self._is_inside = True
        try:
            yield
        finally:
            self._running, self._is_inside = None, False
            self._rollback.leave()

    # ---- accumulated batches -------------------------------------------------------------------

    @property
    def is_weight_in_doubt(self) -> bool:
        """Return whether a later batch could show that the loss divides by something else."""
        return self._check.is_in_doubt

    @property
    def is_begun(self) -> bool:
        """Return whether any batch has been run since the last step."""
        return self._so_far.num > 0

    @property
    def _is_whole(self) -> bool:
        return self._so_far.num >= self._accumulate

    @property
    def _factor(self) -> float:
        """Return the factor for the gradients: batches may not all weigh as much as the first."""
        if self._division.is_sum or (self._carried.num and self._carried.by == "sum"):
            return 1.0
        return self._expected / self._so_far.total

    @property
    def _so_far(self) -> Accumulated:
        """Return all batches of the step, including those from before a checkpoint."""
        carried, opened = self._carried, self._opened
        return Accumulated(
            num=carried.num + len(opened),
            total=sum((batch.total for batch in opened), carried.total),
            expected=self._expected,
            size=opened[-1].size if opened else carried.size,
            by=self._division.by,
        )

    def _open(self, data: Batch, arguments: Any) -> OpenBatch:
        self._rollback.enter()
        if not self._opened:
            self._losses = [*self._carried_losses]
        return super()._open(data, arguments)

    def _keeps_gradients(self) -> bool:
        return self._carried.num > 0

    def _set_size(self, batch: OpenBatch) -> None:
        batch.size = batch.num
        if self._recovery.splits:
            batch.size = self._recovery.sizes.size_for(batch.num, batch.elements)

    def _parts(self, batch: OpenBatch) -> list[Part]:
        """Return the pieces of a batch, weighted by their share of all batches of the step."""
        sizes, division, carried = piece_sizes(batch.num, batch.size), self._division, self._carried
        if carried.num and not division.is_given and division.by != carried.by:
            raise UsageError(
                "gradients of the checkpoint cannot be added to those of this batch",
                because=f"they were weighted by {carried.by}, and this batch is weighted by"
                f" {division.by}",
                attempt="weight= from the beginning, to say what the loss is a mean of; or saving"
                " only after an optimizer step",
            )
        parts = division.pieces(batch.data, sizes)
        weights = self._weights(batch, division.weights(parts, sizes))
        self._expected = self._expected or batch.total * self._accumulate
        return [
            (part, num, 1.0 if division.is_sum else weight / self._expected)
            for part, num, weight in zip(parts, sizes, weights, strict=True)
            if weight
        ]

    def _weights(self, batch: OpenBatch, weights: list[float]) -> list[float]:
        """Return the weights of a batch's pieces, and set its total.

        Passes of a sharded model mix the gradients of all ranks, so the ranks agree before the
        first one: on the mean of their totals, or that every rank's batch counts the same.
        """
        batch.total = sum(weights)
        if self._ranks.is_sharded and not self._division.is_sum:
            if self._division.is_given:
                batch.total = self._ranks.mean_weight(batch.total, self._recovery)
            else:
                weights, batch.total = [each / batch.total for each in weights], 1.0
        return weights

    def _continues(self) -> bool:
        return bool(self._losses)

    def _has_all_gradients(self) -> bool:
        return not (self._carried.num or self._rollback.adds_to_gradients)

    def _note_check(self, batch: OpenBatch) -> None:
        sizes = piece_sizes(batch.num, batch.size)
        self._check.warn_of_doubt(batch.data, sizes, self._others(batch))
        if self._carried.num:
            self._check.warn_of_carried()

    def forward_context(self) -> AbstractContextManager[Any] | None:
        variant = self._recovery.resorts.variant
        if self._autocast is None and not variant.offload_activations:
            return None
        stack = ExitStack()
        if self._autocast is not None:
            stack.enter_context(self._autocast)
        stack.enter_context(apply.around_forward(variant))
        return stack

    def backward(self, loss: Any, share: float) -> None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise no_scalar(loss)
        self._losses.append((loss.detach(), share))
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        self._has_updated = self._recovery.resorts.variant.optimizer_in_backward
        if share == 1:
            loss.backward()
        else:  # the gradient that backward of `loss * share` starts with, without the extra op
            loss.backward(torch.full_like(loss, share))

    # ---- after all pieces ----------------------------------------------------------------------

    def _settle(self, is_done: bool) -> bool:
        """Close the batch if all ranks have run all of their pieces.

        A rank must not be interrupted between its vote and the action voted for.
        """
        with SignalsHeld():
            at = At.LAST_BATCH if self._is_whole else At.BATCH
            is_ready = is_done and (not self._is_whole or self._is_ready())
            if not self._ranks.settle(at, is_ready, self._recovery):
                if is_ready:  # another rank could not get ready
                    self._undo_or_refuse()
                return False
            self._close()
        return True

    def _is_ready(self) -> bool:
        """Scale the gradients for the update; return False if memory ran out, as for a piece."""
        try:
            self.update.scale(self._factor)
        except BaseException as error:
            if not self.catches(error):
                raise
            return False
        return True

    def _close(self, *, is_last: bool = False) -> Result:
        """Step, if the step has all its batches. The caller holds back Ctrl-C until it is done."""
        is_whole = is_last or self._is_whole
        if is_whole and self._division.is_given and not self._division.is_sum:
            self._ranks.weigh(self._so_far.total)
        factor, size = self._factor if is_whole else 1.0, self._so_far.size
        if is_whole and self._ranks.is_sharded and not self._division.is_sum:
            factor = 1 / sum(share for _, share in self._losses)  # a mean over this rank's own
        self.result = Result(
            tuple(self._losses),
            factor,
            has_stepped=is_whole,
            micro_batch=size,
            num_ooms=self._recovery.num_ooms - self._recovery.num_ooms_before,
            grad_norm=self._step() if is_whole else None,
        )
        if is_whole:
            self.signs.after(self.result.losses, factor, self.result.grad_norm)
        else:
            self._rollback.pause()
        self._ranks.end()
        return self.result

    def _step(self) -> torch.Tensor | None:
        try:
            self.signs.before_update()
            norm = self.update()
            self.signs.after_update()
        except BaseException:
            self._give_up()
            raise
        for batch in self._opened:
            self._recovery.sizes.fitted(batch.num, batch.elements, batch.size)
        self._clear()
        self._has_updated = False
        self.update.finish()  # the step is complete: a failure here undoes none of it
        return norm

    # ---- when something fails ------------------------------------------------------------------

    def _is_half_updated(self) -> bool:
        return self._has_updated

    def _undo(self) -> None:
        with SignalsHeld():
            super()._undo()
            self._losses, self._has_updated = [*self._carried_losses], False
            self._expected = self._carried.expected

    def _end(self) -> None:
        """Also drop gradients from a checkpoint, which belong to the abandoned step."""
        if self._carried.num:
            self._rollback.drop_gradients()
        super()._end()

    def _clear(self) -> None:
        super()._clear()
        self._carried, self._expected, self._carried_losses = Accumulated(), 0.0, []
        self._rollback.is_begun = False

    # ---- checkpoints ---------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """Return what is accumulated; None between two steps. Raises UsageError within a batch."""
        if self._is_inside:
            raise UsageError(
                "a Stepper has no state to save in the middle of a batch",
                attempt="saving after the last piece",
            )
        if not self.is_begun:
            return None
        if self._ranks.is_sharded:
            raise UsageError(
                "a Stepper of a sharded model has no state to save while it accumulates",
                because="its gradients are shards, of as many ranks as there are now",
                attempt="saving after an optimizer step, or after flush()",
            )
        parameters = self._rollback.own_parameters()
        return {
            **asdict(self._so_far),
            "gradients": [None if p.grad is None else on_host(p.grad) for p in parameters],
            "losses": [(on_host(loss), share) for loss, share in self._losses],
        }

    def load(self, state: dict[str, Any] | None) -> None:
        """Load accumulated gradients. Raises ValueError if they belong to another model."""
        if self._is_inside:
            raise UsageError(
                "a batch is being run: no state can be loaded", attempt="loading it between batches"
            )
        self._give_up()
        if state is None:
            return
        parameters = self._rollback.own_parameters()
        pairs = list(zip(parameters, state["gradients"], strict=True))
        if any(gradient is not None and p.shape != gradient.shape for p, gradient in pairs):
            raise ValueError("its gradients have other shapes than the parameters")
        for parameter, gradient in pairs:
            if gradient is not None:  # a copy, since the state may be loaded again
                gradient = gradient.to(parameter.device, parameter.dtype, copy=True)
            parameter.grad = gradient
        self._carried = Accumulated(*(state[each.name] for each in fields(Accumulated)))
        self._expected, self._division.by_before = self._carried.expected, self._carried.by
        self._carried_losses = [(loss, float(share)) for loss, share in state["losses"]]
        self._losses, self._has_updated = [*self._carried_losses], False
        self._rollback.is_begun = True

"""One effective batch in, one optimizer step out, whatever the micro-batch.

    step = oomph.Stepper(model, optimizer, loss, plan=plan)
    for batch in loader:
        step(batch)

A step completes or does not happen. After an out-of-memory error, gradients, generators and buffers
are restored and the same examples rerun in smaller pieces. After Ctrl-C or any other error, the
state is that of the last complete step. With DistributedDataParallel and FSDP2, this holds on all
ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from oomph.errors import UsageError
from oomph.records.plan import Plan
from oomph.records.stability import NoiseScale, StabilityWarning
from oomph.records.workload import Precision, Variant
from oomph.stability.examples import BatchDim
from oomph.training.evaluation import Evaluation, Join, in_eval_mode
from oomph.training.micro_batches import Batch, Count, Division, Micro, Split, Weight
from oomph.training.noise_meter import NoiseMeter, NoiseScaleMode
from oomph.training.ranks import Ranks
from oomph.training.recovery import NAMES, recovery_for
from oomph.training.restarting import RestartFile
from oomph.training.rollback import OwnRollback
from oomph.training.shards import ranks_of_any
from oomph.training.split_check import OnDifference
from oomph.training.step import Loss, Result, StepAttempts, scaler_for
from oomph.training.update import Copies, SignalsHeld, Update, several
from oomph.training.vital_signs import VitalSigns
from oomph.tricks import apply
from oomph.tricks.optimizer_in_backward import wants_closure

_log = logging.getLogger("oomph")
_FORMAT = 2  # version of the state_dict layout


class Stepper:
    """Trains one batch at a time, in as many pieces as memory requires.

    model: plain, in DistributedDataParallel or sharded by FSDP2, compiled or not. On several ranks,
        each gets its part of a batch, and all step or all raise.
    loss: (model, batch) -> a scalar, as in a Workload; without one, use `micro`.
    plan: from oomph.plan. Its tricks are applied, and the sizes that it says fit are tried first.
    weight: what the loss averages over: "mean" over examples, "sum", "tokens" (labels that are not
        -100), "next-tokens" (for causal language models), or a function of a batch. If not given,
        oomph finds it when a batch is first split. A wrong weight raises an error. On several
        ranks, a weight that is given counts globally; else each rank counts the same.
    on_difference: what to do if training in pieces differs from training on whole batches, as with
        a loss that compares examples: "raise", "warn" and go on, or "ignore" (skip the check).
    accumulate: loader batches per optimizer step; `flush` ends a step early.
    clip_grad_norm: applied once, after the last piece. scheduler: advances with each step.
    precision, scaler, micro_batch: for use without a plan. device: where pieces are moved to.
    batch_dim: the example dimension if it is not the first: one for all tensors, or by name:
        {"source": 1, "mask": None}. None passes a tensor whole to every piece, as does `whole`.
    split: (batch, sizes) -> pieces.
    count: batch -> its number of examples, if that is not the number of rows of its first tensor.
    last_resorts: what may be switched on if a single example does not fit.
    copies: when weights and optimizer states are copied to the host: before the "first" update,
        "always" or "never".
    keeps_other_rngs: also restore Python's and numpy's generators, at some cost in every step.
    keeps_gradients: add to gradients that exist before a step, instead of dropping them.
    beside: modules that forward writes to and that neither the model nor `loss` refers to.
    restart_file: where a smaller micro-batch is noted if a step cannot be recovered in place. A
        Stepper that finds the file, as after torchrun has restarted all ranks, begins with it.
    noise_scale: "free" measures the gradient noise scale where a step has several pieces or ranks;
        "probe" also runs two halves of a batch, one step in fifty, where it has not; or "off".
    watch_stability: warn of a loss that oscillates or jumps, of gradients and updates that are out
        of proportion, of steps that the loss scaler skips, and of values that are not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        loss: Loss | None = None,
        plan: Plan | None = None,
        *,
        weight: Weight | None = None,
        on_difference: OnDifference = "raise",
        scheduler: Any = None,
        clip_grad_norm: float | None = None,
        precision: Precision | None = None,
        scaler: torch.amp.GradScaler | None = None,
        micro_batch: int | None = None,
        accumulate: int = 1,
        device: torch.device | str | int | None = None,
        whole: Collection[str] = (),
        batch_dim: BatchDim | None = None,
        split: Split | None = None,
        count: Count | None = None,
        last_resorts: Sequence[str] = NAMES,
        copies: Copies = "first",
        keeps_other_rngs: bool = False,
        keeps_gradients: bool = False,
        beside: Sequence[nn.Module] = (),
        restart_file: str | os.PathLike[str] | None = None,
        noise_scale: NoiseScaleMode = "free",
        watch_stability: bool = True,
        say: Callable[[str], None] | None = None,
    ) -> None:
        variant, optimizers = _variant_of(plan, precision), several(optimizer)
        ranks = ranks_of_any(model, optimizers)
        _check(variant, ranks, accumulate=accumulate, clip_grad_norm=clip_grad_norm)
        _check_optimizers(optimizers)
        if plan is not None:
            apply.put_on_made(model, optimizers, variant)
        apply.set_precision(variant)
        self.model, self._ranks = model, ranks
        restarts = RestartFile(restart_file)
        self._recovery = recovery_for(
            model,
            variant,
            plan,
            _first_size(micro_batch, plan, restarts.micro_batch()),
            ranks.possible_resorts(last_resorts),
            say or _log.warning,
        )
        say, splits = self._recovery.say, self._recovery.splits
        scaler = scaler_for(model, variant.precision, scaler, optimizers)
        if scaler is not None and ranks.is_sharded:
            raise UsageError(
                "a sharded model cannot be trained with a loss scaler",
                because="each rank would find other overflows in its shards",
                attempt='precision="bf16", which needs no scaler',
            )
        self._division = Division(
            weight, whole=whole, split=split, count=count, batch_dim=batch_dim
        )
        rollback = OwnRollback(
            model,
            optimizers,
            keeps_gradients=keeps_gradients,
            keeps_other_rngs=keeps_other_rngs,
            loss=loss,
            beside=beside,
            updates_in_backward=not splits,
            say=say,
        )
        self._meter = NoiseMeter(rollback.parameters, noise_scale if splits else "off")
        update = Update(
            optimizers,
            rollback.parameters,
            several(scheduler),
            scaler=scaler,
            clip_grad_norm=clip_grad_norm,
            copies=copies if splits else "never",
            ranks=ranks,
            meter=self._meter,
        )
        self._signs = VitalSigns(
            model,
            self._meter,
            scaler,
            say,
            is_on=watch_stability,
            is_clipped=clip_grad_norm is not None,
            is_first_rank=ranks.rank == 0,
        )
        self._evaluation = Evaluation(self._division.pieces, self._division.num, say)
        self._attempts = StepAttempts(
            model,
            loss,
            self._division,
            rollback,
            self._recovery,
            update,
            ranks,
            scaler=scaler,
            device=device,
            accumulate=accumulate,
            on_difference=on_difference if splits else "ignore",
            meter=self._meter,
            signs=self._signs,
        )
        self._attempts.restart_file = restarts

    def __call__(self, batch: Batch) -> Result:
        """Train on a batch. Raises OomphError if not even one example of it fits."""
        # If backward performs the update, it must not be interrupted.
        with nullcontext() if self._recovery.splits else SignalsHeld():
            return self._attempts.train(batch)

    def micro(self, batch: Batch) -> Iterator[Micro]:
        """Yield the pieces of a batch, for your own forward.

            for micro in step.micro(batch):
                with micro:
                    micro.backward(model(**micro.data).loss)

        After an out-of-memory error the batch restarts in smaller pieces (`micro.is_first`). The
        optimizer steps after the last piece; `step.result` then holds the result.
        """
        if not self._recovery.splits:
            raise UsageError(
                "step.micro() does not work with an optimizer that steps in backward",
                attempt="step(batch)",
            )
        yield from self._attempts.pieces(batch)

    def flush(self) -> Result | None:
        """Step with what has been accumulated, at the end of an epoch; None if there is nothing."""
        return self._attempts.flush()

    # ---- evaluation ----------------------------------------------------------------------------

    def evaluate(
        self,
        batch: Batch,
        function: Loss | None = None,
        join: Join | None = None,
    ) -> Any:
        """Return the loss of a batch, or the result of `function(model, batch)`, without training.

        Runs without gradients, in eval mode, with the autocast of training. A batch that does not
        fit runs in pieces and the results are joined: rows are concatenated, floats averaged as in
        the loss, and integers added; or `join(results, examples of each)` joins them. Training
        sizes are not affected.
        """

        def work(data: Batch) -> Any:
            return self._attempts.evaluate(data, function)

        with (
            in_eval_mode(self.model),
            self._ranks.quiet(),
            self._ranks.evaluating(work, self._recovery) as run,
        ):
            weight = None if self._attempts.is_weight_in_doubt else self._division.weight
            is_rounded = self._attempts.is_rounded
            return self._evaluation.evaluate(
                batch, run, weight, function=function, join=join, is_rounded=is_rounded
            )

    # ---- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides the model, the optimizer and the scheduler.

        This is the loss scaler, the sizes learnt, the tricks switched on, and gradients being
        accumulated. Random generators and the loader's position are not included.
        """
        recovery, scaler = self._recovery, self._attempts.scaler
        # torch.distributed.checkpoint takes a tuple as one value. Of a dict it loads only names
        # that are in the state of the new Stepper, too.
        return {
            "format": _FORMAT,
            "scaler": (None if scaler is None else scaler.state_dict(),),
            "sizes": (recovery.sizes.state(),),
            "measured": (None if recovery.measured is None else recovery.measured.state(),),
            "tricks": list(recovery.resorts.switched_on),
            "num_ooms": recovery.num_ooms,
            "accumulated": (self._attempts.state(),),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from another Stepper's state. Load the model and the optimizer first."""
        recovery, scaler = self._recovery, self._attempts.scaler
        state = _opened(state)
        _check_state(state, has_scaler=scaler is not None)
        try:
            self._attempts.load(state["accumulated"])
            recovery.resorts.switch_on_again(state["tricks"])
            recovery.sizes.load(state["sizes"])
            if recovery.measured is not None and state["measured"] is not None:
                recovery.measured.load(state["measured"])
            if scaler is not None:
                scaler.load_state_dict(state["scaler"])
            recovery.num_ooms = recovery.num_ooms_before = int(state["num_ooms"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                "this state does not belong to this Stepper",
                because=f"{type(error).__name__}: {error}",
                attempt="a Stepper with the model, optimizer and options that it was saved with",
            ) from error

    def forget_sizes(self) -> None:
        """Try the first size again, for instance after another process has released memory."""
        self._recovery.sizes.forget()

    @property
    def result(self) -> Result | None:
        """Return the result of the last batch; None before the first."""
        return self._attempts.result

    @property
    def noise_scale(self) -> NoiseScale | None:
        """Return the gradient noise scale; None while it is not known."""
        return self._meter.noise_scale

    @property
    def stability_warnings(self) -> tuple[StabilityWarning, ...]:
        """Return what has gone wrong with the training so far; empty while all is well."""
        return self._signs.warnings

    @property
    def micro_batch(self) -> int | None:
        """Return the examples at a time in the last step; None before the first."""
        return self.result.micro_batch if self.result else None

    @property
    def num_ooms(self) -> int:
        """Return the number of out-of-memory errors recovered from."""
        return self._recovery.num_ooms


# ---- checking the arguments --------------------------------------------------------------------


def _variant_of(plan: Plan | None, precision: Precision | None) -> Variant:
    """Return the training variant. Raises UsageError if the plan contradicts `precision`."""
    if plan is None:
        return Variant(micro_batch=1, precision=precision or "fp32")
    if precision not in (None, plan.precision):
        raise UsageError(
            f"precision={precision!r} contradicts the plan's {plan.precision}",
            attempt="leaving precision= out, or a plan with that precision",
        )
    return plan.variant


def _first_size(given: int | None, plan: Plan | None, noted: int | None) -> int | None:
    """Return the micro-batch never to exceed: the one given, or less if an earlier start failed."""
    planned = plan.micro_batch if plan else None
    sizes = [size for size in (given or planned, noted) if size is not None]
    return given if noted is None else min(sizes)


def _check(
    variant: Variant, ranks: Ranks, *, accumulate: int, clip_grad_norm: float | None
) -> None:
    """Raise UsageError if options contradict each other."""
    is_so = ranks.is_replicated if variant.sharding == "ddp" else ranks.is_sharded
    if variant.num_gpus > 1 and not is_so:
        raise UsageError(
            f"the plan is for several GPUs ({variant.num_gpus}, {variant.sharding})",
            because="this model is neither replicated nor sharded as planned",
            attempt="torchrun, and model = oomph.apply(plan, model) before the optimizer is made",
        )
    if variant.optimizer_in_backward and ranks.is_joint:
        raise UsageError(
            "the optimizer cannot step in backward on several ranks",
            because="gradients are averaged only after backward",
            attempt="a plan without optimizer-in-backward",
        )
    if accumulate < 1:
        raise UsageError(f"{accumulate} batches cannot be accumulated", attempt="accumulate=1")
    if variant.optimizer_in_backward and (accumulate > 1 or clip_grad_norm is not None):
        raise UsageError(
            "the optimizer cannot step in backward",
            because="accumulating and clipping need gradients that this step has already freed",
            attempt="a plan without optimizer-in-backward",
        )


def _check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Raise UsageError for an optimizer that evaluates the loss by itself, any number of times."""
    for optimizer in optimizers:
        inside = getattr(optimizer, "optimizer", optimizer)
        name = type(inside).__name__
        if wants_closure(inside):
            raise UsageError(
                f"a Stepper cannot run {name}",
                because="its step needs a closure that runs the whole batch again",
                attempt="a loop of your own; or an optimizer without a closure, such as AdamW",
            )


_KEYS = {"format", "scaler", "sizes", "measured", "tricks", "num_ooms", "accumulated"}


def _opened(state: Any) -> Any:
    """Return a state without the tuples around its parts; format 1 had none."""
    if not isinstance(state, dict):
        return state
    opened = {
        name: part[0] if isinstance(part, tuple) and len(part) == 1 else part
        for name, part in state.items()
    }
    return {**opened, "format": _FORMAT} if state.get("format") == 1 else opened


def _check_state(state: object, *, has_scaler: bool) -> None:
    """Raise UsageError if this is not the state of such a Stepper."""
    missing = _KEYS - set(state if isinstance(state, dict) else ())
    if not isinstance(state, dict) or missing:
        raise UsageError(
            "this is not the state of a Stepper",
            because=f"it is a {type(state).__name__} without {', '.join(sorted(missing))}",
            attempt="what Stepper.state_dict() returned",
        )
    if state["format"] != _FORMAT:
        raise UsageError(
            f"this Stepper state has format {state['format']!r:.40}",
            because=f"this version of oomph reads format {_FORMAT}",
            attempt="the version of oomph that saved it",
        )
    if (state["scaler"] is not None) is not has_scaler:
        saved, here = ("without", "has one") if has_scaler else ("with", "has none")
        raise UsageError(
            f"this state was saved {saved} a loss scaler, and this Stepper {here}",
            attempt='the same precision="fp16" or scaler= as before',
        )

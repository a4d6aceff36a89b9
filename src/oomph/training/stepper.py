"""One effective batch in, one optimizer step out, whatever the micro-batch.

step = oomph.Stepper(model, optimizer, loss, plan=plan)
for batch in loader:
    step(batch)

A step is whole or did not happen: after an out-of-memory error, gradients, generators and buffers
are set back and the same examples are run again in smaller pieces; after Ctrl-C or any other error
the state is that of the last whole step. With DistributedDataParallel that holds for all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from oomph.errors import UsageError
from oomph.records.plan import Plan
from oomph.records.workload import Precision
from oomph.training import apply, recovery_tricks, stepper_options
from oomph.training.division import Count, Division, Split
from oomph.training.evaluation import Evaluation, Join, in_eval_mode
from oomph.training.examples import BatchDim
from oomph.training.ranks import ranks_of
from oomph.training.recovery_of_model import recovery_for
from oomph.training.rollback import OwnRollback
from oomph.training.split_check import OnDifference, SplitCheck
from oomph.training.stepper_attempts import Attempts
from oomph.training.stepper_batches import Batches
from oomph.training.stepper_micro import Micro
from oomph.training.stepper_passes import Passes
from oomph.training.stepper_result import Result
from oomph.training.stepper_signals import SignalsHeld
from oomph.training.stepper_update import Copies, Update
from oomph.training.weights import Weight

_log = logging.getLogger("oomph")
_FORMAT = 1  # of state_dict


class Stepper:
    """Trains one batch at a time, in as many pieces as its memory needs.

    model: as it is, or in DistributedDataParallel, compiled or not; then each rank is given its
        part of a batch, and all ranks step or all raise.
    loss: (model, batch) -> a scalar, as in a Workload; without one, use `micro`.
    plan: of oomph.plan; its tricks are put on, and what fits by it is the first to be tried.
    weight: what the loss is a mean of: "mean" over examples, "sum", "tokens" (labels that are not
        -100), "next-tokens" (those of a causal language model), or a function of a batch. Without
        one it is found out when a batch is split for the first time; one that is wrong is refused.
    on_difference: "raise" where pieces of a batch would train otherwise than the whole (losses that
        compare examples, for one); "warn" goes on; "ignore" does not look.
    accumulate: batches of the loader to one step of the optimizer; `flush` ends it early.
    clip_grad_norm: once, after the last piece. scheduler: goes on with each step.
    precision, scaler, micro_batch: where there is no plan. device: where pieces are moved to.
    batch_dim: the dimension of the examples, where it is not the first: of all tensors, or by name:
        {"source": 1, "mask": None}; None is given whole to every piece, as what `whole` names is.
    split: (batch, sizes) -> pieces.
    count: batch -> how many examples it has, where that is not what its first tensor has rows.
    last_resorts: what may be switched on when a single example does not fit.
    copies: of weights and states on the host, before the "first" update, "always" or "never".
    keeps_other_rngs: set Python's and numpy's generators back, too, which costs each step.
    keeps_gradients: add to gradients that are there before a step, instead of dropping them.
    beside: modules that the forward writes into and that neither the model nor `loss` names.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loss: Callable[[Any, Any], Any] | None = None,
        plan: Plan | None = None,
        *,
        weight: Weight | None = None,
        on_difference: OnDifference = "raise",
        scheduler: Any = None,
        clip_grad_norm: float | None = None,
        precision: Precision | None = None,
        scaler: Any = None,
        micro_batch: int | None = None,
        accumulate: int = 1,
        device: Any = None,
        whole: Collection[str] = (),
        batch_dim: BatchDim | None = None,
        split: Split | None = None,
        count: Count | None = None,
        last_resorts: Sequence[str] = recovery_tricks.NAMES,
        copies: Copies = "first",
        keeps_other_rngs: bool = False,
        keeps_gradients: bool = False,
        beside: Sequence[Any] = (),
        say: Callable[[str], None] | None = None,
    ) -> None:
        how = stepper_options.how_to_train(plan, precision)
        optimizers = stepper_options.several(optimizer)
        ranks = ranks_of(model, optimizers)
        stepper_options.check(how, ranks, accumulate=accumulate, clip_grad_norm=clip_grad_norm)
        stepper_options.check_optimizers(optimizers)
        if plan is not None:
            apply.put_on_made(model, optimizers, how)
        apply.set_precision(how)
        self.model = model
        self._recovery = recovery_for(
            model,
            how,
            plan,
            micro_batch=micro_batch,
            last_resorts=last_resorts,
            say=say or _log.warning,
        )
        passes = Passes(model, loss, self._recovery.resorts, device=device, scaler=scaler)
        rollback = OwnRollback(
            model,
            optimizers,
            keeps_gradients=keeps_gradients,
            keeps_other_rngs=keeps_other_rngs,
            loss=loss,
            beside=beside,
            updates_in_backward=how.optimizer_in_backward,
            say=self._recovery.say,
        )
        update = Update(
            model,
            optimizers,
            stepper_options.several(scheduler),
            scaler=passes.scaler,
            clip_grad_norm=clip_grad_norm,
            copies=copies if self._recovery.splits else "never",
            ranks=ranks,
            parameters=rollback.parameters,
        )
        division = Division(weight, whole=whole, split=split, count=count, batch_dim=batch_dim)
        check = SplitCheck(
            model,
            division,
            rollback,
            self._recovery.say,
            on_difference=on_difference if self._recovery.splits else "ignore",
            around=passes.forward_context,
        )
        self._passes, self._ranks, self._division, self._check = passes, ranks, division, check
        self._evaluation = Evaluation(division.pieces, division.num, self._recovery.say)
        batches = Batches(division, accumulate)
        self._attempts = Attempts(batches, rollback, self._recovery, passes, update, ranks, check)

    def __call__(self, batch: Any) -> Result:
        """Train on a batch. Raises OomphError if not even one example of it fits."""
        if self._recovery.splits:
            return self._attempts.train(batch)
        with SignalsHeld():  # backward is the update: it is not to be left in the middle
            return self._attempts.train(batch)

    def micro(self, batch: Any) -> Iterator[Micro]:
        """The pieces of a batch, for a forward of one's own.

        for micro in step.micro(batch):
            with micro:
                micro.backward(model(**micro.data).loss)

        After an out-of-memory error the batch begins again, in smaller pieces: `micro.is_first`.
        The optimizer steps after the last piece; `step.result` then has what was done.
        """
        if not self._recovery.splits:
            raise UsageError(
                "an optimizer that steps in backward has no pieces to wait for",
                attempt="step(batch)",
            )
        yield from self._attempts.issue(batch)

    def flush(self) -> Result | None:
        """Step with what has been accumulated, at the end of an epoch; None if that is nothing."""
        return self._attempts.flush()

    # ---- evaluation ----------------------------------------------------------------------------

    def evaluate(
        self,
        batch: Any,
        function: Callable[[Any, Any], Any] | None = None,
        join: Join | None = None,
    ) -> Any:
        """The loss of a batch, or what `function(model, batch)` gives; nothing is trained.

        Without gradients, in eval mode, with the autocast of training. A batch that does not fit is
        run in pieces, and what they give is put together: rows are joined, numbers averaged as the
        loss is, whole numbers added; or by `join(results, examples of each)`. Sizes of training are
        not touched.
        """
        quiet = nullcontext() if self._ranks is None else self._ranks.quiet()

        def work(data: Any) -> Any:
            return self._passes.evaluate(data, function)

        with in_eval_mode(self.model), quiet:
            done = self._evaluation.run(batch, work)
            if join is not None and len(done) > 1:
                return join([result for _, _, result in done], [num for _, num, _ in done])
            weight = None if self._check.is_in_doubt else self._division.weight
            is_rounded = self._passes.is_rounded()
            return self._evaluation.whole_of(
                batch, work, done, weight, function=function, is_rounded=is_rounded
            )

    # ---- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the model's, the optimizer's and the scheduler's.

        The loss scaler, the sizes that were learnt, tricks that were switched on, and gradients
        that are being accumulated. Not the random generators, nor where the loader is.
        """
        recovery = self._recovery
        return {
            "format": _FORMAT,
            "scaler": None if self._passes.scaler is None else self._passes.scaler.state_dict(),
            "sizes": recovery.sizes.state(),
            "measured": None if recovery.measured is None else recovery.measured.state(),
            "tricks": list(recovery.resorts.switched_on),
            "num_ooms": recovery.num_ooms,
            "accumulated": self._attempts.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another Stepper was, after the model and the optimizer have been loaded."""
        stepper_options.check_state(state, _FORMAT, has_scaler=self._passes.scaler is not None)
        try:
            self._load(state)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                "this state does not belong to this Stepper",
                because=f"{type(error).__name__}: {error}",
                attempt="a Stepper with the model, optimizer and options that it was saved with",
            ) from error

    def _load(self, state: dict[str, Any]) -> None:
        recovery = self._recovery
        self._attempts.load(state["accumulated"])
        recovery.resorts.switch_on_again(state["tricks"])
        recovery.sizes.load(state["sizes"])
        if recovery.measured is not None and state["measured"] is not None:
            recovery.measured.load(state["measured"])
        if self._passes.scaler is not None:
            self._passes.scaler.load_state_dict(state["scaler"])
        recovery.num_ooms = recovery.num_ooms_before = int(state["num_ooms"])

    def forget_sizes(self) -> None:
        """Try the first size again: somebody else has given memory back."""
        self._recovery.sizes.forget()

    @property
    def result(self) -> Result | None:
        """Of the last batch; None before the first."""
        return self._attempts.result

    @property
    def micro_batch(self) -> int | None:
        """Examples at a time, in the last step; None before the first."""
        return self.result.micro_batch if self.result else None

    @property
    def num_ooms(self) -> int:
        """Out-of-memory errors that were recovered from."""
        return self._recovery.num_ooms

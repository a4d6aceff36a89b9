"""Lightning: a callback -> a Trainer whose batches are split where memory runs out.

trainer = pytorch_lightning.Trainer(callbacks=[oomph.lightning.Guard()])

Each batch goes through the module's own `training_step` and the strategy's own backward, whole or
piece by piece: steps, batches, schedule, clipping, loss scaler, checkpoints and the other callbacks
are Lightning's. What the module logs is logged once for the whole batch. Held against 2.6;
automatic optimization, one process or several with DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from oomph.errors import UsageError
from oomph.training.adapters.lightning_callback import as_callback
from oomph.training.adapters.lightning_logs import Logged, joined, log_once, recorded
from oomph.training.adapters.lightning_metrics import (
    RollbackWithMetrics,
    metrics_of,
    put_back,
    state_of,
)
from oomph.training.adapters.limits import ranks_for
from oomph.training.adapters.pieces import Evaluated, Piece, total_loss
from oomph.training.adapters.update import make_whole
from oomph.training.adapters.window import Window
from oomph.training.evaluation import evaluation_for, shares_of
from oomph.training.evaluation import joined as joined_results
from oomph.training.ranks import Ranks
from oomph.training.weights import weigher

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from oomph.training.adapters.options import Options


class GuardHooks:
    """What the callback does; `Guard` is this and Lightning's Callback.

    options: plan, micro_batch, weight, on_difference, whole, batch_dim, split, count, last_resorts,
        keeps_other_rngs, beside: as for a Stepper.
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        super().__init__()
        self._options = options
        self._evaluation = evaluation_for(options, _say)
        self._window: Window | None = None
        self._has_told_of_means = False

    @property
    def micro_batch(self) -> int | None:
        """Examples at a time, of the last batch; None before the first."""
        return self._window.micro_batch if self._window else None

    @property
    def num_ooms(self) -> int:
        """Out-of-memory errors that were recovered from."""
        return self._window.num_ooms if self._window else 0

    # ---- hooks ---------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        ranks = _checked(trainer, pl_module)
        for optimizer in trainer.optimizers:
            make_whole(optimizer, ranks=ranks)
        options = self._options
        keeps = options.get("keeps_other_rngs", False)
        rollback = RollbackWithMetrics(
            pl_module,
            trainer.optimizers,
            keeps_other_rngs=keeps,
            beside=options.get("beside", ()),
        )
        self._window = Window(
            pl_module,
            trainer.optimizers,
            _say,
            rollback=rollback,
            is_zeroed_later=True,  # between the first forward and its backward
            ranks=ranks,
            **options,
        )
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        accumulates = trainer.fit_loop._should_accumulate
        made = _Closures(loop._make_closure, pl_module, self._window, accumulates)
        loop._make_closure = made

    def on_train_batch_end(self, _: Any, pl_module: Any, *__: Any) -> None:
        if self._window is not None and self._window.num_ooms:
            size = float(self._window.micro_batch or 0)
            pl_module.log("micro_batch", size, on_step=True, on_epoch=False, prog_bar=True)

    # ---- evaluation ----------------------------------------------------------------------------

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._guard_step(trainer, pl_module, "validation_step")

    def on_validation_end(self, trainer: Any, _: Any) -> None:
        vars(trainer.strategy).pop("validation_step", None)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._guard_step(trainer, pl_module, "test_step")

    def on_test_end(self, trainer: Any, _: Any) -> None:
        vars(trainer.strategy).pop("test_step", None)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self._guard_step(trainer, pl_module, "predict_step")

    def on_predict_end(self, trainer: Any, _: Any) -> None:
        vars(trainer.strategy).pop("predict_step", None)

    def _guard_step(self, trainer: Any, pl_module: Any, name: str) -> None:
        """Where other processes wait in a forward, pieces would leave them waiting."""
        vars(trainer.strategy).pop(name, None)
        if trainer.world_size > 1 or trainer.strategy.handles_gradient_accumulation:
            return
        step = getattr(trainer.strategy, name)
        weigh = self._options.get("weight") or "mean"

        def tell(num: int) -> None:
            if num > 1 and self._options.get("weight") is None and not self._has_told_of_means:
                self._has_told_of_means = True
                _say(
                    f"{name} runs in pieces, and oomph averages what it logs and returns over"
                    ' examples. If these are means over tokens, pass Guard(weight="tokens")'
                )

        def guarded(batch: Any, *others: Any, **keywords: Any) -> Any:
            done = self._evaluation.run(
                batch, lambda part: _evaluated(pl_module, step, (part, *others), keywords)
            )
            tell(len(done))
            shares = shares_of(done, weigher(weigh), is_sum=weigh == "sum")
            pieces = [
                (Evaluated(num, share), result)
                for (_, num, result), share in zip(done, shares, strict=True)
            ]
            log_once(pl_module, [(each, None, logged) for each, (_, logged) in pieces])
            results = [(part, num, result) for part, num, (result, _) in done]
            return joined_results(results, weigher(weigh), is_sum=weigh == "sum")

        setattr(trainer.strategy, name, guarded)

    def teardown(self, trainer: Any, *_: Any, **__: Any) -> None:
        vars(trainer.fit_loop.epoch_loop.automatic_optimization).pop("_make_closure", None)


def _evaluated(module: Any, step: Any, args: Any, keywords: Any) -> tuple[Any, list[Logged]]:
    """What a step gave and logged. Metrics of one that fails are set back."""
    metrics = metrics_of(module)
    before = [state_of(metric) for metric in metrics]
    try:
        with recorded(module) as logged:
            return step(*args, **keywords), logged
    except BaseException:
        for metric, state in zip(metrics, before, strict=True):
            put_back(metric, state)
        raise


def _checked(trainer: Any, pl_module: Any) -> Ranks | None:
    """The ranks that the module is replicated on. Raises UsageError."""
    if not pl_module.automatic_optimization:
        raise UsageError(
            "a module that optimizes by itself cannot be split from outside",
            because="automatic_optimization is False",
            attempt="oomph.Stepper in its training_step",
        )
    strategy, num = trainer.strategy, trainer.world_size
    is_engine = strategy.handles_gradient_accumulation
    return ranks_for(
        strategy.model, trainer.optimizers, num, is_engine=is_engine, library="Lightning"
    )


@dataclass(slots=True)
class _Said:
    """What Lightning said of a batch: the arguments of its training_step, and so on."""

    arguments: dict[str, Any]
    optimizer: Any
    number: int
    is_zeroed: bool = False  # gradients of the step before are set to zero once, and counted


class _Closures:
    """Makes what Lightning has its optimizer call: forward and backward of one batch."""

    def __init__(
        self, make: Any, pl_module: Any, window: Window, accumulates: Callable[[], bool]
    ) -> None:
        """accumulates: whether the batch that is run is not the last before a step."""
        self._make, self._module, self._window = make, pl_module, window
        self._accumulates = accumulates

    def __call__(self, arguments: dict[str, Any], optimizer: Any, number: int) -> Any:
        """Lightning's own closure, that runs pieces instead."""
        if "batch" not in arguments:
            raise UsageError(
                "a training_step that fetches its batches cannot be split from outside",
                because="it takes dataloader_iter",
                attempt="training_step(self, batch, batch_idx)",
            )
        made = self._make(arguments, optimizer, number)
        said = _Said(arguments, optimizer, number)
        made.closure = lambda *_, **__: self._run(said)
        return made

    def _run(self, said: _Said) -> Any:
        """What Lightning takes for the result of one training_step."""
        with torch.enable_grad():  # torch's optimizers call closures without
            done = self._window.run(said.arguments["batch"], self._run_piece, said=said)
        if not self._accumulates():
            self._window.close()
        log_once(self._module, [(piece, result.loss, logged) for piece, (result, logged) in done])
        results = [(piece, result) for piece, (result, _) in done]
        _, last = results[-1]
        if len(results) > 1:
            losses = [(piece, r.loss) for piece, r in results if r.loss is not None]
            last.loss = total_loss(losses) if losses else None
            last.extra = joined([(piece, result.extra) for piece, result in results])
        return last

    def _run_piece(self, piece: Piece) -> tuple[Any, list[Logged]]:
        said: _Said = piece.said
        arguments = {**said.arguments, "batch": piece.data}
        closure = self._make(arguments, said.optimizer, said.number)
        with recorded(self._module) as logged:
            result = closure._step_fn()
            if piece.is_forward_only:
                piece.backward(result.closure_loss)
                return result, logged
            if closure._zero_grad_fn is not None and not said.is_zeroed:
                closure._zero_grad_fn()
                said.is_zeroed = True
            if closure._backward_fn is not None and result.closure_loss is not None:
                loss = result.closure_loss
                closure._backward_fn(loss if piece.share == 1 else loss * piece.share)
        result.closure_loss = None  # and its graph
        return result, logged


def _say(text: str) -> None:
    from lightning_utilities.core.rank_zero import rank_zero_info

    rank_zero_info(text)


def __getattr__(name: str) -> Any:
    if name != "Guard":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()["Guard"] = as_callback("Guard", GuardHooks, __name__)
    return made

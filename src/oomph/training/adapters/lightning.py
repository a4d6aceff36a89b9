"""Lightning: a callback -> a Trainer whose batches are split if memory runs out.

    trainer = pytorch_lightning.Trainer(callbacks=[oomph.lightning.Guard()])

Each batch runs through the module's own `training_step` and the strategy's own backward, whole or
in pieces. Steps, batches, schedule, clipping, loss scaler, checkpoints and other callbacks stay
Lightning's. The module's logs are written once per batch. Tested with 2.6, with automatic
optimization, in one process or several with DistributedDataParallel.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from oomph.errors import UsageError
from oomph.records.stability import NoiseScale
from oomph.training.adapters.window import Window, ranks_for, total_loss
from oomph.training.evaluation import evaluation_for, shares_of
from oomph.training.evaluation import joined as joined_results
from oomph.training.micro_batches import Micro
from oomph.training.ranks import Ranks
from oomph.training.update import make_whole

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from oomph.training.adapters.window import Options

_LIBRARIES = ("lightning.pytorch", "pytorch_lightning")  # the same library under two names


def as_callback(name: str, hooks: type, module: str) -> type:
    """Return a class of that name and module: the hooks plus the Callback of the loaded library."""
    loaded = [library for library in _LIBRARIES if library in sys.modules]
    if not loaded:
        found = (one for one in _LIBRARIES if importlib.util.find_spec(one.split(".")[0]))
        loaded = [next(found, _LIBRARIES[-1])]
    bases = [importlib.import_module(library).Callback for library in loaded]
    return type(name, (hooks, *bases), {"__doc__": hooks.__doc__, "__module__": module})


# ---- logs --------------------------------------------------------------------------------------
# If a piece is rerun, its `self.log` would count twice in the epoch's mean, and the value of the
# last piece would stand for the whole batch. So calls are recorded and made once, after all pieces.


class Evaluated(NamedTuple):
    """A piece of an evaluated batch: its number of examples and its weight."""

    num: int
    share: float


Part = Micro | Evaluated

_SUMS, _MOST, _LEAST = ("sum", torch.sum), ("max", torch.max), ("min", torch.min)


@dataclass(frozen=True, slots=True)
class Logged:
    """One call of `self.log`."""

    hook: str | None  # the hook that made it
    name: str
    value: Any
    others: tuple[Any, ...]
    keywords: dict[str, Any]


@contextmanager
def recorded(module: Any) -> Iterator[list[Logged]]:
    """Record what a module logs, instead of logging it."""
    calls: list[Logged] = []

    def log(name: str, value: Any, *others: Any, **keywords: Any) -> None:
        value = value.detach() if isinstance(value, torch.Tensor) else value
        calls.append(Logged(module._current_fx_name, name, value, others, keywords))

    before = vars(module).get("log")  # other code may have replaced it too
    vars(module)["log"] = log
    try:
        yield calls
    finally:
        del vars(module)["log"]
        if before is not None:
            vars(module)["log"] = before


def log_once(module: Any, done: Sequence[tuple[Part, Any, list[Logged]]]) -> None:
    """Log once for a whole batch what its pieces logged. done: (piece, loss, calls)."""
    for calls in itertools.zip_longest(*(logged for _, __, logged in done)):
        made = [(p, loss, c) for (p, loss, _), c in zip(done, calls, strict=True) if c is not None]
        _log(module, made)


def _log(module: Any, made: Sequence[tuple[Part, Any, Logged]]) -> None:
    last = made[-1][2]
    keywords = dict(last.keywords)
    if keywords.get("batch_size") is not None:
        keywords["batch_size"] = sum(call.keywords["batch_size"] for *_, call in made)
    before = module._current_fx_name
    module._current_fx_name = last.hook
    try:
        module.log(last.name, _of_whole(made), *last.others, **keywords)
    finally:
        module._current_fx_name = before


def _of_whole(made: Sequence[tuple[Part, Any, Logged]]) -> Any:
    values = [call.value for *_, call in made]
    if len(values) == 1 or not all(map(_is_number, values)):
        return values[-1]  # a metric, which has counted all pieces
    reduction = made[-1][2].keywords.get("reduce_fx", "mean")
    if reduction in _SUMS:
        return sum(values)
    if reduction in _MOST or reduction in _LEAST:
        return max(values) if reduction in _MOST else min(values)
    return sum(v * part for v, part in zip(values, _parts(made), strict=True))


def _parts(made: Sequence[tuple[Part, Any, Logged]]) -> list[float]:
    """Return the weight of each value: as its loss, or by examples if only the loss is a sum."""
    shares = [piece.share for piece, *_ in made]
    is_sum = len(made) > 1 and all(share == 1 for share in shares)
    if not is_sum or all(loss is not None and float(c.value) == float(loss) for _, loss, c in made):
        return shares
    num = sum(piece.num for piece, *_ in made)
    return [piece.num / num for piece, *_ in made]


def joined(extras: Sequence[tuple[Part, dict[str, Any]]]) -> dict[str, Any]:
    """Join what training_step returned besides the loss: all pieces' rows, or the last value."""
    whole: dict[str, Any] = {}
    for name, last in extras[-1][1].items():
        found = [(piece, each.get(name)) for piece, each in extras]
        is_rows = all(
            isinstance(v, torch.Tensor) and v.dim() and v.size(0) == p.num for p, v in found
        )
        whole[name] = torch.cat([v.detach() for _, v in found]) if is_rows else last  # type: ignore[union-attr]
    return whole


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    )


# ---- metrics -----------------------------------------------------------------------------------
# torchmetrics keeps its counts in attributes that are not buffers. In training they are restored
# with the module (rollback_state.py); an evaluation, which has no rollback, restores them here, so
# that a rerun example is counted once.

_COUNTERS = ("_update_count", "_computed", "_forward_cache")


def metrics_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "metric_state")]


def put_back(metric: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(metric, name, _copied(value))


def state_of(metric: Any) -> dict[str, Any]:
    counters = {name: getattr(metric, name) for name in _COUNTERS if hasattr(metric, name)}
    return {name: _copied(value) for name, value in {**metric.metric_state, **counters}.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


# ---- the callback ------------------------------------------------------------------------------

Hook = Callable[["GuardHooks", Any, Any], None]


def _around_steps(name: str) -> tuple[Hook, Hook]:
    """Return the hooks before and after an evaluation whose steps have this name."""

    def start(self: GuardHooks, trainer: Any, pl_module: Any) -> None:
        self._guard_step(trainer, pl_module, name)

    def end(_: GuardHooks, trainer: Any, __: Any) -> None:
        vars(trainer.strategy).pop(name, None)

    return start, end


class GuardHooks:
    """The hooks of the callback; `Guard` combines them with Lightning's Callback.

    options: plan, micro_batch, weight, on_difference, whole, batch_dim, split, count, last_resorts,
        keeps_other_rngs, beside, noise_scale: as for a Stepper.
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        super().__init__()
        self._options = options
        self._evaluation = evaluation_for(options, _say)
        self._window: Window | None = None
        self._has_warned_of_means = False

    @property
    def micro_batch(self) -> int | None:
        """Return the examples at a time in the last batch; None before the first."""
        return self._window.micro_batch if self._window else None

    @property
    def num_ooms(self) -> int:
        """Return the number of out-of-memory errors recovered from."""
        return self._window.num_ooms if self._window else 0

    @property
    def noise_scale(self) -> NoiseScale | None:
        """Return the gradient noise scale, if it is known yet."""
        return self._window.noise_scale if self._window else None

    # ---- hooks ---------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        ranks = _checked(trainer, pl_module)
        for optimizer in trainer.optimizers:
            make_whole(optimizer, ranks=ranks)
        self._window = Window(
            pl_module,
            trainer.optimizers,
            _say,
            is_zeroed_later=True,  # between the first forward and its backward
            ranks=ranks,
            **self._options,
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

    on_validation_start, on_validation_end = _around_steps("validation_step")
    on_test_start, on_test_end = _around_steps("test_step")
    on_predict_start, on_predict_end = _around_steps("predict_step")

    def _guard_step(self, trainer: Any, pl_module: Any, name: str) -> None:
        """Wrap an evaluation step, unless pieces would leave other processes waiting."""
        vars(trainer.strategy).pop(name, None)
        if trainer.world_size > 1 or trainer.strategy.handles_gradient_accumulation:
            return
        step = getattr(trainer.strategy, name)
        weight = self._options.get("weight") or "mean"

        def guarded(batch: Any, *others: Any, **keywords: Any) -> Any:
            done = self._evaluation.run(
                batch, lambda part: _evaluated(pl_module, step, (part, *others), keywords)
            )
            is_split = len(done) > 1 and self._options.get("weight") is None
            if is_split and not self._has_warned_of_means:
                self._has_warned_of_means = True
                _say(
                    f"{name} runs in pieces, and oomph averages what it logs and returns over"
                    ' examples. If these are means over tokens, pass Guard(weight="tokens")'
                )
            pairs = zip(done, shares_of(done, weight), strict=True)
            log_once(
                pl_module,
                [(Evaluated(each.num, share), None, each.result[1]) for each, share in pairs],
            )
            return joined_results([each._replace(result=each.result[0]) for each in done], weight)

        setattr(trainer.strategy, name, guarded)

    def teardown(self, trainer: Any, *_: Any, **__: Any) -> None:
        vars(trainer.fit_loop.epoch_loop.automatic_optimization).pop("_make_closure", None)


def _evaluated(module: Any, step: Any, args: Any, keywords: Any) -> tuple[Any, list[Logged]]:
    """Return what a step returned and logged. If it fails, its metrics are restored."""
    metrics = metrics_of(module)
    before = [state_of(metric) for metric in metrics]
    try:
        with recorded(module) as logged:
            return step(*args, **keywords), logged
    except BaseException:
        for metric, state in zip(metrics, before, strict=True):
            put_back(metric, state)
        raise


def _checked(trainer: Any, pl_module: Any) -> Ranks:
    """Return the ranks that the module is replicated on. Raises UsageError."""
    if not pl_module.automatic_optimization:
        raise UsageError(
            "batches of a module with manual optimization cannot be split from outside",
            because="automatic_optimization is False",
            attempt="oomph.Stepper in its training_step",
        )
    strategy, num = trainer.strategy, trainer.world_size
    is_engine = strategy.handles_gradient_accumulation
    return ranks_for(
        strategy.model, trainer.optimizers, num, is_engine=is_engine, library="Lightning"
    )


@dataclass(slots=True)
class _Call:
    """What Lightning passed for one batch: the arguments of training_step, and so on."""

    arguments: dict[str, Any]
    optimizer: Any
    number: int
    is_zeroed: bool = False  # gradients are zeroed once per batch; Lightning counts it


class _Closures:
    """Makes the closures that Lightning's optimizer calls: forward and backward of one batch."""

    def __init__(
        self, make: Any, pl_module: Any, window: Window, accumulates: Callable[[], bool]
    ) -> None:
        """accumulates: returns whether the current batch is not the last before a step."""
        self._make, self._module, self._window = make, pl_module, window
        self._accumulates = accumulates

    def __call__(self, arguments: dict[str, Any], optimizer: Any, number: int) -> Any:
        """Return Lightning's own closure, changed to run pieces."""
        if "batch" not in arguments:
            raise UsageError(
                "batches that training_step fetches itself cannot be split from outside",
                because="it takes dataloader_iter",
                attempt="training_step(self, batch, batch_idx)",
            )
        made = self._make(arguments, optimizer, number)
        call = _Call(arguments, optimizer, number)
        made.closure = lambda *_, **__: self._run(call)
        return made

    def _run(self, call: _Call) -> Any:
        """Run a batch; return what Lightning expects from one training_step."""
        with torch.enable_grad():  # torch's optimizers call closures without gradients
            done = self._window.run(call.arguments["batch"], self._run_piece, call)
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

    def _run_piece(self, piece: Micro) -> tuple[Any, list[Logged]]:
        call: _Call = piece.arguments
        arguments = {**call.arguments, "batch": piece.data}
        closure = self._make(arguments, call.optimizer, call.number)
        with recorded(self._module) as logged:
            result = closure._step_fn()
            if piece.is_forward_only:
                piece.backward(result.closure_loss)
                return result, logged
            if closure._zero_grad_fn is not None and not call.is_zeroed:
                closure._zero_grad_fn()
                call.is_zeroed = True
            if closure._backward_fn is not None and result.closure_loss is not None:
                loss = result.closure_loss
                closure._backward_fn(loss if piece.share == 1 else loss * piece.share)
        result.closure_loss = None  # drops its graph
        return result, logged


def _say(text: str) -> None:
    from lightning_utilities.core.rank_zero import rank_zero_info

    rank_zero_info(text)


def __getattr__(name: str) -> Any:
    if name != "Guard":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()["Guard"] = as_callback("Guard", GuardHooks, __name__)
    return made

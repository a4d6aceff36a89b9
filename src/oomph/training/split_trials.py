"""Some examples of a batch -> their gradients, as a whole and in two pieces. All is undone.

The training loop runs the trials like pieces of a batch, because the code around forward may be the
user's. An example draws the same random numbers in every trial. Gradients are sampled.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from oomph.out_of_memory import is_out_of_memory
from oomph.records.check import SAME_IN_FP32, SAME_IN_FP64, Finding
from oomph.stability import coupling, examples
from oomph.stability.examples import Dims, mapped
from oomph.stability.normalisers import Divisors, is_of_labels
from oomph.stability.randomness import (
    Drawing,
    Draws,
    Redrawing,
    WithoutHiddenDropout,
    seed_everything,
)
from oomph.stability.trial import Widened, own_tensor
from oomph.training.micro_batches import IGNORED, Division, no_scalar, weigher
from oomph.training.recovery import if_memory_allows, release
from oomph.training.rollback import Rollback, restore_rngs, rng_states

_MOST_SAMPLES = 2048  # judgement: per parameter; two different gradients differ almost everywhere
# Judgement: rounding errors of gradients in half precision reach the first value; a difference
# above the second is not rounding.
_SAME_IN_HALF, _OTHER_IN_HALF = 2e-2, 0.2
_UNDIVIDED = 1e-6  # judgement: relative; gradients of different examples are never this close
# Errors of models and losses that reject a piece of some size or a cut along some dimension.
_REFUSALS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
Modes = Sequence[AbstractContextManager[Any]]


class Trial:
    """One run of a few examples. Stands in for a Stepper as the runner of a Micro."""

    newest: Any = None  # for libraries, which did not ask for its loss

    def __init__(
        self,
        data: Any,
        num: int,
        context: AbstractContextManager[Any],
        undo: Callable[[], None],
        *,
        is_forward_only: bool,
    ) -> None:
        self.data, self.num = data, num
        self._context, self._undo, self.is_forward_only = context, undo, is_forward_only
        self.loss: Any = None
        self.error: BaseException | None = None
        self.is_out_of_memory = False
        self.gradient: Any = None  # samples of it, or the loss if only forward is run

    def forward_context(self) -> AbstractContextManager[Any]:
        return self._context

    def backward(self, loss: Any, share: float) -> None:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise no_scalar(loss)
        self.loss = loss.detach()
        if not self.is_forward_only:
            torch.autograd.backward(loss if share == 1 else loss * share)

    def catches(self, error: BaseException) -> bool:
        """Accept a size that does not fit or a cut that the model rejects: others are tried."""
        self.is_out_of_memory = is_out_of_memory(error)
        if self.is_out_of_memory:
            release(error)
        elif not isinstance(error, _REFUSALS):
            self._undo()
            return False
        traceback.clear_frames(error.__traceback__)  # they hold activations
        self.error = error
        return True


@dataclass
class Cut:
    """Some examples of a batch, cut in two, and the outcome of running them."""

    batch: Any
    dims: Dims
    num: int  # examples in the batch
    start: int = 0  # the first example that is run
    total: int = 0  # how many are run
    at: int = 0  # where the second piece starts, among those run
    is_forward_only: bool = False
    error: BaseException | None = None  # the model rejects such pieces
    written: list[str] = field(default_factory=list)  # what each forward changes
    whole: Whole | None = None

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Return the bounds of the whole and of its two pieces."""
        return [(0, self.total), (0, self.at), (self.at, self.total)]


@dataclass(frozen=True)
class Whole:
    """Some examples, run together."""

    gradient: Tensor
    draws: Draws
    is_repeatable: bool  # another seed changes nothing: all random draws can be repeated


@dataclass(frozen=True)
class Compared:
    """Some examples, run as a whole and in pieces."""

    whole: Tensor  # gradient
    pieces: list[Tensor]
    batches: list[Any]  # the pieces
    sizes: list[int]
    divisors: list[Divisors]
    is_repeatable: bool

    def left_over(self, weights: Sequence[float]) -> float:
        """Return the relative remainder of the gradient after subtracting the weighted pieces."""
        parts = [w * g for w, g in zip(weights, self.pieces, strict=True)]
        scale = max(float(self.whole.norm()), *(float(part.norm()) for part in parts))
        return float((self.whole - sum(parts)).norm()) / scale

    @property
    def is_finite(self) -> bool:
        """Return whether no gradient has an infinite value or a NaN."""
        return all(bool(torch.isfinite(g).all()) for g in (self.whole, *self.pieces))

    @property
    def is_telling(self) -> bool:
        """Return whether all gradients are nonzero and finite."""
        return self.is_finite and all(bool(g.any()) for g in (self.whole, *self.pieces))

    @property
    def is_undivided(self) -> bool:
        """Return whether each piece gives the whole gradient, so what was cut is unused."""
        scale = float(self.whole.norm())
        return all(float((self.whole - g).norm()) <= _UNDIVIDED * scale for g in self.pieces)


class Trials:
    """Runs examples, always from the same state. Generators yield trials for the caller to run."""

    def __init__(
        self,
        model: nn.Module,
        division: Division,
        rollback: Rollback,
        around: Callable[[], AbstractContextManager[Any] | None],
        *,
        is_plain: bool = False,
    ) -> None:
        """is_plain: do not trace ops, so random numbers cannot be repeated."""
        self._model, self._division, self._rollback = model, division, rollback
        self._around = around
        # Without tracing ops, which some part of the model does not support.
        self._is_plain = is_plain
        # Gradients closer than the first are equal; those farther apart than the second differ.
        self.tolerance = self.hard_tolerance = SAME_IN_FP32

    def set_tolerance(self) -> None:
        """Set the tolerances by the precision of the parameters."""
        dtypes = self._dtypes()
        if dtypes & {torch.float16, torch.bfloat16}:
            self.tolerance, self.hard_tolerance = _SAME_IN_HALF, _OTHER_IN_HALF
        elif dtypes == {torch.float64}:
            self.tolerance = self.hard_tolerance = SAME_IN_FP64

    def _dtypes(self) -> set[torch.dtype]:
        return {p.dtype for p in self._rollback.parameters() if p.requires_grad}

    # ---- as a whole and in pieces --------------------------------------------------------------

    def whole(self, cut: Cut) -> Generator[Trial, None, Whole | None]:
        """Run the examples together, twice; return None if the model rejects them."""
        draws, bound = Draws(), (0, cut.total)
        first = yield from self._run(cut, bound, Drawing(draws))
        if first.error is not None and not self._is_plain:
            self._is_plain = True
            again = yield from self._run(cut, bound)
            self._is_plain = again.error is None
            first = again if self._is_plain else first
        cut.error = first.error
        if first.error is not None:
            return None
        redrawing = Redrawing(draws, *bound, cut.total)
        again = yield from self._run(cut, bound, redrawing, is_other_seed=True)
        cut.error = again.error
        if again.error is not None:
            return None
        apart = float((first.gradient - again.gradient).norm())
        is_repeatable = apart <= self.tolerance * float(first.gradient.norm())
        return Whole(first.gradient, draws, is_repeatable)

    def pieces(self, cut: Cut, whole: Whole) -> Generator[Trial, None, Compared | None]:
        """Run the same examples in two pieces; return None if the model rejects them."""
        trials, divisors, is_repeatable = [], [Divisors(), Divisors()], whole.is_repeatable
        for bound, each in zip(cut.bounds[1:], divisors, strict=True):
            redrawing = Redrawing(whole.draws, *bound, cut.total)
            trial = yield from self._run(cut, bound, each, redrawing)
            trials.append(trial)
            is_repeatable &= redrawing.is_aligned
            cut.error = trial.error
            if trial.error is not None:
                return None
        cut.whole = whole
        return Compared(
            whole.gradient,
            [trial.gradient for trial in trials],
            [trial.data for trial in trials],
            [trial.num for trial in trials],
            divisors,
            is_repeatable,
        )

    def meeting(self, cut: Cut) -> Generator[Trial, None, Finding | None]:
        """Return the module or loss where examples interact, after running everything once more."""
        if cut.whole is None or self._is_plain:
            return None
        seen = [coupling.watch(self._model, stop - start) for start, stop in cut.bounds]
        other = next((at for at in coupling.cuts(cut.total) if at != cut.at), None)
        elsewhere = [] if other is None else [(0, other), (other, cut.total)]
        trials = []
        runs = [*zip(cut.bounds, seen, strict=True), *((bound, ()) for bound in elsewhere)]
        with if_memory_allows():
            for bound, modes in runs:
                redrawing = Redrawing(cut.whole.draws, *bound, cut.total)
                trials.append((yield from self._run(cut, bound, *modes, redrawing)))
        if len(trials) < len(runs) or any(trial.error is not None for trial in trials[:3]):
            return None
        whole, *gradients = (trial.gradient for trial in trials)
        pieces, others = gradients[:2], gradients[2:]
        is_known = bool(others) and all(each is not None for each in others)
        if is_known and coupling.is_constant_term(whole, pieces, others, self.tolerance):
            return coupling.CONSTANT_TERM
        return coupling.find_meeting(self._model, seen, cut.whole.draws)

    def _run(
        self,
        cut: Cut,
        bound: tuple[int, int],
        *modes: AbstractContextManager[Any],
        is_other_seed: bool = False,
    ) -> Generator[Trial, None, Trial]:
        start, stop = cut.start + bound[0], cut.start + bound[1]
        sizes = [size for size in (start, stop - start, cut.num - stop) if size]
        piece = self._division.pieces(cut.batch, sizes, cut.dims)[int(start > 0)]
        trial = Trial(
            mapped(piece, lambda _, leaf: own_tensor(leaf) if isinstance(leaf, Tensor) else leaf),
            stop - start,
            self._context(modes, cut),
            self._rollback.undo,
            is_forward_only=cut.is_forward_only,
        )
        for parameter in self._rollback.parameters():
            parameter.grad = None  # drop gradients from a checkpoint or from before
        other_rngs = rng_states("cpu", keeps_other_rngs=True)[1:]
        if is_other_seed:
            seed_everything(1)
        try:
            yield trial
            if trial.error is None:
                trial.gradient = self._sampled(trial)
                trial.data = piece  # as it was before the user's code received it
            cut.written = self._rollback.written()
        finally:
            restore_rngs(other_rngs)
            self._rollback.undo()
        if trial.is_out_of_memory:
            raise torch.OutOfMemoryError
        return trial

    @contextmanager
    def _context(self, modes: Modes, cut: Cut) -> Iterator[None]:
        with ExitStack() as stack:
            around = self._around()
            if around is not None:
                stack.enter_context(around)
            stack.enter_context(in_full_precision())
            if cut.is_forward_only:
                stack.enter_context(torch.no_grad())
            if not self._is_plain:
                dtypes, wide = self._dtypes(), (torch.float64, torch.float32)
                widest = next((dtype for dtype in wide if dtype in dtypes), torch.bfloat16)
                for mode in (Widened(widest), WithoutHiddenDropout(), *modes):
                    stack.enter_context(mode)
            yield

    def _sampled(self, trial: Trial) -> Tensor:
        """Return enough values of each parameter's gradient, in fp64 on the CPU."""
        if trial.is_forward_only:
            loss: Tensor = trial.loss
            return loss.reshape(1).double().cpu()
        samples = [_some(p) for p in self._rollback.parameters() if p.requires_grad]
        return torch.cat(samples) if samples else torch.zeros(1, dtype=torch.float64)

    # ---- which examples ------------------------------------------------------------------------

    def telling_start(self, cut: Cut) -> int:
        """Return where to start: at the examples that differ most in what a loss may count."""
        division = self._division
        if not division.is_free and division.dims is examples.FIRST:
            return 0  # the user's function splits
        scores = torch.zeros(cut.num - 1)
        for path, tensor in examples.named_tensors(cut.batch, division.whole):
            dim = cut.dims.of(path, tensor.dim())
            if dim is None or not tensor.dim() or tensor.size(dim) != cut.num:
                continue
            if tensor.is_floating_point() and not is_of_labels(tensor):
                continue
            scores += _differences(tensor.movedim(dim, 0).reshape(cut.num, -1).cpu())
        given = division.weight
        if given not in (None, "mean", "sum"):  # avoid examples that have weight 0
            weigh = weigher(given)
            is_empty = [float(weigh(each, 1)) == 0 for each in self.singles(cut)]
            scores += _where_empty(torch.tensor(is_empty), torch.zeros(()))
        return self.around(cut, int(scores.argmax()))

    def around(self, cut: Cut, at: int) -> int:
        """Return where to start so that the cut comes after example `at`, if possible."""
        return min(max(at + 1 - cut.at, 0), cut.num - cut.total)

    def singles(self, cut: Cut) -> Sequence[Any]:
        """Return every example of the batch by itself."""
        return self._division.pieces(cut.batch, [1] * cut.num, cut.dims)


def _some(parameter: Tensor) -> Tensor:
    """Return evenly spaced values of a parameter's gradient."""
    gradient = parameter.grad
    step = -(-parameter.numel() // _MOST_SAMPLES) | 1
    if gradient is None:
        return torch.zeros(-(-parameter.numel() // step), dtype=torch.float64)
    gradient = gradient.detach()
    gradient = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    gradient = torch.view_as_real(gradient)[..., 0] if gradient.is_complex() else gradient
    return gradient.reshape(-1)[::step].double().cpu()


def _differences(rows: Tensor) -> Tensor:
    """Return how much each row differs from the next in what may be counted.

    Rows where everything is ignored get a score far below 0.
    """
    if rows.size(1) == 1:
        apart = (rows[1:] != rows[:-1]).float()[:, 0]
    else:
        counts = torch.stack([(rows != IGNORED).sum(1), (rows != 0).sum(1)]).float()
        apart = (counts[:, 1:] - counts[:, :-1]).abs().sum(0)
    return _where_empty((rows == IGNORED).all(1), apart / apart.max().clamp(min=1))


def _where_empty(is_empty: Tensor, scores: Tensor) -> Tensor:
    """Return the scores, with a value far below 0 where one of two neighbours counts nothing."""
    return torch.where(is_empty[1:] | is_empty[:-1], -1e3, scores)


def norms_in_training(model: nn.Module) -> Iterator[str]:
    """Yield the names of the model's BatchNorms that use batch statistics."""
    return (name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training)


@contextmanager
def frozen_norms(model: nn.Module) -> Iterator[None]:
    """Make BatchNorm use its running statistics, whatever mode a loss sets the model to."""
    was_training: dict[int, bool] = {}

    def hold(module: nn.Module, _: Any) -> None:
        was_training[id(module)], module.training = module.training, False

    def let_go(module: nn.Module, *_: Any) -> None:
        module.training = was_training.pop(id(module), module.training)

    norms = [each for each in model.modules() if isinstance(each, _BatchNorm)]
    handles = [each.register_forward_pre_hook(hold) for each in norms]
    handles += [each.register_forward_hook(let_go, always_call=True) for each in norms]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def in_full_precision() -> Iterator[None]:
    """Switch off TF32, and compiled code, which would be recompiled for each size."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if torch.cuda.is_available():
            cudnn: Any = torch.backends.cudnn
            stack.enter_context(cudnn.flags(enabled=cudnn.enabled, allow_tf32=False))
        yield

"""The first batch that is split -> how its pieces count, tried on a few of its examples.

Some examples are run as a whole and in two pieces, and their gradients compared, as `oomph check`
does it: the weights that put the pieces together tell what the loss divides by, what is left over
tells that examples depend on each other, or that the batch was cut along another dimension than
that of its examples. Nothing is trained: each run is undone. What the Stepper was told (weight,
batch_dim) is held against it, too.

BatchNorm is told of, and held still while the rest is looked at: that its statistics are those of
a piece is what everybody gets who accumulates, and other differences are not to hide behind it.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from oomph.errors import OomphError, UsageError
from oomph.records.check import SAME_IN_FP32, SAME_IN_FP64, Finding
from oomph.stability import coupling
from oomph.stability.equivalence import fitted
from oomph.stability.examples import mapped
from oomph.stability.normalisers import Divisors, Weighing, is_of_labels, shares, weighings
from oomph.stability.randomness import Drawing, Draws, Redrawing, WithoutHiddenDropout
from oomph.stability.trial import Widened
from oomph.stability.whereabouts import Whereabouts
from oomph.training import examples
from oomph.training.division import Division, named_by
from oomph.training.examples import Dims
from oomph.training.out_of_memory import is_out_of_memory
from oomph.training.recovery import release
from oomph.training.rollback import Rollback, restore_rngs, rng_states
from oomph.training.stepper_options import no_scalar
from oomph.training.weights import IGNORED, Weight, weigher, weights_of

OnDifference = Literal["raise", "warn", "ignore"]
ON_DIFFERENCE = ("raise", "warn", "ignore")

_MOST_EXAMPLES, _FEW_EXAMPLES = 8, 4
_MOST_CHECKS = 8  # of batches that might tell more
_MANY = 8  # parts of a batch: more are examples
_MOST_SAMPLES = 2048  # of a parameter's gradient
# Gradients of half precision: rounding is as large as this, and what is larger is none.
_SAME_IN_HALF, _OTHER_IN_HALF = 2e-2, 0.2
_SAME_SHARE = 1e-9
_UNDIVIDED = 1e-6  # of a gradient: nearer than other examples ever are
_SAME_LOSS = 1e-3  # relative; TF32 and kernels of other sizes included
_TRAIN_ANYWAY = 'on_difference="warn" to train anyway'
_COUNT = "weight=function, where function(batch) returns what the loss divides by"
_SUM = "nothing: it is a sum"
# What models and losses raise that do not take a piece of some size, or cut in some way.
_REFUSALS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
_DOES_NOT_FIT = "two examples do not fit into memory at once"
_IS_SINGLE = "the batch has only one example"


class Trial:
    """One run of a few examples, by whoever runs pieces: what a Micro needs of a Stepper."""

    newest: Any = None  # for libraries: its loss is none that was asked for

    def __init__(
        self,
        data: Any,
        num: int,
        context: Any,
        undo: Callable[[], None],
        *,
        is_forward_only: bool,
    ) -> None:
        self.data, self.num = data, num
        self._context, self._undo, self.is_forward_only = context, undo, is_forward_only
        self.loss: Any = None
        self.error: BaseException | None = None
        self.is_out_of_memory = False
        self.gradient: Any = None  # samples of it, or the loss where only forward is run

    def forward_context(self) -> AbstractContextManager[Any]:
        return self._context  # type: ignore[no-any-return]

    def backward(self, loss: Any, share: float) -> None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise no_scalar(loss)
        self.loss = loss.detach()
        if not self.is_forward_only:
            (loss if share == 1 else loss * share).backward()

    def catches(self, error: BaseException) -> bool:
        """A size that does not fit, or a cut that the model does not take: others are tried."""
        self.is_out_of_memory = is_out_of_memory(error)
        if self.is_out_of_memory:
            release(error)
        elif not isinstance(error, _REFUSALS):
            self._undo()
            return False
        traceback.clear_frames(error.__traceback__)  # they hold activations
        self.error = error
        return True


@dataclass(frozen=True)
class _Whole:
    """Some examples together."""

    gradient: Any
    draws: Draws
    is_repeatable: bool


@dataclass(frozen=True)
class _Ran:
    """What was run of one batch: some examples, as a whole and in pieces."""

    whole: Any  # gradients
    pieces: list[Any]
    batches: list[Any]  # of the pieces
    sizes: list[int]
    divisors: list[Divisors]
    is_repeatable: bool  # another seed changes nothing: all that is drawn can be drawn again

    def left_over(self, weights: Sequence[float]) -> float:
        """What these weights leave of the gradient."""
        parts = [w * g for w, g in zip(weights, self.pieces, strict=True)]
        scale = max(float(self.whole.norm()), *(float(part.norm()) for part in parts))
        return float((self.whole - sum(parts)).norm()) / scale

    @property
    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(g).all()) for g in (self.whole, *self.pieces))

    @property
    def is_undivided(self) -> bool:
        """Does each piece give the gradient of the whole? Then what was cut is not used."""
        scale = float(self.whole.norm())
        return all(float((self.whole - g).norm()) <= _UNDIVIDED * scale for g in self.pieces)

    @property
    def is_empty(self) -> bool:
        return not all(bool(g.any()) for g in (self.whole, *self.pieces))


@dataclass
class _Found:
    """What became of one way to cut the batch."""

    batch: Any
    dims: Dims
    num: int
    at: int = 0  # where the examples begin that were run, and where they were cut
    cut: int = 0
    total: int = 0
    matches: list[tuple[Weight, str]] = field(default_factory=list)  # what may be divided by
    alike: list[Weighing] = field(default_factory=list)  # what every example has as much of
    read: list[str] = field(default_factory=list)  # off the loss itself
    is_exact: bool = False  # some weights give the whole gradient
    residual: float | None = None  # that the best weights leave
    unknown: str | None = None  # why nothing can be told
    error: BaseException | None = None  # the model does not take such pieces
    is_forward_only: bool = False
    written: list[str] = field(default_factory=list)  # what each forward changes
    whole: _Whole | None = None


class SplitCheck:
    """Checks the first batch that is split, once.

    on_difference: what to do where pieces train otherwise than the whole: "raise", "warn", or
        "ignore", which does not look.
    """

    def __init__(
        self,
        model: Any,
        division: Division,
        rollback: Rollback,
        say: Callable[[str], None],
        *,
        on_difference: OnDifference = "raise",
        around: Callable[[], AbstractContextManager[Any] | None] = lambda: None,
    ) -> None:
        """around: what each forward runs in."""
        if on_difference not in ON_DIFFERENCE:
            raise UsageError(
                f"on_difference={on_difference!r:.40} is unknown",
                attempt=f"one of {', '.join(ON_DIFFERENCE)}",
            )
        self._model, self._division, self._rollback, self._tell = model, division, rollback, say
        self._on_difference, self._around = on_difference, around
        self._said: set[str] = set()
        self._is_found = False  # the weight, by a check before
        self._was_single = False  # a batch that told nothing: others like it are not asked
        self._known: set[Any] = set()  # kinds of batches that were checked
        self._num_checked, self.is_postponed = 0, False  # until it is known what fits
        self._rivals: list[Weight] = []  # that count the same as the weight, so far
        self._is_plain = False  # no looking at ops: something in the model does not take it
        self._tolerance, self._hard_tolerance = SAME_IN_FP32, SAME_IN_FP32

    @property
    def is_in_doubt(self) -> bool:
        """Could a batch to come show that the weight that was found is another one?"""
        return bool(self._rivals) and not self._division.is_given

    def is_due(self, batch: Any) -> bool:
        """Is this another kind of batch than those that were checked? Asked before each batch."""
        return self._on_difference != "ignore" and (
            bool(self._rivals) or _kind_of(batch) not in self._known
        )

    def is_due_for(
        self, batch: Any, sizes: list[int], others: Sequence[tuple[Any, int]] = ()
    ) -> bool:
        """The same, of a batch that is to be run in pieces of these sizes.

        others: batches that are accumulated with it, and their examples.
        """
        if _kind_of(batch) not in self._known:
            return not (self._was_single and sum(sizes) < 2)
        pieces = [*self._division.pieces(batch, sizes), *(data for data, _ in others)]
        sizes = [*sizes, *(num for _, num in others)]
        mine = shares(self._division.weights(pieces, sizes))
        return any(_differ(mine, rival, pieces, sizes) for rival in self._rivals)

    def trials(self, batch: Any, num: int, size: int, *, is_known_to_fit: bool) -> Iterator[Trial]:
        """What to run, one after the other; then the division is set, or an error is raised.

        All that was done since the last whole step is undone. Where memory is too short to tell,
        it stays due until it is known how many examples fit. Raises UsageError.
        """
        self._rollback.undo()
        before = self._division.weight, self._division.by, self._rivals
        self._rivals = []
        if self._is_found:
            self._division.set_weight(None)
        is_settled = False
        try:
            is_settled = yield from self._checked(batch, num, size, is_known_to_fit)
        finally:
            if not is_settled:  # what was known stays, and what was doubted
                weight, by, self._rivals = before
                self._division.set_weight(weight, by)

    def _checked(
        self, batch: Any, num: int, size: int, is_known_to_fit: bool
    ) -> Generator[Trial, None, bool]:
        """False if it is postponed."""
        with _frozen_norms(self._model):
            found = yield from self._found(batch, num, size)
            where = None
            if not found.is_exact and found.unknown is None and found.error is None:
                where = yield from self._where(batch, found)
        self.is_postponed = found.unknown == _DOES_NOT_FIT and not is_known_to_fit
        if self.is_postponed:
            return False
        self._settle(found, where)
        self._num_checked += 1
        self._was_single |= found.unknown == _IS_SINGLE
        if found.unknown != _IS_SINGLE:  # else the next that has more examples tells
            self._known.add(_kind_of(batch))
        if self._rivals and self._num_checked >= _MOST_CHECKS:
            self._rivals = []
            self._say(
                "oomph cannot tell for certain what the loss divides by, and weights the pieces of"
                f" a batch by {_used(self._division.weight)}. Pass weight= to set it"
            )
        return True

    # ---- which way to cut ------------------------------------------------------------------------

    def _found(self, batch: Any, num: int, size: int) -> Generator[Trial, None, _Found]:
        """The first way to cut that gives the whole gradient; else the likeliest."""
        self._set_tolerance()
        ways = [(self._division.dims, num)]
        if self._division.is_free:
            ways = examples.layouts(batch, self._division.whole) or ways
        tried: list[_Found] = []
        for dims, num_there in ways:
            found = yield from self._tried(batch, dims, num_there, size)
            tried.append(found)
            if found.matches or (found.unknown is not None and found.error is None):
                break  # it is this one, or it is none of the dimension's
        exact = [found for found in tried if found.is_exact]
        return next((found for found in exact if found.matches), (exact or tried)[0])

    def _set_tolerance(self) -> None:
        dtypes = {p.dtype for p in self._rollback.parameters() if p.requires_grad}
        if dtypes & {torch.float16, torch.bfloat16}:
            self._tolerance, self._hard_tolerance = _SAME_IN_HALF, _OTHER_IN_HALF
        elif dtypes == {torch.float64}:
            self._tolerance = self._hard_tolerance = SAME_IN_FP64

    def _tried(self, batch: Any, dims: Dims, num: int, size: int) -> Generator[Trial, None, _Found]:
        """One way to cut, with as many examples as fit."""
        found = _Found(batch, dims, num)
        if num < 2:
            found.unknown = _IS_SINGLE
            return found
        most = min(num, _MOST_EXAMPLES, max(size, _FEW_EXAMPLES))
        sizes = sorted({most, *(k for k in (_FEW_EXAMPLES, 2) if k < most)}, reverse=True)
        attempts = [(k, False) for k in sizes] + [(2, True)]
        for total, is_forward_only in attempts:
            found.is_forward_only, found.error = is_forward_only, None
            is_done = yield from self._compared(batch, found, total)
            if is_done:
                return found
        found.unknown = _DOES_NOT_FIT
        return found

    def _compared(self, batch: Any, found: _Found, total: int) -> Generator[Trial, None, bool]:
        """Compare some examples with their pieces. False if they do not fit into memory."""
        cuts = _cuts(total)
        found.total, found.cut = total, cuts[0]
        try:
            found.at = self._telling(batch, found)
            yield from self._compared_here(batch, found, cuts)
            others = (0, found.num - total)
            if found.matches and (at := self._doubtful(batch, found)) is not None:
                found.at, found.matches = at, []
                yield from self._compared_here(batch, found, cuts)
            elif found.matches and total < _MOST_EXAMPLES and found.num > total:
                # A few may not take the branch in which they meet: some others, too.
                found.at = max(others, key=lambda at: abs(at - found.at))
                yield from self._compared_here(batch, found, cuts[:1])
        except UsageError as error:  # the batch cannot be cut like this
            found.error = error
        except RuntimeError as error:
            if not is_out_of_memory(error):  # of a trial, or of what is compared here
                raise
            release(error)
            return False
        return True

    def _compared_here(
        self, batch: Any, found: _Found, cuts: Sequence[int]
    ) -> Generator[Trial, None, None]:
        whole = yield from self._whole(batch, found)
        for found.cut in cuts:
            ran = yield from self._pieces(batch, found, whole)
            if ran is not None and self._judge(found, ran, is_first=not found.matches):
                break

    def _whole(self, batch: Any, found: _Found) -> Generator[Trial, None, _Whole | None]:
        """The examples together, twice; None if the model does not take them."""
        draws, bound = Draws(), (0, found.total)
        whole = yield from self._run(batch, found, bound, Drawing(draws))
        if whole.error is not None and not self._is_plain:
            self._is_plain = True
            again = yield from self._run(batch, found, bound)
            self._is_plain = again.error is None
            whole = again if self._is_plain else whole
        found.error = whole.error
        if whole.error is not None:
            return None
        redrawing = Redrawing(draws, *bound, found.total)
        again = yield from self._run(batch, found, bound, redrawing, is_other_seed=True)
        found.error = again.error
        if again.error is not None:
            return None
        apart = float((whole.gradient - again.gradient).norm())
        is_repeatable = apart <= self._tolerance * float(whole.gradient.norm())
        return _Whole(whole.gradient, draws, is_repeatable)

    def _pieces(
        self, batch: Any, found: _Found, whole: _Whole | None
    ) -> Generator[Trial, None, _Ran | None]:
        """The same in two pieces; None if the model does not take them."""
        if whole is None:
            return None
        trials, divisors, is_aligned = [], [Divisors(), Divisors()], True
        for bound, each in zip(_bounds(found)[1:], divisors, strict=True):
            redrawing = Redrawing(whole.draws, *bound, found.total)
            trial = yield from self._run(batch, found, bound, each, redrawing)
            trials.append(trial)
            is_aligned &= redrawing.is_aligned
            if trial.error is not None:
                found.error = None if found.matches else trial.error
                return None
        found.error, found.whole = None, whole
        return _Ran(
            whole.gradient,
            [trial.gradient for trial in trials],
            [trial.data for trial in trials],
            [trial.num for trial in trials],
            divisors,
            is_repeatable=is_aligned and whole.is_repeatable,
        )

    def _run(
        self,
        batch: Any,
        found: _Found,
        bound: tuple[int, int],
        *modes: Any,
        is_other_seed: bool = False,
    ) -> Generator[Trial, None, Trial]:
        """Some examples, from the same state as ever."""
        start, stop = found.at + bound[0], found.at + bound[1]
        sizes = [start, stop - start, found.num - stop]
        pieces = self._division.pieces(batch, [size for size in sizes if size], found.dims)
        data = mapped(pieces[int(start > 0)], _own)
        context = self._context((), found) if self._is_plain else self._context(modes, found)
        trial = Trial(
            data,
            stop - start,
            context,
            self._rollback.undo,
            is_forward_only=found.is_forward_only,
        )
        for parameter in self._rollback.parameters():
            parameter.grad = None  # not those that came with a checkpoint, or were there before
        other_rngs = rng_states("cpu", keeps_other_rngs=True)[1:]
        if is_other_seed:
            _seed(1)
        try:
            yield trial
            if trial.error is None:
                trial.gradient = self._sampled(trial)
                trial.data = pieces[int(start > 0)]  # as it was before the user's code had it
            found.written = self._rollback.written()
        finally:
            restore_rngs(other_rngs)
            self._rollback.undo()
        if trial.is_out_of_memory:
            raise torch.OutOfMemoryError
        return trial

    @contextmanager
    def _context(self, modes: Sequence[Any], found: _Found) -> Iterator[None]:
        with ExitStack() as stack:
            around = self._around()
            if around is not None:
                stack.enter_context(around)
            stack.enter_context(in_full_precision())
            if found.is_forward_only:
                stack.enter_context(torch.no_grad())
            if not self._is_plain:
                stack.enter_context(Widened(_widest(self._rollback.parameters())))
                stack.enter_context(WithoutHiddenDropout())
            for mode in modes:
                stack.enter_context(mode)
            yield

    def _sampled(self, trial: Trial) -> Any:
        """Values of each parameter's gradient, as many as tell enough; in fp64, on the CPU."""
        if trial.is_forward_only:
            return trial.loss.reshape(1).double().cpu()
        samples = [_some(p) for p in self._rollback.parameters() if p.requires_grad]
        return torch.cat(samples) if samples else torch.zeros(1, dtype=torch.float64)

    def _telling(self, batch: Any, found: _Found) -> int:
        """Where to begin: examples that differ most in how much they have that may be counted."""
        if not self._division.is_free and self._division.dims is examples.FIRST:
            return 0  # a function of the user's splits
        named = examples.named_tensors(batch, self._division.whole)
        scores = torch.zeros(found.num - 1)
        for path, tensor in named:
            dim = found.dims.of(path, tensor.dim())
            if dim is None or not tensor.dim() or tensor.size(dim) != found.num:
                continue
            if tensor.is_floating_point() and not is_of_labels(tensor):
                continue
            scores += _differences(tensor.movedim(dim, 0).reshape(found.num, -1).cpu())
        scores += self._nothing_counts(batch, found)
        at = int(scores.argmax()) + 1 - found.cut
        return min(max(at, 0), found.num - found.total)

    def _doubtful(self, batch: Any, found: _Found) -> int | None:
        """Where examples begin that tell apart what these could not; None if none do."""
        weight, said = found.matches[0]
        rivals = [] if said in found.read else _rivals(found, said)
        if not rivals or found.num <= found.total:
            return None
        singles = self._division.pieces(batch, [1] * found.num, found.dims)
        mine = [float(weigher(weight)(each, 1)) for each in singles]
        for rival in rivals:
            theirs = [float(weigher(rival)(each, 1)) for each in singles]
            for at in range(found.num - 1):
                here, there = slice(at, at + 2), theirs[at] * mine[at + 1]
                is_counted = min(*mine[here], *theirs[here]) > 0
                if is_counted and abs(there - theirs[at + 1] * mine[at]) > _SAME_SHARE:
                    return min(max(at + 1 - found.cut, 0), found.num - found.total)
        return None

    def _nothing_counts(self, batch: Any, found: _Found) -> Any:
        """Much less than 0 where an example counts nothing by the weight that was given."""
        given = self._division.weight
        if given in (None, "mean", "sum"):
            return torch.zeros(found.num - 1)
        singles, weigh = self._division.pieces(batch, [1] * found.num, found.dims), weigher(given)
        is_empty = torch.tensor([float(weigh(each, 1)) == 0 for each in singles])
        return torch.where(is_empty[1:] | is_empty[:-1], -1e3, 0.0)

    # ---- what it tells -------------------------------------------------------------------------

    def _judge(self, found: _Found, ran: _Ran, *, is_first: bool) -> bool:
        """True if another cut would tell nothing more."""
        found.unknown = None
        if not ran.is_finite or ran.is_empty:
            if not found.matches:
                found.unknown = "the gradients of some examples are zero or not finite"
            return False
        within = _SAME_LOSS if found.is_forward_only else self._hard_tolerance
        _, found.residual = fitted(ran.whole, ran.pieces)
        if found.residual > within or (ran.is_undivided and not found.is_forward_only):
            found.is_exact, found.matches = False, []
            is_mixed = found.whole is not None and bool(found.whole.draws.mixing)
            if not ran.is_repeatable and not is_mixed:
                found.unknown = "the model uses random numbers that oomph cannot repeat"
            return True
        among = None if is_first else {said for _, said in found.matches}
        found.matches = self._matches(ran, found, within, among)
        # Any weights fit a single number.
        found.is_exact = bool(found.matches) or not found.is_forward_only
        return len(found.matches) <= 1

    def _matches(
        self, ran: _Ran, found: _Found, within: float, among: set[str] | None
    ) -> list[tuple[Weight, str]]:
        """What gives the whole gradient, of all that a loss may divide by."""
        off: dict[str, tuple[float, Weight]] = {}
        for weight, said in self._candidates(ran, found):
            if among is None or said in among:
                counts = weights_of(ran.batches, ran.sizes, weigher(weight))
                weights = counts if weight == "sum" else shares(counts)
                off.setdefault(said, (ran.left_over(weights), weight))
        best = min((left for left, _ in off.values()), default=1.0)
        near = min(max(3 * best, self._tolerance / 100), within)
        return [(weight, said) for said, (left, weight) in off.items() if left <= near]

    def _candidates(self, ran: _Ran, found: _Found) -> Iterator[tuple[Weight, str]]:
        if self._division.weight is not None:
            yield self._division.weight, _given(self._division.weight)
        counted = [
            each
            for each in weighings(ran.batches[0], ran.divisors[0].found)
            if min(_counts(each, ran)) >= 0 and any(_counts(each, ran))
        ]
        found.alike = [each for each in counted if self._is_alike(each, ran, found.dims)]
        found.read = [each.said for each in counted if each.is_read]
        for each in counted:
            if each.is_read and _counts(each, ran) != ran.sizes:
                yield each.count, each.said
        yield "mean", "examples"
        yield "sum", _SUM
        for each in counted:
            if not each.is_read and each not in found.alike:
                yield each.count, each.said

    def _is_alike(self, weighing: Weighing, ran: _Ran, dims: Dims) -> bool:
        """Does it count as much in each example? Then it is a mean over examples here."""
        if len({c / n for c, n in zip(_counts(weighing, ran), ran.sizes, strict=True)}) > 1:
            return False
        singles = [
            each
            for batch, num in zip(ran.batches, ran.sizes, strict=True)
            for each in self._division.pieces(batch, [1] * num, dims)
        ]
        return len({float(weighing.count(each)) for each in singles}) == 1

    # ---- what follows ----------------------------------------------------------------------------

    def _where(self, batch: Any, found: _Found) -> Generator[Trial, None, Finding | None]:
        """In which module or loss examples meet: everything is run once more."""
        if found.whole is None or self._is_plain:
            return None
        runs: list[Any] = []
        try:
            for bound in _bounds(found):
                where = Whereabouts(self._model, keeps=True)
                pairs = coupling.Pairs(where, bound[1] - bound[0])
                redrawing = Redrawing(found.whole.draws, *bound, found.total)
                trial = yield from self._run(batch, found, bound, where, pairs, redrawing)
                runs.append((trial, where.calls, pairs.op))
            gradients = [trial.gradient for trial, _, _ in runs]
            is_constant = yield from self._is_constant_term(batch, found, found.whole, gradients)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            release(error)
            return None
        if any(trial.error is not None for trial, _, _ in runs):
            return None
        if is_constant:
            return coupling.constant_term()
        return coupling.finding_of(
            self._model,
            coupling.first_meeting(runs[0][1], [calls for _, calls, _ in runs[1:]]),
            mixing=found.whole.draws.mixing,
            pairs=runs[0][2] if all(op for _, _, op in runs) else None,
            scalars=coupling.single_values(self._model, runs[0][1]),
        )

    def _is_constant_term(
        self, batch: Any, found: _Found, whole: _Whole, gradients: list[Any]
    ) -> Generator[Trial, None, bool]:
        """Is what is counted too often the same wherever the examples are cut?"""
        other = next((cut for cut in _cuts(found.total) if cut != found.cut), None)
        if other is None:
            return False
        for bound in ((0, other), (other, found.total)):
            redrawing = Redrawing(whole.draws, *bound, found.total)
            trial = yield from self._run(batch, found, bound, redrawing)
            gradients = [*gradients, trial.gradient]
        if any(each is None for each in gradients):
            return False
        apart = gradients[1] + gradients[2] - gradients[3] - gradients[4]
        return float(apart.norm()) <= self._tolerance * float(gradients[0].norm())

    def _settle(self, found: _Found, where: Finding | None) -> None:
        """Set what was found, and say it; or raise."""
        given = self._division.weight
        self._tell_of_norms()
        if found.is_exact:
            self._tell_of_dims(found)
            self._tell_of_writes(found)
            self._tell_of_rounding(found)
            self._weigh(found)
            return
        if found.error is not None:
            raise self._not_taken(found, found.error)
        if found.unknown is not None:
            text = f"oomph cannot tell how to weight the pieces of a batch: {found.unknown}"
            if found.unknown == _IS_SINGLE and given is None:
                self._say(f"{text}. It counts examples; pass weight= if the loss is another mean")
            elif given is None:
                self._differs(text, "weight=, to say what the loss is a mean of")
            else:
                self._say(f"{text}. It uses {_given(given)}, as you asked")
            return
        self._differs(*_coupled(found, where))

    def _weigh(self, found: _Found) -> None:
        given, matches = self._division.weight, found.matches
        if given is not None:
            if any(weight is given for weight, _ in matches):
                self._rivals = _rivals(found, _given(given)) if isinstance(given, str) else []
                return
            others = [said for _, said in matches]
            says = (
                f"the loss is a mean over {others[0]}"
                if others
                else "the loss divides by something else"
            )
            if others and matches[0][0] == "sum":
                says = "the loss is a sum"
            self._differs(
                f"{_given(given)} is wrong: {says}",
                _suggested(matches),
            )
            return
        if not matches:
            self._differs(
                "the loss divides by something that differs between examples and that oomph does"
                " not recognise",
                _COUNT,
            )
            return
        weight, said = self._as_before(found) or matches[0]
        self._rivals = [] if said in found.read else _rivals(found, said)
        if callable(weight) and said not in found.read:
            weight = _of_some(weight, said)
        self._division.set_weight(weight, said)
        self._is_found = True
        if weight == "mean":
            return
        if weight == "sum":
            self._say("the loss is a sum over examples, so oomph adds up the pieces of a batch")
        else:
            self._say(
                f"the loss is a mean over {said}, so oomph weights pieces of a batch by these"
            )

    def _as_before(self, found: _Found) -> tuple[Weight, str] | None:
        """What batches counted by before a checkpoint, if this one may count by it, too."""
        alike: list[tuple[Weight, str]] = [(each.count, each.said) for each in found.alike]
        before = self._division.by_before
        return next((m for m in [*found.matches, *alike] if named_by(*m) == before), None)

    def tell_of_doubt(
        self, batch: Any, sizes: list[int], others: Sequence[tuple[Any, int]]
    ) -> None:
        """Where batches that were checked one by one could count otherwise beside each other."""
        if _kind_of(batch) in self._known and self.is_due_for(batch, sizes, others):
            self._say(
                "what the loss divides by cannot be told for certain from this batch: pieces count"
                f" by {self._division.by}. weight= says by what"
            )

    def tell_of_carried(self) -> None:
        """Of batches before a checkpoint nobody can count anything else any more."""
        if self._rivals:
            self._say(
                "what the loss divides by cannot be told for certain, and batches from before the"
                f" checkpoint count by {self._division.by}. weight= says by what"
            )

    def _differs(self, what: str, attempt: str) -> None:
        """Raises UsageError, unless it was told to go on."""
        if self._on_difference == "raise":
            raise UsageError(
                "splitting this batch would change the training",
                because=what,
                attempt=f"{attempt}; or {_TRAIN_ANYWAY}",
            )
        self._say(
            f"training in pieces differs from training on whole batches: {what}. Try: {attempt}"
        )

    def _say(self, text: str) -> None:
        """Once, though another kind of batch is checked again."""
        if text not in self._said:
            self._said.add(text)
            self._tell(text)

    def _not_taken(self, found: _Found, error: BaseException) -> BaseException:
        if isinstance(error, OomphError):
            return error
        told = " ".join(str(error).split())[:200]
        refused = UsageError(
            "this batch cannot be split",
            because=f"it has {_shapes(found.batch)}, and the model fails on its pieces, however"
            f" they are cut: {type(error).__name__}: {told}",
            attempt='batch_dim={"name": 1} to name the dimension of the examples, or {"name": None}'
            " to pass a tensor whole to every piece; or split=function and count=function",
        )
        refused.__cause__ = error
        return refused

    def _tell_of_dims(self, found: _Found) -> None:
        if found.dims is self._division.dims or found.dims is examples.FIRST:
            return
        self._division.dims = found.dims
        named = found.dims.named
        cut = [
            f"{path or 'it'} along dimension {dim}"
            for path, dim in named.items()
            if dim is not None
        ]
        whole = [path for path, dim in named.items() if dim is None]
        passed = f", and passes {', '.join(whole)} whole to every piece" if whole else ""
        self._say(
            f"the batch has {found.num} examples: oomph splits {', '.join(cut)}{passed}. Pass"
            f" batch_dim={dict(named)!r} to set this beforehand"
        )

    def _tell_of_norms(self) -> None:
        name = next(_norms_in_training(self._model), None)
        if name is not None:
            self._say(
                f"BatchNorm ({name}) normalises each piece of a batch by itself, so training"
                " differs from training on whole batches. GroupNorm, or BatchNorm in eval mode,"
                " avoids this"
            )

    def _tell_of_rounding(self, found: _Found) -> None:
        if not found.is_forward_only and (found.residual or 0) > self._tolerance:
            self._say(
                f"gradients of pieces differ by {found.residual:.2g} from those of the whole batch."
                " In half precision oomph cannot tell rounding from a real difference:"
                " `oomph check` can, in fp64"
            )

    def _tell_of_writes(self, found: _Found) -> None:
        if found.written:
            rest = f" (and {len(found.written) - 1} more)" if len(found.written) > 1 else ""
            self._say(
                f"{found.written[0]}{rest} changes in every forward: once for each piece of a"
                " batch instead of once a step. Training differs a little from training on whole"
                " batches"
            )


def _cuts(total: int) -> list[int]:
    """Uneven, and then others: 3 + 5, 2 + 6, 4 + 4."""
    wanted = (3 * total // 8, total // 4, total // 2)
    return list(dict.fromkeys(max(at, 1) for at in wanted))


def _rivals(found: _Found, mine: str) -> list[Weight]:
    """What counts the same here, and may not in another batch."""
    others: list[Weight] = [w for w, said in found.matches if said != mine and w != "sum"]
    if all(weight != "mean" for weight, _ in found.matches):
        return others
    may_differ = [each for each in found.alike if each.is_of_labels or each.is_read]
    return [*others, *(each.count for each in may_differ)]


def _differ(mine: Sequence[float], rival: Weight, pieces: Sequence[Any], sizes: list[int]) -> bool:
    """Do pieces have other shares by a rival?"""
    try:
        theirs = shares(weights_of(pieces, sizes, weigher(rival)))
    except (UsageError, KeyError):  # nothing of it is here
        return True
    return any(abs(a - b) > _SAME_SHARE for a, b in zip(mine, theirs, strict=True))


def _kind_of(batch: Any) -> Any:
    """What is in a batch: names, and which of them are None."""
    if isinstance(batch, Mapping):
        return tuple(name for name, part in batch.items() if part is not None)
    if isinstance(batch, list | tuple):
        return tuple(part is None for part in batch) if len(batch) < _MANY else type(batch)
    return type(batch)


def _of_some(count: Callable[[Any], Any], said: str) -> Callable[[Any], Any]:
    """The count, where there is any: else a piece would be left out that may not be empty.

    Of labels that torch's own loss ignores it is known that they add nothing; of a sum that is
    divided by the number of positives it is not so.
    """

    def counted(batch: Any) -> Any:
        value = count(batch)
        if not float(value):
            raise UsageError(
                f"a piece of the batch has none of {said}",
                because="the loss divides by these, so oomph cannot weight that piece",
                attempt="a larger micro_batch=; or weight=function, where function(batch) returns 0"
                " for a piece that adds nothing to the loss",
            )
        return value

    return counted


def _bounds(found: _Found) -> list[tuple[int, int]]:
    """Of the whole, and of its two pieces."""
    return [(0, found.total), (0, found.cut), (found.cut, found.total)]


def _given(weight: Weight) -> str:
    return f'weight="{weight}"' if isinstance(weight, str) else "your weight function"


def _used(weight: Weight | None) -> str:
    return (
        "examples"
        if weight in (None, "mean")
        else str(weight)
        if isinstance(weight, str)
        else "a count of its own"
    )


def _counts(weighing: Weighing, ran: _Ran) -> list[float]:
    return [float(weighing.count(batch)) for batch in ran.batches]


def _suggested(matches: Sequence[tuple[Weight, str]]) -> str:
    if not matches:
        return _COUNT
    weight = matches[0][0]
    return (
        f'weight="{weight}"'
        if isinstance(weight, str)
        else "leaving weight= out: oomph finds this one"
    )


def _coupled(found: _Found, where: Finding | None) -> tuple[str, str]:
    """What differs, and what to do."""
    by = (
        f" (relative difference of the gradients: {found.residual:.2g})"
        if found.residual is not None
        else ""
    )
    if where is None:
        what = f"its examples depend on each other, or lie along another dimension{by}"
        return what, "batch_dim=, if the examples lie along another dimension"
    return f"in {where.where}, {where.what}{by}", where.do


def _shapes(batch: Any) -> str:
    named = [f"{name} of {list(t.shape)}" for name, t in examples.named_tensors(batch)]
    return ", ".join(named[:8]) or "no tensors"


def _own(_: str, leaf: Any) -> Any:
    """A copy that the user's code may change."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _some(parameter: Any) -> Any:
    """Values of a parameter's gradient at even distances."""
    gradient = parameter.grad
    step = -(-parameter.numel() // _MOST_SAMPLES) | 1
    if gradient is None:
        return torch.zeros(-(-parameter.numel() // step), dtype=torch.float64)
    gradient = gradient.detach()
    gradient = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    gradient = torch.view_as_real(gradient)[..., 0] if gradient.is_complex() else gradient
    return gradient.reshape(-1)[::step].double().cpu()


def _widest(parameters: Sequence[Any]) -> torch.dtype:
    dtypes = {p.dtype for p in parameters if p.requires_grad}
    return next((d for d in (torch.float64, torch.float32) if d in dtypes), torch.bfloat16)


def _differences(rows: Any) -> Any:
    """How far each row is from the next in what may be counted; never where all is ignored."""
    if rows.size(1) == 1:
        apart = (rows[1:] != rows[:-1]).float()[:, 0]
    else:
        counts = torch.stack([(rows != IGNORED).sum(1), (rows != 0).sum(1)]).float()
        apart = (counts[:, 1:] - counts[:, :-1]).abs().sum(0)
    apart = apart / apart.max().clamp(min=1)
    is_empty = (rows == IGNORED).all(1)
    return torch.where(is_empty[1:] | is_empty[:-1], -1e3, apart)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def _norms_in_training(model: Any) -> Iterator[str]:
    return (name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training)


@contextmanager
def _frozen_norms(model: Any) -> Iterator[None]:
    """BatchNorm uses its running statistics in here, whatever mode a loss sets the model to."""
    was_training: dict[int, bool] = {}

    def hold(module: Any, _: Any) -> None:
        was_training[id(module)], module.training = module.training, False

    def let_go(module: Any, *_: Any) -> None:
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
    """No TF32, and no compiled code, which would be compiled anew for each size."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if torch.cuda.is_available():
            cudnn: Any = torch.backends.cudnn
            stack.enter_context(cudnn.flags(enabled=cudnn.enabled, allow_tf32=False))
        yield

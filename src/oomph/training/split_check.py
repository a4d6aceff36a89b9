"""The first batch that is split -> the weights of its pieces, or an error.

A few examples are run as a whole and in two pieces (split_trials.py) and the gradients compared, as
`oomph check` does. The weights that recombine the pieces show what the loss divides by. A remainder
shows that examples depend on each other, or that the batch was split along the wrong dimension. The
user's weight and batch_dim are checked too. BatchNorm, whose statistics are always per piece, gets
a warning and is frozen during the check, so that it hides no other difference.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from oomph.errors import OomphError, UsageError
from oomph.records.check import Finding
from oomph.stability import examples
from oomph.stability.coupling import cuts, fitted
from oomph.stability.examples import Dims
from oomph.stability.normalisers import Weighing, shares, weighings
from oomph.stability.trial import one_line
from oomph.training.micro_batches import (
    SAME_SHARE,
    Division,
    Weight,
    counts_otherwise,
    named_by,
    neighbours_apart,
    weigher,
    weights_of,
)
from oomph.training.recovery import if_memory_allows
from oomph.training.rollback import Rollback
from oomph.training.split_trials import (
    Compared,
    Cut,
    Trial,
    Trials,
    frozen_norms,
    norms_in_training,
)

OnDifference = Literal["raise", "warn", "ignore"]
ON_DIFFERENCE = ("raise", "warn", "ignore")

# Judgement, all of these: a check costs a few steps and is made once per kind of batch.
_MOST_EXAMPLES, _FEW_EXAMPLES = 8, 4
_MOST_CHECKS = 8  # checks of batches that might resolve a doubt
_MANY = 8  # entries of a batch: a longer list is a list of examples
_SAME_LOSS = 1e-3  # relative; covers TF32 and kernels chosen for other sizes
_TRAIN_ANYWAY = 'on_difference="warn" to train anyway'
_COUNT = "weight=function, where function(batch) returns what the loss divides by"
_SUM = "nothing: it is a sum"
_DOES_NOT_FIT = "two examples do not fit into memory at once"
_IS_SINGLE = "the batch has only one example"


@dataclass
class _Found(Cut):
    """The result of splitting the batch along one dimension."""

    matches: list[tuple[Weight, str]] = field(default_factory=list)  # what the loss may divide by
    alike: list[Weighing] = field(default_factory=list)  # counts that are equal in every example
    read: list[str] = field(default_factory=list)  # read off the loss itself
    is_exact: bool = False  # some weights reproduce the whole gradient
    residual: float | None = None  # left by the best weights
    unknown: str | None = None  # why nothing can be concluded


class SplitCheck:
    """Checks the first batch that is split, once per kind of batch.

    on_difference: what to do if training in pieces differs from training on whole batches: "raise",
    "warn", or "ignore", which skips the check.
    """

    def __init__(
        self,
        model: nn.Module,
        division: Division,
        rollback: Rollback,
        say: Callable[[str], None],
        *,
        on_difference: OnDifference = "raise",
        around: Callable[[], AbstractContextManager[Any] | None] = lambda: None,
        is_sharded: bool = False,
    ) -> None:
        """around: returns the context that each forward runs in.

        is_sharded: gradients would be those of all ranks' trials, so losses are compared.
        """
        if on_difference not in ON_DIFFERENCE:
            raise UsageError(
                f"on_difference={on_difference!r:.40} is unknown",
                attempt=f"one of {', '.join(ON_DIFFERENCE)}",
            )
        self._model, self._division, self._rollback, self._report = model, division, rollback, say
        self._on_difference = on_difference
        self._trials = Trials(model, division, rollback, around, is_plain=is_sharded)
        self._is_forward_only = is_sharded
        self._messages: set[str] = set()
        self._is_found = False  # an earlier check found the weight
        self._was_single = False  # a single example showed nothing; skip batches like it
        self._known: set[Any] = set()  # kinds of batches already checked
        self._num_checked, self.is_postponed = 0, False  # postponed until it is known what fits
        self._rivals: list[Weight] = []  # weights that agree with the one found, so far

    @property
    def is_in_doubt(self) -> bool:
        """Return whether a later batch could show that the weight found is wrong."""
        return bool(self._rivals) and not self._division.is_given

    def is_due(self, batch: Any) -> bool:
        """Return whether this kind of batch still needs a check. Called before each batch."""
        return self._on_difference != "ignore" and (
            bool(self._rivals) or _kind_of(batch) not in self._known
        )

    def is_due_for(
        self, batch: Any, sizes: list[int], others: Sequence[tuple[Any, int]] = ()
    ) -> bool:
        """Return whether a batch that will run in pieces of these sizes needs a check.

        others: batches accumulated with it, and their numbers of examples.
        """
        if _kind_of(batch) not in self._known:
            return not (self._was_single and sum(sizes) < 2)
        pieces = [*self._division.pieces(batch, sizes), *(data for data, _ in others)]
        sizes = [*sizes, *(num for _, num in others)]
        mine = shares(self._division.weights(pieces, sizes))
        return any(counts_otherwise(mine, rival, pieces, sizes) for rival in self._rivals)

    def trials(
        self, batch: Any, num: int, size: int, *, is_known_to_fit: bool
    ) -> Generator[Trial, None, None]:
        """Yield the trials to run, then set the division or raise UsageError.

        Everything since the last complete step is undone. If memory is too short for a check, it
        stays due until it is known how many examples fit.
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
            if not is_settled:  # keep the previous weight and its rivals
                weight, by, self._rivals = before
                self._division.set_weight(weight, by)

    def _checked(
        self, batch: Any, num: int, size: int, is_known_to_fit: bool
    ) -> Generator[Trial, None, bool]:
        """Run the check; return False if it is postponed."""
        with frozen_norms(self._model):
            found = yield from self._found(batch, num, size)
            where = None
            if not found.is_exact and found.unknown is None and found.error is None:
                where = yield from self._trials.meeting(found)
        self.is_postponed = found.unknown == _DOES_NOT_FIT and not is_known_to_fit
        if self.is_postponed:
            return False
        self._settle(found, where)
        self._num_checked += 1
        self._was_single |= found.unknown == _IS_SINGLE
        if found.unknown != _IS_SINGLE:  # otherwise wait for a batch with more examples
            self._known.add(_kind_of(batch))
        if self._rivals and self._num_checked >= _MOST_CHECKS:
            self._rivals = []
            weight = self._division.weight
            used = weight if isinstance(weight, str) else "a count of its own"
            self._say(
                "oomph cannot tell for certain what the loss divides by, and weights the pieces of"
                f" a batch by {'examples' if weight in (None, 'mean') else used}. Pass weight= to"
                " set it"
            )
        return True

    # ---- which dimension, which examples -------------------------------------------------------

    def _found(self, batch: Any, num: int, size: int) -> Generator[Trial, None, _Found]:
        """Return the first layout that reproduces the whole gradient, or else the likeliest."""
        self._trials.set_tolerance()
        layouts = [(self._division.dims, num)]
        if self._division.is_free:
            layouts = examples.layouts(batch, self._division.whole) or layouts
        tried: list[_Found] = []
        for dims, num_there in layouts:
            found = _Found(batch, dims, num_there)
            tried.append(found)
            yield from self._try(found, size)
            if found.matches or (found.unknown is not None and found.error is None):
                break  # this layout is right, or the dimension is not the problem
        exact = [found for found in tried if found.is_exact]
        return next((found for found in exact if found.matches), (exact or tried)[0])

    def _try(self, found: _Found, size: int) -> Generator[Trial, None, None]:
        """Check one layout with as many examples as fit."""
        if found.num < 2:
            found.unknown = _IS_SINGLE
            return
        most = min(found.num, _MOST_EXAMPLES, max(size, _FEW_EXAMPLES))
        totals = sorted({most, *(k for k in (_FEW_EXAMPLES, 2) if k < most)}, reverse=True)
        runs = [(total, self._is_forward_only) for total in totals]
        for total, is_forward_only in [*runs, (2, True)]:
            found.is_forward_only, found.error = is_forward_only, None
            with if_memory_allows():  # in a trial and in the comparison here
                try:
                    yield from self._compare(found, total)
                except UsageError as error:  # the batch cannot be split like this
                    found.error = error
                return
        found.unknown = _DOES_NOT_FIT

    def _compare(self, found: _Found, total: int) -> Generator[Trial, None, None]:
        """Compare some examples with their pieces; use others too if these show too little."""
        places = cuts(total)
        found.total, found.at = total, places[0]
        found.start = self._trials.telling_start(found)
        yield from self._compare_here(found, places)
        if found.matches and (start := self._doubtful(found)) is not None:
            found.start, found.matches = start, []
            yield from self._compare_here(found, places)
        elif found.matches and total < _MOST_EXAMPLES and found.num > total:
            # A few examples may miss the branch where examples interact, so try some others too.
            found.start = max((0, found.num - total), key=lambda at: abs(at - found.start))
            yield from self._compare_here(found, places[:1])

    def _compare_here(self, found: _Found, places: Sequence[int]) -> Generator[Trial, None, None]:
        whole = yield from self._trials.whole(found)
        if whole is None:
            return
        for found.at in places:
            ran = yield from self._trials.pieces(found, whole)
            if ran is None:
                found.error = None if found.matches else found.error
            elif self._judge(found, ran, is_first=not found.matches):
                break

    def _doubtful(self, found: _Found) -> int | None:
        """Return where examples start that resolve the doubt; None if none do."""
        weight, counted = found.matches[0]
        rivals = [] if _is_proven(found, counted) else _rivals(found, counted)
        if not rivals or found.num <= found.total:
            return None
        singles = self._trials.singles(found)
        apart = (neighbours_apart(weight, rival, singles) for rival in rivals)
        telling = (at for each in apart for at, by in enumerate(each) if by > SAME_SHARE)
        at = next(telling, None)
        return None if at is None else self._trials.around(found, at)

    # ---- what the comparison shows -------------------------------------------------------------

    def _judge(self, found: _Found, ran: Compared, *, is_first: bool) -> bool:
        """Judge one comparison; return True if another cut would show nothing more."""
        found.unknown = None
        within = _SAME_LOSS if found.is_forward_only else self._trials.hard_tolerance
        # A piece without a gradient shows no weights, but the other must then give the whole.
        residual = fitted(ran.whole, ran.pieces)[1] if ran.is_finite else 0.0
        if not ran.is_telling and not residual > within:
            if not found.matches:
                found.unknown = "the gradients of some examples are zero or not finite"
            return False
        found.residual = residual
        if residual > within or (ran.is_undivided and not found.is_forward_only):
            found.is_exact, found.matches = False, []
            is_mixed = found.whole is not None and bool(found.whole.draws.mixing)
            if not ran.is_repeatable and not is_mixed:
                found.unknown = "the model uses random numbers that oomph cannot repeat"
            return True
        among = None if is_first else {counted for _, counted in found.matches}
        found.matches = self._matches(ran, found, within, among)
        # Any weights fit a single number.
        found.is_exact = bool(found.matches) or not found.is_forward_only
        return len(found.matches) <= 1

    def _matches(
        self, ran: Compared, found: _Found, within: float, among: set[str] | None
    ) -> list[tuple[Weight, str]]:
        """Return the candidate divisors of the loss that reproduce the whole gradient."""
        off: dict[str, tuple[float, Weight]] = {}
        for weight, counted in self._candidates(ran, found):
            if among is None or counted in among:
                counts = weights_of(ran.batches, ran.sizes, weigher(weight))
                weights = counts if weight == "sum" else shares(counts)
                off.setdefault(counted, (ran.left_over(weights), weight))
        best = min((left for left, _ in off.values()), default=1.0)
        near = min(max(3 * best, self._trials.tolerance / 100), within)
        return [(weight, counted) for counted, (left, weight) in off.items() if left <= near]

    def _candidates(self, ran: Compared, found: _Found) -> Iterator[tuple[Weight, str]]:
        if self._division.weight is not None:
            yield self._division.weight, _given(self._division.weight)
        candidates = [
            each
            for each in weighings(ran.batches[0], ran.divisors[0].found)
            if min(_counts(each, ran)) >= 0 and any(_counts(each, ran))
        ]
        found.alike = [each for each in candidates if self._is_alike(each, ran, found.dims)]
        found.read = [each.counted for each in candidates if each.is_read]
        for each in candidates:
            if each.is_read and _counts(each, ran) != ran.sizes:
                yield each.count, each.counted
        yield "mean", "examples"
        yield "sum", _SUM
        for each in candidates:
            if not each.is_read and each not in found.alike:
                yield each.count, each.counted

    def _is_alike(self, weighing: Weighing, ran: Compared, dims: Dims) -> bool:
        """Return whether all examples count the same, which makes it a mean over examples."""
        if len({c / n for c, n in zip(_counts(weighing, ran), ran.sizes, strict=True)}) > 1:
            return False
        singles = [
            each
            for batch, num in zip(ran.batches, ran.sizes, strict=True)
            for each in self._division.pieces(batch, [1] * num, dims)
        ]
        return len({float(weighing.count(each)) for each in singles}) == 1

    # ---- consequences --------------------------------------------------------------------------

    def _settle(self, found: _Found, where: Finding | None) -> None:
        """Apply the result and report it, or raise."""
        given = self._division.weight
        self._warn_of_norms()
        if found.is_exact:
            self._report_dims(found)
            self._warn_of_writes(found)
            self._warn_of_rounding(found)
            self._weigh(found)
        elif found.error is not None:
            raise _not_taken(found.batch, found.error)
        elif found.unknown is None:
            self._differs(*_coupled(found, where))
        else:
            text = f"oomph cannot tell how to weight the pieces of a batch: {found.unknown}"
            if given is not None:
                self._say(f"{text}. It uses {_given(given)}, as you asked")
            elif found.unknown == _IS_SINGLE:
                self._say(f"{text}. It counts examples; pass weight= if the loss is another mean")
            else:
                self._differs(text, "weight=, to say what the loss is a mean of")

    def _weigh(self, found: _Found) -> None:
        given, matches = self._division.weight, found.matches
        if given is not None:
            self._hold_against(given, found)
            return
        if not matches:
            self._differs(
                "the loss divides by something that differs between examples and that oomph does"
                " not recognise",
                _COUNT,
            )
            return
        weight, counted = self._as_before(found) or matches[0]
        self._rivals = [] if _is_proven(found, counted) else _rivals(found, counted)
        if callable(weight) and counted not in found.read:
            weight = _of_some(weight, counted)
        self._division.set_weight(weight, counted)
        self._is_found = True
        if weight == "sum":
            self._say("the loss is a sum over examples, so oomph adds up the pieces of a batch")
        elif weight != "mean":
            self._say(
                f"the loss is a mean over {counted}, so oomph weights pieces of a batch by these"
            )

    def _hold_against(self, given: Weight, found: _Found) -> None:
        """Compare the user's weight with what was found."""
        if any(weight is given for weight, _ in found.matches):
            self._rivals = _rivals(found, _given(given)) if isinstance(given, str) else []
            return
        says, attempt = "the loss divides by something else", _COUNT
        if found.matches:
            weight, counted = found.matches[0]
            says = "the loss is a sum" if weight == "sum" else f"the loss is a mean over {counted}"
            attempt = "leaving weight= out: oomph finds this one"
            if isinstance(weight, str):
                attempt = f'weight="{weight}"'
        self._differs(f"{_given(given)} is wrong: {says}", attempt)

    def _as_before(self, found: _Found) -> tuple[Weight, str] | None:
        """Return the weight used before a checkpoint, if this batch allows it too."""
        alike: list[tuple[Weight, str]] = [(each.count, each.counted) for each in found.alike]
        before = self._division.by_before
        return next((m for m in [*found.matches, *alike] if named_by(*m) == before), None)

    # ---- messages ------------------------------------------------------------------------------

    def warn_of_doubt(
        self, batch: Any, sizes: list[int], others: Sequence[tuple[Any, int]]
    ) -> None:
        """Warn if batches that were checked one by one could be weighted differently together."""
        if _kind_of(batch) in self._known and self.is_due_for(batch, sizes, others):
            self._say(
                "oomph cannot tell for certain from this batch what the loss divides by, and"
                f" weights pieces by {self._division.by}. Pass weight= to set it"
            )

    def warn_of_carried(self) -> None:
        """Warn that batches from before a checkpoint can no longer be weighted differently."""
        if self._rivals:
            self._say(
                "oomph cannot tell for certain what the loss divides by. Batches from before the"
                f" checkpoint are weighted by {self._division.by}. Pass weight= to set it"
            )

    def _differs(self, what: str, attempt: str) -> None:
        """Raise UsageError, or only warn if the user wants to go on."""
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
        """Say it once, even if another kind of batch is checked later."""
        if text not in self._messages:
            self._messages.add(text)
            self._report(text)

    def _report_dims(self, found: _Found) -> None:
        if found.dims is self._division.dims or found.dims is examples.FIRST:
            return
        self._division.dims = found.dims
        named = found.dims.named.items()
        cut = [f"{path or 'it'} along dimension {dim}" for path, dim in named if dim is not None]
        whole = [path for path, dim in named if dim is None]
        passed = f", and passes {', '.join(whole)} whole to every piece" if whole else ""
        self._say(
            f"the batch has {found.num} examples: oomph splits {', '.join(cut)}{passed}. Pass"
            f" batch_dim={dict(named)!r} to set this beforehand"
        )

    def _warn_of_norms(self) -> None:
        name = next(norms_in_training(self._model), None)
        if name is not None:
            self._say(
                f"BatchNorm ({name}) normalises each piece of a batch by itself, so training"
                " differs from training on whole batches. GroupNorm, or BatchNorm in eval mode,"
                " avoids this"
            )

    def _warn_of_rounding(self, found: _Found) -> None:
        if not found.is_forward_only and (found.residual or 0) > self._trials.tolerance:
            self._say(
                f"gradients of pieces differ by {found.residual:.2g} from those of the whole batch."
                " In half precision oomph cannot tell rounding from a real difference:"
                " `oomph check` can, in fp64"
            )

    def _warn_of_writes(self, found: _Found) -> None:
        if found.written:
            rest = f" (and {len(found.written) - 1} more)" if len(found.written) > 1 else ""
            self._say(
                f"{found.written[0]}{rest} changes in every forward: once for each piece of a"
                " batch instead of once a step. Training differs a little from training on whole"
                " batches"
            )


def _is_proven(found: _Found, counted: str) -> bool:
    """Return whether the divisor was read off the loss and a mean over examples is ruled out.

    A loss can have a second term that divides by examples. If these pieces have the same share of
    both, only another batch can tell them apart.
    """
    return counted in found.read and all(weight != "mean" for weight, _ in found.matches)


def _rivals(found: _Found, mine: str) -> list[Weight]:
    """Return weights that agree with this one here but may not in another batch."""
    others: list[Weight] = [w for w, counted in found.matches if counted != mine and w != "sum"]
    if all(weight != "mean" for weight, _ in found.matches):
        return others
    may_differ = [each for each in found.alike if each.is_of_labels or each.is_read]
    return [*others, *(each.count for each in may_differ)]


def _kind_of(batch: Any) -> Any:
    """Return what a batch contains: its names, and which entries are None."""
    if isinstance(batch, Mapping):
        return tuple(name for name, part in batch.items() if part is not None)
    if isinstance(batch, list | tuple):
        return tuple(part is None for part in batch) if len(batch) < _MANY else type(batch)
    return type(batch)


def _of_some(count: Callable[[Any], Any], counted: str) -> Callable[[Any], Any]:
    """Return a count that raises for 0, since a piece with weight 0 would be skipped.

    Labels that torch's own loss ignores are known to add nothing. A sum divided by the number of
    positives can still contribute without any positives.
    """

    def checked_count(batch: Any) -> Any:
        value = count(batch)
        if not float(value):
            raise UsageError(
                f"a piece of the batch has none of {counted}",
                because="the loss divides by these, so oomph cannot weight that piece",
                attempt="a larger micro_batch=; or weight=function, where function(batch) returns 0"
                " for a piece that adds nothing to the loss",
            )
        return value

    return checked_count


def _given(weight: Weight) -> str:
    return f'weight="{weight}"' if isinstance(weight, str) else "your weight function"


def _counts(weighing: Weighing, ran: Compared) -> list[float]:
    return [float(weighing.count(batch)) for batch in ran.batches]


def _coupled(found: _Found, where: Finding | None) -> tuple[str, str]:
    """Return what differs, and what to do about it."""
    by = ""
    if found.residual is not None:
        by = f" (relative difference of the gradients: {found.residual:.2g})"
    if where is None:
        what = f"its examples depend on each other, or lie along another dimension{by}"
        return what, "batch_dim=, if the examples lie along another dimension"
    return f"in {where.where}, {where.what}{by}", where.do


def _not_taken(batch: Any, error: BaseException) -> BaseException:
    if isinstance(error, OomphError):
        return error
    named = [f"{name} of {list(t.shape)}" for name, t in examples.named_tensors(batch)]
    refused = UsageError(
        "this batch cannot be split",
        because=f"it has {', '.join(named[:8]) or 'no tensors'}, and the model fails on its pieces,"
        f" however they are cut: {type(error).__name__}: {one_line(error, 200)}",
        attempt='batch_dim={"name": 1} to name the dimension of the examples, or {"name": None}'
        " to pass a tensor whole to every piece; or split=function and count=function",
    )
    refused.__cause__ = error
    return refused

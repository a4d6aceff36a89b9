"""A batch to evaluate -> the result of the whole batch, run in smaller pieces if memory runs out.

Without gradients, pieces do not accumulate anything: finished pieces are kept, and only the piece
that failed is rerun, smaller. Sizes are learnt separately from training, which needs more memory.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from oomph.errors import OomphError, UsageError
from oomph.out_of_memory import is_out_of_memory
from oomph.stability import examples
from oomph.stability.normalisers import Divisors, Weighing, shares, weighings
from oomph.training.micro_batches import (
    IGNORED,
    Batch,
    Count,
    Division,
    Split,
    Weight,
    counts_otherwise,
    labels_of,
    neighbours_apart,
    piece_sizes,
    weigher,
    weights_of,
)
from oomph.training.recovery import if_memory_allows, release, text_of
from oomph.training.sizes import Sizes
from oomph.training.split_trials import in_full_precision

# Judgement: relative rounding errors of a result, in fp32 (trials use no TF32) and in half
# precision.
_WITHIN, _WITHIN_ROUNDED = 1e-4, 3e-2
_MOST_TRIALS = 6  # judgement: per batch
# Judgement, relative to the losses of two examples: differences below the first are noise, above
# the second a mismatch. fp32 is accurate to 1e-7, TF32 to 1e-3 per product; bf16 has 8 bits and
# rounds in each layer.
_NOISE, _SAME_WITHIN = 1e-6, 1e-3
_NOISE_ROUNDED, _SAME_WITHIN_ROUNDED = 4e-3, 2e-2

_JOIN = "join=function, where function(results, sizes) joins the results of the pieces"
Join = Callable[[Sequence[Any], Sequence[int]], Any]  # (results, sizes) -> result of the whole
Work = Callable[[Batch], Any]  # a piece -> its result


class Done(NamedTuple):
    """A piece that has been evaluated."""

    part: Batch
    num: int  # examples in it
    result: Any


@dataclasses.dataclass
class _Known:
    """The weight used for the pieces of one function's batches."""

    weight: Weight
    rivals: list[Weight]  # that agreed with it in the trials
    num_batches: int = 0


class Evaluation:
    """Runs batches without gradients; remembers how many examples fit at a time."""

    def __init__(self, split: Split, count: Count, say: Callable[[str], None]) -> None:
        self.split, self._count, self._say = split, count, say
        self._sizes = Sizes()
        # By function, as long as it is alive; for the training loss, by this object itself.
        self._known: weakref.WeakKeyDictionary[Any, dict[Any, _Known]] = weakref.WeakKeyDictionary()
        self.num_ooms = 0

    def evaluate(
        self,
        data: Batch,
        work: Work,
        weight: Weight | None,
        *,
        function: Any,
        join: Join | None,
        is_rounded: bool,
    ) -> Any:
        """Return the result of `work` on a batch, joined from pieces if it does not fit."""
        done = self.run(data, work)
        if join is not None and len(done) > 1:
            return join([each.result for each in done], [each.num for each in done])
        return self.whole_of(data, work, done, weight, function=function, is_rounded=is_rounded)

    def run(self, data: Batch, work: Work) -> list[Done]:
        """Run `work` on each piece, or on the whole batch if it fits."""
        num = self._count(data)
        elements = examples.elements_per_example(data, num)
        size = self._sizes.size_for(num, elements)
        done: list[Done] = []
        while (left := num - sum(each.num for each in done)) > 0:
            error = self._run_rest(data, work, done, _unequal(piece_sizes(left, size)))
            if error is not None:
                size = self._smaller(error, num, elements, size)
        self._sizes.fitted(num, elements, size)
        return done

    def _run_rest(
        self, data: Batch, work: Work, done: list[Done], sizes: list[int]
    ) -> BaseException | None:
        """Append each piece to `done` until one runs out of memory; return that error."""
        sizes = [*(each.num for each in done), *sizes]
        parts = [data] if len(sizes) == 1 else self.split(data, sizes)
        try:
            for part, num in list(zip(parts, sizes, strict=True))[len(done) :]:
                done.append(Done(part, num, work(part)))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return error
        return None

    def _smaller(self, error: BaseException, num: int, elements: int, size: int) -> int:
        self.num_ooms += 1
        text = text_of(error)
        release(error)
        smaller = self._sizes.failed(num, elements, size)
        if not smaller:
            raise OomphError(
                "evaluation runs out of memory even with one example at a time",
                because=text,
                attempt="shorter examples, bf16, or a GPU with more memory",
            ) from None
        self._say(
            f"out of memory in evaluation with {size} of {num} examples at a time;"
            f" trying {smaller} at a time. {text}"
        )
        return smaller

    def whole_of(
        self,
        data: Batch,
        work: Work,
        done: Sequence[Done],
        weight: Weight | None,
        *,
        function: Any = None,
        is_rounded: bool = False,
    ) -> Any:
        """Return the result of the whole batch, joined from its pieces. Raises UsageError.

        The joining is tested on two examples, and again if a batch could show more. In the first
        batch of a function, the second, the fourth and so on, it is also tested on a whole piece.

        weight: what the loss averages over, if known. If another function returns a single number,
        oomph finds out what that averages over.
        """
        if len(done) == 1:
            return done[0].result
        key, known = (getattr(function, "__func__", None), weight), self._known_of(function)
        if key not in known or self._is_in_doubt(known[key], done):
            num = sum(each.num for each in done)
            is_found = weight is None or function is not None
            tried, at = list[Weight](), None
            for _ in range(_MOST_TRIALS):
                tried = self._tried(
                    data, work, num, done[0].result, weight, is_found, is_rounded, at
                )
                if (at := self._telling(data, num, _Known(tried[0], tried[1:]), done)) is None:
                    break
            num_batches = known[key].num_batches if key in known else 0
            known[key] = _Known(tried[0], tried[1:], num_batches)
        mine = known[key]
        mine.num_batches += 1
        if mine.num_batches & (mine.num_batches - 1) == 0:
            self._hold_against_a_piece(mine.weight, work, done, is_rounded)
        return joined(done, mine.weight)

    def _known_of(self, function: Any) -> dict[Any, _Known]:
        """Return what is known of a function. A new one is tested anew: its closure may differ."""
        owner = self if function is None else getattr(function, "__self__", function)
        try:
            return self._known.setdefault(owner, {})
        except TypeError:  # it cannot be a weak key
            return {}

    def _is_in_doubt(self, known: _Known, done: Sequence[Done]) -> bool:
        """Return whether a rival weight that has agreed so far weights these pieces differently."""
        if not known.rivals:
            return False
        pieces, sizes = [each.part for each in done], [each.num for each in done]
        mine = shares(weights_of(pieces, sizes, weigher(known.weight)))
        return any(counts_otherwise(mine, rival, pieces, sizes) for rival in known.rivals)

    def _telling(self, data: Batch, num: int, known: _Known, done: Sequence[Done]) -> int | None:
        """Return the first of two neighbours that show more; None if all weights agree here."""
        if not self._is_in_doubt(known, done):
            return None
        singles = self.split(data, [1] * num)
        for rival in known.rivals:
            pairs = neighbours_apart(known.weight, rival, singles)
            if max(pairs, default=0) > 0:
                return pairs.index(max(pairs))
        return None

    def _tried(
        self,
        data: Batch,
        work: Work,
        num: int,
        sample: Any,
        weight: Weight | None,
        is_found: bool,
        is_rounded: bool,
        at: int | None,
    ) -> list[Weight]:
        """Return the weight that a trial supports, and then its rivals. sample: a result.

        is_found: a single number shows by itself what it averages over. at: the first of the two
        examples to try.
        """
        divisors, together = Divisors(), None
        with if_memory_allows():
            split = functools.partial(self.split, data)
            first, second, both = telling_pieces(data, num, split, at)
            with in_full_precision():
                alone = work(first), work(second)
                with divisors:
                    together = (work(both),)
        if together is None:
            if weight is None and _has_number(sample):
                raise _unknown_mean("two examples do not fit into memory at once")
            self._say(
                "evaluation runs one example at a time. Two do not fit at once, so oomph cannot"
                " check that examples do not influence each other"
            )
            return ["mean" if weight is None else weight]
        if _is_number(alone[0]) and is_found:
            losses = float(alone[0]), float(alone[1])
            counted = list(weighings(both, divisors.found))
            return weights_in(
                first, second, losses, float(together[0]), counted, is_rounded=is_rounded
            )
        if weight is None and _has_number(alone[0]):
            raise _unknown_mean(
                "the batch does not fit, so the numbers of its pieces have to be weighted"
            )
        weight = "mean" if weight is None else weight
        pieces = [Done(first, 1, alone[0]), Done(second, 1, alone[1])]
        _check_close(joined(pieces, weight), together[0], is_rounded)
        return [weight]

    def _hold_against_a_piece(
        self, weight: Weight, work: Work, done: Sequence[Done], is_rounded: bool
    ) -> None:
        """Run the largest piece whole and in two. Raises UsageError if the results differ."""
        pairs = zip(done, shares_of(done, weight), strict=True)
        piece, num, _ = max((each for each, share in pairs if share), key=lambda each: each.num)
        if num < 2:
            return
        cut = max(3 * num // 8, 1)
        with if_memory_allows():
            first, second = self.split(piece, [cut, num - cut])
            with in_full_precision():
                whole = work(piece)
                pieces = [Done(first, cut, work(first)), Done(second, num - cut, work(second))]
            _check_close(joined(pieces, weight), whole, is_rounded)


def _check_close(joined: Any, whole: Any, is_rounded: bool) -> None:
    if not _is_close(joined, whole, _WITHIN_ROUNDED if is_rounded else _WITHIN):
        raise UsageError(
            "evaluating this batch in pieces would change the result",
            because="some examples give different results together than in pieces: the result is a"
            " mean over something else, the examples influence each other, or they lie along"
            " another dimension than the one that is split",
            attempt="weight=function, which counts what the result is a mean over; batch_dim=1, if"
            f" the examples lie along the second dimension; or {_JOIN}",
        )


def _unknown_mean(because: str) -> UsageError:
    return UsageError(
        "oomph cannot tell what the numbers of this evaluation are a mean of",
        because=because,
        attempt=f'weight="mean" (over examples) or weight="tokens"; or {_JOIN}',
    )


def _is_close(one: Any, other: Any, within: float) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape:
            return False
        if within == _WITHIN_ROUNDED and not other.is_floating_point():
            return True  # rounding may change the result of an argmax
        scale = float(other.abs().max()) if other.numel() and other.is_floating_point() else 0.0
        return torch.allclose(
            one.to(other.dtype), other, rtol=within, atol=within * scale, equal_nan=True
        )
    if isinstance(one, float):
        is_nan = one != one and other != other
        return is_nan or bool(abs(one - other) <= within * max(abs(one), abs(other)))
    ours, theirs = _parts_of(one), _parts_of(other)
    if ours is not None and theirs is not None:
        is_alike = ours.keys() == theirs.keys()
        return is_alike and all(_is_close(ours[name], theirs[name], within) for name in ours)
    return within == _WITHIN_ROUNDED or bool(one == other)


def _parts_of(result: Any) -> Mapping[Any, Any] | None:
    """Return the parts of a container, by name or number; None for anything else."""
    if isinstance(result, Mapping):
        return result
    if isinstance(result, list | tuple):
        return dict(enumerate(result))
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {each.name: getattr(result, each.name) for each in dataclasses.fields(result)}
    return None


def evaluation_for(options: Mapping[str, Any], say: Callable[[str], None]) -> Evaluation:
    """Return an Evaluation with an adapter's options. A batch it cannot count is run whole."""
    names = ("whole", "split", "count", "batch_dim")
    given = {name: options[name] for name in names if options.get(name) is not None}
    division = Division(options.get("weight"), **given)

    def counted(data: Any) -> int:
        try:
            return division.num(data)
        except UsageError:
            return 1

    return Evaluation(division.pieces, counted, say)


def _is_number(result: Any) -> bool:
    """Return whether it is a single number that is a mean, such as a loss."""
    if isinstance(result, torch.Tensor):
        return result.dim() == 0 and result.is_floating_point()
    return isinstance(result, float)


def _has_number(result: Any) -> bool:
    """Return whether it contains a number that is a mean."""
    parts = _parts_of(result)
    return _is_number(result) if parts is None else any(map(_has_number, parts.values()))


def _unequal(sizes: list[int]) -> list[int]:
    """Make sizes unequal, to tell rows apart from a vector that happens to be as long."""
    if len(sizes) == 1 or len(set(sizes)) > 1 or sizes[0] == 1:
        return sizes
    return [*sizes[:-1], sizes[-1] - 1, 1]


@contextmanager
def in_eval_mode(model: Any) -> Iterator[None]:
    """Run without gradients, with every module in eval mode; then restore each module's mode."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, is_training in before:
            module.training = is_training


# ---- what a loss is a mean of ------------------------------------------------------------------
# Two examples run alone and together. A sum over examples or tokens gives the sum of the two
# losses; a mean gives their mean, weighted by what it counts. Forward only, without dropout. The
# pair is taken where the candidates differ most.


def weights_in(
    first: Any,
    second: Any,
    losses: tuple[float, float],
    together: float,
    counted: Sequence[Weighing] = (),
    *,
    is_rounded: bool = False,
) -> list[Weight]:
    """Return what the loss of two examples may be a mean of: the likeliest, then equally good fits.

    A divisor that was read off the loss itself has no rivals. counted: candidates besides the usual
    ones. is_rounded: computed in half precision. Raises UsageError if no candidate fits.
    """
    scale = max(map(abs, losses))
    noise = (_NOISE_ROUNDED if is_rounded else _NOISE) * scale
    within = (_SAME_WITHIN_ROUNDED if is_rounded else _SAME_WITHIN) * scale
    read: list[Weight] = [each.count for each in counted if each.is_read]
    others = [each.count for each in counted if not each.is_read]
    kinds: list[Weight] = [*read, "tokens", "next-tokens", "mean", *others]
    off: dict[Weight, float] = {
        weight: abs(together - expected)
        for weight, expected in _expected(first, second, losses, kinds)
    }
    fits = [weight for weight, difference in off.items() if difference <= within]
    if not fits or ("sum" in fits and len(fits) > 1):
        kind = "a sum as well as a mean" if fits else "neither a sum nor a mean"
        raise UsageError(
            "oomph cannot tell what the loss is a mean of, and so not how to weight parts of a"
            " batch",
            because=f"two examples have losses of {losses[0]:.6g} and {losses[1]:.6g}, together"
            f" {together:.6g}: {kind} over examples or labels",
            attempt="weight=function, where function(batch) returns what the loss divides by; or"
            ' weight="mean" to count examples anyway',
        )
    best = min(off[weight] // noise for weight in fits)
    found = [weight for weight in fits if off[weight] // noise == best]
    return found[:1] if found[0] in read else found


def _expected(
    first: Any, second: Any, losses: tuple[float, float], kinds: Sequence[Weight]
) -> Iterator[tuple[Weight, float]]:
    """Yield each kind of loss with its expected value for both examples."""
    yield "sum", sum(losses)
    for kind in kinds:
        weigh = weigher(kind)
        try:
            counts = float(weigh(first, 1)), float(weigh(second, 1))
        except UsageError:  # there are no labels to count
            continue
        if min(counts) > 0:
            total = sum(n * loss for n, loss in zip(counts, losses, strict=True))
            yield kind, total / sum(counts)


def telling_pieces(
    batch: Any,
    num: int,
    split: Callable[[Sequence[int]], Sequence[Any]],
    at: int | None = None,
) -> tuple[Any, Any, Any]:
    """Return two neighbours, alone and together. at: the first of them, if the caller knows it."""
    at = _telling_pair(batch, num) if at is None else at
    before, after = [at] * (at > 0), [num - at - 2] * (num > at + 2)
    first, second = split([*before, 1, 1, *after])[len(before) :][:2]
    return first, second, split([*before, 2, *after])[len(before)]


def _telling_pair(batch: Any, num: int) -> int:
    """Return the first of two neighbours that differ most in counted labels, or else in class."""
    try:
        labels = labels_of(batch)
    except UsageError:
        return 0
    if labels.dim() == 0 or labels.size(0) != num:
        return 0
    counts = (labels != IGNORED).reshape(num, -1).sum(1)
    if labels.dim() > 1:
        apart = (counts[1:] - counts[:-1]).abs()
    else:
        apart = (labels[1:] != labels[:-1]).long()
    is_empty = (counts[1:] == 0) | (counts[:-1] == 0)  # the mean would be 0 / 0
    return int(torch.where(is_empty, -1, apart).argmax())


# ---- joining pieces ----------------------------------------------------------------------------


def joined(done: Sequence[Done], weight: Weight) -> Any:
    """Join the results of pieces into the result of the batch. Raises UsageError.

    Rows are concatenated, floats averaged by the pieces' weights, integers (counts) added.
    """
    if len(done) == 1:
        return done[0].result
    joining = _Joining([each.num for each in done], shares_of(done, weight))
    return joining.join([each.result for each in done], "the result")


def shares_of(done: Sequence[Done], weight: Weight) -> list[float]:
    """Return the share of each piece in the loss of the whole; 1 for a sum."""
    if weight == "sum" or len(done) == 1:
        return [1.0] * len(done)
    parts, nums = [each.part for each in done], [each.num for each in done]
    return shares(weights_of(parts, nums, weigher(weight)))


class _Joining:
    def __init__(self, nums: Sequence[int], shares: Sequence[float]) -> None:
        self._nums, self._shares = nums, shares

    def join(self, results: Sequence[Any], path: str) -> Any:
        first = results[0]
        if isinstance(first, torch.Tensor):
            return self._of_tensors(results, path)
        if isinstance(first, bool | str | None):
            return self._equal(results, path)
        if isinstance(first, int):
            return sum(results)
        if isinstance(first, float):
            return self._mean(results)
        if isinstance(first, Mapping):
            content = {
                key: self.join([each[key] for each in results], f"{path}[{key!r}]") for key in first
            }
            return content if type(first) is dict else type(first)(**content)
        if isinstance(first, list | tuple):
            return self._of_lists(results, path)
        if dataclasses.is_dataclass(first) and not isinstance(first, type):
            names = [field.name for field in dataclasses.fields(first)]
            return type(first)(
                **{n: self.join([getattr(e, n) for e in results], f"{path}.{n}") for n in names}
            )
        return self._equal(results, path)

    def _of_tensors(self, results: Sequence[Any], path: str) -> Any:
        if all(each.dim() and len(each) == n for each, n in zip(results, self._nums, strict=True)):
            return torch.cat(list(results))
        if any(each.dim() for each in results):
            return self._equal(results, path)
        if results[0].is_floating_point():
            return self._mean(results)
        return torch.stack(list(results)).sum()

    def _of_lists(self, results: Sequence[Any], path: str) -> Any:
        if all(
            isinstance(each, list) and len(each) == num
            for each, num in zip(results, self._nums, strict=True)
        ):
            return [row for each in results for row in each]
        columns = [
            self.join(column, f"{path}[{at}]")
            for at, column in enumerate(zip(*results, strict=True))
        ]
        kind = type(results[0])
        return kind(*columns) if hasattr(results[0], "_fields") else kind(columns)

    def _mean(self, results: Sequence[Any]) -> Any:
        """Return the weighted mean, without pieces of weight 0, whose mean is 0 / 0."""
        pairs = zip(results, self._shares, strict=True)
        return sum(each * share for each, share in pairs if share)

    def _equal(self, results: Sequence[Any], path: str) -> Any:
        first = results[0]
        if isinstance(first, torch.Tensor):
            is_same = all(
                each.shape == first.shape and torch.equal(each, first) for each in results
            )
        else:
            is_same = all(each is first or bool(each == first) for each in results)
        if is_same:
            return first
        raise UsageError(
            f"oomph cannot join {path} of several pieces",
            because=f"it is a {type(first).__name__} without a row for each example, and differs"
            " between pieces",
            attempt=_JOIN,
        )

"""A batch that is evaluated -> what the whole gives, run in smaller pieces where memory runs out.

Without gradients nothing adds up from piece to piece: what has been run stays, and only the piece
that failed is run again, smaller. How many fit is learnt apart from training, which needs more.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from oomph.errors import OomphError, UsageError
from oomph.stability.normalisers import Divisors, weighings
from oomph.training import examples, splitting
from oomph.training.division import Division
from oomph.training.normaliser import telling_pieces, weights_in
from oomph.training.out_of_memory import is_out_of_memory
from oomph.training.recovery import release, said_by
from oomph.training.recovery_sizes import Sizes
from oomph.training.split_check import in_full_precision
from oomph.training.weights import Weight, weigher, weights_of

# Relative: what rounding may do to a result, in fp32 (trials are without TF32) and in half
# precision.
_WITHIN, _WITHIN_ROUNDED = 1e-4, 3e-2
_SAME_SHARE = 1e-9
_MOST_TRIALS = 6  # of one batch

_JOIN = "join=function, where function(results, sizes) joins the results of the pieces"
Join = Callable[[Sequence[Any], Sequence[int]], Any]  # (results, examples of each) -> the whole's


@dataclasses.dataclass
class _Known:
    """What the pieces of one function's batches count by."""

    weight: Weight
    rivals: list[Weight]  # that counted the same where it was tried
    num_batches: int = 0


class Evaluation:
    """Runs batches without gradients; remembers how many examples fit at a time."""

    def __init__(
        self,
        split: Callable[[Any, Sequence[int]], Sequence[Any]],
        count: Callable[[Any], int],
        say: Callable[[str], None],
    ) -> None:
        self.split, self._count, self._say = split, count, say
        self._sizes = Sizes()
        # By function, as long as somebody has it; that of training is this object's own.
        self._known: weakref.WeakKeyDictionary[Any, dict[Any, _Known]] = weakref.WeakKeyDictionary()
        self.num_ooms = 0

    def run(self, data: Any, work: Callable[[Any], Any]) -> list[tuple[Any, int, Any]]:
        """`work` of each piece, as (piece, its examples, result); one piece if the batch fits."""
        num = self._count(data)
        elements = examples.elements_per_example(data, num)
        size = self._sizes.size_for(num, elements)
        done: list[tuple[Any, int, Any]] = []
        while (left := num - sum(num for _, num, _ in done)) > 0:
            error = self._run_rest(data, work, done, _unequal(splitting.piece_sizes(left, size)))
            if error is not None:
                size = self._smaller(error, num, elements, size)
        self._sizes.fitted(num, elements, size)
        return done

    def _run_rest(
        self,
        data: Any,
        work: Callable[[Any], Any],
        done: list[tuple[Any, int, Any]],
        sizes: list[int],
    ) -> BaseException | None:
        """`done` grows with each piece, until one runs out of memory: that error."""
        sizes = [*(num for _, num, _ in done), *sizes]
        parts = [data] if len(sizes) == 1 else self.split(data, sizes)
        try:
            for part, num in list(zip(parts, sizes, strict=True))[len(done) :]:
                done.append((part, num, work(part)))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return error
        return None

    def _smaller(self, error: BaseException, num: int, elements: int, size: int) -> int:
        self.num_ooms += 1
        text = said_by(error)
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
        data: Any,
        work: Callable[[Any], Any],
        done: Sequence[tuple[Any, int, Any]],
        weight: Weight | None,
        *,
        function: Any = None,
        is_rounded: bool = False,
    ) -> Any:
        """What the batch would have given, put together of its pieces. Raises UsageError.

        That this is so is tried on two examples, and again where a batch would tell more; then on
        a whole piece, in the first batch of a function, the second, the fourth and so on. weight:
        what the loss is a mean of, if that is known; what one number of another function is a mean
        of is found out.
        """
        if len(done) == 1:
            return done[0][2]
        key, known = (getattr(function, "__func__", None), weight), self._known_of(function)
        if key not in known or self._is_in_doubt(known[key], done):
            num = sum(num for _, num, _ in done)
            is_found = weight is None or function is not None
            tried, at = list[Weight](), None
            for _ in range(_MOST_TRIALS):
                tried = self._tried(data, work, num, done[0][2], weight, is_found, is_rounded, at)
                if (at := self._telling(data, num, _Known(tried[0], tried[1:]), done)) is None:
                    break
            num_batches = known[key].num_batches if key in known else 0
            known[key] = _Known(tried[0], tried[1:], num_batches)
        mine = known[key]
        mine.num_batches += 1
        if mine.num_batches & (mine.num_batches - 1) == 0:
            self._hold_against_a_piece(mine.weight, work, done, is_rounded)
        return _joined_by(mine.weight, done)

    def _known_of(self, function: Any) -> dict[Any, _Known]:
        """A function that is made anew is tried anew: what it closes over may be another."""
        owner = self if function is None else getattr(function, "__self__", function)
        try:
            return self._known.setdefault(owner, {})
        except TypeError:  # nothing that can be remembered
            return {}

    def _is_in_doubt(self, known: _Known, done: Sequence[tuple[Any, int, Any]]) -> bool:
        """Do pieces count otherwise by what seemed the same so far?"""
        if not known.rivals:
            return False
        mine = shares_of(done, weigher(known.weight), is_sum=False)
        for rival in known.rivals:
            try:
                theirs = shares_of(done, weigher(rival), is_sum=False)
            except (UsageError, KeyError):  # nothing of it is here
                return True
            if any(abs(a - b) > _SAME_SHARE for a, b in zip(mine, theirs, strict=True)):
                return True
        return False

    def _telling(
        self, data: Any, num: int, known: _Known, done: Sequence[tuple[Any, int, Any]]
    ) -> int | None:
        """Two neighbours that tell more; None if these pieces count the same by all that fits."""
        if not self._is_in_doubt(known, done):
            return None
        singles = self.split(data, [1] * num)
        mine = [float(weigher(known.weight)(each, 1)) for each in singles]
        for rival in known.rivals:
            theirs = [float(weigher(rival)(each, 1)) for each in singles]
            pairs = [
                abs(theirs[at] * mine[at + 1] - theirs[at + 1] * mine[at])
                * (min(mine[at], mine[at + 1], theirs[at], theirs[at + 1]) > 0)
                for at in range(num - 1)
            ]
            if max(pairs, default=0) > 0:
                return pairs.index(max(pairs))
        return None

    def _tried(
        self,
        data: Any,
        work: Callable[[Any], Any],
        num: int,
        sample: Any,
        weight: Weight | None,
        is_found: bool,
        is_rounded: bool,
        at: int | None,
    ) -> list[Weight]:
        """What numbers are a mean of, after a trial, and what may be it as well. sample: a result.

        is_found: one number tells by itself what it is a mean of. at: the two to be tried.
        """
        divisors = Divisors()
        try:
            split = functools.partial(self.split, data)
            first, second, both = telling_pieces(data, num, split, at)
            with in_full_precision():
                alone = work(first), work(second)
                with divisors:
                    together = work(both)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            release(error)
            if weight is None and _has_number(sample):
                raise _unknown_mean("two examples do not fit into memory at once") from None
            self._say(
                "evaluation runs one example at a time. Two do not fit at once, so oomph cannot"
                " check that examples do not influence each other"
            )
            return ["mean" if weight is None else weight]
        if _is_number(alone[0]) and is_found:
            counted = list(weighings(both, divisors.found))
            read = [each.count for each in counted if each.is_read]
            others = [each.count for each in counted if not each.is_read]
            losses = float(alone[0]), float(alone[1])
            found = weights_in(
                first,
                second,
                losses,
                float(together),
                read=read,
                others=others,
                is_rounded=is_rounded,
            )
            return found[:1] if found[0] in read else found
        if weight is None and _has_number(alone[0]):
            raise _unknown_mean(
                "the batch does not fit, so the numbers of its pieces have to be weighted"
            )
        weight = "mean" if weight is None else weight
        whole = _joined_by(weight, [(first, 1, alone[0]), (second, 1, alone[1])])
        _check_close(whole, together, is_rounded)
        return [weight]

    def _hold_against_a_piece(
        self,
        weight: Weight,
        work: Callable[[Any], Any],
        done: Sequence[tuple[Any, int, Any]],
        is_rounded: bool,
    ) -> None:
        """The largest piece, as a whole and in two. Raises UsageError if they differ."""
        shares = shares_of(done, weigher(weight), is_sum=weight == "sum")
        counted = [each for each, share in zip(done, shares, strict=True) if share]
        piece, num, _ = max(counted, key=lambda each: each[1])
        if num < 2:
            return
        cut = max(3 * num // 8, 1)
        try:
            parts = list(zip(self.split(piece, [cut, num - cut]), (cut, num - cut), strict=True))
            with in_full_precision():
                whole = work(piece)
                results = [(part, size, work(part)) for part, size in parts]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            release(error)
            return
        _check_close(_joined_by(weight, results), whole, is_rounded)


def _check_close(joined: Any, whole: Any, is_rounded: bool) -> None:
    if not _is_close(joined, whole, _WITHIN_ROUNDED if is_rounded else _WITHIN):
        raise UsageError(
            "evaluating this batch in pieces would change the result",
            because="some examples give other results together than in pieces: the result is a mean"
            " over something else, the examples influence each other, or they lie along another"
            " dimension than the one that is split",
            attempt="weight=function, which counts what the result is a mean over; batch_dim=1, if"
            f" the examples lie along the second dimension; or {_JOIN}",
        )


def _joined_by(weight: Weight, done: Sequence[tuple[Any, int, Any]]) -> Any:
    return joined(done, weigher(weight), is_sum=weight == "sum")


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
            return True  # what was chosen by a maximum may be another by rounding
        scale = float(other.abs().max()) if other.numel() and other.is_floating_point() else 0.0
        return torch.allclose(
            one.to(other.dtype), other, rtol=within, atol=within * scale, equal_nan=True
        )
    if isinstance(one, float):
        is_nan = one != one and other != other
        return is_nan or bool(abs(one - other) <= within * max(abs(one), abs(other)))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_is_close(one[k], other[k], within) for k in one)
    if isinstance(one, list | tuple):
        same_length = len(one) == len(other)
        return same_length and all(map(functools.partial(_is_close, within=within), one, other))
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        names = [each.name for each in dataclasses.fields(one)]
        return all(_is_close(getattr(one, n), getattr(other, n), within) for n in names)
    return within == _WITHIN_ROUNDED or bool(one == other)


def evaluation_for(options: Mapping[str, Any], say: Callable[[str], None]) -> Evaluation:
    """As an adapter was told to split. A batch that nobody can count is run whole."""
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
    """Is it one number that is a mean, such as a loss?"""
    if isinstance(result, torch.Tensor):
        return result.dim() == 0 and result.is_floating_point()
    return isinstance(result, float)


def _has_number(result: Any) -> bool:
    """Is there one in it?"""
    if isinstance(result, Mapping):
        return any(map(_has_number, result.values()))
    if isinstance(result, list | tuple):
        return any(map(_has_number, result))
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return any(_has_number(getattr(result, each.name)) for each in dataclasses.fields(result))
    return _is_number(result)


def _unequal(sizes: list[int]) -> list[int]:
    """Pieces of one size would not tell rows from a vector that happens to be as long."""
    if len(sizes) == 1 or len(set(sizes)) > 1 or sizes[0] == 1:
        return sizes
    return [*sizes[:-1], sizes[-1] - 1, 1]


@contextmanager
def in_eval_mode(model: Any) -> Iterator[None]:
    """Without gradients, every module in eval; then each as it was."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, is_training in before:
            module.training = is_training


# ---- pieces to the whole -----------------------------------------------------------------------


def joined(
    done: Sequence[tuple[Any, int, Any]], weigh: Callable[[Any, int], Any], *, is_sum: bool = False
) -> Any:
    """What pieces gave, as the batch would have given it. Raises UsageError.

    Rows are put together, numbers are averaged by what the pieces count, whole numbers (counts)
    are added.
    """
    if len(done) == 1:
        return done[0][2]
    shares = shares_of(done, weigh, is_sum=is_sum)
    nums = [num for _, num, _ in done]
    return _Joining(nums, shares).join([result for _, _, result in done], "the result")


def shares_of(
    done: Sequence[tuple[Any, int, Any]], weigh: Callable[[Any, int], Any], *, is_sum: bool
) -> list[float]:
    """How much the loss of each piece counts in that of the whole; of a summed one, all of it."""
    if is_sum or len(done) == 1:
        return [1.0] * len(done)
    weights = weights_of([part for part, _, _ in done], [num for _, num, _ in done], weigh)
    return [weight / sum(weights) for weight in weights]


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
        """Without pieces in which nothing counts: their mean is 0 / 0."""
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

"""A batch that is evaluated -> what the whole gives, run in smaller pieces where memory runs out.

Without gradients nothing adds up from piece to piece: what has been run stays, and only the piece
that failed is run again, smaller. How many fit is learnt apart from training, which needs more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from oomph.errors import OomphError, UsageError
from oomph.training import examples, splitting
from oomph.training.out_of_memory import is_out_of_memory
from oomph.training.recovery import release, said_by
from oomph.training.recovery_sizes import Sizes
from oomph.training.weights import weights_of

Join = Callable[[Sequence[Any], Sequence[int]], Any]  # (results, examples of each) -> the whole's


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
                "one example does not fit into memory in evaluation",
                because=text,
                attempt="shorter examples, bf16, or a GPU with more memory",
            ) from None
        self._say(
            f"out of memory in evaluation with {size} of {num} examples at a time:"
            f" {smaller} at a time. {text}"
        )
        return smaller


def evaluation_for(options: Mapping[str, Any], say: Callable[[str], None]) -> Evaluation:
    """As an adapter was told to split. A batch that nobody can count is run whole."""
    whole, split, count = (options.get(name) for name in ("whole", "split", "count"))

    def cut(data: Any, sizes: Sequence[int]) -> Sequence[Any]:
        return split(data, sizes) if split else splitting.split(data, sizes, whole or ())

    def counted(data: Any) -> int:
        try:
            return int(count(data)) if count else examples.num_examples(data, whole or ())
        except UsageError:
            return 1

    return Evaluation(cut, counted, say)


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
            f"{path} of several pieces cannot be put together",
            because=f"it is a {type(first).__name__} that has no row for each example, and differs",
            attempt="join=function of (results, examples of each)",
        )

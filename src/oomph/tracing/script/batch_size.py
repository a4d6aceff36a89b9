"""How many examples a batch of a script has, and another batch for it.

Its loader says so, and through it the batch is made another. A script without a DataLoader makes
its batches itself. Their tensors are known by their leading dimension, which the rehearsal of the
script as it is has told, and are cut or repeated when they are moved, or when they reach the model.
Where a line of the loop makes such a tensor on the GPU itself, it makes one of another size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from oomph.errors import OomphError, UsageError
from oomph.records.script import Loader, Seen
from oomph.tracing.script.loaders import Loaders
from oomph.tracing.script.loop import Loop
from oomph.tracing.script.users_line import in_words, users_line

# They take a size as so many numbers, too.
_OF_NUMBERS = ("empty", "ones", "rand", "randn", "zeros")
RESIZED = "the batch was changed by cutting or repeating tensors of the script, not by its loader"

_NO_TENSOR = (
    "no DataLoader feeds the model, and its input has no tensor with a row for each example"
)
_ROW = "no DataLoader feeds the model, and its input has one row"
_UNEVEN = "the batches of the DataLoader differ in their number of examples"


class BatchSize:
    """The batch that is asked for, and that which the script has."""

    def __init__(self, wanted: int | None, first: Seen | None) -> None:
        self.given = None if first is None else first.micro_batch
        self.wanted = wanted if wanted != self.given else None
        self._first_rows = None if first is None else first.num_rows
        self.is_by_loader = False
        self.has_resized = False
        # Of each line that makes tensors on the GPU: their rows, and in which micro-steps.
        self._made: dict[tuple[str, int], tuple[set[int], set[int]]] = {}
        lines = () if first is None else first.lines
        self._lines = {(line.file, line.line) for line in lines if line.what == "batch"}

    def made(self, name: str, args: Any, kwargs: Any, loop: Loop) -> Any:
        """What is asked for of a function that makes a tensor on the GPU."""
        if loop.depth or loop.in_backward or loop.in_step:
            return args, kwargs
        rows = _rows_asked_for(name, args, kwargs)
        line = None if rows is None else users_line()
        if rows is None or line is None:
            return args, kwargs
        if self.wanted is None:
            known = self._made.setdefault(line, (set(), set()))
            known[0].add(rows)
            known[1].add(loop.num_forwards)
            return args, kwargs
        if self.is_by_loader or rows != self.given or line not in self._lines:
            return args, kwargs
        self.has_resized = True
        return _with_rows(args, kwargs, self.given, self.wanted)

    def lines(self, micro_batch: int | None) -> list[tuple[str, int]]:
        """Those that make a batch for more than one micro-step, and nothing else."""
        return [
            line
            for line, (rows, moments) in self._made.items()
            if rows == {micro_batch} and len(moments) > 1
        ]

    def moved(self, tensor: Any, loop: Loop) -> Any:
        """A real tensor on its way to the GPU."""
        if self.wanted is None or self.is_by_loader or loop.depth or not _has(tensor, self.given):
            return tensor
        return self._resized(tensor)

    def given_to_model(self, args: Any, kwargs: Any) -> Any:
        if self.wanted is None or self.is_by_loader:
            return args, kwargs
        return tree_map_only(
            torch.Tensor,
            lambda one: self._resized(one) if _has(one, self.given) else one,
            (args, kwargs),
        )

    def _resized(self, tensor: Any) -> Any:
        assert self.wanted is not None  # noqa: S101 - the callers have looked
        self.has_resized = True
        return tensor[:1].expand(self.wanted, *tensor.shape[1:]).contiguous()

    def blamed(self, error: OomphError) -> UsageError | None:
        """An error of a script whose batch is not its own; None if it is its own."""
        if self.wanted is None:
            return None
        return UsageError(
            f"the batch of the script could not be varied to {self.wanted}",
            because=f"{error.what}: {error.because}",
            attempt="the script's own option for its batch size, after --",
        )

    def check_together(self, loader: Loader, beside: Iterable[Loader]) -> None:
        """Raises UsageError where loaders with batches of several sizes feed one step."""
        for other in beside:
            if other.batch_size != loader.batch_size:
                raise UsageError(
                    f"the batch of the script could not be varied to {self.wanted}",
                    because=f"each step takes {loader.batch_size} examples of the DataLoader at"
                    f" {loader.place} and {other.batch_size} of the one at {other.place}",
                    attempt="the script's own options for its batch sizes, after --",
                )

    def check(self, seen: Seen) -> None:
        """Raises UsageError where the batch did not become what was asked for."""
        if self.wanted is None:
            return
        rows = seen.num_rows
        is_as_before = rows is not None and rows == self.given == self._first_rows
        if seen.micro_batch == self.wanted and not is_as_before:
            return
        loader = seen.loader
        raise UsageError(
            f"the batch of the script could not be varied to {self.wanted}",
            because=f"the model was given {rows if is_as_before else seen.micro_batch} examples at"
            f" {loader.place if loader else in_words(users_line())}",
            attempt="the script's own option for its batch size, after --",
        )


def with_batch(seen: Seen, loop: Loop, loaders: Loaders, asked: BatchSize) -> Seen:
    """Seen, with the examples of a batch and who says so; or why nobody does.

    One row may be anything, except where a batch of known size was made one example.
    """
    loader, rows = seen.loader, seen.num_rows
    size = None if loader is None else loader.batch_size
    if loader is not None and size is not None and not _is_cut(size, rows, loop, loaders, loader):
        return replace(seen, micro_batch=size, batch_from="loader")
    if loader is not None and loaders.is_uneven(loader):
        return replace(seen, batch_doubt=_UNEVEN)
    is_made_one = asked.wanted == 1 and asked.given is not None
    if rows is None or (rows == 1 and not is_made_one):
        return replace(seen, batch_doubt=_NO_TENSOR if rows is None else _ROW)
    return replace(seen, micro_batch=rows, batch_from=loop.given.dimension)


def _is_cut(size: int, rows: int | None, loop: Loop, loaders: Loaders, loader: Loader) -> bool:
    """Whether the script itself cuts what the loader gives, and trains on the pieces."""
    if rows is None or rows >= size or size % rows:
        return False
    return 2 * loop.given.num_batches > 3 * max(loaders.num_read(loader), 1)


def _rows_asked_for(name: str, args: Any, kwargs: Any) -> int | None:
    """The first number of a size of two or more; None where there is none."""
    sizes = [each for each in (*args, kwargs.get("size")) if isinstance(each, tuple | list)]
    size = sizes[0] if sizes else args if name in _OF_NUMBERS else ()
    is_size = len(size) > 1 and all(isinstance(each, int) for each in size)
    return int(size[0]) if is_size else None


def _with_rows(args: Any, kwargs: Any, given: int | None, wanted: int) -> Any:
    def changed(each: Any) -> Any:
        is_size = isinstance(each, tuple | list) and len(each) > 1 and each[0] == given
        return (wanted, *each[1:]) if is_size else each

    if any(isinstance(each, tuple | list) for each in (*args, kwargs.get("size"))):
        return tuple(map(changed, args)), {name: changed(each) for name, each in kwargs.items()}
    return (wanted, *args[1:]), kwargs


def _has(tensor: Any, num_examples: int | None) -> bool:
    return bool(tensor.dim()) and num_examples is not None and tensor.shape[0] == num_examples

"""A script's DataLoaders: read in this process, with another batch size if asked.

Workers and pinned memory change nothing on the GPU. The loader that feeds training is the one read
last before a model is trained. A batch has as many examples as indices were drawn for it, because a
graph batch has one row per node and an image batch may be a list.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch.utils import data as torch_data
from torch.utils._pytree import tree_map_only
from torch.utils.data import _utils

from oomph.errors import OomphError, UsageError
from oomph.pretending.patches import put, wrap
from oomph.records.script import Loader, Seen
from oomph.rehearsing.fault import in_words, users_line
from oomph.rehearsing.script.loop import Loop

_OF_TORCH = str(Path(torch_data.__file__).parent)


class Workers:
    """Replaces a loader's workers by a single one, in this process.

    Data sets use the worker info to open their files and to seed themselves. Here there is only one
    worker, so it gets all the data. Torch's own code still sees no worker, because it would put
    batches into shared memory.
    """

    def __init__(self) -> None:
        self._info: Any = None

    def install(self) -> None:
        def info() -> Any:
            is_of_torch = sys._getframe(1).f_code.co_filename.startswith(_OF_TORCH)
            return None if is_of_torch else self._info

        for module in (torch_data, _utils.worker):
            put(module, get_worker_info=info)

    @contextlib.contextmanager
    def at_work(self, loader: Any) -> Iterator[None]:
        """Provide the worker info while a loader is read; initialise the worker the first time."""
        if not getattr(loader, "oomph_has_workers", False):
            yield
            return
        is_new = not hasattr(loader, "oomph_worker")
        if is_new:
            seed = torch.initial_seed()
            loader.oomph_worker = _utils.worker.WorkerInfo(
                id=0, num_workers=1, seed=seed, dataset=loader.dataset
            )
        before, self._info = self._info, loader.oomph_worker
        try:
            if is_new and loader.worker_init_fn is not None:
                loader.worker_init_fn(0)
            yield
        finally:
            self._info = before


WORKERS = "DataLoader: read without workers and without pinned memory"
_LEAST_BATCHES = (
    64  # judgement: minimum from a loader with a changed batch size; small data sets repeat
)


class Loaders:
    """The loaders in the order they were created."""

    def __init__(self, loop: Loop, batch_size: BatchSize) -> None:
        self._loop, self._batch_size = loop, batch_size
        self._made: list[Loader] = []
        self._numbers: dict[int, int] = {}
        self._drawn: dict[int, Counter[int]] = {}  # per loader: examples in its batches
        # The loaders read since a model was last trained, each with the number of examples drawn.
        self._waiting: list[tuple[int, int | None]] = []
        self._fed: dict[int, list[int]] = {}  # loaders read for each backward, in order

    def note_reading(self, loader: Any, num_drawn: int | None) -> None:
        number = self._numbers.get(id(loader))
        if number is None:
            return
        self._waiting.append((number, num_drawn))
        if num_drawn is not None:
            self._drawn.setdefault(number, Counter())[num_drawn] += 1

    def note_end(self, loader: Any) -> None:
        """Drop a loader that was read to its end before any training: it fed an evaluation."""
        number = self._numbers.get(id(loader))
        others = [one for one in self._waiting if one[0] != number]
        self._waiting = others or self._waiting

    def note_training(self, num_rows: int | None) -> None:
        """Note that a model is trained on a batch of `num_rows` rows."""
        if not self._waiting:
            return
        fed = self._fed.setdefault(self._loop.num_backwards, [])
        fed += [number for number, _ in self._waiting]
        fed += [number for number, drawn in self._waiting if drawn == num_rows][-1:]
        self._waiting = []

    @property
    def feeding(self) -> Loader | None:
        """Return the loader read last before most training batches."""
        lasts = Counter(numbers[-1] for numbers in self._fed.values())
        return self._as_shown(lasts.most_common(1)[0][0]) if lasts else None

    @property
    def beside(self) -> tuple[Loader, ...]:
        """Return loaders that are always read along with it, as for unlabelled data."""
        feeding = self.feeding
        if feeding is None:
            return ()
        together = [set(n) for n in self._fed.values() if n[-1] == feeding.number]
        others = set.intersection(*together) - {feeding.number}
        return tuple(self._as_shown(number) for number in sorted(others))

    def num_read(self, loader: Loader) -> int:
        """Return how many batches of known size were read from the loader."""
        return self._drawn.get(loader.number, Counter()).total()

    def _as_shown(self, number: int) -> Loader:
        """Return the loader with its most frequent batch size, or that of full batches.

        A sampler that counts tokens has no single batch size.
        """
        made, drawn = self._made[number], self._drawn.get(number)
        if not drawn:
            return made
        most, times = drawn.most_common(1)[0]
        is_one_size = times * 2 > drawn.total() or most == made.batch_size
        return replace(made, batch_size=most if is_one_size else None)

    def is_uneven(self, loader: Loader) -> bool:
        """Return whether the loader's batches vary in their number of examples."""
        return loader.batch_size is None and bool(self._drawn.get(loader.number))

    def install(self, approximate: Callable[[str], None]) -> None:
        @wrap("__init__", torch_data.DataLoader)
        def init(
            original: Any, loader: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kw: Any
        ) -> None:
            given = {"batch_size": batch_size, **dict(zip(_POSITIONS, args, strict=False)), **kw}
            number = len(self._made)
            self._numbers[id(loader)] = number
            if given.get("num_workers") or given.get("pin_memory"):
                approximate(WORKERS)
            if number in self._batch_size.loaders and self._batch_size.wanted is not None:
                given = _rebatched(dataset, given, self._batch_size.wanted)
            self._made.append(_record(number, dataset, given))
            loader.oomph_has_workers = bool(given.get("num_workers"))
            original(loader, dataset, **_alone(given))
            _set_options(loader, given)

        @wrap("_get_iterator", torch_data.DataLoader)
        def iterator(original: Any, loader: Any) -> Any:
            """Read in this process, whatever the number of workers."""
            given = {"num_workers": loader.num_workers, "pin_memory": loader.pin_memory}
            loader.num_workers, loader.pin_memory = 0, False
            try:
                return original(loader)
            finally:
                _set_options(loader, given)

        workers = Workers()
        workers.install()
        self._patch_next(workers)

    def _patch_next(self, workers: Workers) -> None:
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        @wrap("__init__", _BaseDataLoaderIter)
        def init(original: Any, iterator: Any, loader: Any) -> None:
            with workers.at_work(loader):
                original(iterator, loader)
            iterator.oomph_loader, iterator.oomph_drawn = loader, None

        @wrap("_next_index", _BaseDataLoaderIter)
        def draw(original: Any, iterator: Any) -> Any:
            index = original(iterator)
            iterator.oomph_drawn = _num_drawn(index)
            return index

        @wrap("__next__", _BaseDataLoaderIter)
        def following(original: Any, iterator: Any) -> Any:
            self._loop.next_batch()
            try:
                with workers.at_work(iterator.oomph_loader):
                    batch = original(iterator)
            except StopIteration:
                self.note_end(iterator.oomph_loader)
                raise
            self.note_reading(iterator.oomph_loader, iterator.oomph_drawn)
            return batch


def _rebatched(dataset: Any, given: dict[str, Any], size: int) -> dict[str, Any]:
    """Return the options of a loader that reads batches of `size` examples."""
    if given.get("batch_sampler") is not None:
        return {**given, "batch_sampler": _resized(given["batch_sampler"], size)}
    if given["batch_size"] is None:  # its sampler or the data set makes the batches
        if getattr(given.get("sampler"), "batch_size", None) is not None:
            return {**given, "sampler": _resized(given["sampler"], size)}
        if getattr(dataset, "batch_size", None) is not None:
            dataset.batch_size = size
        return given
    if isinstance(dataset, torch_data.IterableDataset):
        return {**given, "batch_size": size}
    sampler = given.get("sampler")
    if sampler is None:
        is_shuffled = bool(given.get("shuffle"))
        order = torch_data.RandomSampler if is_shuffled else torch_data.SequentialSampler
        sampler = order(dataset)
    sampler = _Round(sampler, size * _LEAST_BATCHES)
    return {**given, "batch_size": size, "sampler": sampler, "shuffle": None, "drop_last": True}


def _resized(batches: Any, size: int) -> Any:
    """Return a batch sampler for another batch size."""
    if type(batches) is not torch_data.BatchSampler:
        return _Regrouped(batches, size)
    examples: Any = _Round(batches.sampler, size * _LEAST_BATCHES)
    return torch_data.BatchSampler(examples, size, drop_last=True)


class _Like:
    """A sampler that delegates everything it does not define itself."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for during copying, before `_sampler` is set
            raise AttributeError(name)
        return getattr(self._sampler, name)


class _Round(_Like):
    """A sampler that repeats until it has given enough."""

    def __init__(self, sampler: Any, least: int) -> None:
        super().__init__(sampler)
        self._least = least

    def __iter__(self) -> Iterator[Any]:
        rounds = itertools.chain.from_iterable(iter(self._sampler) for _ in itertools.count())
        return itertools.islice(rounds, len(self))

    def __len__(self) -> int:
        return max(len(self._sampler), self._least)


class _Regrouped(_Like):
    """A batch sampler's examples in batches of another size; a small data set repeats."""

    def __init__(self, sampler: Any, batch_size: int) -> None:
        super().__init__(sampler)
        self.batch_size, self.drop_last = batch_size, True

    def __iter__(self) -> Iterator[list[Any]]:
        batches = itertools.chain.from_iterable(iter(self._sampler) for _ in itertools.count())
        examples = itertools.chain.from_iterable(batches)
        for _ in range(len(self)):
            batch = list(itertools.islice(examples, self.batch_size))
            if len(batch) < self.batch_size:
                return
            yield batch

    def __len__(self) -> int:
        before = len(self._sampler) * (getattr(self._sampler, "batch_size", None) or 1)
        return int(max(before // self.batch_size, _LEAST_BATCHES))


# DataLoader's arguments after self, the data set and the batch size.
_POSITIONS = tuple(signature(torch_data.DataLoader.__init__).parameters)[3:]


def _num_drawn(index: Any) -> int | None:
    """Return the examples in a batch. Without batching, a tuple is the key of one example."""
    is_one_row = getattr(index, "ndim", None) == 1
    return len(index) if isinstance(index, list | range) or is_one_row else None


def _record(number: int, dataset: Any, given: dict[str, Any]) -> Loader:
    is_sampled = given.get("batch_sampler") is not None
    own = getattr(given.get("batch_sampler"), "batch_size", None)
    size = own if is_sampled else given["batch_size"]
    if size is None and not is_sampled:  # the data set makes the batches, and may give their size
        size = getattr(dataset, "batch_size", None)
    is_number = isinstance(size, int) and not isinstance(size, bool)
    return Loader(
        number=number,
        batch_size=size if is_number else None,
        num_workers=int(given.get("num_workers") or 0),
        pin_memory=bool(given.get("pin_memory")),
        place=in_words(users_line()),
    )


def _set_options(loader: Any, given: dict[str, Any]) -> None:
    """Show the original options, for frameworks that build another loader from this one."""
    loader.num_workers = int(given.get("num_workers") or 0)
    loader.pin_memory = bool(given.get("pin_memory"))


def _alone(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a loader that reads in this process."""
    dropped = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
    rest = {name: value for name, value in given.items() if name not in dropped}
    return {**rest, "num_workers": 0, "pin_memory": False}


# ---- a batch's number of examples, and another batch size ----------------------------------------
# With a DataLoader, oomph reads and changes the batch size there. A script without one makes its
# batches itself: oomph recognises their tensors by the leading dimension that it saw when it
# rehearsed the unchanged script. They are cut or repeated when they are moved, or when they reach
# the model. A line of the loop that makes such a tensor on the GPU makes one of the new size.

# These also take a size as separate numbers.
_OF_NUMBERS = ("empty", "ones", "rand", "randn", "zeros")
RESIZED = "the batch was changed by cutting or repeating tensors of the script, not by its loader"

_NO_TENSOR = (
    "no DataLoader feeds the model, and its input has no tensor with a row for each example"
)
_ROW = "no DataLoader feeds the model, and its input has one row"
_UNEVEN = "the batches of the DataLoader differ in their number of examples"


class BatchSize:
    """The requested batch size, and the script's own."""

    def __init__(self, wanted: int | None, first: Seen | None, loop: Loop) -> None:
        self._loop = loop
        self.given = None if first is None else first.micro_batch
        self.wanted = wanted if wanted != self.given else None
        self._first_rows = None if first is None else first.num_rows
        self.has_resized = False
        self.loaders: set[int] = set()  # numbers of those that are given the requested size
        loader = None if first is None or self.wanted is None else first.loader
        if first is not None and loader is not None and loader.batch_size is not None:
            self._check_together(loader, first.loaders_beside)
            self.loaders = {one.number for one in (loader, *first.loaders_beside)}
        # Per line that makes tensors on the GPU: their numbers of rows, and in which micro-steps.
        self._made: dict[tuple[str, int], tuple[set[int], set[int]]] = {}
        lines = () if first is None else first.lines
        self._lines = {(line.file, line.line) for line in lines if line.what == "batch"}

    def made(self, name: str, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a tensor factory on the GPU, with the batch size changed."""
        if self._loop.depth or self._loop.in_backward or self._loop.in_step:
            return args, kwargs
        rows = _rows_asked_for(name, args, kwargs)
        line = None if rows is None else users_line()
        if rows is None or line is None:
            return args, kwargs
        if self.wanted is None:
            known = self._made.setdefault(line, (set(), set()))
            known[0].add(rows)
            known[1].add(self._loop.num_forwards)
            return args, kwargs
        if self.loaders or rows != self.given or line not in self._lines:
            return args, kwargs
        self.has_resized = True
        return _with_rows(args, kwargs, self.given, self.wanted)

    def lines(self, micro_batch: int | None) -> list[tuple[str, int]]:
        """Return the lines that make a batch for more than one micro-step, and nothing else."""
        return [
            line
            for line, (rows, moments) in self._made.items()
            if rows == {micro_batch} and len(moments) > 1
        ]

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a real tensor on its way to the GPU, with the batch size changed."""
        return tensor if self._loop.depth else self._resized(tensor)

    def given_to_model(self, args: Any, kwargs: Any) -> Any:
        if self.wanted is None or self.loaders:
            return args, kwargs
        return tree_map_only(torch.Tensor, self._resized, (args, kwargs))

    def _resized(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.wanted is None or self.loaders:
            return tensor
        if not tensor.dim() or tensor.shape[0] != self.given:
            return tensor
        self.has_resized = True
        return tensor[:1].expand(self.wanted, *tensor.shape[1:]).contiguous()

    def blamed(self, error: OomphError) -> UsageError | None:
        """Blame the changed batch size for the script's error; None if the script had its own."""
        if self.wanted is None:
            return None
        return self._unvaried(f"{error.what}: {error.because}")

    def _unvaried(self, because: str, options: str = "option for its batch size") -> UsageError:
        return UsageError(
            f"the batch of the script could not be varied to {self.wanted}",
            because=because,
            attempt=f"the script's own {options}, after --",
        )

    def _check_together(self, loader: Loader, beside: Iterable[Loader]) -> None:
        """Raise UsageError if loaders with different batch sizes feed one step."""
        for other in beside:
            if other.batch_size != loader.batch_size:
                raise self._unvaried(
                    f"each step takes {loader.batch_size} examples of the DataLoader at"
                    f" {loader.place} and {other.batch_size} of the one at {other.place}",
                    "options for its batch sizes",
                )

    def check(self, seen: Seen) -> None:
        """Raise UsageError if the batch did not get the requested size."""
        if self.wanted is None:
            return
        rows = seen.num_rows
        is_as_before = rows is not None and rows == self.given == self._first_rows
        if seen.micro_batch == self.wanted and not is_as_before:
            return
        place = seen.loader.place if seen.loader else in_words(users_line())
        given = rows if is_as_before else seen.micro_batch
        raise self._unvaried(f"the model was given {given} examples at {place}")


def with_batch(seen: Seen, loop: Loop, loaders: Loaders, asked: BatchSize) -> Seen:
    """Return `seen` with the batch size and its source, or with why it is unknown.

    A single row is not taken for a batch, unless a batch of known size was reduced to one example.
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
    """Return whether the script splits the loader's batches and trains on the pieces."""
    if rows is None or rows >= size or size % rows:
        return False
    return 2 * loop.given.num_batches > 3 * max(loaders.num_read(loader), 1)


def _rows_asked_for(name: str, args: Any, kwargs: Any) -> int | None:
    """Return the first number of a size with two or more; None if there is no such size."""
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

"""DataLoaders of a script: read in this process, and, if asked, with another batch.

Workers and pinned memory change nothing on the GPU. Which loader feeds the training is told by
what was read last before a model was trained, and how many examples a batch has by the indices that
were drawn for it: a batch of graphs has a row for each node, and one of images may be a list.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from torch.utils import data as torch_data

from oomph.records.script import Loader
from oomph.tracing.script.loop import Loop
from oomph.tracing.script.users_line import in_words, users_line
from oomph.tracing.script.workers import Workers

WORKERS = "DataLoader: read without workers and without pinned memory"
_LEAST_BATCHES = 64  # that a loader gives when its batch is changed: a small data set goes round


class Loaders:
    """The loaders in the order of their making."""

    def __init__(self, loop: Loop, changed: Collection[int], micro_batch: int | None) -> None:
        self._loop, self._changed, self._micro_batch = loop, changed, micro_batch
        self._made: list[Loader] = []
        self._numbers: dict[int, int] = {}
        self._drawn: dict[int, Counter[int]] = {}  # of each loader: examples of its batches
        # Those that were read since a model was trained, each with the examples that were drawn.
        self._waiting: list[tuple[int, int | None]] = []
        self._fed: dict[int, list[int]] = {}  # those that were read for a backward, in order
        self.has_changed = False

    def note_reading(self, loader: Any, num_drawn: int | None) -> None:
        number = self._numbers.get(id(loader))
        if number is None:
            return
        self._waiting.append((number, num_drawn))
        if num_drawn is not None:
            self._drawn.setdefault(number, Counter())[num_drawn] += 1

    def note_end(self, loader: Any) -> None:
        """It was read to its end before a model was trained: that was an evaluation."""
        number = self._numbers.get(id(loader))
        others = [one for one in self._waiting if one[0] != number]
        self._waiting = others or self._waiting

    def note_training(self, num_rows: int | None) -> None:
        """A model is trained, and is given so many rows."""
        if not self._waiting:
            return
        fed = self._fed.setdefault(self._loop.num_backwards, [])
        fed += [number for number, _ in self._waiting]
        fed += [number for number, drawn in self._waiting if drawn == num_rows][-1:]
        self._waiting = []

    @property
    def feeding(self) -> Loader | None:
        """The one that is read last before most of the batches that are trained on."""
        lasts = Counter(numbers[-1] for numbers in self._fed.values())
        return self._told(lasts.most_common(1)[0][0]) if lasts else None

    @property
    def beside(self) -> tuple[Loader, ...]:
        """Others that are read whenever that one is: of another domain, or without labels."""
        feeding = self.feeding
        if feeding is None:
            return ()
        together = [set(n) for n in self._fed.values() if n[-1] == feeding.number]
        others = set.intersection(*together) - {feeding.number}
        return tuple(self._told(number) for number in sorted(others))

    def num_read(self, loader: Loader) -> int:
        """Batches of it, as far as their sizes are known."""
        return self._drawn.get(loader.number, Counter()).total()

    def _told(self, number: int) -> Loader:
        """With the batch size that it has shown: that of most batches, or of those that are full.

        A sampler that counts tokens has none.
        """
        made, drawn = self._made[number], self._drawn.get(number)
        if not drawn:
            return made
        most, times = drawn.most_common(1)[0]
        is_one_size = times * 2 > drawn.total() or most == made.batch_size
        return replace(made, batch_size=most if is_one_size else None)

    def is_uneven(self, loader: Loader) -> bool:
        """Whether its batches have as many examples as they like."""
        return loader.batch_size is None and bool(self._drawn.get(loader.number))

    def install(self, approximate: Callable[[str], None]) -> None:
        kind: Any = torch_data.DataLoader
        original = kind.__init__

        def init(loader: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kw: Any) -> None:
            given = _by_name(batch_size, args, kw)
            number = len(self._made)
            self._numbers[id(loader)] = number
            if given.get("num_workers") or given.get("pin_memory"):
                approximate(WORKERS)
            if number in self._changed and self._micro_batch is not None:
                given = self._rebatched(dataset, given)
            self._made.append(_record(number, dataset, given))
            loader.oomph_has_workers = bool(given.get("num_workers"))
            original(loader, dataset, **_alone(given))
            _tell(loader, given)

        kind.__init__ = init
        _patch_iterator(kind)
        workers = Workers()
        workers.install()
        self._patch_next(workers)

    def _patch_next(self, workers: Workers) -> None:
        from torch.utils.data import dataloader

        kind: Any = dataloader._BaseDataLoaderIter
        original, original_init, original_draw = kind.__next__, kind.__init__, kind._next_index

        def init(iterator: Any, loader: Any) -> None:
            with workers.at_work(loader):
                original_init(iterator, loader)
            iterator.oomph_loader, iterator.oomph_drawn = loader, None

        def draw(iterator: Any) -> Any:
            index = original_draw(iterator)
            iterator.oomph_drawn = _num_drawn(index)
            return index

        def following(iterator: Any) -> Any:
            self._loop.next_batch()
            try:
                with workers.at_work(iterator.oomph_loader):
                    batch = original(iterator)
            except StopIteration:
                self.note_end(iterator.oomph_loader)
                raise
            self.note_reading(iterator.oomph_loader, iterator.oomph_drawn)
            return batch

        kind.__init__, kind.__next__, kind._next_index = init, following, draw

    def _rebatched(self, dataset: Any, given: dict[str, Any]) -> dict[str, Any]:
        size = self._micro_batch
        assert size is not None  # noqa: S101 - the caller has looked
        self.has_changed = True
        if given.get("batch_sampler") is not None:
            return {**given, "batch_sampler": _resized(given["batch_sampler"], size)}
        if given["batch_size"] is None:  # its sampler, or the data set, batches by itself
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
    """A batch sampler with batches of another size."""
    if type(batches) is not torch_data.BatchSampler:
        return _Regrouped(batches, size)
    examples: Any = _Round(batches.sampler, size * _LEAST_BATCHES)
    return torch_data.BatchSampler(examples, size, drop_last=True)


class _Round:
    """A sampler that goes round until it has given enough."""

    def __init__(self, sampler: Any, least: int) -> None:
        self._sampler, self._least = sampler, least

    def __iter__(self) -> Iterator[Any]:
        rounds = itertools.chain.from_iterable(iter(self._sampler) for _ in itertools.count())
        return itertools.islice(rounds, len(self))

    def __len__(self) -> int:
        return max(len(self._sampler), self._least)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for while it is copied, before it has anything
            raise AttributeError(name)
        return getattr(self._sampler, name)


class _Regrouped:
    """The examples of a batch sampler in batches of another size; a small data set goes round."""

    def __init__(self, sampler: Any, batch_size: int) -> None:
        self._batches, self.batch_size, self.drop_last = sampler, batch_size, True

    def __iter__(self) -> Iterator[list[Any]]:
        batches = itertools.chain.from_iterable(iter(self._batches) for _ in itertools.count())
        examples = itertools.chain.from_iterable(batches)
        for _ in range(len(self)):
            batch = list(itertools.islice(examples, self.batch_size))
            if len(batch) < self.batch_size:
                return
            yield batch

    def __len__(self) -> int:
        before = len(self._batches) * (getattr(self._batches, "batch_size", None) or 1)
        return int(max(before // self.batch_size, _LEAST_BATCHES))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for while it is copied, before it has anything
            raise AttributeError(name)
        return getattr(self._batches, name)


_POSITIONS = (
    "shuffle",
    "sampler",
    "batch_sampler",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
)  # fmt: skip - of DataLoader.__init__, after the data set and the batch size


def _by_name(batch_size: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return {"batch_size": batch_size, **dict(zip(_POSITIONS, args, strict=False)), **kwargs}


def _num_drawn(index: Any) -> int | None:
    """Examples of one batch. A tuple is the key of one, where the loader does not batch."""
    is_one_row = getattr(index, "ndim", None) == 1
    return len(index) if isinstance(index, list | range) or is_one_row else None


def _record(number: int, dataset: Any, given: dict[str, Any]) -> Loader:
    is_sampled = given.get("batch_sampler") is not None
    own = getattr(given.get("batch_sampler"), "batch_size", None)
    size = own if is_sampled else given["batch_size"]
    if size is None and not is_sampled:  # the data set batches by itself, and may say how
        size = getattr(dataset, "batch_size", None)
    is_number = isinstance(size, int) and not isinstance(size, bool)
    return Loader(
        number=number,
        batch_size=size if is_number else None,
        num_workers=int(given.get("num_workers") or 0),
        pin_memory=bool(given.get("pin_memory")),
        place=in_words(users_line()),
    )


def _tell(loader: Any, given: dict[str, Any]) -> None:
    """What it was given, for frameworks that make another loader of it."""
    loader.num_workers = int(given.get("num_workers") or 0)
    loader.pin_memory = bool(given.get("pin_memory"))


def _patch_iterator(kind: Any) -> None:
    """Reading is done in this process, whatever the loader tells."""
    original = kind._get_iterator

    def iterator(loader: Any) -> Any:
        told = {"num_workers": loader.num_workers, "pin_memory": loader.pin_memory}
        loader.num_workers, loader.pin_memory = 0, False
        try:
            return original(loader)
        finally:
            _tell(loader, told)

    kind._get_iterator = iterator


def _alone(given: dict[str, Any]) -> dict[str, Any]:
    """The options of a loader that reads in this process."""
    dropped = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
    kept = {name: value for name, value in given.items() if name not in dropped}
    return {**kept, "num_workers": 0, "pin_memory": False}

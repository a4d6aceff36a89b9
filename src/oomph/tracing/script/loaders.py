"""DataLoaders of a script: read in this process, and, if asked, with another batch.

Workers and pinned memory change nothing on the GPU. Which loader feeds the training is told by
what was read last before a model was trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
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

    def __init__(self, loop: Loop, changed: int | None, micro_batch: int | None) -> None:
        self._loop, self._changed, self._micro_batch = loop, changed, micro_batch
        self._made: list[Loader] = []
        self._numbers: dict[int, int] = {}
        self._last: int | None = None
        self._feeding: int | None = None
        self.has_changed = False

    def note_reading(self, loader: Any) -> None:
        self._last = self._numbers.get(id(loader))

    def note_training(self) -> None:
        if self._last is not None:
            self._feeding = self._last

    @property
    def feeding(self) -> Loader | None:
        return None if self._feeding is None else self._made[self._feeding]

    def install(self, approximate: Callable[[str], None]) -> None:
        kind: Any = torch_data.DataLoader
        original = kind.__init__

        def init(loader: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kw: Any) -> None:
            given = _by_name(batch_size, args, kw)
            number = len(self._made)
            self._made.append(_record(number, given))
            self._numbers[id(loader)] = number
            if given.get("num_workers") or given.get("pin_memory"):
                approximate(WORKERS)
            if number == self._changed and self._micro_batch is not None:
                given = self._rebatched(dataset, given)
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
        original, original_init = kind.__next__, kind.__init__

        def init(iterator: Any, loader: Any) -> None:
            with workers.at_work(loader):
                original_init(iterator, loader)
            iterator.oomph_loader = loader

        def following(iterator: Any) -> Any:
            self.note_reading(iterator.oomph_loader)
            self._loop.next_batch()
            with workers.at_work(iterator.oomph_loader):
                return original(iterator)

        kind.__init__, kind.__next__ = init, following

    def _rebatched(self, dataset: Any, given: dict[str, Any]) -> dict[str, Any]:
        size = self._micro_batch
        assert size is not None  # noqa: S101 - the caller has looked
        self.has_changed = True
        batches = given.get("batch_sampler")
        if type(batches) is torch_data.BatchSampler:
            examples: Any = _Round(batches.sampler, size * _LEAST_BATCHES)
            again = torch_data.BatchSampler(examples, size, drop_last=True)
            return {**given, "batch_sampler": again}
        if batches is not None:
            return {**given, "batch_sampler": _Regrouped(batches, size)}
        if isinstance(dataset, torch_data.IterableDataset) or given["batch_size"] is None:
            return {**given, "batch_size": size if given["batch_size"] is not None else None}
        sampler = given.get("sampler")
        if sampler is None:
            is_shuffled = bool(given.get("shuffle"))
            order = torch_data.RandomSampler if is_shuffled else torch_data.SequentialSampler
            sampler = order(dataset)
        sampler = _Round(sampler, size * _LEAST_BATCHES)
        return {**given, "batch_size": size, "sampler": sampler, "shuffle": None, "drop_last": True}


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


def _record(number: int, given: dict[str, Any]) -> Loader:
    is_sampled = given.get("batch_sampler") is not None
    own = getattr(given.get("batch_sampler"), "batch_size", None)
    return Loader(
        number=number,
        batch_size=own if is_sampled else given["batch_size"],
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

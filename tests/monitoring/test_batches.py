"""torch's own loaders, timed from outside; and how many samples a batch has."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from oomph.monitoring.callbacks import TimedLoader
from oomph.monitoring.in_script import (
    BatchSizes,
    num_batches_in,
    num_drawn_by,
    num_samples_in,
)


class Slow(Dataset[torch.Tensor]):
    """Twelve samples, each of which takes its time, and what they took in this process."""

    def __init__(self) -> None:
        self.slept_s = 0.0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> torch.Tensor:
        began = time.monotonic()
        time.sleep(0.01)
        self.slept_s += time.monotonic() - began
        return torch.full((3,), float(number))


@pytest.mark.parametrize(
    ("batch", "number"),
    [
        (torch.zeros(5, 2), 5),
        ((torch.zeros(7, 2), torch.zeros(7)), 7),
        ({"names": ["a"], "x": [torch.zeros(4)]}, 4),
        (torch.tensor(1.0), None),
        (["a", "b"], None),
        (None, None),
        ([[[[[torch.zeros(3)]]]]], None),  # deeper than anybody looks
    ],
)
def test_a_batch_has_as_many_samples_as_its_first_tensor_is_long(
    batch: Any, number: int | None
) -> None:
    assert num_samples_in(batch) == number


def asked(truth: Sequence[int], num_batches: int | None) -> tuple[list[int | None], list[int]]:
    """What is taken for the sizes of these batches, and which were asked."""
    sizes, found, numbers = BatchSizes(num_batches, None), list[int | None](), list[int]()
    for number, size in enumerate(truth):
        if number >= sizes.ask_at:
            sizes.ask(number, torch.zeros(size, 1))
            numbers.append(number)
        found.append(sizes.size)
    return found, numbers


def test_of_batches_that_are_all_alike_few_are_asked_and_the_short_last_one_is() -> None:
    truth = [8] * 199 + [3]
    found, numbers = asked(truth, 200)
    assert found == truth
    assert numbers[-1] == 199
    assert len(numbers) < 50


def test_where_nobody_knows_which_batch_is_the_last_each_is_asked() -> None:
    truth = [8] * 199 + [3]
    assert asked(truth, None) == (truth, list(range(200)))


def test_batches_of_changing_sizes_are_all_asked() -> None:
    truth = [4 + number % 3 for number in range(200)]
    assert asked(truth, 200) == (truth, list(range(200)))


def test_sizes_that_begin_to_change_late_are_noticed_within_sixteen_batches() -> None:
    truth = [8] * 100 + [4 + number % 3 for number in range(100)]
    found, _ = asked(truth, 200)
    assert found[116:] == truth[116:]


def _counted(loader: Any, batches: Any) -> list[int | None]:
    sizes = BatchSizes(num_batches_in(loader), None, num_drawn_by(loader))
    found = []
    for number, batch in enumerate(batches):
        if number >= sizes.ask_at:
            sizes.ask(number, batch)
        found.append(sizes.size)
    return found


def test_a_loader_says_how_many_samples_a_batch_has_whose_rows_are_something_else() -> None:
    data = TensorDataset(torch.zeros(20, 7))
    nodes = DataLoader(data, batch_size=4, collate_fn=lambda b: torch.cat([x for (x,) in b]))
    assert _counted(nodes, nodes) == [4] * 5
    sampled = DataLoader(
        data,
        batch_sampler=BatchSampler(SequentialSampler(data), 4, drop_last=False),
        collate_fn=lambda b: torch.stack([x for (x,) in b], 1),
    )
    assert _counted(sampled, sampled) == [4] * 5
    usual = DataLoader(data, batch_size=8)
    assert _counted(usual, usual) == [8, 8, 4]  # the last is short, and its rows count
    assert _counted([torch.zeros(3)], [torch.zeros(3)]) == [3]


class Endless(IterableDataset[torch.Tensor]):
    """It hopes to have two samples, and has three."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.zeros(3, 1)


def test_the_number_of_batches_is_taken_from_a_loader_only_where_it_is_certain() -> None:
    of_tensors = TensorDataset(torch.zeros(12, 3))
    assert num_batches_in(DataLoader(of_tensors, 5)) == 3
    assert num_batches_in([1, 2]) == 2
    assert num_batches_in(iter([1, 2])) is None
    loader = DataLoader(Endless(), 1)
    assert num_batches_in(loader) is None
    assert len(list(loader)) == 3  # and torch warns nobody: nobody has asked how long it is


class Heard:
    """What a timed loader told."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []
        self.sizes: list[int | None] = []

    def __call__(self, began: float, ended: float, batch: Any) -> None:
        self.waits_s.append(ended - began)
        self.sizes.append(num_samples_in(batch))


@pytest.mark.parametrize(("num_workers", "persists"), [(0, False), (1, False), (1, True)])
def test_each_batch_of_a_loader_is_told_once_with_its_wait_in_every_epoch(
    num_workers: int, persists: bool
) -> None:
    slow = Slow()
    loader = DataLoader(slow, 5, num_workers=num_workers, persistent_workers=persists)
    heard = Heard()
    timed = TimedLoader(loader, heard)
    kinds = {type(iter(DataLoader(Slow(), 5, num_workers=num_workers)))}
    for _ in range(2):
        iterator = iter(loader)
        assert type(iterator) in kinds  # what others look at is what it was
        assert [len(batch) for batch in iterator] == [5, 5, 2]
    assert timed.is_timed
    assert heard.sizes == [5, 5, 2] * 2
    if not num_workers:
        assert sum(heard.waits_s) >= slow.slept_s > 0


def test_a_loader_that_is_no_longer_timed_is_as_before() -> None:
    loader, heard = DataLoader(Slow(), 12), Heard()
    timed = TimedLoader(loader, heard)
    timed.undo()
    list(loader)
    assert heard.sizes == []
    assert "_get_iterator" not in vars(loader)


def test_what_accelerate_makes_of_a_loader_is_timed_inside() -> None:
    from accelerate import Accelerator

    loader, heard = Accelerator(cpu=True).prepare(DataLoader(Slow(), 4)), Heard()
    TimedLoader(loader, heard)
    assert len(list(loader)) == 3
    assert heard.sizes == [4, 4, 4]


def test_a_loader_of_another_kind_is_left_alone() -> None:
    loader = [torch.zeros(2)]
    timed = TimedLoader(loader, Heard())
    assert not timed.is_timed
    timed.undo()

"""Small jobs that each library trains, what they used of their data, and errors that strike."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch names it
from torch.utils.data import DataLoader

from oomph.training.micro_batches import Micro
from oomph.training.rollback import Rollback
from training.stepper_kinds import OutOfMemoryAt as OutOfMemoryAt

NUM, BATCH, LENGTH, NUM_CLASSES = 44, 12, 9, 5  # the last batch has 8 examples
WIDTH = 128  # of the model for an emulated GPU
MOST_FAILURES = 3  # of one step: 12 at a time, 6, 3 and then 1


class Tagger(nn.Module):
    """Labels tokens: {"ids", "labels", "number"} -> {"loss"}, a mean over labels that count."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(16, NUM_CLASSES)
        self.used = Used()

    def forward(self, ids: Any, labels: Any, number: Any) -> Any:
        self.used.note(number)
        return {"loss": self.loss(self.head(self.body(self.table(ids))), labels)}

    def loss(self, logits: Any, labels: Any, **options: Any) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


class OfExamples(Tagger):
    """A mean over examples of each example's own mean."""

    def loss(self, logits: Any, labels: Any, **_: Any) -> Any:
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)
        return (each / (labels != -100).sum(1)).mean()


class Taking(Tagger):
    """Takes what a Trainer says of the whole batch, and does not use it: as BERT's classifiers."""

    def forward(self, ids: Any, labels: Any, number: Any, **_: Any) -> Any:
        return super().forward(ids, labels, number)


class Dividing(Tagger):
    """Divides by the labels of all batches of a step: as language models of transformers."""

    def forward(self, ids: Any, labels: Any, number: Any, **said: Any) -> Any:
        self.used.note(number)
        count = said.get("num_items_in_batch")
        logits = self.head(self.body(self.table(ids)))
        if count is None:
            return {"loss": self.loss(logits, labels)}
        return {"loss": self.loss(logits, labels, reduction="sum") / count}


class Coupled(Tagger):
    """A loss over pairs of examples."""

    def loss(self, logits: Any, labels: Any, **_: Any) -> Any:
        del labels
        means = logits.mean(1)
        return (means @ means.t()).logsumexp(1).mean()


class Wide(Tagger):
    """Large enough for an emulated GPU of some MiB."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.table = nn.Embedding(20, WIDTH)
        self.body = nn.Sequential(*[Block(dropout) for _ in range(4)])
        self.head = nn.Linear(WIDTH, NUM_CLASSES)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Any) -> Any:
        return x + self.dropout(self.second(torch.tanh(self.first(x))))


class Used:
    """Which examples were trained on. What an error undid was not."""

    def __init__(self) -> None:
        self.whole: list[int] = []  # of steps that are done
        self.since: list[int] = []  # the last step

    def note(self, numbers: Any) -> None:
        if torch.is_grad_enabled():
            self.since += numbers.tolist()

    def undo(self) -> None:
        self.since = []

    def step(self) -> None:
        self.whole, self.since = self.whole + self.since, []


def make(kind: Callable[..., Tagger] = Tagger, dtype: Any = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(**options).to(dtype)


def examples(num: int = NUM, length: int = LENGTH) -> list[dict[str, torch.Tensor]]:
    """Sequences in which 1 to all labels count, the rest is ignored."""
    torch.manual_seed(1)
    ids, labels = torch.randint(0, 20, (num, length)), torch.randint(0, NUM_CLASSES, (num, length))
    labels[torch.arange(length) >= torch.randint(1, length + 1, (num, 1))] = -100
    numbers = torch.arange(num)
    return [
        {"ids": i, "labels": y, "number": n} for i, y, n in zip(ids, labels, numbers, strict=True)
    ]


def collate(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def loader(rows: Any = None, batch: int = BATCH) -> Any:
    return DataLoader(rows or examples(), batch, collate_fn=collate)  # type: ignore[arg-type]


@contextmanager
def undone(used: Used) -> Iterator[None]:
    """Tells what was used of each error that was recovered from in here."""
    undo = Rollback.undo

    def undo_both(rollback: Rollback) -> None:
        used.undo()
        undo(rollback)

    with patch.object(Rollback, "undo", undo_both):
        yield


@contextmanager
def only_in_pieces(injector: OutOfMemoryAt) -> Iterator[None]:
    """Errors strike in forward and backward, and not in what the library does around them."""
    enter, leave = Micro.__enter__, Micro.__exit__
    kept: list[Any] = [0, []]  # ops so far, and what is armed

    def entered(piece: Micro) -> Any:
        injector.num_ops, injector.armed = kept
        return enter(piece)

    def left(piece: Micro, *error: Any) -> bool:
        kept[:] = injector.num_ops, injector.armed
        injector.disarm()
        return leave(piece, *error)

    def arm(numbers: Sequence[int]) -> None:
        kept[:] = 0, list(numbers)

    with (
        injector,
        patch.object(Micro, "__enter__", entered),
        patch.object(Micro, "__exit__", left),
        patch.object(injector, "arm", arm),
    ):
        yield


class Faults:
    """Errors at random ops of forward and backward, up to three in each step."""

    def __init__(self, model: Any, *, seed: int = 0, batches: int = 1, row: Any = None) -> None:
        """`batches` to one step of the optimizer; `row`: an example, where it is none of these."""
        self.injector = OutOfMemoryAt(model.used.undo)
        self._used = model.used
        self._num_ops = batches * num_ops(model, row or examples(1)[0])
        self._chance = random.Random(seed)  # noqa: S311

    def begin_step(self) -> None:
        num = self._chance.randint(0, MOST_FAILURES)
        self.injector.arm([self._chance.randint(1, self._num_ops) for _ in range(num)])

    def end_step(self) -> None:
        """Of forward and backward; the update comes."""
        self.injector.disarm()
        self._used.step()

    @property
    def num_raised(self) -> int:
        return self.injector.num_raised


def num_ops(model: Any, row: Any) -> int:
    """Of forward and backward of a batch, or a little fewer; they do not depend on its size."""
    counting, twin = OutOfMemoryAt(), copy.deepcopy(model)
    with counting:
        twin(**collate([row, row]))["loss"].backward()
    return counting.num_ops


def strike_in_update(optimizer: Any, injector: OutOfMemoryAt, number: int = 3) -> None:
    """The next update runs out of memory, once, at its op of that number."""
    strikes = [number]

    def arm(*_: Any) -> None:
        injector.arm(strikes)
        strikes.clear()

    optimizer.register_step_pre_hook(arm)
    optimizer.register_step_post_hook(lambda *_: injector.disarm())


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def assert_close(
    some: dict[str, torch.Tensor], others: dict[str, torch.Tensor], within: float
) -> None:
    """To so much of each weight; of what is nothing but rounding, of a thousandth of the largest.

    The bias of keys in attention has no gradient.
    """
    assert some.keys() == others.keys()
    least = max(float(value.abs().max()) for value in others.values()) / 1000
    for name, value in some.items():
        difference = (value - others[name]).abs().max()
        assert difference <= within * max(float(others[name].abs().max()), least), name


def assert_equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert some.keys() == others.keys()
    for name, value in some.items():
        assert torch.equal(value, others[name]), name

"""A script's training loop -> a Workload whose rehearsal holds the same at the same time.

The loop of a rehearsal clears gradients first, then has the batch copied, and keeps the batch and
the loss by name. Where a script's loop does otherwise, its twin does so from inside `loss`, or in
a hook of its optimizer.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch

from examples.commands import SCRIPTS
from oomph.records.workload import Variant, Workload

Clears = Literal["first", "before forward", "before backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """A script with its arguments, and the same training as a Workload."""

    program: str  # "mnist_cnn.py", or "-m tagger.train"
    arguments: tuple[str, ...]
    workload: Workload
    variant: Variant
    gpu: str = "rtx4090"


def script(name: str) -> Any:
    """An example script as a module: its main guard keeps it from training."""
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))
    return importlib.import_module(name)


def names_of(model: Any) -> SimpleNamespace:
    """The names of the script's loop: what they hold lives until they are bound anew.

    They hang on the model, so that they end with the rehearsal.
    """
    names: SimpleNamespace = model.__dict__.setdefault("names_of_the_loop", SimpleNamespace())
    return names


def _clear_nothing(set_to_none: bool = True) -> None:
    """In the place of zero_grad, where the loop of a rehearsal calls it."""


class OneByOne(dict[str, Any]):
    """A batch of which each name is bound anew before the next one is copied: `x = ...to(device)`.

    A rehearsal copies the tensors of a batch in the order of `items`.
    """

    def __init__(self, names: SimpleNamespace, tensors: dict[str, Any]) -> None:
        super().__init__(tensors)
        self._names = names

    def items(self) -> Any:
        for name, tensor in super().items():
            yield name, tensor
            vars(self._names).pop(name, None)


@dataclass(slots=True, kw_only=True)
class Loop:
    """What differs from the loop of a rehearsal."""

    make: Callable[[], Any]
    batch_of: Callable[[Any, int], Any]  # (model, number of examples)
    loss_of: Callable[[Any, Any], Any]
    optimizer_of: Callable[[Any, Any], Any]  # (model, parameters), when the model is on the GPU
    clears: Clears = "first"
    after_step: Callable[[Any], None] | None = None
    benchmarks: bool = False  # torch.backends.cudnn.benchmark
    _model: Any = None
    _optimizer: Any = None

    def model(self) -> Any:
        torch.backends.cudnn.benchmark = self.benchmarks
        made = self.make()
        self._model = weakref.ref(made)
        return made

    def batch(self, num_examples: int) -> Any:
        return self.batch_of(self._model(), num_examples)

    def optimizer(self, parameters: Any) -> Any:
        model = self._model()
        made = self.optimizer_of(model, parameters)
        self._optimizer = weakref.ref(made)
        if self.clears != "first":
            made.zero_grad = _clear_nothing
        after = self.after_step
        if after is not None:
            made.register_step_post_hook(lambda *_: after(model))
        return made

    def loss(self, model: Any, batch: Any) -> Any:
        if self.clears == "before forward":
            self._clear()
        loss = self.loss_of(model, batch)
        if self.clears == "before backward":
            self._clear()
        return loss

    def _clear(self) -> None:
        made = self._optimizer()
        type(made).zero_grad(made)


def workload(
    make: Callable[[], Any],
    batch: Callable[[Any, int], Any],
    loss: Callable[[Any, Any], Any],
    optimizer: Callable[[Any, Any], Any],
    batch_size: int,
    *,
    clip: float | None = None,
    clears: Clears = "first",
    after_step: Callable[[Any], None] | None = None,
    benchmarks: bool = False,
) -> Workload:
    loop = Loop(
        make=make,
        batch_of=batch,
        loss_of=loss,
        optimizer_of=optimizer,
        clears=clears,
        after_step=after_step,
        benchmarks=benchmarks,
    )
    return Workload(
        model=loop.model,
        batch=loop.batch,
        loss=loop.loss,
        optimizer=loop.optimizer,
        batch_size=batch_size,
        clip_grad_norm=clip,
    )


def let_go(tensor: torch.Tensor) -> None:
    """Its memory goes, though the loop of the rehearsal still has it by name."""
    tensor.data = tensor.detach().new_empty(0)


def whole(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)

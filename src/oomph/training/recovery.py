"""An out-of-memory error -> freed memory and a smaller size or another trick, or a clear error.

First everything that the error holds is released: its traceback holds the frames of forward, which
hold the activations. What the caller's frames hold cannot be released from here.
"""

from __future__ import annotations

import gc
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from oomph.errors import OomphError, UsageError
from oomph.out_of_memory import Memory, is_out_of_memory, which_memory
from oomph.records.plan import Plan
from oomph.records.workload import Variant, as_text, recomputed_blocks
from oomph.training.restarting import HOW, NotRecovered
from oomph.training.sizes import CudaMemory, Measurements, Sizes, planned_sizes, predictor_of
from oomph.tricks.blocks import find_blocks
from oomph.tricks.checkpointing import checkpoint_blocks

# Tricks that may be switched on during training, in this order: they change neither the update nor
# the parameters.
NAMES = ("checkpointing", "offload")


class LastResorts:
    """Tricks still available if a single example does not fit; `variant` has those switched on."""

    def __init__(self, model: nn.Module, variant: Variant, names: Sequence[str] = NAMES) -> None:
        unknown = [name for name in names if name not in NAMES]
        if unknown:
            raise UsageError(
                f"{unknown[0]!r:.40} cannot be switched on in the middle of training",
                attempt=f"last_resorts={NAMES}, or some of them",
            )
        self._model, self.variant = model, variant
        self._left = [name for name in NAMES if name in names]
        self.tried: list[str] = []
        self.switched_on: list[str] = []  # their names, in order

    def switch_on(self, memory: Memory | None) -> str | None:
        """Switch on the next trick; return its description, or None if none is left."""
        while self._left:
            done = self._put_on(self._left[0], memory)
            if done:
                self.tried.append(done)
                return done
        return None

    def switch_on_again(self, names: Sequence[str]) -> None:
        """Switch on the tricks of a checkpoint, unless they are on already."""
        for name in [each for each in names if each in self._left]:
            self._put_on(name, None)

    def _put_on(self, name: str, memory: Memory | None) -> str | None:
        self._left.remove(name)
        done = self._checkpoint() if name == "checkpointing" else self._offload(memory)
        if done:
            self.switched_on.append(name)
        return done

    def _checkpoint(self) -> str | None:
        if self.variant.checkpointing == "selective":
            return None
        try:
            num_blocks = len(find_blocks(self._model))
            done = set(recomputed_blocks(self.variant.checkpointing, num_blocks))
            rest = [number for number in range(num_blocks) if number not in done]
            if not rest:
                return None
            checkpoint_blocks(self._model, as_text(rest, num_blocks))
        except UsageError:  # it already recomputes, by itself or through other code
            return None
        self.variant = replace(self.variant, checkpointing="blocks")
        return f"recomputing {len(rest)} blocks in backward"

    def _offload(self, memory: Memory | None) -> str | None:
        if self.variant.offload_activations or memory == "host":
            return None
        self.variant = replace(self.variant, offload_activations=True)
        return "offloading activations to the host"


_MOST_TEXT = 400  # judgement, in characters: the rest of torch's message is advice
_T = TypeVar("_T")


@dataclass(slots=True)
class Recovery:
    """Decides what to do after each failure, and records what was done."""

    sizes: Sizes
    resorts: LastResorts
    say: Callable[[str], None]
    splits: bool = True
    measured: Measurements | None = None
    num_ooms: int = 0
    num_ooms_before: int = 0  # before this step
    tried: dict[str, None] = field(default_factory=dict)  # in order

    def after(self, error: BaseException, num: int, elements: int, size: int) -> int:
        """Return the size to go on with; 0 if there is nothing left to try."""
        memory, text = which_memory(error), text_of(error)
        self.num_ooms += 1
        release(error, is_thorough=self.num_ooms - self.num_ooms_before > 2)
        smaller = self.sizes.failed(num, elements, size) if self.splits else 0
        if smaller:
            next_one = f"trying {smaller} at a time"
        else:
            next_one = self.resorts.switch_on(memory) or ""
            smaller = size if next_one else 0
            self.sizes.grow_soon()
        self.tried.setdefault(f"{size} of {num} examples at a time")
        if next_one:
            self.say(f"out of memory with {size} of {num} examples at a time; {next_one}. {text}")
        return smaller

    def nothing_left(self, error_text: str) -> OomphError:
        """Return the error that lists what was tried and what would help."""
        tried = ", ".join([*self.tried, *self.resorts.tried])
        return OomphError(
            "one step does not fit into memory",
            because=f"tried: {tried}. {error_text}" if tried else error_text,
            attempt="oomph plan, to find settings that fit: 8-bit or offloaded optimizer states,"
            " lower precision, several GPUs. Weights and optimizer are those of the last whole"
            " step",
        )


def half_updated(error_text: str) -> OomphError:
    return NotRecovered(
        "the optimizer ran out of memory in the middle of its step",
        because=f"{error_text}. Some parameters may have been updated and others not",
        attempt=f'{HOW}. Stepper(..., copies="always") keeps a copy of each step, where the'
        " optimizer does not step in backward",
    )


def text_of(error: BaseException) -> str:
    """Return the start of an error's message, on one line."""
    return textwrap.shorten(" ".join(map(str, error.args)), _MOST_TEXT, placeholder=" ...")


def release(error: BaseException, *, is_thorough: bool = False) -> None:
    """Release what an error holds, and return cached memory."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        pending += [each.__context__, each.__cause__]
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None
    # Graphs with Python functions often contain reference cycles. They are young objects;
    # collecting all generations takes a good part of a second.
    gc.collect(2 if is_thorough else 1)
    for name in ("cuda", "xpu", "mps"):
        device = getattr(torch, name)
        if getattr(device, "is_initialized", device.is_available)():
            device.empty_cache()


@contextmanager
def if_memory_allows() -> Iterator[None]:
    """Do work that can be left out: if memory runs out, free what it took and go on after it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        release(error)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, in the same memory; others as they are."""
    if type(tensor).__name__ != "DTensor":
        return tensor
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def tried_twice(work: Callable[[], _T]) -> _T:
    """Do repeatable work; if memory runs out, empty the cache and do it again."""
    with if_memory_allows():
        return work()
    return work()


# ---- for a model and its plan ------------------------------------------------------------------


def recovery_for(
    model: nn.Module,
    variant: Variant,
    plan: Plan | None,
    micro_batch: int | None,
    last_resorts: Sequence[str],
    say: Callable[[str], None],
) -> Recovery:
    """Return a Recovery that starts with `micro_batch`, never exceeded, or with the plan's size."""
    splits = not variant.optimizer_in_backward
    measured = _measurements_of(model, plan) if splits else None
    may_differ = micro_batch is None and not any(_batch_norms(model))
    sizes = Sizes(
        micro_batch or (plan.micro_batch if plan else None),
        predictor_of(plan) if plan else None,
        planned=planned_sizes(plan) if may_differ else None,
        measured=measured,
        # Whether BatchNorm is in training mode is known only once the model has been trained.
        may_grow=lambda: micro_batch is None and not any(n.training for n in _batch_norms(model)),
    )
    resorts = LastResorts(model, variant, last_resorts)
    return Recovery(sizes, resorts, say, splits=splits, measured=measured)


def _measurements_of(model: nn.Module, plan: Plan | None) -> Measurements | None:
    """Return measurements of the memory that the plan leaves to torch; None without a GPU."""
    parameter, limit_bytes = next(iter(model.parameters()), None), None
    if parameter is None or parameter.device.type != "cuda":
        return None
    if plan is not None:
        predicted = plan.prediction
        outside_bytes = predicted.device_bytes - predicted.reserved_bytes  # not in torch's pool
        limit_bytes = predicted.capacity_bytes - outside_bytes
    memory = CudaMemory(parameter.device, limit_bytes)
    return Measurements(memory, lambda: _gradient_bytes_to_come(model))


def _gradient_bytes_to_come(model: nn.Module) -> int:
    """Return the bytes of gradients yet to be allocated; accumulated or unzeroed ones exist."""
    to_come = (each for each in model.parameters() if each.requires_grad and each.grad is None)
    return sum(part.numel() * part.element_size() for part in map(own_part, to_come))


def _batch_norms(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the BatchNorms; in training mode, another micro-batch would change the training."""
    return (each for each in model.modules() if isinstance(each, _BatchNorm))

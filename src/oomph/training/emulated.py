"""A GPU with so much memory, emulated on the CPU: real training, real numbers, real shortages.

Within `EmulatedGpu`, device "cuda" is a card whose memory is accounted by the replica of the
caching allocator; the tensors on it are CPU tensors. When its memory does not suffice, the op
that asked raises torch.OutOfMemoryError with torch's own words. On leaving, torch is as before.

Not emulated: a second GPU, NCCL, CUDA graphs, custom CUDA kernels, torch.compile (left out with
a warning), and that CUDA refuses to mix tensors of the host and of the GPU in one op.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from oomph.errors import UsageError
from oomph.training.emulation.accounting import Accounting, Known
from oomph.training.emulation.branches import patch_branches
from oomph.training.emulation.card import Card, Memory
from oomph.training.emulation.cuda_answers import patch_cuda
from oomph.training.emulation.factories import patch_factories
from oomph.training.emulation.fused_attention import fused_attention
from oomph.training.emulation.ops import KernelFacts
from oomph.training.emulation.patches import Patches
from oomph.training.emulation.places import Places
from oomph.training.emulation.tensors import patch_tensors
from oomph.training.emulation.threads import patch_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuda:
    """What is known of CUDA beside its memory."""

    capability: tuple[int, int]
    facts: KernelFacts
    attention: Callable[..., Any]  # scaled_dot_product_attention, by the op that CUDA chooses
    streams: Any  # Stream, Event, use_stream, current_stream, default_stream
    # autocast("cuda") for the tensors of which a function says yes, in the whole process ...
    casts: Callable[[Callable[[Any], bool]], contextlib.AbstractContextManager[None]]
    casts_here: Callable[[], Any]  # ... and, within a context, in this thread


class EmulatedGpu:
    """The context, and what the card says of its memory, within it and afterwards."""

    _current: EmulatedGpu | None = None  # in this process

    def __init__(self, memory: Memory, cuda: Cuda) -> None:
        self._card = Card(memory)
        self._cuda = cuda
        self._stack = contextlib.ExitStack()

    # ---- figures -----------------------------------------------------------------------------

    @property
    def total_bytes(self) -> int:
        return self._card.memory.total_bytes

    @property
    def allocated_bytes(self) -> int:
        return self._card.settled().allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        return self._card.settled().reserved_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """Since the beginning, or torch.cuda.reset_peak_memory_stats()."""
        return self._card.statistics.all.bytes.peak

    @property
    def peak_reserved_bytes(self) -> int:
        return self._card.statistics.all.reserved.peak

    @property
    def num_out_of_memory(self) -> int:
        """How often torch.OutOfMemoryError was raised."""
        return self._card.num_out_of_memory

    # ---- the context -------------------------------------------------------------------------

    def __enter__(self) -> EmulatedGpu:
        if EmulatedGpu._current is not None:
            raise UsageError(
                "there is an emulated GPU already",
                because="one process has one emulated GPU at a time",
                attempt="leave the first `with oomph.emulated_gpu(...)` before the second",
            )
        with contextlib.ExitStack() as stack:
            self._install(stack)
            self._stack = stack.pop_all()
        return self

    def _install(self, stack: contextlib.ExitStack) -> None:
        # Before anything is patched. Torch imports it with the first optimizer, and it keeps what
        # it finds in torch's namespaces then, for good.
        importlib.import_module("torch._dynamo")
        EmulatedGpu._current = self
        stack.callback(setattr, EmulatedGpu, "_current", None)
        stack.callback(self._card.forget)
        places, patches = Places(self._card), Patches()
        stack.callback(_restore, torch.get_default_dtype(), _default_device())
        stack.callback(patches.undo)
        known = Known(places, self._cuda.facts)
        patch_tensors(patches, places)
        patch_factories(patches, places)
        patch_branches(patches, places)
        patch_cuda(patches, self._card, self._cuda.streams, self._cuda.capability)
        patch_threads(patches, lambda: self._in_this_thread(known))
        stack.enter_context(fused_attention(patches, places, self._cuda.attention))
        stack.enter_context(self._cuda.casts(places.on_card))
        stack.enter_context(self._in_this_thread(known))

    @contextlib.contextmanager
    def _in_this_thread(self, known: Known) -> Iterator[None]:
        with self._cuda.casts_here(), Accounting(known):
            yield

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _default_device() -> Any:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _restore(dtype: Any, device: Any) -> None:
    """What is made by default: a script may have set it to the card."""
    if torch.get_default_dtype() != dtype:
        torch.set_default_dtype(dtype)
    if _default_device() != device:
        torch.set_default_device(device)

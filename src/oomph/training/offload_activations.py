"""What backward needs -> waits in the host's memory, and comes back when backward asks for it.

Copies run on a stream of their own, beside the computing. The newest few tensors stay on the GPU:
backward begins with them. Parameters stay, and so does what is small or an odd view. A tensor
that several ops need is moved once. Nothing is computed differently.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from oomph.training.host import empty_on_host
from oomph.units import KIB

# A copy of less is not worth its launch. Not more than that: what stays would depend on the
# micro-batch, and two rehearsals would not tell a third.
_SMALL_BYTES = 64 * KIB
_NUM_KEPT = 5  # as max_fwd_stash_size of torchtune's OffloadActivations


def offloaded_activations(
    *, small_bytes: int = _SMALL_BYTES, num_kept: int = _NUM_KEPT
) -> AbstractContextManager[None]:
    """Around a forward: what it saves for backward is offloaded."""
    offloading = _Offloading(small_bytes, num_kept)
    # Backward holds `_unpack` and what was packed, and not what packed it.
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    context: AbstractContextManager[None] = hooks(offloading.pack, _unpack)
    return context


class _Offloading:
    """What has been offloaded in one forward."""

    def __init__(self, small_bytes: int, num_kept: int) -> None:
        self._small_bytes, self._num_kept = small_bytes, num_kept
        self._known: dict[int, tuple[Any, int, _Away]] = {}  # by storage
        self._newest: deque[_Away] = deque()

    def pack(self, tensor: Any) -> Any:
        if not self._is_worth_it(tensor):
            return tensor
        with torch.no_grad():
            away = self._away(tensor.detach())
        away.num_uses += 1
        return _Packed(away, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def _is_worth_it(self, tensor: Any) -> bool:
        """Not a parameter or a view of one, not small, and most of the memory that it is in."""
        if tensor.layout is not torch.strided or isinstance(tensor, torch.nn.Parameter):
            return False
        if isinstance(tensor._base, torch.nn.Parameter) or 0 in tensor.stride():
            return False
        whole_bytes = tensor.untyped_storage().nbytes()
        size_bytes = tensor.numel() * tensor.element_size()
        is_most = whole_bytes <= 2 * size_bytes <= 2 * whole_bytes
        return bool(is_most and whole_bytes >= self._small_bytes)

    def _away(self, tensor: Any) -> _Away:
        """The copy of a tensor's whole storage, made if it is not there yet."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is not None and known[0]() is storage:
            _, version, away = known
            if (version, away.host.dtype) == (tensor._version, tensor.dtype):
                return away
        num_elements = storage.nbytes() // tensor.element_size()
        away = _Away(tensor.as_strided((num_elements,), (1,), 0))
        self._known[storage._cdata] = (weakref.ref(storage), tensor._version, away)
        self._newest.append(away)
        if len(self._newest) > self._num_kept:
            self._newest.popleft().leave()
        return away


def _unpack(packed: Any) -> Any:
    if not isinstance(packed, _Packed):
        return packed
    with torch.no_grad():
        return packed.away.use().as_strided(packed.shape, packed.stride, packed.offset)


@dataclass(frozen=True, slots=True)
class _Packed:
    """A view of what is away."""

    away: _Away
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Away:
    """A storage that is on its way to the host, there, or back."""

    def __init__(self, flat: Any) -> None:
        self.num_uses = 0  # in backward, that are still to come
        self.host = empty_on_host(flat)
        self._gpu: Any = flat  # until it has been copied
        self._device = flat.device
        self._copied = _copy_out(self.host, flat)

    def leave(self) -> None:
        """Give the GPU's memory back, when the copy is done; not if backward has it already."""
        if self._copied is not None:
            self._copied.synchronize()
        self._gpu = None

    def use(self) -> Any:
        """The whole on the GPU, for one of its uses."""
        gpu = self._gpu if self._gpu is not None else _copy_back(self.host, self._device)
        self.num_uses -= 1
        self._gpu = gpu if self.num_uses > 0 else None
        return gpu


def _copy_out(host: Any, gpu: Any) -> Any:
    """Begin a copy; the event of its end, on a GPU."""
    if not gpu.is_cuda:
        host.copy_(gpu)
        return None
    stream = _copying_stream(gpu.device)
    stream.wait_stream(torch.cuda.current_stream(gpu.device))
    with torch.cuda.stream(stream):
        host.copy_(gpu, non_blocking=True)
    done = torch.cuda.Event()
    done.record(stream)
    return done


def _copy_back(host: Any, device: Any) -> Any:
    if device.type != "cuda":
        return torch.empty(host.shape, dtype=host.dtype, device=device).copy_(host)
    stream, computing = _copying_stream(device), torch.cuda.current_stream(device)
    # Memory of the copying stream: that of the other is not free before its queue is done.
    with torch.cuda.stream(stream):
        gpu = torch.empty(host.shape, dtype=host.dtype, device=device)
        gpu.copy_(host, non_blocking=True)
    computing.wait_stream(stream)
    gpu.record_stream(computing)
    return gpu


_streams: dict[Any, Any] = {}


def _copying_stream(device: Any) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]

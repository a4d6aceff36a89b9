"""Move activations to host memory during forward, and back when backward needs them.

Copies run on their own stream, in parallel with computation. The newest few tensors stay on the
GPU, because backward starts with them. Parameters, small tensors and unusual views stay, too. A
tensor that several ops need is moved once. The results do not change.
"""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections import deque
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from oomph.records.workload import Variant
from oomph.tricks.definition import Definition, Fragment, by_hand
from oomph.units import KIB

if TYPE_CHECKING:
    import torch


@functools.cache
def _host_memory() -> tuple[Any, Any]:
    """Register a torch op for host memory, so that a rehearsal sees it is not the GPU's."""
    import torch

    library = torch.library.Library("oomph", "DEF")
    library.define("empty_on_host(Tensor like, ScalarType? dtype=None) -> Tensor")

    def empty(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        # Copies to and from unpinned memory cannot overlap with the GPU's work.
        dtype = dtype or like.dtype
        return torch.empty(like.shape, dtype=dtype, device="cpu", pin_memory=like.is_cuda)

    for key in ("CPU", "CUDA"):
        library.impl("empty_on_host", empty, key)
    return torch.ops.oomph.empty_on_host, library  # a collected library takes its ops with it


def empty_on_host(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a contiguous host tensor of the same shape, and the same dtype unless one is given."""
    make, _ = _host_memory()
    made: torch.Tensor = make(like, dtype)
    return made


# Judgement: copying less is not worth the launch. A higher limit would make what stays depend on
# the micro-batch, and two rehearsals could not predict a third.
_SMALL_BYTES = 64 * KIB
_NUM_KEPT = 5  # as max_fwd_stash_size of torchtune's OffloadActivations


def offloaded_activations(
    *, small_bytes: int = _SMALL_BYTES, num_kept: int = _NUM_KEPT
) -> AbstractContextManager[None]:
    """Return a context for a forward that offloads what it saves for backward.

    Use it for each forward anew, the loss included; backward may run outside.
    """
    import torch

    offloading = _Offloading(small_bytes, num_kept)
    # Backward holds `_unpack` and the packed tensors, but not the packing object.
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    context: AbstractContextManager[None] = hooks(offloading.pack, _unpack)
    return context


class _Offloading:
    """The tensors offloaded in one forward."""

    def __init__(self, small_bytes: int, num_kept: int) -> None:
        self._small_bytes, self._num_kept = small_bytes, num_kept
        self._known: dict[int, tuple[Any, int, _Away]] = {}  # keyed by storage
        self._newest: deque[_Away] = deque()

    def pack(self, tensor: torch.Tensor) -> Any:
        import torch

        if not self._is_worth_it(tensor):
            return tensor
        with torch.no_grad():
            away = self._away(tensor.detach())
        away.num_uses += 1
        return _Packed(away, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _is_worth_it(self, tensor: torch.Tensor) -> bool:
        """Return whether to offload: no parameter (or view), not small, most of its storage."""
        import torch

        if tensor.layout is not torch.strided or isinstance(tensor, torch.nn.Parameter):
            return False
        if isinstance(tensor._base, torch.nn.Parameter) or 0 in tensor.stride():
            return False
        whole_bytes = tensor.untyped_storage().nbytes()
        size_bytes = tensor.numel() * tensor.element_size()
        is_most = whole_bytes <= 2 * size_bytes <= 2 * whole_bytes
        return bool(is_most and whole_bytes >= self._small_bytes)

    def _away(self, tensor: torch.Tensor) -> _Away:
        """Return the copy of a tensor's whole storage, made at its first use."""
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
    import torch

    with torch.no_grad():
        return packed.away.use().as_strided(packed.shape, packed.stride, packed.offset)


class _Packed(NamedTuple):
    """A view of an offloaded storage."""

    away: _Away
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Away:
    """A storage that is on its way to the host, on the host, or back."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.num_uses = 0  # uses in backward still to come
        self.host = empty_on_host(flat)
        self._gpu: torch.Tensor | None = flat  # until the copy is done
        self._device = flat.device
        self._copied = _copy_out(self.host, flat)

    def leave(self) -> None:
        """Free the GPU memory once the copy is done, unless backward already uses it."""
        if self._copied is not None:
            self._copied.synchronize()
        self._gpu = None

    def use(self) -> torch.Tensor:
        """Return the whole storage on the GPU, for one of its uses."""
        gpu = self._gpu if self._gpu is not None else _copy_back(self.host, self._device)
        self.num_uses -= 1
        self._gpu = gpu if self.num_uses > 0 else None
        return gpu


def _copy_out(host: torch.Tensor, gpu: torch.Tensor) -> torch.cuda.Event | None:
    """Start a copy, and return the event of its end if it runs on a GPU."""
    if not gpu.is_cuda:
        host.copy_(gpu)
        return None
    import torch

    stream = _copying_stream(gpu.device)
    stream.wait_stream(torch.cuda.current_stream(gpu.device))
    with torch.cuda.stream(stream):
        host.copy_(gpu, non_blocking=True)
    done = torch.cuda.Event()
    done.record(stream)
    return done


def _copy_back(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    import torch

    if device.type != "cuda":
        return torch.empty(host.shape, dtype=host.dtype, device=device).copy_(host)
    stream, computing = _copying_stream(device), torch.cuda.current_stream(device)
    # Use the copying stream's memory: the other stream's is free only when its queue is done.
    with torch.cuda.stream(stream):
        gpu = torch.empty(host.shape, dtype=host.dtype, device=device)
        gpu.copy_(host, non_blocking=True)
    computing.wait_stream(stream)
    gpu.record_stream(computing)
    return gpu


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    import torch

    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


# ---- the trick -----------------------------------------------------------------------------------

_ON_HOST = """
def empty_on_host(like):
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
"""
_STREAMS_LINE = "_streams = {}  # of copies, for each GPU"


def _in_code(_: Variant) -> Fragment:
    """Return this module's own functions: the plan's memory and time are theirs."""
    own = (_Offloading, _unpack, _Packed, _Away, _copy_out, _copy_back, _copying_stream)
    texts = (re.sub(r"\n +import torch\n\n?", "\n", inspect.getsource(one)) for one in own)
    around = (
        "def offloaded_activations():\n"
        '    """What backward needs waits in host memory; copies run beside the computation."""\n'
        f"    offloading = _Offloading({_SMALL_BYTES}, {_NUM_KEPT})\n"
        "    return torch.autograd.graph.saved_tensors_hooks(offloading.pack, _unpack)\n"
    )
    return Fragment(
        imports=[
            "from __future__ import annotations",
            "import weakref",
            "from collections import deque",
            "from typing import Any, NamedTuple",
        ],
        constants=[_STREAMS_LINE],
        functions=[_ON_HOST, *texts, around],
        around_forward=["offloaded_activations()"],
    )


_LINE = "with oomph.offloaded_activations(): loss = ..., around each forward"

OFFLOAD_ACTIVATIONS = Definition(
    name="offload-activations",
    stability="same",
    setting="offload_activations",
    what="keep what backward needs in host memory",
    code=f"oomph.Stepper, or {_LINE}",
    caveat="as fast as the bus: measure a step",
    # A checkpointed block saves next to nothing that could be offloaded.
    is_pointless=lambda v: v.checkpointing != "none" or v.optimizer_in_backward,
    around_forward=offloaded_activations,
    # torch's save_on_cpu moves everything, parameters too, and waits for each copy.
    by_hand=by_hand(f"activations on the host: {_LINE}"),
    in_code=_in_code,
    has_edit=True,
)

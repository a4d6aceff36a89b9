"""Emulate a GPU with a given amount of memory on the CPU, for real training that can run out.

Inside `EmulatedGpu`, device "cuda" is a card whose memory the replica of the caching allocator
accounts for; the tensors on it are CPU tensors. If memory runs out, the op raises
torch.OutOfMemoryError with torch's own message. On exit torch is restored.

Not emulated: a second GPU, NCCL, CUDA graphs, custom CUDA kernels, torch.compile (skipped with a
warning), and CUDA's refusal to mix host and GPU tensors in one op.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import warnings
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._ops import OpOverload
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.errors import UsageError
from oomph.pretending import autocast, cuda, ops
from oomph.pretending.branches import fused_attention, patch_dropout
from oomph.pretending.card import Card, Place, place_of
from oomph.pretending.card_history import History
from oomph.pretending.emulated_run import settings_text, size_of
from oomph.pretending.factories import (
    Function,
    move_of,
    patch_factories,
    patch_generator,
    patch_legacy_types,
)
from oomph.pretending.kernels import cublas_handle
from oomph.pretending.ops import Behaviour
from oomph.pretending.patches import Patches, patch_threads
from oomph.pretending.reductions import Taken
from oomph.pretending.tensors import (
    GPU,
    HOST,
    META,
    key_of,
    leaves_of,
    tensors_in,
    true_device,
)
from oomph.records.generation import DEFAULT_CAPABILITY, generation_of


class EmulatedGpu:
    """The context manager, and the card's memory figures, available inside it and afterwards."""

    _current: EmulatedGpu | None = None  # the one active in this process

    def __init__(
        self, memory: str | int, allocator: str | None, capability: tuple[int, int] | None
    ) -> None:
        text = settings_text() if allocator is None else allocator
        self._card = Card(size_of(memory), text, capability or DEFAULT_CAPABILITY)
        self._stack = contextlib.ExitStack()

    # ---- figures -----------------------------------------------------------------------------

    @property
    def total_bytes(self) -> int:
        return self._card.total_bytes

    @property
    def allocated_bytes(self) -> int:
        return self._card.settled().allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        return self._card.settled().reserved_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """Return the peak since the start or since torch.cuda.reset_peak_memory_stats()."""
        return self._card.statistics.all.bytes.peak

    @property
    def peak_reserved_bytes(self) -> int:
        return self._card.statistics.all.reserved.peak

    @property
    def num_out_of_memory(self) -> int:
        """Return how often torch.OutOfMemoryError was raised."""
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
        # Import this before anything is patched. Torch imports it with the first optimizer, and it
        # keeps whatever it finds in torch's namespaces at that time.
        importlib.import_module("torch._dynamo")
        EmulatedGpu._current = self
        stack.callback(setattr, EmulatedGpu, "_current", None)
        stack.callback(self._card.forget)
        places, patches = _Places(self._card), Patches()
        stack.callback(_restore, torch.get_default_dtype(), _default_device())
        stack.callback(patches.undo)
        known = _Known(places)
        _patch_tensors(patches, places)
        _patch_making(patches, places)
        patch_dropout(patches, places.on_card)
        cuda.install(patches, self._card)
        _patch_annotations(patches, self._card.recording)
        _patch_cpu_choices(patches)
        patch_threads(patches, lambda: self._in_this_thread(known))
        stack.enter_context(fused_attention(patches, places.on_card, self._card.capability))
        stack.enter_context(autocast.installed(places.on_card))
        stack.enter_context(self._in_this_thread(known))

    @contextlib.contextmanager
    def _in_this_thread(self, known: _Known) -> Iterator[None]:
        with autocast.guard(), _Accounting(known):
            yield

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _default_device() -> torch.device | None:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _restore(dtype: torch.dtype, device: torch.device | None) -> None:
    """Restore the default dtype and device: a script may have set them to the card."""
    if torch.get_default_dtype() != dtype:
        torch.set_default_dtype(dtype)
    if _default_device() != device:
        torch.set_default_device(device)


# ---- tensors report, create and move themselves as if the card were a GPU -----------------------
# To C++ every tensor is on the CPU. A tensor is on the card if its storage holds a block there, and
# so are its views. C++ never sees device="cuda", because a CPU-only build has no such device.


class _PerThread(threading.local):
    asked: Place | None = None  # by the device passed to the current function
    last: Place = "host"  # place of the last op that had tensors; C++ creates tensors there


class _Places:
    """Record which tensors are on the card and where the current call puts its result."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.now = _PerThread()
        self._live = card.live
        # By the storage's address in C++.
        self._pinned: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()

    def on_card(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the card."""
        if not self._live:
            return False
        if tensor.layout is not torch.strided:
            return tensor.layout is torch.sparse_coo and self.on_card(tensor._values())
        try:
            return tensor.untyped_storage()._cdata in self._live
        except (RuntimeError, NotImplementedError):  # the tensor has no storage of its own
            return False

    def pin(self, tensor: torch.Tensor) -> None:
        """Mark a host tensor as pinned; its memory is ordinary."""
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided or not self._pinned:
            return False
        return tensor.untyped_storage()._cdata in self._pinned

    @contextlib.contextmanager
    def asking(self, place: Place) -> Iterator[None]:
        """Put the results of calls within this context in the given place."""
        before, self.now.asked = self.now.asked, place
        try:
            yield
        finally:
            self.now.asked = before


def _patch_tensors(patches: Patches, places: _Places) -> None:
    _patch_device(patches, places)
    _patch_moves(patches, places)
    _patch_pinning(patches, places)
    _patch_numpy(patches, places)
    _patch_storages(patches, places)


def _patch_device(patches: Patches, places: _Places) -> None:
    on_card = places.on_card

    def device(tensor: torch.Tensor) -> torch.device:
        true = true_device(tensor)
        return GPU if true.type == "cpu" and on_card(tensor) else true

    patches.put(
        torch.Tensor,
        device=property(device),
        is_cuda=property(on_card),
        is_cpu=property(lambda it: device(it).type == "cpu"),
        get_device=lambda tensor: 0 if on_card(tensor) else -1,
    )


def _patch_moves(patches: Patches, places: _Places) -> None:
    original: Function = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device, dtype, options = move_of(args, kwargs)
        place = place_of(device)
        if device is not None and place is None:  # `meta` is left to torch
            return original(tensor, device, dtype or tensor.dtype, **options)
        if place is None or places.on_card(tensor) == (place == "card"):
            return original(tensor, dtype or tensor.dtype, **options)
        with places.asking(place):  # a move between host and card always copies
            return original(tensor, dtype or tensor.dtype, **{**options, "copy": True})

    def to_gpu(
        tensor: torch.Tensor, device: Any = "cuda", non_blocking: bool = False, **how: Any
    ) -> Any:
        return to(tensor, "cuda" if device is None else device, non_blocking=non_blocking, **how)

    def to_host(tensor: torch.Tensor, **how: Any) -> Any:
        return to(tensor, "cpu", **how)

    patches.put(torch.Tensor, to=to, cuda=to_gpu, cpu=to_host, record_stream=lambda *_, **__: None)


def _patch_pinning(patches: Patches, places: _Places) -> None:
    """Report memory as pinned although it is ordinary; nothing is really copied to a GPU."""

    def pin_memory(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if places.on_card(tensor) or tensor.layout is not torch.strided:
            kind = tensor.type()
            raise RuntimeError(f"cannot pin '{kind}' only dense CPU tensors can be pinned")
        if places.is_pinned(tensor):
            return tensor
        pinned = tensor.detach().clone()
        places.pin(pinned)
        return pinned

    patches.put(
        torch.Tensor,
        pin_memory=pin_memory,
        is_pinned=lambda tensor, *_, **__: places.is_pinned(tensor),
    )


def _patch_numpy(patches: Patches, places: _Places) -> None:
    """Refuse .numpy() with the error that a real GPU tensor gives."""

    def refusing(original: Function) -> Function:
        def convert(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if places.on_card(tensor):
                raise TypeError(
                    "can't convert cuda:0 device type tensor to numpy. "
                    "Use Tensor.cpu() to copy the tensor to host memory first."
                )
            return original(tensor, *args, **kwargs)

        return convert

    for name in ("numpy", "__array__"):
        patches.put(torch.Tensor, **{name: refusing(getattr(torch.Tensor, name))})


def _patch_storages(patches: Patches, places: _Places) -> None:
    """Move storages for torch.load(..., map_location="cuda"), which dispatches no op."""
    original = torch.UntypedStorage.to

    def to(storage: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> Any:
        if place_of(device) != "card":
            return original(storage, device=device, non_blocking=non_blocking)
        moved: torch.UntypedStorage = storage.clone()
        places.card.place(moved)
        return moved

    patches.put(torch.UntypedStorage, to=to, cuda=lambda storage, *_, **__: to(storage, device=GPU))


def _patch_making(patches: Patches, places: _Places) -> None:
    """Make every factory function put its tensor on the card for device="cuda"."""
    wrapped = patch_factories(patches, lambda function: _wrapped(function, places))
    _patch_default_device(patches, wrapped)
    patch_legacy_types(patches)
    patch_generator(patches)


def _wrapped(function: Function, places: _Places) -> Function:
    def make(*args: Any, **kwargs: Any) -> Any:
        place = place_of(kwargs.get("device"))
        if kwargs.get("pin_memory"):
            if place == "card":
                raise RuntimeError("Only dense CPU tensors can be pinned")
            kwargs["pin_memory"] = False  # a CPU-only build cannot pin
            made = make(*args, **kwargs)
            places.pin(made)
            return made
        if place is None:
            return function(*args, **kwargs)
        kwargs["device"] = HOST
        with places.asking(place):
            return function(*args, **kwargs)

    return make


def _patch_default_device(patches: Patches, wrapped: dict[Function, Function]) -> None:
    """Support `with torch.device("cuda")` and torch.set_default_device("cuda")."""
    original: Function = DeviceContext.__torch_function__

    def torch_function(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        make = wrapped.get(func)
        if make is None or kwargs.get("device") is not None or self.device.type != "cuda":
            return original(self, func, types, args, kwargs)
        return make(*args, **{**kwargs, "device": self.device})

    patches.put(DeviceContext, __torch_function__=torch_function)


# ---- where the CPU's code differs from CUDA's ----------------------------------------------------


def _patch_annotations(patches: Patches, recording: History) -> None:
    """Pass torch.profiler.record_function to snapshots; torch marks optimizer steps with it."""
    kind = torch.autograd.profiler.record_function
    enter, leave = kind.__enter__, kind.__exit__

    def entered(self: Any) -> Any:
        recording.annotate("START", self.name)
        return enter(self)

    def left(self: Any, *args: Any) -> Any:
        recording.annotate("END", self.name)
        return leave(self, *args)

    patches.put(kind, __enter__=entered, __exit__=left)


def _patch_cpu_choices(patches: Patches) -> None:
    patches.put(torch.backends.cudnn, is_acceptable=lambda _: False)  # otherwise it would warn
    patches.put(torch, compile=_uncompiled)
    original = torch._C._group_tensors_by_device_and_dtype

    def grouped(lists: Any, with_indices: bool = False) -> Any:
        """Correct the devices of groups: optimizers and gradient clipping ask C++ for them."""
        return {
            (_device_of(tensors, device), dtype): (tensors, indices)
            for (device, dtype), (tensors, indices) in original(lists, with_indices).items()
        }

    patches.put(torch._C, _group_tensors_by_device_and_dtype=grouped)


def _uncompiled(model: Any = None, **_: Any) -> Any:
    warnings.warn("the emulated GPU compiles nothing: torch.compile is left out", stacklevel=2)
    return (lambda function: function) if model is None else model


def _device_of(lists: Any, device: torch.device) -> torch.device:
    tensors = (tensor for tensors in lists for tensor in tensors if tensor is not None)
    return next((tensor.device for tensor in tensors), device)


# ---- a call -> the bytes of the storages that it will create -------------------------------------
# torch's meta kernels give the sizes once for each kind of call, and the answer is remembered. If
# the real kernel creates other storages, those are remembered instead. The answer is None if the
# sizes cannot be known in advance: they depend on values (nonzero), or there is no meta kernel.

# Meta kernels have many authors; these are the errors they raise when they cannot know a size.
_UNKNOWN = (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError, KeyError)


def _new_sizes_of(function: OpOverload, args: Any, kwargs: Any) -> tuple[int, ...] | None:
    """Return the bytes of each new storage, in order."""
    if torch.Tag.dynamic_output_shape in function.tags:
        return None
    given: set[int] = set()
    try:
        with torch.no_grad():
            out = function(*_as_meta(args, given), **_keywords(kwargs, given))
        return tuple(_new_sizes(out, given))
    except _UNKNOWN:
        return None


def _keywords(kwargs: Any, given: set[int]) -> dict[str, Any]:
    keywords = {
        name: value
        for (name, _), value in zip(kwargs.items(), _as_meta(kwargs.values(), given), strict=True)
        if name not in ("pin_memory", "generator")
    }
    if not given or keywords.get("device") is not None:
        keywords["device"] = META
    return keywords


def _as_meta(values: Any, given: set[int]) -> list[Any]:
    made: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            twin = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
            given.add(twin.untyped_storage()._cdata)
            made.append(twin)
        elif isinstance(value, list | tuple):
            made.append(_as_meta(value, given))
        else:
            made.append(value)
    return made


def _new_sizes(out: Any, given: set[int]) -> list[int]:
    sizes: list[int] = []
    for leaf in leaves_of(out):
        if isinstance(leaf, torch.Tensor):
            storage = leaf.untyped_storage()
            if storage._cdata not in given and storage.nbytes():
                given.add(storage._cdata)
                sizes.append(storage.nbytes())
    return sizes


# ---- every op -> blocks on the card, taken before the op runs ------------------------------------
# An op's results are on the card if any argument is, or if the caller asked for the card. Memory is
# reserved first: if there is no room, torch.OutOfMemoryError is raised and the op does not run.

# Outputs that stay on the host though the arguments are on the GPU, by their index.
_ON_HOST = {"_pack_padded_sequence": frozenset({1})}  # batch_sizes
_OF_HOST = ("empty_on_host",)  # oomph's own op: everything it creates is on the host
_LAST_FIRST = ("native_dropout",)  # the kernel makes the mask first (Dropout.cu, dropout_cuda)
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


class _Known:
    """What the accounting has learnt, shared by all threads."""

    def __init__(self, places: _Places) -> None:
        self.places = places
        self.behaviours: dict[int, Behaviour] = {}  # by id: torch hashes its ops slowly
        self.sizes: dict[Any, tuple[int, ...] | None] = {}  # of new storages, by kind of call
        self.handles: set[tuple[str, int]] = set()  # of cuBLAS, those with a workspace
        ops.calibrate()


class _Accounting(TorchDispatchMode):
    """Account for ops in the thread that entered this mode.

    Each thread enters its own; they share `known`.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the check would run for each op

    def __init__(self, known: _Known) -> None:
        super().__init__()
        self._known = known
        self._places, self._card = known.places, known.places.card
        self._behaviours = known.behaviours

    def __torch_dispatch__(
        self, function: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if types and not _PLAIN_TYPES.issuperset(types) and _is_made_of_others(types):
            return NotImplemented  # the ops it consists of come here
        op = self._behaviours.get(id(function))
        if op is None:  # it keeps the function alive, so that the id stays unique
            op = self._behaviours[id(function)] = Behaviour(function)
        kwargs = kwargs or {}
        if op.is_composite:  # only in inference mode: the ops it consists of come here
            with self:
                return function.decompose(*args, **kwargs)
        if op.changes_first or (op.kind == "view" and not op.lifts):
            return function(*args, **kwargs)
        if op.in_place is not None and ops.is_in_place(op.name, args):
            return getattr(torch.ops.aten, op.in_place)(*args, **kwargs)
        try:
            return self._run(op, function, args, kwargs)
        except torch.OutOfMemoryError as error:
            # An error that is kept keeps this frame and the frames of its context alive. They must
            # not keep the tensors of the op alive.
            args = kwargs = None
            error.__context__ = None
            raise error.with_traceback(None) from None

    def _run(self, op: Behaviour, function: OpOverload, args: Any, kwargs: Any) -> Any:
        if op.name in _OF_HOST or not self._goes_to_card(args, kwargs):
            return function(*args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": HOST}
        if op.lifts or op.moves_storage:
            out = function(*args, **kwargs)
            self._card.place(out.untyped_storage())
            return out
        return self._fresh(op, function, args, kwargs)

    def _goes_to_card(self, args: Any, kwargs: Any) -> bool:
        now = self._places.now
        if now.asked is not None:
            now.last = now.asked
            return now.asked == "card"
        tensors = tensors_in((args, kwargs)) if kwargs else tensors_in(args)
        if not tensors:
            return self._is_made_on_card(kwargs)
        is_on_card = any(map(self._places.on_card, tensors))
        now.last = "card" if is_on_card else "host"
        return is_on_card

    def _is_made_on_card(self, kwargs: Any) -> bool:
        """Return whether a factory call without tensor arguments puts its result on the card."""
        if place_of(kwargs.get("device")) == "card":
            return True
        # Python always passes pin_memory. C++ does not: it creates a tensor inside an op or
        # backward, on the device of the tensors that it is working on.
        return "pin_memory" not in kwargs and self._places.now.last == "card"

    def _fresh(self, op: Behaviour, function: OpOverload, args: Any, kwargs: Any) -> Any:
        known, card = self._known, self._card
        key = (torch.get_default_dtype(), key_of(op, args, kwargs, is_guess=True))
        try:
            sizes = known.sizes[key]
        except KeyError:
            sizes = known.sizes[key] = _new_sizes_of(function, args, kwargs)
        taken = [] if sizes is None else self._take_results(op, sizes)
        try:
            if op.is_gemm or op.temporaries is not None:
                self._take_beside(op, args, kwargs)
            out = function(*args, **kwargs)
        except BaseException:
            card.give_back(taken)
            raise
        leaves = leaves_of(out)
        if op.name in _ON_HOST:
            leaves = [leaf for i, leaf in enumerate(leaves) if i not in _ON_HOST[op.name]]
        self._hold(leaves, sizes, taken, key)
        return out

    def _take_results(self, op: Behaviour, sizes: tuple[int, ...]) -> list[int]:
        """Take a block for each result, in the order in which the kernel makes them."""
        if op.name in _LAST_FIRST:
            return self._card.take(sizes[::-1])[::-1]
        return self._card.take(sizes)

    def _take_beside(self, op: Behaviour, args: Any, kwargs: Any) -> None:
        """Take the memory that CUDA's kernel needs beyond its outputs, then free or keep it."""
        known = self._known
        if op.is_gemm and (handle := cublas_handle()) not in known.handles:
            generation = generation_of(self._card.capability)
            self._card.take((generation.cublas_workspace_bytes(torch.__version__),))
            known.handles.add(handle)
        if op.temporaries is not None:
            self._take_and_free(op.temporaries(args, kwargs))

    def _take_and_free(self, blocks: Iterable[Taken]) -> None:
        """Take blocks in this order; -n frees the n-th. What a GPU's reductions stage is left."""
        num_taken = 0
        living: dict[int, int] = {}  # address of each block, by its number: addresses come again
        for block in blocks:
            if isinstance(block, int) and block < 0:
                self._card.give_back([living.pop(-block)])
            elif isinstance(block, int):
                num_taken += 1
                if block:  # the allocator takes no block for 0 bytes
                    living[num_taken] = self._card.take((block,))[0]
        self._card.give_back(list(reversed(living.values())))

    def _hold(
        self, leaves: list[Any], sizes: tuple[int, ...] | None, taken: list[int], key: Any
    ) -> None:
        """Assign the blocks to the storages that the op created."""
        card, live = self._card, self._card.live
        made: dict[int, tuple[torch.UntypedStorage, int]] = {}
        for leaf in _parts_of(leaves):
            storage = leaf.untyped_storage()
            size_bytes = storage.nbytes()
            known = live.get(storage._cdata)
            if not size_bytes:
                card.hold_nothing(storage)
            elif known is None or not known.size_bytes:
                made.setdefault(storage._cdata, (storage, size_bytes))
        real = tuple(size for _, size in made.values())
        if sizes != real:
            card.give_back(taken)
            if sizes is not None:
                self._known.sizes[key] = real
            taken = card.take(real)
        for (storage, size_bytes), address in zip(made.values(), taken, strict=True):
            card.hold(storage, size_bytes, address)


def _is_made_of_others(types: Any) -> bool:
    plain = torch.Tensor.__torch_dispatch__
    return any(kind.__torch_dispatch__ is not plain for kind in types)


def _parts_of(leaves: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors that have a storage."""
    parts: list[torch.Tensor] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            continue
        if leaf.layout is torch.sparse_coo:
            parts += [leaf._indices(), leaf._values()]
        elif leaf.layout is torch.strided:
            parts.append(leaf)
    return parts

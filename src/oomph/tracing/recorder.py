"""Every op that torch dispatches -> allocations, frees and the work of kernels, in order.

A pretended tensor's storage is an allocation: it is requested when an op first returns it and
freed when Python and autograd have dropped it. The shapes that an op returns are remembered, so
that the meta kernels, which are slow, run once for each kind of call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.records.trace import Convolution, Op, Phase
from oomph.tracing import host_memory, in_place, kernels, known_outputs, sparse
from oomph.tracing.behaviour import Behaviour
from oomph.tracing.convolutions import note_convolution
from oomph.tracing.known_outputs import key_of, leaves_of
from oomph.tracing.pretend import Lie, is_pretended
from oomph.tracing.script.users_line import in_words, users_line
from oomph.tracing.shadows import WRITE_OVER, Shadows
from oomph.tracing.streams import Now
from oomph.tracing.work import work_of


class _Live(weakref.ref):  # type: ignore[type-arg]
    """A storage that is alive: which allocation it is."""

    __slots__ = ("address", "number")
    address: int
    number: int


class Recorder(TorchDispatchMode):
    """Records while it is entered. `phase` is set by whoever drives the training loop."""

    counts: Callable[[Any], bool] = staticmethod(is_pretended)  # is a tensor memory of the GPU?
    counts_storage: Callable[[Any], bool] = staticmethod(lambda it: it.device.type == "meta")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the check would be made for each op

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__()
        self.phase: Phase = "build"
        self.events: list[int] = []
        self.sizes: list[int] = []
        self.born: list[tuple[str, str, Phase]] = []  # op, module, phase of each allocation
        self.streams: list[int] = []  # and its stream
        self.unfolded: frozenset[type] = frozenset()  # tensors made of others: those are recorded
        self.ops: list[Op] = []
        self.convolutions: list[Convolution] = []
        self.notes: set[str] = set()
        self.current_module: Callable[[], str] = str
        self.computes = True  # whether the work of kernels is noted
        self.capability = capability
        self.host = host_memory.HostMemory()
        self.shadows = Shadows()  # the values that are known
        self._live: dict[int, _Live] = {}
        self._behaviours: dict[Any, Behaviour] = {}
        self._known = known_outputs.shared(torch.get_default_dtype())
        self._works: dict[Any, dict[str, Op | None]] = {}  # of each kind of call, by module
        self._has_workspace = False
        self._on_death = self._make_on_death()
        in_place.calibrate()

    # ---- what is asked of it -----------------------------------------------------------------

    def number_of(self, tensor: Any) -> int | None:
        """Which allocation holds a tensor."""
        if tensor.layout is not torch.strided:
            return self.number_of(tensor._values())
        live = self._live.get(tensor.untyped_storage()._cdata)
        return None if live is None else live.number

    def allocate(self, size_bytes: int, op: str) -> int:
        """An allocation that no tensor shows. Freed by `free`, or never."""
        sizes = self.sizes
        sizes.append(size_bytes)
        number = len(sizes)
        self.born.append((op, self.current_module(), self.phase))
        self.streams.append(Now.stream)
        self.events.append(number)
        return number - 1

    def free(self, number: int) -> None:
        self.events.append(-(number + 1))

    def real(self, tensor: Any) -> Any:
        """A real copy of a pretended tensor, with its values, or with zeros in their place."""
        known = self.shadows.of(tensor)
        if known is not None:
            return known.clone()
        self.note_unknown("values copied from the GPU to the host: taken as 0", "0")
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")

    def note_unknown(self, sentence: str, value: str) -> None:  # noqa: ARG002 - for scripts
        """Note what is taken for a value that does not exist, under the user's own line."""
        self.notes.add(f"{sentence}, at {in_words(users_line())}")

    # ---- what torch calls --------------------------------------------------------------------

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = self.recorded(function, types, args, kwargs)
        if out is not NotImplemented and self._is_followed(function, args, out):
            self.shadows.follow(function, args, kwargs, out)
        return out

    def _is_followed(self, function: Any, args: Any, out: Any) -> bool:
        """Can it have changed what is known? What is on the host alone has its own values."""
        behaviour = self._behaviours[function]
        kind = behaviour.kind
        if kind == "view":
            return False
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and is_pretended(first):  # most ops end here
            is_alone = kind != "other" and not self.shadows.has(first)
            if is_alone and behaviour.name not in WRITE_OVER:
                return False
        if kind in ("in place", "other"):
            out = args[0] if args else None
        return any(isinstance(one, torch.Tensor) and is_pretended(one) for one in leaves_of(out))

    def recorded(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on pretended tensors, and note what it takes and gives back."""
        if types and not self.unfolded.isdisjoint(types):
            return NotImplemented
        behaviour = self._behaviours.get(function)
        if behaviour is None:
            behaviour = self._behaviours[function] = Behaviour(function)
        kind = behaviour.kind
        if Lie.hosted and self.host.has_any(args, kwargs):
            return host_memory.run_on_host(self, behaviour, function, args, kwargs)
        if kind == "view":
            out = function(*args, **kwargs)
            if behaviour.lifts:
                self.track(out, behaviour.label)
            return out
        if kind == "in place":
            return self._in_place(behaviour, function, args, kwargs)
        if behaviour.in_place is not None and in_place.is_in_place(behaviour.name, args):
            return self._changed(behaviour, args, kwargs)
        rule = behaviour.rule or behaviour.by_value
        if rule is not None:
            answer = rule(self, behaviour, function, args, kwargs)
            if answer is not NotImplemented:
                return answer
        return self.fresh(behaviour, function, args, kwargs)

    def _changed(self, behaviour: Behaviour, args: Any, kwargs: Any) -> Any:
        """What backward does in place, though a dispatch mode is asked for a copy."""
        if not is_pretended(args[0]):
            return getattr(torch.ops.aten, str(behaviour.in_place))(*args, **kwargs)
        self.note_work(behaviour, args, kwargs, ())
        return args[0]

    def _in_place(self, behaviour: Behaviour, function: Any, args: Any, kwargs: Any) -> Any:
        first = args[0]
        if first.__class__ is list or first.__class__ is tuple:
            first = first[0]
        if first.layout is torch.sparse_coo:
            sparse.change(self, behaviour, function, args, kwargs)
            return args[0]
        if is_pretended(first):  # nothing to compute, and nothing is allocated
            self.note_work(behaviour, args, kwargs, ())
            return args[0] if behaviour.returns else None
        if len(args) > 1 and isinstance(args[1], torch.Tensor) and is_pretended(args[1]):
            return function(first, self.real(args[1]), *args[2:], **kwargs)
        return function(*args, **kwargs)

    def fresh(self, behaviour: Behaviour, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an op, or make what it returned before, and track the result."""
        key = None if behaviour.kind == "other" else key_of(function, args, kwargs)
        made = None if key is None else self._known.make(key)
        if made is not None:
            out, outputs = made
        else:
            Lie.suspended += 1
            try:
                out = function(*args, **kwargs)
            finally:
                Lie.suspended -= 1
            outputs = leaves_of(out)
            if key is not None:
                self._known.remember(key, args, kwargs, out)
        for output in outputs:
            self.track(output, behaviour.label)
            if behaviour.is_convolution:
                note_convolution(self, behaviour.name, args, outputs, output)
        # A kernel has its outputs when it takes what it needs beside them.
        if behaviour.is_gemm or behaviour.temporaries is not None:
            self.take_temporaries(behaviour, args, outputs)
        if self.computes:
            self.note_work(behaviour, args, kwargs, outputs, key)
        return out

    # ---- allocations -------------------------------------------------------------------------

    def track(self, tensor: Any, op: str) -> None:
        """Note the storage of a tensor, if it counts and is new."""
        if not isinstance(tensor, torch.Tensor) or not self.counts(tensor):
            return
        if tensor.layout is not torch.strided:
            self.track(tensor._indices(), op)
            self.track(tensor._values(), op)
            return
        self.track_storage(tensor.untyped_storage(), op)

    def track_storage(self, storage: Any, op: str) -> None:
        """Note a storage that is new, or has another size than before."""
        address, size_bytes = storage._cdata, storage.nbytes()
        known = self._live.get(address)
        if known is not None:
            if self.sizes[known.number] == size_bytes:
                return
            self._live.pop(address)  # resized: a new block, and the old one is given back
        if size_bytes:  # an allocator gives nothing for nothing
            live: Any = _Live(storage, self._on_death)
            live.address = address
            live.number = self.allocate(size_bytes, op)
            self._live[address] = live
        if known is not None:
            self.free(known.number)

    def begin_with_the_living(self) -> None:
        """Forget what is dead already, as if it had never been."""
        living = sorted(self._live.values(), key=lambda live: live.number)
        kept = [live.number for live in living]
        for new, live in enumerate(living):
            live.number = new
        columns: tuple[list[Any], ...] = (self.sizes, self.born, self.streams)
        for column in columns:
            column[:] = [column[number] for number in kept]
        self.events[:] = range(1, len(kept) + 1)

    def _make_on_death(self) -> Callable[[Any], None]:
        # A closure: a bound method would be made anew for each allocation.
        alive, events = self._live, self.events

        def on_death(live: Any) -> None:
            address, number = live.address, live.number
            if alive.get(address) is live:
                del alive[address]
                events.append(-(number + 1))

        return on_death

    def take_temporaries(self, behaviour: Behaviour, args: Any, outputs: Any) -> None:
        """What the kernel takes beside its outputs, and gives back or keeps."""
        if not any(isinstance(output, torch.Tensor) and is_pretended(output) for output in outputs):
            return
        if behaviour.is_gemm and not self._has_workspace:
            self._has_workspace = True
            self.allocate(kernels.cublas_workspace_bytes(self.capability), "cublas workspace")
        if behaviour.temporaries is not None:
            label = f"{behaviour.name} (inside)"
            taken = [self.allocate(size, label) for size in behaviour.temporaries(args)]
            for number in taken:
                self.free(number)

    # ---- work --------------------------------------------------------------------------------

    def note_work(
        self, behaviour: Behaviour, args: Any, kwargs: Any, outputs: Any, key: Any = None
    ) -> None:
        """Note what a kernel computes; calls of one kind compute the same."""
        if not self.computes:
            return
        key = key or key_of(behaviour, args, kwargs)
        module = self.current_module()
        if key is None:
            work = work_of(behaviour, args, kwargs, outputs, self.phase, module)
        else:
            work = self._known_work((self.phase, key), module, behaviour, args, kwargs, outputs)
        if work is not None:
            self.ops.append(work)

    def _known_work(
        self, key: Any, module: str, behaviour: Behaviour, args: Any, kwargs: Any, outputs: Any
    ) -> Op | None:
        of_module = self._works.get(key)
        if of_module is None:
            work = work_of(behaviour, args, kwargs, outputs, self.phase, module)
            self._works[key] = {module: work}
            return work
        work = of_module.get(module, NotImplemented)
        if work is NotImplemented:
            known = next(iter(of_module.values()))
            work = of_module[module] = None if known is None else replace(known, module=module)
        return work

"""Every op that torch dispatches -> allocations, frees and kernel work, in order; then a Trace.

A pretended tensor's storage is an allocation: requested when an op first returns it, freed when
Python and autograd have dropped it. The shapes an op returns are remembered, so the slow meta
kernels run once per kind of call.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.pretending import ops, sparse, tensors
from oomph.pretending.kernels import (
    CUBLAS_WORKSPACE,
    allows_tf32,
    cublas_handle,
    note_convolution,
)
from oomph.pretending.ops import Behaviour
from oomph.pretending.ranks import GATHERED
from oomph.pretending.reductions import Taken
from oomph.pretending.streams import Now
from oomph.pretending.tensors import Disguise, is_pretended, key_of, leaves_of
from oomph.pretending.values import WRITE_OVER, Shadows
from oomph.pretending.work import with_place, work_of
from oomph.records.generation import generation_of
from oomph.records.trace import Allocation, Category, Convolution, Op, Phase, Reduction, Trace
from oomph.rehearsing.fault import in_words, users_line


class Behaviours(dict[Any, Behaviour]):
    """Map each op to its behaviour, looked up once."""

    def __missing__(self, function: Any) -> Behaviour:
        self[function] = behaviour = Behaviour(function)
        return behaviour


class _Live(weakref.ref):  # type: ignore[type-arg]
    """A live storage and the number of its allocation."""

    __slots__ = ("address", "number")
    address: int
    number: int


class Recorder(TorchDispatchMode):
    """Records ops while it is entered. The training loop's driver sets `phase`."""

    counts: Callable[[Any], bool] = staticmethod(is_pretended)  # is this tensor GPU memory?
    counts_storage: Callable[[Any], bool] = staticmethod(lambda it: it.device.type == "meta")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch would check on every op

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__()
        self.phase: Phase = "build"
        self.events: list[int] = []
        self.sizes: list[int] = []
        self.born: list[tuple[str, str, Phase]] = []  # of each allocation: op, module, phase
        self.streams: list[int] = []  # of each allocation
        self.emptied_at: list[int] = []  # events before each torch.cuda.empty_cache()
        self.reductions: dict[int, Reduction] = {}  # those whose size depends on the card
        self.unfolded: frozenset[type] = frozenset()  # wrappers: their inner tensors are recorded
        self.ops: list[Op] = []
        self.convolutions: list[Convolution] = []
        self.notes: set[str] = set()
        self.current_module: Callable[[], str] = str
        self.computes = True  # whether kernel work is recorded
        self.capability = capability
        self.host = tensors.HostMemory()
        self.shadows = Shadows()  # known values
        self._live: dict[int, _Live] = {}
        self._behaviours = Behaviours()
        self._known = tensors.shared(torch.get_default_dtype())
        self._copied: dict[Any, tuple[int, ...]] = {}  # bytes of copied operands, per kind of call
        # per kind of call, by module and views before it
        self._works: dict[Any, dict[tuple[str, int], tuple[Op, ...]]] = {}
        self._num_views = 0  # since the last op, in one phase
        self._viewed_in: Phase | None = None
        self._handles: set[tuple[str, int]] = set()  # of cuBLAS, those with a workspace
        self._on_death = self._make_on_death()
        ops.calibrate()

    # ---- queries -----------------------------------------------------------------------------

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the allocation that holds a tensor."""
        if tensor.layout is not torch.strided:
            return self.number_of(tensor._values())
        live = self._live.get(tensor.untyped_storage()._cdata)
        return None if live is None else live.number

    def numbers_of(self, values: Iterable[Any]) -> set[int]:
        """Return the allocations that hold the pretended tensors among these values."""
        pretended = [v for v in values if isinstance(v, torch.Tensor) and is_pretended(v)]
        return {number for number in map(self.number_of, pretended) if number is not None}

    def allocate(self, size_bytes: int, op: str) -> int:
        """Record an allocation that belongs to no tensor. Ends at `free`, or never."""
        sizes = self.sizes
        sizes.append(size_bytes)
        number = len(sizes)
        self.born.append((op, self.current_module(), self.phase))
        self.streams.append(Now.stream)
        self.events.append(number)
        return number - 1

    def free(self, number: int) -> None:
        self.events.append(-(number + 1))

    def empty_cache(self) -> None:
        """Record torch.cuda.empty_cache()."""
        self.emptied_at.append(len(self.events))

    def real(self, tensor: torch.Tensor) -> Any:
        """Return a real copy of a pretended tensor, with its known values or with zeros."""
        known = self.shadows.of(tensor)
        if known is not None:
            return known.clone()
        self.note_unknown("values copied from the GPU to the host: taken as 0", "0")
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")

    def note_unknown(self, sentence: str, value: str) -> None:  # noqa: ARG002 - for scripts
        """Note the value assumed for an unknown one, under the user's own line."""
        self.notes.add(f"{sentence}, at {in_words(users_line())}")

    # ---- calls from torch --------------------------------------------------------------------

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = self.recorded(function, types, args, kwargs)
        if out is not NotImplemented and self._is_followed(function, args, out):
            self.shadows.follow(function, args, kwargs, out)
        return out

    def _is_followed(self, function: Any, args: Any, out: Any) -> bool:
        """Return whether the op may change known values; an op on the host alone cannot."""
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
        """Run an op on pretended tensors and record what it allocates and frees."""
        if types and not self.unfolded.isdisjoint(types):
            return NotImplemented
        behaviour = self._behaviours[function]
        kind = behaviour.kind
        if Disguise.hosted and self.host.has_any(args, kwargs):
            return tensors.run_on_host(self, behaviour, function, args, kwargs)
        if kind == "view":
            return self._view(behaviour, function, args, kwargs)
        if kind == "in place":
            return self._in_place(behaviour, function, args, kwargs)
        if behaviour.in_place is not None and ops.is_in_place(behaviour.name, args):
            return self._changed(behaviour, args, kwargs)
        rule = behaviour.rule or behaviour.by_value
        if rule is not None:
            answer = rule(self, behaviour, function, args, kwargs)
            if answer is not NotImplemented:
                return answer
        return self.fresh(behaviour, function, args, kwargs)

    def _view(self, behaviour: Behaviour, function: Any, args: Any, kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor) and is_pretended(args[0]):
            if self._viewed_in is not self.phase:
                self._viewed_in, self._num_views = self.phase, 0
            self._num_views += 1
        out = function(*args, **kwargs)
        if behaviour.lifts:
            self.track(out, behaviour.label)
        return out

    def _changed(self, behaviour: Behaviour, args: Any, kwargs: Any) -> Any:
        """Run in place an op that backward runs in place, though torch dispatches a copy."""
        if not is_pretended(args[0]):
            return getattr(torch.ops.aten, str(behaviour.in_place))(*args, **kwargs)
        if behaviour.temporaries is not None:
            self.take_temporaries(behaviour, args, kwargs, args[:1])
        self.note_work(behaviour, args, kwargs, ())
        return args[0]

    def _in_place(self, behaviour: Behaviour, function: Any, args: Any, kwargs: Any) -> Any:
        first = args[0]
        if first.__class__ is list or first.__class__ is tuple:
            first = first[0]
        if first.layout is torch.sparse_coo:
            sparse.change(self, behaviour, function, args, kwargs)
            return args[0]
        if is_pretended(first):  # nothing to compute
            if behaviour.temporaries is not None:
                self.take_temporaries(behaviour, args, kwargs, (first,))
            self.note_work(behaviour, args, kwargs, ())
            return args[0] if behaviour.returns else None
        if len(args) > 1 and isinstance(args[1], torch.Tensor) and is_pretended(args[1]):
            return function(first, self.real(args[1]), *args[2:], **kwargs)
        return function(*args, **kwargs)

    def fresh(self, behaviour: Behaviour, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an op, or remake what it returned before, and track the result."""
        key = None if behaviour.kind == "other" else key_of(function, args, kwargs)
        made = None if key is None else self._known.make(key)
        if made is not None:
            out, outputs = made
        else:
            Disguise.suspended += 1
            try:
                out = function(*args, **kwargs)
            finally:
                Disguise.suspended -= 1
            outputs = leaves_of(out)
            if key is not None:
                self._known.remember(key, args, kwargs, out)
        copies = self.take_copies(behaviour, args, key, before=True)
        for output in outputs:
            self.track(output, behaviour.label)
            if behaviour.is_convolution:
                note_convolution(self, behaviour.name, args, outputs, output)
        copies += self.take_copies(behaviour, args, key, before=False)
        # A kernel already has its outputs when it allocates temporaries.
        if behaviour.is_gemm or behaviour.temporaries is not None:
            self.take_temporaries(behaviour, args, kwargs, outputs)
        for number in reversed(copies):
            self.free(number)
        if self.computes:
            self.note_work(behaviour, args, kwargs, outputs, key)
        return out

    # ---- allocations -------------------------------------------------------------------------

    def track(self, tensor: torch.Tensor, op: str) -> None:
        """Record a tensor's storage if it counts and is new."""
        if not isinstance(tensor, torch.Tensor) or not self.counts(tensor):
            return
        if tensor.layout is not torch.strided:
            self.track(tensor._indices(), op)
            self.track(tensor._values(), op)
            return
        self.track_storage(tensor.untyped_storage(), op)

    def track_storage(self, storage: torch.UntypedStorage, op: str) -> None:
        """Record a storage that is new or has changed size."""
        address, size_bytes = storage._cdata, storage.nbytes()
        known = self._live.get(address)
        if known is not None:
            if self.sizes[known.number] == size_bytes:
                return
            self._live.pop(address)  # resized: a new block, and the old one is freed
        if size_bytes:  # the allocator takes no block for 0 bytes
            live: Any = _Live(storage, self._on_death)
            live.address = address
            live.number = self.allocate(size_bytes, op)
            self._live[address] = live
        if known is not None:
            self.free(known.number)

    def begin_with_the_living(self) -> None:
        """Drop allocations that are already freed, as if they had never happened."""
        living = sorted(self._live.values(), key=lambda live: live.number)
        numbers = [live.number for live in living]
        for new, live in enumerate(living):
            live.number = new
        self.reductions.clear()  # none of them outlives its kernel
        self.emptied_at.clear()
        columns: tuple[list[Any], ...] = (self.sizes, self.born, self.streams)
        for column in columns:
            column[:] = [column[number] for number in numbers]
        self.events[:] = range(1, len(numbers) + 1)

    def end(self) -> None:
        """Record nothing any more, such as the end of the model itself."""
        self._live.clear()

    def _make_on_death(self) -> Callable[[Any], None]:
        # A closure, because a bound method would be created again for each allocation.
        alive, events = self._live, self.events

        def on_death(live: Any) -> None:
            address, number = live.address, live.number
            if alive.get(address) is live:
                del alive[address]
                events.append(-(number + 1))

        return on_death

    def take_temporaries(self, behaviour: Behaviour, args: Any, kwargs: Any, outputs: Any) -> None:
        """Record what the kernel allocates besides its outputs, and what it keeps of that."""
        if not any(isinstance(output, torch.Tensor) and is_pretended(output) for output in outputs):
            return
        if behaviour.is_gemm and (handle := cublas_handle()) not in self._handles:
            self._handles.add(handle)
            generation = generation_of(self.capability)
            self.allocate(generation.cublas_workspace_bytes(torch.__version__), CUBLAS_WORKSPACE)
        if behaviour.temporaries is not None:
            self._take_and_free(behaviour.temporaries(args, kwargs), f"{behaviour.name} (inside)")

    def take_copies(self, behaviour: Behaviour, args: Any, key: Any, *, before: bool) -> list[int]:
        """Record the operands that the kernel copies, before or after its results exist."""
        copies = behaviour.copies
        if copies is None or copies.are_first != before:
            return []
        sizes = None if key is None else self._copied.get(key)
        if sizes is None:
            sizes = copies.sizes(args)
            if key is not None:
                self._copied[key] = sizes
        return [self.allocate(size, f"{behaviour.name} (inside)") for size in sizes if size]

    def _take_and_free(self, blocks: Iterable[Taken], label: str) -> None:
        """Record blocks that a kernel takes in this order; -n frees the n-th, the rest at last."""
        taken: list[int] = []
        living: dict[int, None] = {}
        for block in blocks:
            if isinstance(block, int) and block < 0:
                living.pop(taken[-block - 1])
                self.free(taken[-block - 1])
                continue
            number = self.allocate(block if isinstance(block, int) else 0, label)
            if not isinstance(block, int):
                self.reductions[number] = block
            taken.append(number)
            living[number] = None
        for number in reversed(living):
            self.free(number)

    # ---- work --------------------------------------------------------------------------------

    def note_work(
        self, behaviour: Behaviour, args: Any, kwargs: Any, outputs: Any, key: Any = None
    ) -> None:
        """Record a kernel's work; calls of one kind do the same work."""
        if not self.computes:
            return
        key = key or key_of(behaviour, args, kwargs)
        module = self.current_module()
        if self._viewed_in is not self.phase:
            self._num_views = 0
        if key is None:
            work = work_of(behaviour, args, kwargs, outputs, self.phase, module, self._num_views)
        else:
            work = self._known_work((self.phase, key), module, behaviour, args, kwargs, outputs)
        if work:
            self.ops += work
            self._num_views = 0

    def _known_work(
        self, key: Any, module: str, behaviour: Behaviour, args: Any, kwargs: Any, outputs: Any
    ) -> tuple[Op, ...]:
        alike = self._works.setdefault(key, {})
        place = module, self._num_views
        found = alike.get(place)
        if found is None:
            known = next(iter(alike.values()), None)
            if known is None:
                found = work_of(behaviour, args, kwargs, outputs, self.phase, *place)
            else:
                found = with_place(known, *place)
            alike[place] = found
        return found


# ---- a recording -> Trace: each allocation gets a category ---------------------------------------


def labelled(
    recorder: Recorder,
    micro_batch: int,
    *,
    parameters: Container[int],
    gradients: set[int],
    states: set[int],
    outputs: set[int],
    step_starts: Sequence[int],
    phase_starts: Sequence[tuple[int, Phase]],
) -> Trace:
    """Return the recording as a Trace, with a category for each allocation."""
    deaths = _deaths(recorder.events, phase_starts)
    allocations = [
        Allocation(
            size_bytes=size_bytes,
            op=op,
            module=module,
            phase=phase,
            category="optimizer"
            if number in states
            else _category(number, op, phase, deaths.get(number), parameters, gradients),
            stream=stream,
            is_output=number in outputs,
            reduction=recorder.reductions.get(number),
        )
        for number, (size_bytes, (op, module, phase), stream) in enumerate(
            zip(recorder.sizes, recorder.born, recorder.streams, strict=True)
        )
    ]
    return Trace(
        allocations=allocations,
        events=list(recorder.events),  # what dies later, in a loop that keeps it, is not in it
        step_starts=step_starts,
        phase_starts=phase_starts,
        ops=recorder.ops,
        convolutions=tuple(recorder.convolutions),
        measures_convolutions=torch.backends.cudnn.benchmark,
        emptied_at=tuple(recorder.emptied_at),
        allows_tf32=allows_tf32(),
        micro_batch=micro_batch,
        torch_version=str(torch.__version__),  # a plain str: its own class would import torch
        compute_capability=recorder.capability,
        notes=tuple(sorted(recorder.notes)),
        host_peak_bytes=recorder.host.peak_bytes,
    )


def _deaths(
    events: Sequence[int], phase_starts: Sequence[tuple[int, Phase]]
) -> dict[int, Phase | None]:
    """Return the phase in which each allocation is freed."""
    deaths: dict[int, Phase | None] = {}
    starts = iter(phase_starts)
    next_start, next_phase = next(starts, (len(events), None))
    phase: Phase | None = None
    for index, event in enumerate(events):
        while index >= next_start:
            phase = next_phase
            next_start, next_phase = next(starts, (len(events) + 1, None))
        if event < 0:
            deaths[-event - 1] = phase
    return deaths


def _category(
    number: int,
    op: str,
    phase: Phase,
    death: Phase | None,
    parameters: Container[int],
    gradients: set[int],
) -> Category:
    if number in parameters or op == GATHERED:
        return "parameters"
    if op == CUBLAS_WORKSPACE:
        return "workspace"
    if number in gradients:
        return "gradients"
    if phase == "input":
        return "inputs"
    if phase in ("step", "build") and death is None:
        return "optimizer"
    if phase == "forward" and death not in ("forward", None):
        return "activations"
    return "temporaries"


# ---- which module is running ---------------------------------------------------------------------

_ACCUMULATE_GRAD = 1 << 62  # sequence numbers from here on belong to no forward op


class ModuleStack:
    """Tracks which module an allocation belongs to, in forward and in backward.

    In forward it is the innermost running module. In backward, each autograd node carries the
    sequence number at which it was created; the sequence numbers at which modules began and ended
    identify the module. Recomputation in backward adds new numbers.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # by id, of modules that are alive
        self._known: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._stack = [""]
        self._numbers = [0]
        self._modules = [""]
        self._handles: list[Any] = []

    def know(self, model: torch.nn.Module) -> None:
        """Learn the names of a model's modules; names of models that were known before stay."""
        for name, module in model.named_modules():
            place = id(module)
            if place not in self._known:
                self._names[place] = name
                self._known[place] = weakref.ref(module, partial(self._forget, place))

    def _forget(self, place: int, _: object) -> None:
        """Drop a dead module, whose id another one may get."""
        self._names.pop(place, None)
        self._known.pop(place, None)

    def __enter__(self) -> ModuleStack:
        from torch.nn.modules import module

        self._handles = [
            module.register_module_forward_pre_hook(self._enter_module),
            module.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def current(self) -> str:
        node = torch._C._current_autograd_node()
        if node is None or len(self._stack) > 1:
            return self._stack[-1]
        number = node._sequence_nr()
        if number >= _ACCUMULATE_GRAD:
            return ""
        return self._modules[bisect.bisect_right(self._numbers, number) - 1]

    def _enter_module(self, module: torch.nn.Module, _: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1]))
        self._note_boundary()

    def _leave_module(self, *_: Any) -> None:
        if len(self._stack) > 1:
            self._stack.pop()
        self._note_boundary()

    def _note_boundary(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._modules.append(self._stack[-1])

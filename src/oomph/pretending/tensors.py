"""Make meta tensors report that they are on a GPU.

To C++ a pretended tensor is on `meta`: it has a size but no memory, and autograd runs backward in
the calling thread. To Python it is on `cuda:0`, so scripts, models and torch's own Python code take
their GPU branches. CPU tensors stay real.

`install` patches torch for the whole process and cannot be undone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch._ops import OpOverload
from torch.utils._device import DeviceContext

from oomph.pretending import cuda
from oomph.pretending.factories import Function, move_of, patch_factories, patch_generator
from oomph.pretending.patches import Patches, put
from oomph.records.generation import DEFAULT_CAPABILITY
from oomph.records.trace import Convolution, Op, Phase

META, HOST, GPU = torch.device("meta"), torch.device("cpu"), torch.device("cuda", 0)
# torch's own getters, unaffected by patches. `is_pretended`: is a tensor really on `meta`?
is_pretended: Callable[[torch.Tensor], bool] = torch._C.TensorBase.is_meta.__get__  # type: ignore[attr-defined]
true_device: Callable[[torch.Tensor], torch.device] = torch._C.TensorBase.device.__get__
empty: Function = torch._C._VariableFunctions.empty
empty_strided: Function = torch._C._VariableFunctions.empty_strided


class Disguise:
    """Global state: whether meta tensors currently report that they are on a GPU."""

    suspended = 0  # > 0 while a meta kernel runs or a model is built, which must see `meta`
    building = 0  # > 0 while a model is built: on the host, whatever device is named
    in_setitem = 0  # > 0 inside `x[i] = 3`: on a GPU the scalar stays on the host
    unread = 0  # > 0 inside an op of several ops: what it makes on the way cannot be read
    hosted: dict[int, Any] = {}  # storages that stand for the host's memory # noqa: RUF012
    # Makes a real copy of a pretended tensor. Replaced by the module that knows values.
    real: Callable[[torch.Tensor], torch.Tensor] = staticmethod(
        lambda it: torch.zeros(it.shape, dtype=it.dtype)
    )
    # Called with a pretended tensor and the values it was created from.
    give: Callable[[torch.Tensor, torch.Tensor], None] | None = None
    capability = DEFAULT_CAPABILITY


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Let tensors report their real device, for meta kernels and for building a model."""
    Disguise.suspended += 1
    try:
        yield
    finally:
        Disguise.suspended -= 1


def install(capability: tuple[int, int] = DEFAULT_CAPABILITY) -> None:
    """Make this process believe that it has a GPU."""
    Disguise.capability = capability
    # Import this first: torch's decorators import it lazily, and it breaks on patched classes.
    importlib.import_module("torch._dynamo")
    patches = Patches()  # never undone
    _patch_tensor()
    patch_factories(patches, factory)
    _patch_new()
    original = DeviceContext.__init__
    put(DeviceContext, __init__=lambda self, device: original(self, to_meta(device)))
    _patch_moves()
    cuda.install(patches, cuda.Gpu(capability))
    patch_generator(patches)


def _patch_tensor() -> None:
    def is_hosted(tensor: torch.Tensor) -> bool:
        return bool(Disguise.hosted) and tensor.untyped_storage()._cdata in Disguise.hosted

    def is_cuda(tensor: torch.Tensor) -> bool:
        return not Disguise.suspended and is_pretended(tensor) and not is_hosted(tensor)

    def device(tensor: torch.Tensor) -> torch.device:
        true = true_device(tensor)
        if Disguise.suspended or true.type != "meta":
            return true
        return HOST if is_hosted(tensor) else GPU

    put(
        torch.Tensor,
        device=property(device),
        is_cuda=property(is_cuda),
        is_meta=property(lambda tensor: bool(Disguise.suspended) and is_pretended(tensor)),
        get_device=lambda tensor: 0 if is_pretended(tensor) else -1,
    )
    _patch_setitem()
    _patch_repr()


def _patch_repr() -> None:
    """Make `print(x)` in a model work although the values do not exist."""
    original = torch.Tensor.__repr__

    def represented(tensor: torch.Tensor, **options: Any) -> str:
        if Disguise.suspended or not is_pretended(tensor):
            return str(original(tensor, **options))
        shape, dtype = tuple(tensor.shape), tensor.dtype
        return f"tensor(..., device='{tensor.device}', size={shape}, dtype={dtype})"

    put(torch.Tensor, __repr__=represented)


def _patch_setitem() -> None:
    original = torch.Tensor.__setitem__

    def setitem(tensor: torch.Tensor, key: Any, value: Any) -> None:
        is_scalar = not isinstance(value, torch.Tensor)
        Disguise.in_setitem += is_scalar
        try:
            original(tensor, key, value)
        finally:
            Disguise.in_setitem -= is_scalar

    put(torch.Tensor, __setitem__=setitem)


def to_meta(device: Any) -> Any:
    """Replace a device that names a GPU by `meta`, or by the host while a model is built."""
    if not (isinstance(device, int) or str(device).startswith("cuda")):
        return device
    return HOST if Disguise.building else META


def _patch_new() -> None:
    """Support `gradient.new(indices, values, size)`, which torch's sparse optimizers call."""
    original: Function = torch.Tensor.new
    assemble = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default

    def new(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_pretended(tensor) or tensor.layout is not torch.sparse_coo or len(args) != 3:
            return original(tensor, *args, **kwargs)
        indices, values, size = args
        made = {"dtype": values.dtype, "layout": tensor.layout, "device": META}
        return assemble(len(indices), values.dim() - 1, size, indices, values, **made)

    put(torch.Tensor, new=new)


# These functions receive values, and torch writes them without dispatching an op.
OF_VALUES = frozenset({"tensor", "as_tensor", "asarray", "scalar_tensor", "new_tensor"})


def factory(function: Function) -> Function:
    """Wrap a function that creates tensors, so that `device="cuda"` creates a pretended one."""
    is_of_values = function.__name__ in OF_VALUES

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = to_meta(kwargs["device"])
            if isinstance(kwargs["device"], torch.device) and kwargs["device"].type == "meta":
                kwargs.pop("generator", None)
                kwargs.pop("pin_memory", None)
        out = function(*args, **kwargs)
        if is_of_values and Disguise.give and not Disguise.suspended and is_pretended(out):
            of_host = {name: value for name, value in kwargs.items() if name != "requires_grad"}
            if not (args and isinstance(args[0], torch.Tensor)):  # an op shows a tensor's values
                Disguise.give(out, function(*args, **{**of_host, "device": "cpu"}))
        return out

    return wrapped


def _patch_moves() -> None:
    original_to: Function = torch.Tensor.to
    original_tolist = torch.Tensor.tolist

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device, dtype, options = move_of(args, kwargs)
        wanted = to_meta(device)
        if is_pretended(tensor) and str(wanted) == "cpu" and not Disguise.building:
            real = Disguise.real(tensor)
            return real if dtype is None else real.to(dtype)
        if is_pretended(tensor) and str(wanted) == "cpu":
            wanted = META
        return original_to(tensor, wanted, dtype, **options)

    def cpu(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return Disguise.real(tensor) if is_pretended(tensor) and not Disguise.building else tensor

    put(
        torch.Tensor,
        to=to,
        cpu=cpu,
        cuda=lambda tensor, *_, **__: to(tensor, "cuda"),
        tolist=lambda tensor: original_tolist(cpu(tensor)),
        pin_memory=lambda tensor, *_, **__: tensor,
        is_pinned=lambda *_, **__: False,
        record_stream=lambda *_, **__: None,
    )


# ---- outputs of known calls, recreated without the slow meta kernel ------------------------------

_UNFIT = object()


class KnownOutputs:
    """Calls seen so far, and how to recreate their results."""

    def __init__(self) -> None:
        # call -> type of its result; shape, strides and dtype of each tensor in it
        self._recipes: dict[Any, tuple[type, list[Any]]] = {}

    def make(self, key: Any) -> tuple[Any, list[Any]] | None:
        """Return the result of a known call and the tensors in it, or None for a new call."""
        recipe = self._recipes.get(key)
        if recipe is None:
            return None
        kind, specs = recipe
        made = [
            None if spec is None else empty_strided(spec[0], spec[1], dtype=spec[2], device=META)
            for spec in specs
        ]
        return (made[0] if kind is torch.Tensor else kind(made)), made

    def remember(self, key: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Remember a call if everything that it returns is newly created."""
        kind = torch.Tensor if isinstance(out, torch.Tensor) else type(out)
        if kind not in (torch.Tensor, tuple, list):
            return
        taken = {
            tensor.untyped_storage()._cdata
            for tensor in tensors_in((args, kwargs))
            if tensor.layout is torch.strided
        }
        specs = [_spec_of(output, taken) for output in leaves_of(out)]
        if _UNFIT not in specs:
            self._recipes[key] = kind, specs


@functools.cache
def shared(default_dtype: torch.dtype) -> KnownOutputs:  # noqa: ARG001 - one for each
    """Return the calls this process has seen; calls without a dtype depend on the default one."""
    return KnownOutputs()


def _spec_of(output: object, taken: set[int]) -> Any:
    """Return shape, strides and dtype of an output that owns its whole storage."""
    if output is None:
        return None
    if not isinstance(output, torch.Tensor) or not is_pretended(output):
        return _UNFIT
    if output.layout is not torch.strided or output.storage_offset():
        return _UNFIT
    storage = output.untyped_storage()
    if storage._cdata in taken:
        return _UNFIT
    taken.add(storage._cdata)
    spec = (tuple(output.shape), output.stride(), output.dtype)
    again = empty_strided(spec[0], spec[1], dtype=spec[2], device=META)
    return spec if again.untyped_storage().nbytes() == storage.nbytes() else _UNFIT


def key_of(function: Any, args: Any, kwargs: Any, *, is_guess: bool = False) -> Any:
    """Return what decides the shapes of a call's results, or None if the values may decide.

    A guess ignores values: what is remembered under its key is compared with the real result.
    """
    try:
        if kwargs:
            return (function, _parts(args, is_guess), _parts(kwargs.values(), is_guess), *kwargs)
        return (function, _parts(args, is_guess))
    except _Undecided:
        return None


class _Undecided(Exception):
    """Raised if an argument is a host tensor, whose values may decide shapes, or no plain value."""


_PLAIN_TYPES = frozenset(
    {*(int, float, bool, complex, str, type(None)), torch.dtype, torch.device}
    | {torch.layout, torch.memory_format}
)


def _parts(values: Any, is_guess: bool) -> tuple[Any, ...]:
    parts: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            on_gpu = is_pretended(value)
            if not on_gpu and not is_guess and value.dim():
                raise _Undecided
            strides = value.stride() if value.layout is torch.strided else value.layout
            parts.append((value.shape, strides, value.dtype, on_gpu))
        elif value.__class__ in _PLAIN_TYPES:
            parts.append((value.__class__, value))  # 1, 1.0 and True are different calls
        elif isinstance(value, list | tuple):
            parts.append(_parts(value, is_guess))
        elif is_guess:
            parts.append(value.__class__)  # a key must not keep a storage or a generator alive
        else:
            raise _Undecided
    return tuple(parts)


def with_named_arguments(op: OpOverload, kernel: Callable[[Any], Any]) -> Function:
    """Return a kernel to register; it gets its arguments as one object, named as in the schema."""
    defaults = {argument.name: argument.default_value for argument in op._schema.arguments}

    def called(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(defaults, args, strict=False))
        return kernel(SimpleNamespace(**{**defaults, **given, **kwargs}))

    return called


def leaves_of(out: Any) -> list[Any]:
    """Flatten what an op returns. Some ops return a list among other values."""
    if not isinstance(out, list | tuple):
        return [out]
    leaves: list[Any] = []
    for item in out:
        if isinstance(item, list | tuple):
            leaves += item
        else:
            leaves.append(item)
    return leaves


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments."""
    found: list[torch.Tensor] = []
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple | dict):
            found += tensors_in(value)
    return found


# ---- tensors that stand for host memory: they left the GPU and report it -------------------------
# To C++ these are on `meta`, too; they are recognised by their storage. Computing with them is work
# of the host, and the results are on the host. A copy between host and GPU goes over the bus.

_COPIES = ("copy_", "_foreach_copy_")


class _Live(weakref.ref):  # type: ignore[type-arg]
    __slots__ = ("address", "place", "size_bytes")
    address: int
    place: str
    size_bytes: int


class HostMemory:
    """Track the host memory of tensors that left the GPU."""

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = 0
        self._live: dict[int, _Live] = {}
        Disguise.hosted = self._live

    def hold(self, tensor: torch.Tensor) -> None:
        """Record that a tensor's storage is on the host."""
        if tensor.untyped_storage()._cdata in self._live:
            return
        live = self.stand(tensor, "cpu")
        live.size_bytes = tensor.untyped_storage().nbytes()
        self.live_bytes += live.size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def stand(self, tensor: torch.Tensor, place: str) -> _Live:
        """Record that a storage is somewhere other than on the GPU."""
        storage = tensor.untyped_storage()
        live = _Live(storage, self._on_death)
        live.address, live.size_bytes, live.place = storage._cdata, 0, place
        self._live[live.address] = live
        return live

    def _on_death(self, live: Any) -> None:
        address, size_bytes = live.address, live.size_bytes
        if self._live.get(address) is live:
            del self._live[address]
            self.live_bytes -= size_bytes

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._live

    def has_any(self, args: Any, kwargs: Any) -> bool:
        return bool(self._live) and any(map(self.has, tensors_in((args, kwargs))))


class Recorder(Protocol):
    """What the rules of ops call on the recorder of a rehearsal (rehearsing/recorder.py)."""

    phase: Phase
    computes: bool  # whether kernel work is recorded
    events: list[int]
    ops: list[Op]
    convolutions: list[Convolution]
    notes: set[str]
    unfolded: frozenset[type]
    current_module: Callable[[], str]
    shadows: Any  # values.Shadows, which is built on this module

    @property
    def host(self) -> HostMemory: ...
    @property
    def counts_storage(self) -> Callable[[Any], bool]: ...
    def number_of(self, tensor: torch.Tensor) -> int | None: ...
    def track(self, tensor: torch.Tensor, op: str) -> None: ...
    def track_storage(self, storage: torch.UntypedStorage, op: str) -> None: ...
    def allocate(self, size_bytes: int, op: str) -> int: ...
    def free(self, number: int) -> None: ...
    def fresh(self, behaviour: Any, function: Any, args: Any, kwargs: Any) -> Any: ...
    def take_temporaries(self, behaviour: Any, args: Any, kwargs: Any, outputs: Any) -> None: ...
    def note_work(self, behaviour: Any, args: Any, kwargs: Any, outputs: Any) -> None: ...
    def note_unknown(self, sentence: str, value: str) -> None: ...


def run_on_host(recorder: Recorder, behaviour: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """Run an op that has host tensors among its arguments."""
    if behaviour.kind == "view":
        return function(*args, **kwargs)
    if behaviour.name in _COPIES and _crosses(recorder, args):
        name = "copy_to_host" if recorder.host.has(_first(args[0])) else "copy_from_host"
        note_on_host(recorder, name, tensors_in((args[0],)))
        return args[0] if behaviour.returns else None
    if behaviour.updated or behaviour.name in _COPIES or behaviour.name.endswith("_"):
        read = args[1:] if behaviour.name in _COPIES else args
        written = tuple(args[i] for i in behaviour.updated if i < len(args)) or args[:1]
        note_on_host(recorder, "on_host", tensors_in((read, kwargs)), tensors_in(written))
        return args[0] if behaviour.returns else None
    with suspended():
        out = function(*args, **kwargs)
    made = [tensor for tensor in leaves_of(out) if isinstance(tensor, torch.Tensor)]
    for tensor in made:
        recorder.host.hold(tensor)
    note_on_host(recorder, "on_host", tensors_in((args, kwargs)), made)
    return out


def _crosses(recorder: Recorder, args: Any) -> bool:
    """Return whether one side is on the host and the other on the GPU."""
    to, source = _first(args[0]), _first(args[1])
    return is_pretended(to) and recorder.host.has(to) != recorder.host.has(source)


def _first(tensors: Any) -> Any:
    return tensors[0] if isinstance(tensors, list | tuple) else tensors


def note_on_host(recorder: Recorder, name: str, *tensors: list[torch.Tensor]) -> None:
    """Record work of the host or of the bus, if work is recorded at all."""
    if recorder.computes:
        moved = [tensor for some in tensors for tensor in some]
        moved_bytes = sum(tensor.numel() * tensor.element_size() for tensor in moved)
        note_transfer(recorder, name, moved_bytes, moved[0].dtype)


def note_transfer(recorder: Recorder, name: str, moved_bytes: int, dtype: torch.dtype) -> None:
    """Record work that no kernel does."""
    recorder.ops.append(
        Op(
            name=name,
            phase=recorder.phase,
            flops=0,
            moved_bytes=moved_bytes,
            dtype=str(dtype).removeprefix("torch."),
            module=recorder.current_module(),
        )
    )


def _empty_on_host(recorder: Recorder, _: Any, __: Any, args: Any, ___: Any) -> Any:
    like = args[0]
    if not is_pretended(like):
        return NotImplemented
    return hosted_like(recorder, like, args[1] if len(args) > 1 else None)


def hosted_like(recorder: Recorder, like: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
    """Return a tensor of the same shape that stands for host memory."""
    out = empty(like.shape, dtype=dtype or like.dtype, device=META)
    recorder.host.hold(out)
    return out


RULES = {"empty_on_host": _empty_on_host}

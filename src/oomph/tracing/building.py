"""A function that makes a model -> the model on pretended tensors, of any size and at once.

What a constructor makes stands on the host, as a user's does. Small tensors are real there:
widths, rates and masks that it computes with are true. Large ones are without memory, and what is
computed from them is unknown; whoever reads that is told so, and never gets a 0.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from oomph.errors import UserCodeError
from oomph.tracing.behaviour import Behaviour
from oomph.tracing.known_outputs import leaves_of, tensors_in
from oomph.tracing.pretend import Lie, is_pretended, suspended
from oomph.tracing.script.users_line import in_words, users_line
from oomph.tracing.unknown_values import is_by_value

_META, _HOST = torch.device("meta"), torch.device("cpu")
_empty = torch._C._VariableFunctions.empty

# Up to so many values a tensor is made for real: widths, rates, small tables. Weights that are
# larger nobody reads.
MOST_MADE = 2**16
# What is computed from real ones may be larger, up to the largest of them.
MOST_COMPUTED = 2**20
# They return more than they are given, so that the sizes of their arguments say nothing.
_GROWING = frozenset({"repeat", "constant_pad_nd", "diag_embed", "linalg_vander", "as_strided"})
_READS = frozenset({"_local_scalar_dense", "is_nonzero"})
_OVERWRITES = frozenset({"zero_", "fill_", "copy_", "normal_", "uniform_"})
_DRAWS = torch.Tag.nondeterministic_seeded
_MASKS = (torch.bool, torch.uint8)

Note = Callable[[str], None]
DRAWN = "the model's constructor reads a random value: your run draws another"
TAKEN = "the model's constructor reads weights, which have no values in a rehearsal: taken as"


class _Mark(weakref.ref):  # type: ignore[type-arg]
    """Of a real storage: its values are unknown, or drawn by chance."""

    __slots__ = ("address", "is_unknown")
    address: int
    is_unknown: bool


class _Host(TorchDispatchMode):
    """The memory of the host while a model is built."""

    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note
        self._behaviours: dict[Any, Behaviour] = {}
        self._marks: dict[int, _Mark] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        behaviour = self._behaviours.get(function)
        if behaviour is None:
            behaviour = self._behaviours[function] = Behaviour(function)
        first = args[0] if behaviour.kind == "in place" else None
        if isinstance(first, torch.Tensor) and is_pretended(first):
            return first if behaviour.returns else None  # initialisation of what has no memory
        tensors = tensors_in((args, kwargs))
        if any(map(self.is_unknown, tensors)):
            return self._without_values(behaviour, function, args, kwargs)
        out = self._with_values(behaviour, function, args, kwargs, tensors)
        if behaviour.kind != "view" and (_DRAWS in function.tags or self._are_drawn(tensors)):
            self._mark_drawn(behaviour, args, out, tensors)
        return out

    # ---- what is known of a tensor -------------------------------------------------------------

    def is_unknown(self, tensor: Any) -> bool:
        """Has it no values that could be read?"""
        return is_pretended(tensor) or self._is_marked(tensor, is_unknown=True)

    def _is_marked(self, tensor: Any, *, is_unknown: bool) -> bool:
        if not self._marks or tensor.layout is not torch.strided:
            return False
        mark = self._marks.get(tensor.untyped_storage()._cdata)
        return mark is not None and mark.is_unknown == is_unknown

    def _are_drawn(self, tensors: Any) -> bool:
        return any(self._is_marked(tensor, is_unknown=False) for tensor in tensors)

    def _mark(self, tensor: Any, *, is_unknown: bool) -> None:
        if is_pretended(tensor) or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        mark: Any = _Mark(storage, self._on_death)
        mark.address, mark.is_unknown = storage._cdata, is_unknown
        self._marks[mark.address] = mark

    def _on_death(self, mark: Any) -> None:
        address = mark.address
        if self._marks.get(address) is mark:
            del self._marks[address]

    def _mark_drawn(self, behaviour: Behaviour, args: Any, out: Any, tensors: Any) -> None:
        if behaviour.name in _READS:
            self._note(f"{DRAWN}, at {in_words(users_line())}")
            return
        if behaviour.kind == "in place":
            tensors, out = tensors_in(args[:1]), None
            for tensor in tensors:
                self._mark(tensor, is_unknown=False)
        for made in leaves_of(out):
            if isinstance(made, torch.Tensor):
                self._mark(made, is_unknown=False)

    # ---- ops on known values -------------------------------------------------------------------

    def _with_values(
        self, behaviour: Behaviour, function: Any, args: Any, kwargs: Any, tensors: Any
    ) -> Any:
        device = kwargs.get("device")
        if device is not None and device.type == "meta":
            if tensors or _DRAWS in function.tags or behaviour.name.startswith("empty"):
                return _blank(function, args, kwargs)  # by request
        elif behaviour.kind in ("view", "in place") or behaviour.name in _READS:
            return function(*args, **kwargs)
        most = MOST_MADE
        if tensors:
            sizes = [tensor.numel() or 1 for tensor in tensors]
            most = max(MOST_COMPUTED, *sizes)
            if behaviour.name not in _GROWING and math.prod(sizes) <= most:
                return function(*args, **kwargs)
        blank = _blank(function, args, kwargs)
        if any(isinstance(one, torch.Tensor) and one.numel() > most for one in leaves_of(blank)):
            return blank
        return function(*args, **({**kwargs, "device": _HOST} if "device" in kwargs else kwargs))

    # ---- ops on unknown values -----------------------------------------------------------------

    def _without_values(self, behaviour: Behaviour, function: Any, args: Any, kwargs: Any) -> Any:
        if behaviour.kind == "view":
            return function(*args, **kwargs)
        if behaviour.name in _READS:
            return self.read(args[0])
        if behaviour.name in ("equal", "allclose"):
            return self._taken(True)
        if behaviour.kind == "in place":
            return self._changed(behaviour, function, args, kwargs)
        if behaviour.name == "index":
            args = (args[0], [self._positions(index) for index in args[1]])
            args = (args[0], [one for some in args[1] for one in some])
        elif is_by_value(function):
            raise _unknown(f"what {behaviour.name}() finds in a large tensor")
        for tensor in _written(function, args, kwargs):
            self._spoil(tensor)
        blank: Any = tree_map_only(torch.Tensor, _without_memory, (args, kwargs))
        if "device" in kwargs:
            blank[1]["device"] = _META
        out = function(*blank[0], **blank[1])
        if behaviour.name == "all":
            out._oomph_is_true = True
        return out

    def _changed(self, behaviour: Behaviour, function: Any, args: Any, kwargs: Any) -> Any:
        """In place: a real tensor that takes in what is unknown is unknown from here."""
        others = tensors_in((args[1:], kwargs))
        targets = tensors_in(args[:1])
        is_whole = behaviour.name in _OVERWRITES and not any(map(self.is_unknown, others))
        for tensor in targets:
            if is_pretended(tensor):
                continue
            if (
                is_whole
                and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
            ):
                self._marks.pop(tensor.untyped_storage()._cdata, None)
                return function(*args, **kwargs)
            self._spoil(tensor)
        return args[0] if behaviour.returns else None

    def _spoil(self, tensor: Any) -> None:
        """Its old values must not be taken for those that it has now."""
        if is_pretended(tensor) or tensor.layout is not torch.strided:
            return
        self._mark(tensor, is_unknown=True)
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.detach().fill_(math.nan)
        elif tensor.dtype != torch.bool:
            tensor.detach().fill_(torch.iinfo(tensor.dtype).min)

    def _positions(self, index: Any) -> tuple[Any, ...]:
        """A mask as the positions that it chooses."""
        if index is None or index.dtype not in _MASKS:
            return (index,)
        if self.is_unknown(index):
            raise _unknown("how many values a mask selects")
        return tuple(index.nonzero().unbind(1))

    # ---- reading -------------------------------------------------------------------------------

    def read(self, tensor: Any) -> Any:
        """One value of a tensor that has none. A whole number may become a width: no answer."""
        if tensor.dtype == torch.bool:
            return self._taken(bool(getattr(tensor, "_oomph_is_true", False)))
        if tensor.is_floating_point():
            return self._taken(math.nan)  # which no width can be made of
        raise _unknown("a whole number from a large tensor")

    def _taken(self, value: Any) -> Any:
        self._note(f"{TAKEN} {value}, at {in_words(users_line())}")
        return value

    def checked(self, tensor: Any) -> Any:
        """A tensor that is read in bulk, which must be known."""
        if self.is_unknown(tensor):
            raise _unknown("the values of a large tensor")
        if self._are_drawn([tensor]):
            self._note(f"{DRAWN}, at {in_words(users_line())}")
        return tensor


def _unknown(what: str) -> UserCodeError:
    return UserCodeError(
        f"the model's constructor at {in_words(users_line())} reads {what}, which is unknown in a"
        " rehearsal",
        because=f"tensors of more than {MOST_MADE:,} values take no memory in a rehearsal, so they"
        " have no values",
        attempt="computing that number in plain Python, or from a smaller tensor",
    )


@functools.cache
def _names(function: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in function._schema.arguments)


def _written(function: Any, args: Any, kwargs: Any) -> list[Any]:
    found = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(function._schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    ]
    return tensors_in(found)


def _blank(function: Any, args: Any, kwargs: Any) -> Any:
    """What an op returns, without memory; None where only values tell its shape."""
    if is_by_value(function):
        return None
    if _DRAWS in function.tags and "size" in _names(function):
        place = _names(function).index("size")
        size = args[place] if place < len(args) else kwargs["size"]
        return _empty(size, dtype=kwargs.get("dtype"), device=_META)
    if tensors_in((args, kwargs)):
        args, kwargs = tree_map_only(torch.Tensor, _without_memory, (args, kwargs))
    if "device" in _names(function):
        kwargs = {**kwargs, "device": _META}
    return function(*args, **kwargs)


def _without_memory(tensor: Any) -> Any:
    return tensor if is_pretended(tensor) else tensor.to(_META)


def build(make: Any, note: Note = lambda _: None) -> Any:
    """The user's model, without its memory. A module that is built already is taken as it is.

    `note` is told what was taken for true that is not known.
    """
    if isinstance(make, torch.nn.Module):
        return make
    with without_memory(note) as host:
        made = make()
        if isinstance(made, torch.nn.Module):
            _forget_values(made, host)
        return made


def _forget_values(model: Any, host: _Host) -> None:
    """Parameters and buffers that were made for real lose their memory, too."""
    made: dict[int, Any] = {}  # tied weights stay tied

    def blank(tensor: Any) -> Any:
        if id(tensor) not in made:
            made[id(tensor)] = _like(tensor, tensor.detach().to(_META))
            if not host.is_unknown(tensor):
                made[id(tensor)]._true_values = tensor.detach()
        return made[id(tensor)]

    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and not is_pretended(tensor):
                    table[name] = blank(tensor)


def _like(original: Any, tensor: Any) -> Any:
    """A parameter, if the original is one."""
    if not isinstance(original, torch.nn.Parameter):
        return tensor
    return torch.nn.Parameter(tensor, requires_grad=original.requires_grad)


@contextlib.contextmanager
def without_memory(note: Note = lambda _: None) -> Iterator[_Host]:
    """What is large and made in here is on the meta device, and says so.

    Nothing of it is recorded: a user builds on the host, and then moves the model.
    """
    host = _Host(note)
    Lie.building += 1
    try:
        with _disable_current_modes(), suspended(), _read_through(host), host:
            yield host
    finally:
        Lie.building -= 1


def _formatted(tensor: Any, how: str) -> str:
    """As torch does, which does not for tensors on `meta`."""
    return format(tensor.item() if not tensor.dim() else str(tensor), how)


@contextlib.contextmanager
def _read_through(host: _Host) -> Iterator[None]:
    """Values in bulk, which no op shows, and `weight.data = ...` of the one kind to the other."""
    base: Any = torch._C.TensorBase
    write = base.data.__set__

    def assign(tensor: Any, value: Any) -> None:
        if is_pretended(tensor) == is_pretended(value):
            write(tensor, value)
        else:
            given = value.detach().requires_grad_(tensor.requires_grad)
            torch._C._swap_tensor_impl(tensor, given)

    patches = {
        "tolist": lambda tensor: base.tolist(host.checked(tensor)),
        "numpy": lambda tensor, **options: base.numpy(host.checked(tensor), **options),
        "__format__": _formatted,
        "data": property(base.data.__get__, assign),
    }
    methods: Any = torch.Tensor
    before = {name: vars(methods)[name] for name in patches if name in vars(methods)}
    for name, patch in patches.items():
        setattr(methods, name, patch)
    try:
        yield
    finally:
        for name in patches:
            if name in before:
                setattr(methods, name, before[name])
            else:
                delattr(methods, name)


def materialise(
    model: Any, give: Callable[[Any, Any], None] = lambda *_: None, dtype: Any = None
) -> None:
    """Give every parameter and buffer a fresh pretended tensor, in the order of Module.to.

    What was made for real has its values, which `give` is told. `dtype` is that of floating
    tensors where the whole model is to be in it.
    """
    made: dict[int, Any] = {}  # tied weights stay tied

    def fresh(tensor: Any) -> Any:
        if id(tensor) not in made:
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=wanted, device="cuda")
            made[id(tensor)] = _like(tensor, like)
            values = getattr(tensor, "_true_values", None if is_pretended(tensor) else tensor)
            if values is not None:
                give(made[id(tensor)], values.detach())
        return made[id(tensor)]

    for module in _children_first(model):
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = fresh(tensor)
        if isinstance(module, torch.nn.RNNBase):
            module._init_flat_weights()  # it keeps its weights in a list of its own, too


def _children_first(module: Any) -> list[Any]:
    seen: dict[int, Any] = {}

    def visit(one: Any) -> None:
        if id(one) in seen:
            return
        for child in one.children():
            visit(child)
        seen.setdefault(id(one), one)

    visit(module)
    return list(seen.values())

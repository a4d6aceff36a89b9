"""A function that builds a model -> the model on tensors without memory, whatever its size.

The constructor builds on the host, as it would for the user. Small tensors are real, so the widths,
rates and masks computed from them are correct. Large tensors have no memory, and values computed
from them are unknown: reading one raises an error or leaves a note, and never returns a made-up 0.
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
from oomph.pretending.ops import Behaviour
from oomph.pretending.patches import Patches
from oomph.pretending.tensors import (
    HOST,
    META,
    Disguise,
    empty,
    is_pretended,
    suspended,
    tensors_in,
)
from oomph.pretending.values import is_by_value
from oomph.rehearsing.fault import in_words, users_line
from oomph.rehearsing.recorder import Behaviours

# Judgement: tensors of up to this many values are real, which covers widths, rates and small
# tables. Constructors do not read larger weights.
MOST_MADE = 2**16
# Judgement: results computed from real tensors may have this many values, or as many as the largest
# input.
MOST_COMPUTED = 2**20
# These return more values than they get, so the sizes of their arguments are no bound.
_GROWING = frozenset({"repeat", "constant_pad_nd", "diag_embed", "linalg_vander", "as_strided"})
_READS = frozenset({"_local_scalar_dense", "is_nonzero"})
_OVERWRITES = frozenset({"zero_", "fill_", "copy_", "normal_", "uniform_"})
_DRAWS = torch.Tag.nondeterministic_seeded
_MASKS = (torch.bool, torch.uint8)

Note = Callable[[str], None]
DRAWN = "the model's constructor reads a random value: your run draws another"
TAKEN = "the model's constructor reads weights, which have no values in a rehearsal: taken as"


class _Mark(weakref.ref):  # type: ignore[type-arg]
    """A mark on a real storage: its values are unknown or random."""

    __slots__ = ("address", "is_unknown")
    address: int
    is_unknown: bool


class _Host(TorchDispatchMode):
    """Runs ops while a model is built: on small tensors for real, on large ones without memory."""

    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note
        self._behaviours = Behaviours()
        self._marks: dict[int, _Mark] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        behaviour = self._behaviours[function]
        first = args[0] if behaviour.kind == "in place" else None
        if isinstance(first, torch.Tensor) and is_pretended(first):
            return first if behaviour.returns else None  # initialising a tensor without memory
        tensors = tensors_in((args, kwargs))
        if any(map(self.is_unknown, tensors)):
            return self._without_values(behaviour, function, args, kwargs)
        out = self._with_values(behaviour, function, args, kwargs, tensors)
        if behaviour.kind != "view" and (_DRAWS in function.tags or self._are_drawn(tensors)):
            self._mark_drawn(behaviour, args, out)
        return out

    # ---- what is known about a tensor ----------------------------------------------------------

    def is_unknown(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor has no readable values."""
        return is_pretended(tensor) or self._is_marked(tensor, is_unknown=True)

    def _is_marked(self, tensor: torch.Tensor, *, is_unknown: bool) -> bool:
        if not self._marks or tensor.layout is not torch.strided:
            return False
        mark = self._marks.get(tensor.untyped_storage()._cdata)
        return mark is not None and mark.is_unknown == is_unknown

    def _are_drawn(self, tensors: list[torch.Tensor]) -> bool:
        return any(self._is_marked(tensor, is_unknown=False) for tensor in tensors)

    def _mark(self, tensor: torch.Tensor, *, is_unknown: bool) -> None:
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

    def _mark_drawn(self, behaviour: Behaviour, args: Any, out: Any) -> None:
        if behaviour.name in _READS:
            self._note(f"{DRAWN}, at {in_words(users_line())}")
            return
        for tensor in tensors_in(args[:1] if behaviour.kind == "in place" else [out]):
            self._mark(tensor, is_unknown=False)

    # ---- ops on known values -------------------------------------------------------------------

    def _with_values(
        self,
        behaviour: Behaviour,
        function: Any,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
    ) -> Any:
        device = kwargs.get("device")
        if device is not None and device.type == "meta":
            if tensors or _DRAWS in function.tags or behaviour.name.startswith("empty"):
                return _blank(function, args, kwargs)  # the caller asked for `meta`
        elif behaviour.kind in ("view", "in place") or behaviour.name in _READS:
            return function(*args, **kwargs)
        most = MOST_MADE
        if tensors:
            sizes = [tensor.numel() or 1 for tensor in tensors]
            most = max(MOST_COMPUTED, *sizes)
            if behaviour.name not in _GROWING and math.prod(sizes) <= most:
                return function(*args, **kwargs)
        blank = _blank(function, args, kwargs)
        if any(one.numel() > most for one in tensors_in([blank])):
            return blank
        return function(*args, **({**kwargs, "device": HOST} if "device" in kwargs else kwargs))

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
            args = (args[0], [one for index in args[1] for one in self._positions(index)])
        elif is_by_value(function):
            raise _unknown(f"what {behaviour.name}() finds in a large tensor")
        for tensor in _written(function, args, kwargs):
            self._spoil(tensor)
        blank: Any = tree_map_only(torch.Tensor, _without_memory, (args, kwargs))
        if "device" in kwargs:
            blank[1]["device"] = META
        out = function(*blank[0], **blank[1])
        if behaviour.name == "all":
            out._oomph_is_true = True
        return out

    def _changed(self, behaviour: Behaviour, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an in-place op; a real tensor that receives unknown values becomes unknown."""
        others = tensors_in((args[1:], kwargs))
        targets = tensors_in(args[:1])
        is_whole = behaviour.name in _OVERWRITES and not any(map(self.is_unknown, others))
        for tensor in targets:
            if is_pretended(tensor):
                continue
            storage = tensor.untyped_storage()
            if is_whole and tensor.numel() * tensor.element_size() == storage.nbytes():
                self._marks.pop(storage._cdata, None)
                return function(*args, **kwargs)
            self._spoil(tensor)
        return args[0] if behaviour.returns else None

    def _spoil(self, tensor: torch.Tensor) -> None:
        """Overwrite the old values, so that they are not mistaken for the current ones."""
        if is_pretended(tensor) or tensor.layout is not torch.strided:
            return
        self._mark(tensor, is_unknown=True)
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.detach().fill_(math.nan)
        elif tensor.dtype != torch.bool:
            tensor.detach().fill_(torch.iinfo(tensor.dtype).min)

    def _positions(self, index: Any) -> tuple[Any, ...]:
        """Return a mask as the positions it selects."""
        if index is None or index.dtype not in _MASKS:
            return (index,)
        if self.is_unknown(index):
            raise _unknown("how many values a mask selects")
        return tuple(index.nonzero().unbind(1))

    # ---- reading -------------------------------------------------------------------------------

    def read(self, tensor: torch.Tensor) -> Any:
        """Read one value of an unknown tensor. Refuse integers: one may become a width."""
        if tensor.dtype == torch.bool:
            return self._taken(bool(getattr(tensor, "_oomph_is_true", False)))
        if tensor.is_floating_point():
            return self._taken(math.nan)  # NaN cannot become a width
        raise _unknown("a whole number from a large tensor")

    def _taken(self, value: Any) -> Any:
        self._note(f"{TAKEN} {value}, at {in_words(users_line())}")
        return value

    def checked(self, tensor: torch.Tensor) -> Any:
        """Return a tensor that is about to be read in bulk; raise if its values are unknown."""
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
    """Return the op's result without memory; None if its shape depends on values."""
    if is_by_value(function):
        return None
    if _DRAWS in function.tags and "size" in _names(function):
        place = _names(function).index("size")
        size = args[place] if place < len(args) else kwargs["size"]
        return empty(size, dtype=kwargs.get("dtype"), device=META)
    if tensors_in((args, kwargs)):
        args, kwargs = tree_map_only(torch.Tensor, _without_memory, (args, kwargs))
    if "device" in _names(function):
        kwargs = {**kwargs, "device": META}
    return function(*args, **kwargs)


def _without_memory(tensor: torch.Tensor) -> Any:
    return tensor if is_pretended(tensor) else tensor.to(META)


def build(make: Any, note: Note = lambda _: None) -> Any:
    """Return the user's model without its memory. A model that is already built is used as is.

    `note` is called with each assumption about a value that is not known.
    """
    if isinstance(make, torch.nn.Module):
        return make
    with without_memory(note) as host:
        made = make()
        if isinstance(made, torch.nn.Module):
            _forget_values(made, host)
        return made


def _forget_values(model: torch.nn.Module, host: _Host) -> None:
    """Take the memory away from parameters and buffers that were built for real."""

    def blank(tensor: torch.Tensor) -> Any:
        if is_pretended(tensor):
            return tensor
        made: Any = _like(tensor, tensor.detach().to(META))
        if not host.is_unknown(tensor):
            made._true_values = tensor.detach()
        return made

    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        _replace_tensors(module, blank, made)


def _replace_tensors(
    module: torch.nn.Module,
    replacement: Callable[[torch.Tensor], torch.Tensor],
    made: dict[int, torch.Tensor],
) -> None:
    """Replace a module's own parameters and buffers; `made` keeps tied weights tied."""
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for table in tables:
        for name, tensor in table.items():
            if tensor is not None:
                if id(tensor) not in made:
                    made[id(tensor)] = replacement(tensor)
                table[name] = made[id(tensor)]


def _like(original: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as a Parameter if the original is one."""
    if not isinstance(original, torch.nn.Parameter):
        return tensor
    return torch.nn.Parameter(tensor, requires_grad=original.requires_grad)


@contextlib.contextmanager
def without_memory(note: Note = lambda _: None) -> Iterator[_Host]:
    """Put large tensors made in this context on the meta device; they report that device.

    Nothing is recorded: a user builds the model on the host and moves it to the GPU later.
    """
    host = _Host(note)
    Disguise.building += 1
    try:
        with _disable_current_modes(), suspended(), _read_through(host), host:
            yield host
    finally:
        Disguise.building -= 1


def _formatted(tensor: torch.Tensor, how: str) -> str:
    """Format a tensor as torch does; torch itself cannot format `meta` tensors."""
    return format(tensor.item() if not tensor.dim() else str(tensor), how)


@contextlib.contextmanager
def _read_through(host: _Host) -> Iterator[None]:
    """Patch bulk reads, which no op shows, and `weight.data = ...` between real and `meta`."""
    base: Any = torch._C.TensorBase
    write = base.data.__set__

    def assign(tensor: torch.Tensor, value: Any) -> None:
        if is_pretended(tensor) == is_pretended(value):
            write(tensor, value)
        else:
            given = value.detach().requires_grad_(tensor.requires_grad)
            torch._C._swap_tensor_impl(tensor, given)

    patches = Patches()
    patches.put(
        torch.Tensor,
        tolist=lambda tensor: base.tolist(host.checked(tensor)),
        numpy=lambda tensor, **options: base.numpy(host.checked(tensor), **options),
        __format__=_formatted,
        data=property(base.data.__get__, assign),
    )
    try:
        yield
    finally:
        patches.undo()


def materialise(
    model: torch.nn.Module,
    give: Callable[[Any, Any], None] = lambda *_: None,
    dtype: torch.dtype | None = None,
) -> None:
    """Give every parameter and buffer a new pretended tensor, in the order of Module.to.

    Tensors that were real have values; those are passed to `give`. `dtype` replaces the dtype of
    floating tensors if the whole model is to use it.
    """

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=wanted, device="cuda")
        made = _like(tensor, like)
        values = getattr(tensor, "_true_values", None if is_pretended(tensor) else tensor)
        if values is not None:
            give(made, values.detach())
        return made

    made: dict[int, torch.Tensor] = {}
    for module in dict.fromkeys(_children_first(model)):
        _replace_tensors(module, fresh, made)
        if isinstance(module, torch.nn.RNNBase):
            module._init_flat_weights()  # an RNN also keeps its weights in a list


def _children_first(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module

"""The true values of pretended tensors that scripts count and choose with.

Whole numbers, masks and single figures have, beside the storage without memory, a real one on the
host: lengths, labels, masks, step counts, the scale of a GradScaler are true. So have figures that
came from the host and were only moved, cast, joined or chosen from since: labels again. It belongs
to the storage, so that views see each other's changes, and a change that cannot be followed makes
all of them unknown.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from oomph.tracing.known_outputs import leaves_of, tensors_in
from oomph.tracing.pretend import is_pretended

_HOST = torch.device("cpu")
_empty = torch._C._VariableFunctions.empty
_empty_strided = torch._C._VariableFunctions.empty_strided

# Larger tables nobody counts with, and following them would take time.
MOST_WHOLE = 4 * 2**20
MOST_FIGURES = 16
# Of figures that come through as they are, so many: the labels of a batch and those of most data
# sets, and no large images. Copying them takes a millisecond; all of them together are bounded.
MOST_CARRIED = 2**20
MOST_CARRIED_BYTES = 256 * 2**20
_CARRY = frozenset(
    {
        "_to_copy",
        "clone",
        "index",
        "index_select",
        "gather",
        "take",
        "masked_select",
        "cat",
        "stack",
    }
    | {"repeat", "flip", "roll"}
)
# They write their first argument and do not read it, or another that their schema does not tell.
WRITE_OVER = frozenset({"zero_", "fill_", "copy_", "native_batch_norm", "cudnn_batch_norm"})
_RUNNING = {"native_batch_norm": slice(3, 5), "cudnn_batch_norm": slice(3, 5)}
# They say of values that none is infinite: what they are given stays as it is.
_KEEPS = frozenset({"_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"})
# Nobody counts with what they leave, and a dropout on the host would draw other data from then on.
_UNREAD = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "native_dropout"}
)


class _Shadow(weakref.ref):  # type: ignore[type-arg]
    __slots__ = ("address", "carried_bytes", "real")
    address: int
    carried_bytes: int
    real: Any


def is_worth_knowing(dtype: Any, num_elements: int) -> bool:
    is_figure = dtype.is_floating_point or dtype.is_complex
    return num_elements <= (MOST_FIGURES if is_figure else MOST_WHOLE)


def _name_of(function: Any) -> str:
    return str(function._schema.name.partition("::")[2])


def _drawn_apart(function: Any, args: Any, kwargs: Any) -> Any:
    """What a GPU draws, it does not draw from the host's generator: that goes on as it was."""
    before = torch.random.get_rng_state()
    try:
        return function(*args, **kwargs)
    finally:
        torch.random.set_rng_state(before)


class Shadows:
    """Storages without memory, and the real ones that stand beside them."""

    def __init__(self) -> None:
        self._of: dict[int, _Shadow] = {}
        self._written: dict[Any, tuple[Any, ...]] = {}
        self._carried_bytes = 0

    def of(self, tensor: Any) -> Any:
        """The real tensor beside a pretended one, sharing its changes; None if it has none."""
        if tensor.layout is not torch.strided:
            return None
        shadow = self._of.get(tensor.untyped_storage()._cdata)
        if shadow is None:
            return None
        out = _empty((0,), dtype=tensor.dtype, device=_HOST)
        with torch.no_grad():
            out.set_(shadow.real, tensor.storage_offset(), tensor.size(), tensor.stride())
        return out

    def has(self, tensor: Any) -> bool:
        """Are its values known?"""
        if tensor.layout is not torch.strided:
            return False
        return tensor.untyped_storage()._cdata in self._of

    def give(self, tensor: Any, value: Any) -> None:
        """Let a pretended tensor that is all of its storage have a value, if it is worth it."""
        if is_worth_knowing(tensor.dtype, tensor.numel()):
            self._stand_beside(tensor, value, carried_bytes=0)

    def carry(self, tensor: Any, value: Any) -> None:
        """The same with figures that nothing was reckoned with, as long as there is room."""
        if is_worth_knowing(tensor.dtype, tensor.numel()):
            self.give(tensor, value)
        elif self._has_room(tensor):
            size_bytes = tensor.numel() * tensor.element_size()
            self._stand_beside(tensor, value, carried_bytes=size_bytes)

    def _has_room(self, tensor: Any) -> bool:
        size_bytes = tensor.numel() * tensor.element_size()
        is_small = tensor.numel() <= MOST_CARRIED
        return bool(is_small and self._carried_bytes + size_bytes <= MOST_CARRIED_BYTES)

    def _stand_beside(self, tensor: Any, value: Any, *, carried_bytes: int) -> None:
        if tensor.layout is not torch.strided or value.layout is not torch.strided:
            return
        if tensor.shape != value.shape:
            return
        storage = tensor.untyped_storage()
        real = _empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_HOST)
        if tensor.storage_offset() or real.untyped_storage().nbytes() != storage.nbytes():
            return
        with torch.no_grad():
            real.copy_(value)
        beside: Any = _Shadow(storage, self._on_death)
        beside.address, beside.real = storage._cdata, real.untyped_storage()
        beside.carried_bytes = carried_bytes
        self._drop(beside.address)
        self._of[beside.address] = beside
        self._carried_bytes += carried_bytes

    def forget(self, tensor: Any) -> None:
        if self._of and tensor.layout is torch.strided:
            self._drop(tensor.untyped_storage()._cdata)

    def _on_death(self, beside: Any) -> None:
        address = beside.address
        if self._of.get(address) is beside:
            self._drop(address)

    def _drop(self, address: int) -> None:
        beside = self._of.pop(address, None)
        if beside is not None:
            self._carried_bytes -= beside.carried_bytes

    # ---- following ops -----------------------------------------------------------------------

    def knows(self, args: Any, kwargs: Any) -> bool:
        """Has every pretended tensor among the arguments its values?"""
        num_elements = 0
        for tensor in tensors_in((args, kwargs)):
            if is_pretended(tensor) and not self.has(tensor):
                return False
            num_elements += tensor.numel()
        return num_elements <= MOST_WHOLE

    def computed(self, function: Any, args: Any, kwargs: Any) -> Any:
        """What an op returns on the true values; NotImplemented where the host cannot compute it.

        An op in place changes the true values as well.
        """
        if _name_of(function) in _UNREAD:
            return NotImplemented
        args = self._real(args)
        kwargs = {name: self._real(value) for name, value in kwargs.items()}
        if "device" in kwargs:
            kwargs["device"] = _HOST
        try:
            if torch.Tag.nondeterministic_seeded in function.tags:
                return _drawn_apart(function, args, kwargs)
            return function(*args, **kwargs)
        except (RuntimeError, TypeError, IndexError, ValueError):
            return NotImplemented  # no such kernel on the host: the values are unknown from here

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.of(value) if is_pretended(value) else value
        if isinstance(value, list | tuple):
            return type(value)(self._real(item) for item in value)
        return value

    def follow(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        """After an op on pretended tensors: what of its results and of its targets is known."""
        written = self.written_by(function, args, kwargs)
        if written and _name_of(function) in _KEEPS:
            return
        if not self.knows(args, kwargs):
            if written and not self._overwritten(function, args, written):
                for tensor in written:
                    self.forget(tensor)
            return
        carries = _name_of(function) in _CARRY
        if not written and not self._is_worth_it(out, carries=carries):
            return
        value = self.computed(function, args, kwargs)
        if value is NotImplemented:
            for tensor in written:
                self.forget(tensor)
        elif not written:
            if args and out is args[0]:  # autograd adds up in place what it asks for a copy of
                self.forget(out)
            self.give_all(out, value, carries=carries)

    def _is_worth_it(self, out: Any, *, carries: bool) -> bool:
        return any(
            is_worth_knowing(one.dtype, one.numel()) or (carries and self._has_room(one))
            for one in leaves_of(out)
            if isinstance(one, torch.Tensor)
        )

    def _overwritten(self, function: Any, args: Any, written: list[Any]) -> bool:
        """A tensor that is written over as a whole by what is known has its values again."""
        name = _name_of(function)
        target = written[0]
        if name == "zero_":
            value = _empty((), dtype=target.dtype, device=_HOST).zero_()
        elif name in ("fill_", "copy_") and not isinstance(args[1], torch.Tensor):
            value = _empty((), dtype=target.dtype, device=_HOST).fill_(args[1])
        elif name in ("fill_", "copy_"):
            value = self.of(args[1]) if is_pretended(args[1]) else args[1]
        else:
            return False
        if value is None or not is_pretended(target):
            return False
        self.forget(target)
        if is_worth_knowing(target.dtype, target.numel()) and value.dim() <= target.dim():
            self.give(target, value.expand(target.shape))
        return True

    def give_all(self, out: Any, value: Any, *, carries: bool = False) -> None:
        for one, its in zip(leaves_of(out), leaves_of(value), strict=False):
            if isinstance(one, torch.Tensor) and isinstance(its, torch.Tensor):
                is_new = is_pretended(one) and one.layout is torch.strided
                if is_new and one.untyped_storage()._cdata not in self._of:
                    (self.carry if carries else self.give)(one, its)

    def written_by(self, function: Any, args: Any, kwargs: Any, *, real: bool = False) -> list[Any]:
        """The pretended tensors that an op changes, or the real ones."""
        places = self._written.get(function)
        if places is None:
            arguments = enumerate(function._schema.arguments)
            places = self._written[function] = tuple(
                (i, argument.name)
                for i, argument in arguments
                if argument.alias_info and argument.alias_info.is_write
            )
        if not places:
            running = args[_RUNNING.get(_name_of(function), slice(0))]
            return [
                tensor for tensor in running if tensor is not None and is_pretended(tensor) != real
            ]
        values = [args[i] if i < len(args) else kwargs.get(name) for i, name in places]
        return [tensor for tensor in tensors_in(values) if is_pretended(tensor) != real]

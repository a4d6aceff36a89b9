"""Answer for a pretended tensor when its contents are asked for, though they do not exist.

Each answer is the cautious one for memory (every row of a mask is true) and is noted, so that users
learn where the prediction depends on it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._ops import OpOverload

from oomph.pretending.tensors import (
    HOST,
    META,
    Disguise,
    Recorder,
    empty,
    empty_strided,
    is_pretended,
    leaves_of,
    tensors_in,
)

_empty_like = torch.ops.aten.empty_like.default
_MASKS = (torch.bool, torch.uint8)


_BY_VALUE = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def is_by_value(function: OpOverload) -> bool:
    """Return whether values decide an op's result or the shape of its result."""
    return any(tag in function.tags for tag in _BY_VALUE)


def decided_by_values(
    recorder: Recorder, behaviour: Any, function: Any, args: Any, kwargs: Any
) -> Any:
    """Compute `unique`, `bincount`, `equal`, ... if the values are known."""
    if not any(map(is_pretended, tensors_in((args, kwargs)))):
        return NotImplemented
    if recorder.shadows.knows(args, kwargs):
        return made_like(recorder, behaviour, recorder.shadows.computed(function, args, kwargs))
    if behaviour.name in ("allclose", "equal"):
        recorder.note_unknown(
            f"torch.{behaviour.name}(...) of values on the GPU: taken as true",
            f"{behaviour.name}: True",
        )
        return True
    return NotImplemented


def made_like(recorder: Recorder, behaviour: Any, value: Any) -> Any:
    """Return pretended tensors for known results."""
    if not isinstance(value, torch.Tensor | tuple | list):
        return value
    made = [pretended_like(recorder, one, behaviour.label) for one in leaves_of(value)]
    return made[0] if isinstance(value, torch.Tensor) else type(value)(made)


def pretended_like(recorder: Recorder, value: Any, label: str) -> Any:
    """Return a pretended tensor with known values."""
    out = empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)
    recorder.track(out, label)
    recorder.shadows.carry(out, value)
    return out


def _scalar(recorder: Recorder, _: Any, __: Any, args: Any, ___: Any) -> Any:
    tensor = args[0]
    if not is_pretended(tensor):
        return NotImplemented
    known = recorder.shadows.of(tensor)
    if known is not None:
        return known.item()
    if getattr(tensor, "_oomph_is_true", False):
        recorder.note_unknown("all(...) was asked of values on the GPU: taken as true", "True")
        return True
    value = torch.zeros((), dtype=tensor.dtype, device=HOST).item()
    recorder.note_unknown(
        f"a value was read from the GPU (.item(), if loss > ...): taken as {value}", repr(value)
    )
    return value


def _all(recorder: Recorder, behaviour: Any, function: Any, args: Any, kwargs: Any) -> Any:
    if not is_pretended(args[0]):
        return NotImplemented
    out = recorder.fresh(behaviour, function, args, kwargs)
    out._oomph_is_true = True
    return out


def _nonzero(recorder: Recorder, behaviour: Any, _: Any, args: Any, __: Any) -> Any:
    return _positions(recorder, behaviour, args[0]) if is_pretended(args[0]) else NotImplemented


def _positions(recorder: Recorder, behaviour: Any, mask: Any) -> Any:
    recorder.note_unknown(
        "the size of nonzero() or of a mask: taken as the most it can be", "every element of a mask"
    )
    out = empty((mask.dim(), mask.numel()), dtype=torch.int64, device=META)
    recorder.track(out, behaviour.label)
    return out.t()


def _index(recorder: Recorder, behaviour: Any, function: Any, args: Any, _: Any) -> Any:
    """Index by a mask as if every element were selected. A mask on the host is known."""
    tensor, indices = args[0], args[1]
    if not is_pretended(tensor) or all(i is None or i.dtype not in _MASKS for i in indices):
        return NotImplemented
    positions: list[Any] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            positions.append(index)
        elif is_pretended(index):
            positions += _positions(recorder, behaviour, index).unbind(1)
        else:
            positions += index.nonzero().unbind(1)
    return recorder.fresh(behaviour, function, (tensor, positions), {})


def _masked_select(recorder: Recorder, behaviour: Any, _: Any, args: Any, __: Any) -> Any:
    if not is_pretended(args[0]):
        return NotImplemented
    recorder.note_unknown(
        "the size of masked_select(): taken as the most it can be", "every element of a mask"
    )
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    out = empty((shape.numel(),), dtype=args[0].dtype, device=META)
    recorder.track(out, behaviour.label)
    return out


def _dropout(recorder: Recorder, behaviour: Any, _: Any, args: Any, kwargs: Any) -> Any:
    """Return dropout's two outputs, without the meta device's decomposition.

    The kernel makes the mask first (Dropout.cu, dropout_cuda).
    """
    tensor = args[0]
    if not is_pretended(tensor):
        return NotImplemented
    out = _empty_like(tensor)
    mask = _empty_like(tensor, dtype=torch.bool)
    for made in (mask, out):
        recorder.track(made, behaviour.label)
    recorder.note_work(behaviour, args, kwargs, (out, mask))
    return out, mask


def _random_like(recorder: Recorder, behaviour: Any, _: Any, args: Any, kwargs: Any) -> Any:
    """Return a tensor of that shape: the Python decomposition takes seconds to import."""
    if not is_pretended(args[0]):
        return NotImplemented
    out = _empty_like(args[0], dtype=kwargs.get("dtype"))
    recorder.track(out, behaviour.label)
    return out


def _random(recorder: Recorder, behaviour: Any, _: Any, args: Any, kwargs: Any) -> Any:
    device = kwargs.get("device")
    if device is None or torch.device(device).type != "meta":
        return NotImplemented
    size = next((arg for arg in args if isinstance(arg, list | tuple)), (args[0],))
    is_whole = behaviour.name in ("randint", "randperm")
    dtype = kwargs.get("dtype") or (torch.int64 if is_whole else torch.get_default_dtype())
    out = empty(size, dtype=dtype, device=META)
    recorder.track(out, behaviour.label)
    return out


def _scalar_tensor(_: Any, __: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """Keep the 3 of `x[i] = 3` on the host."""
    if not Disguise.in_setitem:
        return NotImplemented
    return function(*args, **{**kwargs, "device": HOST})


# Each rule handles an op, or returns NotImplemented if the call turns out to be an ordinary one.
RULES = {
    "_local_scalar_dense": _scalar,
    "is_nonzero": _scalar,
    "all": _all,
    "nonzero": _nonzero,
    "index": _index,
    "masked_select": _masked_select,
    "native_dropout": _dropout,
    "scalar_tensor": _scalar_tensor,
    "rand": _random,
    "randn": _random,
    "randint": _random,
    "randperm": _random,
    "rand_like": _random_like,
    "randn_like": _random_like,
    "randint_like": _random_like,
}


# ---- the true values of pretended tensors that control what scripts do ---------------------------
# Integers, masks and small floating-point tensors have a real storage on the host beside the one
# without memory, so lengths, labels, masks, step counts and the scale of a GradScaler are true. So
# have floating-point tensors that came from the host and were only moved, cast, joined or indexed
# since, such as labels. The real storage belongs to the pretended storage, so views see each
# other's changes. A change that cannot be followed makes all of them unknown.

# Judgement: scripts do not branch on larger tables, and following those would take time.
MOST_WHOLE = 4 * 2**20
MOST_FIGURES = 16
# Judgement: floating-point values that are passed on unchanged. Enough for the labels of a batch
# and of most data sets, too little for large images. Copying them takes a millisecond; their total
# is bounded as well.
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
# These write their first argument without reading it, or another that their schema omits.
WRITE_OVER = frozenset({"zero_", "fill_", "copy_", "native_batch_norm", "cudnn_batch_norm"})
_RUNNING = {"native_batch_norm": slice(3, 5), "cudnn_batch_norm": slice(3, 5)}
# These report that no value is infinite; their arguments stay unchanged.
_KEEPS = frozenset({"_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"})
# Scripts do not read these values, and a dropout on the host would change later random draws.
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


class Shadows:
    """Storages without memory, and the real storages beside them."""

    def __init__(self) -> None:
        self._of: dict[int, _Shadow] = {}
        self._written: dict[Any, tuple[Any, ...]] = {}
        self._carried_bytes = 0

    def of(self, tensor: Any) -> Any:
        """Return the real tensor beside a pretended one, which shares its changes, or None."""
        if tensor.layout is not torch.strided:
            return None
        shadow = self._of.get(tensor.untyped_storage()._cdata)
        if shadow is None:
            return None
        out = empty((0,), dtype=tensor.dtype, device=HOST)
        with torch.no_grad():
            out.set_(shadow.real, tensor.storage_offset(), tensor.size(), tensor.stride())
        return out

    def has(self, tensor: Any) -> bool:
        """Return whether a tensor's values are known."""
        if tensor.layout is not torch.strided:
            return False
        return tensor.untyped_storage()._cdata in self._of

    def give(self, tensor: Any, value: Any) -> None:
        """Give a value to a pretended tensor that owns its whole storage, if worth keeping."""
        if is_worth_knowing(tensor.dtype, tensor.numel()):
            self._stand_beside(tensor, value, carried_bytes=0)

    def carry(self, tensor: Any, value: Any) -> None:
        """Give values that were only passed on, not computed, as long as there is room."""
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
        real = empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=HOST)
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
        """Return whether the values of every pretended tensor among the arguments are known."""
        num_elements = 0
        for tensor in tensors_in((args, kwargs)):
            if is_pretended(tensor) and not self.has(tensor):
                return False
            num_elements += tensor.numel()
        return num_elements <= MOST_WHOLE

    def computed(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on the true values; NotImplemented if the host cannot compute it.

        An in-place op changes the true values as well.
        """
        if _name_of(function) in _UNREAD:
            return NotImplemented
        args = self._real(args)
        kwargs = {name: self._real(value) for name, value in kwargs.items()}
        if "device" in kwargs:
            kwargs["device"] = HOST
        try:
            # A random op must not advance the host's generator: a GPU has its own.
            is_random = torch.Tag.nondeterministic_seeded in function.tags
            with torch.random.fork_rng(devices=(), enabled=is_random):
                return function(*args, **kwargs)
        except (RuntimeError, TypeError, IndexError, ValueError):
            return NotImplemented  # no such kernel on the host: from here on the values are unknown

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.of(value) if is_pretended(value) else value
        if isinstance(value, list | tuple):
            return type(value)(self._real(item) for item in value)
        return value

    def follow(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Update the known values after an op on pretended tensors: its results and its targets."""
        if not Disguise.unread:
            self._follow(function, args, kwargs, out)

    def _follow(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
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
            if args and out is args[0]:  # autograd accumulates in place where it asks for a copy
                self.forget(out)
            self.give_all(out, value, carries=carries)

    def _is_worth_it(self, out: Any, *, carries: bool) -> bool:
        return any(
            is_worth_knowing(one.dtype, one.numel()) or (carries and self._has_room(one))
            for one in leaves_of(out)
            if isinstance(one, torch.Tensor)
        )

    def _overwritten(self, function: Any, args: Any, written: list[Any]) -> bool:
        """Restore the values of a tensor that known values overwrite as a whole."""
        name = _name_of(function)
        target = written[0]
        if name == "zero_":
            value = empty((), dtype=target.dtype, device=HOST).zero_()
        elif name in ("fill_", "copy_") and not isinstance(args[1], torch.Tensor):
            value = empty((), dtype=target.dtype, device=HOST).fill_(args[1])
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
        """Return the pretended tensors that an op changes, or the real ones."""
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

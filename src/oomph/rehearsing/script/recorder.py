"""Record a script's ops on pretended tensors wherever they are, with the values known.

Ops whose tensors are all real run on the host as usual. Ops on GPU tensors are recorded as for a
Workload. Host tensors without memory are tracked but not counted.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from oomph.pretending.ops import Behaviour
from oomph.pretending.tensors import (
    HOST,
    META,
    empty,
    empty_strided,
    is_pretended,
    note_on_host,
    suspended,
    tensors_in,
)
from oomph.pretending.values import is_by_value, made_like, pretended_like
from oomph.records.script import Invented
from oomph.rehearsing.fault import users_line
from oomph.rehearsing.recorder import Recorder
from oomph.rehearsing.script.deferred import Deferred
from oomph.rehearsing.script.places import ONE_AT_A_TIME, Name, Places, Wanted
from oomph.rehearsing.script.refusals import refused

_full = torch._C._VariableFunctions.full

_MASKS = (torch.bool, torch.uint8)
_JOINS = frozenset({"mul", "logical_and", "bitwise_and", "__and__"})
_TURNS = frozenset({"logical_not", "bitwise_not"})
_REFUSED = frozenset({"bincount", "unique_dim", "repeat_interleave", "nonzero_static"})
_READS = frozenset({"_local_scalar_dense", "is_nonzero"})
# Only these ops accept host tensors along with GPU tensors.
_CROSSING = frozenset(
    {"copy_", "_foreach_copy_", "_to_copy", "index", "index_put_", "_index_put_impl_", "index_put"}
)
_RANDOM = frozenset({"rand_like", "randn_like", "randint_like"})
_BLOCK_BYTES = 512  # the allocator rounds up to this (CUDACachingAllocator.cpp, kMinBlockSize)
_LIBRARY = ("a library", 0)


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in _MASKS


def _note_truth(name: str, args: Any, out: Any) -> None:
    """Mark only results that mean all is well: `isfinite(x)` is (x == x) * (|x| != inf)."""
    if not isinstance(out, torch.Tensor) or out.dtype != torch.bool:
        return
    if name in _JOINS:
        is_true = all(_is_true(arg) for arg in args[:2])
    elif name == "eq":
        is_true = args[0] is args[1]
    elif name == "ne":
        is_true = isinstance(args[1], float) and math.isinf(args[1])
    elif name in _TURNS:
        is_true = not _is_true(args[0])
    else:
        is_true = name == "all"
    if is_true:
        out._oomph_is_true = True  # type: ignore[attr-defined]


def _is_true(arg: Any) -> bool:
    return bool(getattr(arg, "_oomph_is_true", False))


def _blank(tensor: torch.Tensor) -> Any:
    """Take the memory away from a real tensor used with pretended host tensors; not a scalar."""
    if is_pretended(tensor) or not tensor.dim():
        return tensor
    return empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)


def _refuse_sparse(args: Any, kwargs: Any) -> None:
    """Raise for a sparse gradient of a table on the host: torch has no such tensor."""
    is_sparse = kwargs.get("layout") is torch.sparse_coo
    if is_sparse and not all(is_pretended(tensor) for tensor in tensors_in(args)):
        raise refused(
            "a sparse gradient of a table on the host",
            because="its rows are real, and its values are those of a model without memory",
            attempt="nn.Embedding(sparse=False) there, or the table on the GPU",
        )


# ---- made-up values for unknown ones -------------------------------------------------------------


class Inventions:
    """Made-up values for model outputs that a script reads, and where it reads them.

    Floats are 1, so that nothing divides by zero or looks broken. A scalar integer is 1, other
    integers are 0. A boolean is true only if it means that all is well. Every use is counted under
    the script's own line, because the script's further course depends on it.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int, str]] = Counter()

    def note(self, what: str) -> None:
        file, line = users_line() or _LIBRARY
        self._counts[(file, line, what)] += 1

    def has_read(self, place: tuple[str, int]) -> bool:
        """Return whether this line of the script has read a made-up value."""
        return any(each[:2] == place for each in self._counts)

    def value_of(self, tensor: torch.Tensor) -> Any:
        """Return what `.item()` answers."""
        if _is_true(tensor):
            self.note("True")
            return True
        value = _single(tensor.dtype, is_alone=tensor.dim() == 0)
        self.note(repr(value))
        return value

    def tensor_like(self, tensor: torch.Tensor) -> Any:
        """Return a real tensor of that shape, filled with one value."""
        value = self.value_of(tensor)
        return _full(tuple(tensor.shape), value, dtype=tensor.dtype, device=HOST)

    def records(self) -> tuple[Invented, ...]:
        return tuple(
            Invented(file=file, line=line, what=what, count=count)
            for (file, line, what), count in sorted(self._counts.items())
        )


def _single(dtype: torch.dtype, *, is_alone: bool) -> Any:
    if dtype == torch.bool:
        return False
    if dtype.is_complex:
        return 1 + 0j
    if dtype.is_floating_point:
        return 1.0
    return 1 if is_alone else 0


# ---- the recorder --------------------------------------------------------------------------------


class ScriptRecorder(Recorder):
    """Records a whole program."""

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__(capability)
        self.host: Places = Places()
        self.inventions = Inventions()
        self.deferred = Deferred()
        self.num_ops = 0
        self.live_bytes = self.peak_bytes = 0  # as the script sees them
        self._num_counted = 0

    # ---- queries -------------------------------------------------------------------------------

    def count_bytes(self) -> None:
        """Update `live_bytes` and `peak_bytes`."""
        for event in self.events[self._num_counted :]:
            size_bytes = -(-self.sizes[abs(event) - 1] // _BLOCK_BYTES) * _BLOCK_BYTES
            self.live_bytes += size_bytes if event > 0 else -size_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._num_counted = len(self.events)

    def real(self, tensor: torch.Tensor) -> Any:
        """Return a real copy, with made-up values for unknown ones."""
        known = self.shadows.of(tensor)
        return self.inventions.tensor_like(tensor) if known is None else known.clone()

    def real_or_itself(self, tensor: torch.Tensor) -> Any:
        return self.real(tensor) if is_pretended(tensor) else tensor

    def note_unknown(self, sentence: str, value: str) -> None:  # noqa: ARG002 - it notes values
        self.inventions.note(value)

    def take_in(self, tensor: torch.Tensor, op: str) -> None:
        """Record a tensor of the script's values that torch made without a visible op."""
        if Wanted.place in ("cpu", "meta"):
            self.host.stand(tensor, Wanted.place)
        else:
            self.track(tensor, op)

    # ---- calls from torch ----------------------------------------------------------------------

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with ONE_AT_A_TIME:
            return self._dispatched(function, types, args, kwargs or {})

    def _dispatched(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        device = kwargs.get("device")
        num_pretended, is_elsewhere = self._look(args, kwargs)
        if not num_pretended and (device is None or device.type != "meta"):
            return self.deferred.run(function, args, kwargs)
        if args and isinstance(args[0], torch.Tensor) and not is_pretended(args[0]):
            self.deferred.flush(self.shadows.written_by(function, args, kwargs, real=True))
        self.num_ops += 1
        behaviour = self._behaviours[function]
        if behaviour.name in _READS:
            return self._read(args[0])
        if behaviour.name == "empty_on_host":  # from a trick put around the script
            return self.recorded(function, types, args, kwargs)
        if device is not None and behaviour.kind != "view":
            if is_elsewhere:
                _refuse_sparse(args, kwargs)
            return self._placed(behaviour, function, types, args, kwargs)
        if is_elsewhere:
            return self._elsewhere(behaviour, function, args, kwargs)
        return self._on_gpu(behaviour, function, types, args, kwargs)

    def _look(self, args: Any, kwargs: Any) -> tuple[int, bool]:
        """Return the number of pretended tensors, and whether one is not on the GPU.

        It keeps no reference to any of them: later code counts the references held by the autograd
        engine.
        """
        num_pretended, is_elsewhere = 0, False
        has_places = self.host._live
        for tensor in tensors_in((args, kwargs)) if kwargs else tensors_in(args):
            if is_pretended(tensor):
                num_pretended += 1
                if has_places and self.host.has(tensor):
                    is_elsewhere = True
        return num_pretended, is_elsewhere

    def _read(self, tensor: torch.Tensor) -> Any:
        known = self.shadows.of(tensor)
        return self.inventions.value_of(tensor) if known is None else known.item()

    def _on_gpu(
        self, behaviour: Behaviour, function: Any, types: Any, args: Any, kwargs: Any
    ) -> Any:
        answer = self._decided(behaviour, function, args, kwargs)
        if answer is not NotImplemented:
            return answer
        out = self.recorded(function, types, args, kwargs)
        if behaviour.kind != "view":
            self.shadows.follow(function, args, kwargs, out)
        _note_truth(behaviour.name, args, out)
        return out

    def _place_wanted(self) -> Name:
        """Return the wanted place; without one, torch itself asks: follow existing tensors."""
        return Wanted.place or ("cuda" if self.events else "cpu")

    def _placed(
        self, behaviour: Behaviour, function: Any, types: Any, args: Any, kwargs: Any
    ) -> Any:
        """Run an op that says where its result goes: a factory or a move."""
        place: Name = "cpu" if kwargs["device"].type != "meta" else self._place_wanted()
        if place != "cuda":
            return self._made_elsewhere(behaviour, function, args, kwargs, place)
        source = next(iter(tensors_in(args)), None)
        is_from_host = source is not None and is_pretended(source) and self.host.has(source)
        del source  # only the autograd engine may hold it
        if is_from_host:
            out = self.fresh(behaviour, function, args, kwargs)
            note_on_host(self, "copy_from_host", [out])
        else:
            out = self.recorded(function, types, args, kwargs)
        self.shadows.follow(function, args, kwargs, out)
        return out

    # ---- GPU ops whose results or shapes depend on values ---------------------------------------
    # Known values decide. For unknown values the largest possible result is assumed, and noted
    # under the script's own line.

    def _decided(self, behaviour: Behaviour, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an op that depends on values; NotImplemented for all others."""
        name = behaviour.name
        if name == "equal":
            return self._equal(args)
        if name == "copy_" and not is_pretended(args[0]):
            return self._copied_to_host(args)
        if name == "index" and any(_is_mask(index) for index in args[1]):
            return self._index(behaviour, function, args)
        if name == "masked_select":
            return self._masked_select(behaviour, function, args)
        if not is_by_value(function):
            return NotImplemented
        if self.shadows.knows(args, kwargs):
            return made_like(self, behaviour, self.shadows.computed(function, args, kwargs))
        return self._at_most(behaviour, args, kwargs)

    def _equal(self, args: Any) -> bool:
        if self.shadows.knows(args, {}):
            return bool(self.shadows.computed(torch.ops.aten.equal.default, args, {}))
        self.inventions.note("equal: True")
        return True

    def _copied_to_host(self, args: Any) -> Any:
        source = self.shadows.of(args[1])
        if source is None:
            value = self.inventions.value_of(args[1])
            source = _full((), value, dtype=args[1].dtype, device=HOST)
        return args[0].copy_(source)

    def _at_most(self, behaviour: Behaviour, args: Any, kwargs: Any) -> Any:
        """Assume for counts and distinct values of unknown data that all values differ."""
        given = args[0]
        if behaviour.rule is not None or not is_pretended(given):
            return NotImplemented
        minlength = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        if behaviour.name == "bincount" and minlength:
            self.inventions.note("bincount: no value beyond minlength")
            return self._made(behaviour, (minlength,), torch.int64)
        if behaviour.name in ("_unique2", "unique_consecutive"):
            self.inventions.note("unique: every value is one of its own")
            shapes = ((given.numel(),), tuple(given.shape), (given.numel(),))
            dtypes = (given.dtype, torch.int64, torch.int64)
            return tuple(
                self._made(behaviour, shape, dtype)
                for shape, dtype in zip(shapes, dtypes, strict=True)
            )
        if behaviour.name not in _REFUSED:
            return NotImplemented
        raise NotImplementedError(
            f"values of the model, which do not exist here, decide the shape of {behaviour.label}"
        )

    def _made(self, behaviour: Behaviour, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        out = empty(shape, dtype=dtype, device=META)
        self.track(out, behaviour.label)
        return out

    def _index(self, behaviour: Behaviour, function: Any, args: Any) -> Any:
        """Index by a mask with known values, which give the number of rows."""
        if not is_pretended(args[0]):
            return NotImplemented
        positions: list[Any] = []
        for index in args[1]:
            if not _is_mask(index):
                positions.append(index)
                continue
            known = self.shadows.of(index) if is_pretended(index) else index
            if known is None:
                return NotImplemented
            chosen = known.nonzero()
            if is_pretended(index):
                chosen = pretended_like(self, chosen, behaviour.label)
            positions += chosen.unbind(1)
        out = self.fresh(behaviour, function, (args[0], positions), {})
        self.shadows.follow(function, args, {}, out)
        return out

    def _masked_select(self, behaviour: Behaviour, function: Any, args: Any) -> Any:
        known = self.shadows.of(args[1]) if is_pretended(args[1]) else args[1]
        if known is None or not is_pretended(args[0]):
            return NotImplemented
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        num_chosen = int(known.expand(shape).sum())
        out = self._made(behaviour, (num_chosen,), args[0].dtype)
        self.shadows.follow(function, args, {}, out)
        return out

    # ---- ops on tensors without memory on the host, or on `meta` if asked for --------------------
    # They are tracked so that the script can go on, but not counted. A copy between host and GPU
    # goes over the bus and is recorded as such.

    def _elsewhere(self, behaviour: Behaviour, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that has host or `meta` tensors without memory among its arguments."""
        if behaviour.kind == "view":
            return function(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        is_on_gpu = self._is_of_gpu(tensors)
        if is_on_gpu and behaviour.name not in _CROSSING and self._is_mixed(tensors):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices,"
                " cuda:0 and cpu!"
            )
        if behaviour.kind == "in place":
            self._note_copy(behaviour, args)
            self.shadows.follow(function, args, kwargs, args[0])
            if isinstance(args[0], torch.Tensor) and self.host.of(args[0]) == "cpu":
                self.deferred.passed_over(function, args, kwargs, args[0])
            return args[0] if behaviour.returns else None
        if is_on_gpu:  # so is its result, like its first tensor
            return self.fresh(behaviour, function, args, kwargs)
        return self._computed(behaviour, function, args, kwargs, tensors)

    def _is_of_gpu(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether one is on the GPU. A scalar among host tensors comes from autograd."""
        there = [t for t in tensors if is_pretended(t) and not self.host.has(t)]
        return any(t.dim() for t in there) or (bool(there) and not any(t.dim() for t in tensors))

    def _is_mixed(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether GPU and host tensors are mixed, not counting scalars."""
        return len({self.host.named(tensor) for tensor in tensors if tensor.dim()}) > 1

    def _note_copy(self, behaviour: Behaviour, args: Any) -> None:
        if behaviour.name not in ("copy_", "_foreach_copy_"):
            return
        to, source = (one[0] if isinstance(one, list | tuple) else one for one in args[:2])
        places = (self.host.named(to), self.host.named(source))
        if places in (("cpu", "cuda"), ("cuda", "cpu")):
            name = "copy_to_host" if places[0] == "cpu" else "copy_from_host"
            note_on_host(self, name, tensors_in(args[:1]))

    def _computed(
        self, behaviour: Behaviour, function: Any, args: Any, kwargs: Any, tensors: list[Any]
    ) -> Any:
        place = next(self.host.of(one) for one in tensors if is_pretended(one))
        if place == "cpu" and is_by_value(function):
            real = tree_map_only(torch.Tensor, self.real_or_itself, args)
            return function(*real, **kwargs)
        value: Any = NotImplemented
        if self.shadows.knows(args, kwargs):
            value = self.shadows.computed(function, args, kwargs)
        blank_args, blank_kwargs = tree_map_only(torch.Tensor, _blank, (args, kwargs))
        with suspended():
            if behaviour.name in _RANDOM:
                dtype = blank_kwargs.get("dtype")
                out = torch.ops.aten.empty_like.default(blank_args[0], dtype=dtype)
            else:
                out = function(*blank_args, **blank_kwargs)
        for made in tensors_in([out]):
            if not self.host.has(made):
                self.host.stand(made, place)
        if value is not NotImplemented:
            self.shadows.give_all(out, value)
        _note_truth(behaviour.name, args, out)
        return out

    def _made_elsewhere(
        self, behaviour: Behaviour, function: Any, args: Any, kwargs: Any, place: Name
    ) -> Any:
        """Return a factory's tensor or a copy that goes anywhere but the GPU."""
        is_copy = behaviour.name == "_to_copy" and place == "cpu" and is_pretended(args[0])
        known = self.shadows.of(args[0]) if is_copy else None
        if known is not None:
            return known.to(kwargs.get("dtype") or known.dtype, copy=True)
        with suspended():
            out = function(*args, **{**kwargs, "device": META})
        self.host.stand(out, place)
        if is_copy and not self.host.has(args[0]):
            note_on_host(self, "copy_to_host", [out])
        return out

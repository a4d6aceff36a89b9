"""Record state that a forward writes, other than gradients, and restore it after a failed attempt.

Most writes can be detected: torch counts them (`_version`), or a different tensor is registered.
Writes through `.data` and those of batch_norm cannot, so some steps are observed with checksums. If
something was written and has no copy, an error names it.
"""

# Kinds of state, and what restores them:
#
#   parameters, large tensors    _Group: copied once a forward is known to write them
#   buffers, small tensors       _Group: copied whenever they have changed
#   where they are registered    _Slot: if replaced, the original tensor is put back
#   plain attributes             _Holder: values, and contents of lists, dicts, sets and generators
#   train or eval mode           State
#
# Running statistics and codebooks are buffers; momentum encoders are parameters without an
# optimizer; queues and their pointers are plain attributes.
#
# Steps 1, 2, 4, 8 and so on are observed: checksums before and after show what a forward writes,
# and that is copied before every later step. In the first step everything is copied.
#
# After an undo, the next attempt is observed too: if it changes a tensor undetected, the failed
# attempt changed that tensor as well.

from __future__ import annotations

import contextlib
import functools
import itertools
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from oomph.errors import OomphError
from oomph.training.recovery import if_memory_allows, tried_twice
from oomph.training.restarting import HOW, NotRecovered
from oomph.units import GIB, KIB, MIB

# Judgement: copies of everything, on the host, in the first step, when it is not yet known what a
# forward writes.
_MOST_FIRST_BYTES = 2 * GIB
# Judgement: copies made before each step, kept on the tensor's own device, which is fast. The rest
# go to the host.
_MOST_NEAR_BYTES = 64 * MIB
# Judgement, for plain attributes: larger tensors are kept alive instead of copied, and all of them
# together may take _MOST_NEAR_BYTES. A model may leave activations there for inspection.
_MOST_COPIED_BYTES = MIB
_MOST_COUNTER_BYTES = 64 * KIB  # judgement: counters of metrics are kept however full it is
_MOST_ENTRIES = 1000  # judgement: longer lists are not searched for modules; they may be data sets
_INTERNAL = frozenset(vars(nn.Module()))
_NOT_THERE = object()


class State:
    """Everything that some modules hold, at one moment."""

    def __init__(self) -> None:
        self._num_taken = 0
        self._modules: list[nn.Module] = []
        self._is_training: list[bool] = []
        self._holders: list[_Holder] = []
        self._slots: list[_Slot] = []
        self._in_slots: list[Any] = []
        self._lazy: list[bool] = []  # parameters that the first forward creates
        self._large, self._small = _Group(), _Group()  # parameters, and buffers

    def _roots(self) -> list[nn.Module]:
        """Return the modules; called in observed steps, and when a module has gained something."""
        raise NotImplementedError

    def _updated(self) -> Iterable[Tensor]:
        """Return the parameters that an attempt updates; they are not restored here."""
        return ()

    def take(self) -> None:
        """Save the state: it is what `undo` returns to, any number of times."""
        number = self._num_taken = self._num_taken + 1
        is_observed = number & (number - 1) == 0  # 1, 2, 4, 8, ...
        if number == 2:  # of the first step's copies, those known to be written are made again
            for each in self._large.kept.values():
                each.copy = None
        if is_observed or any(holder.has_grown() for holder in self._holders):
            self._look()
        self._take_places()
        self._is_training = [module.training for module in self._modules]
        self._large.copy_moving()
        self._small.copy_changed()
        if number == 1:
            self._large.copy_all()
        for group in (self._large, self._small):
            group.record(with_sums=is_observed)

    def undo(self) -> None:
        """Restore the state. Raises OomphError at the end, naming what cannot be restored."""
        lost = [name for holder in self._holders for name in holder.undo()]
        for slot, tensor, was_lazy in zip(self._slots, self._in_slots, self._lazy, strict=True):
            if slot.place.get(slot.key) is not tensor:
                slot.place[slot.key] = tensor
            if was_lazy and not is_lazy(tensor):
                lost.append(slot.name)
        for module, is_training in zip(self._modules, self._is_training, strict=True):
            if module.training is not is_training:
                module.training = is_training
        for group in (self._large, self._small):
            lost += group.undo()
        if lost:
            raise cannot_be_undone(lost)

    def observe(self) -> None:
        """Learn what a forward writes, after a successful attempt and before the update.

        Raises OomphError if the previous attempt changed something undetected.
        """
        lost = [name for group in (self._large, self._small) for name in group.observe()]
        if lost:
            raise cannot_be_undone(lost)

    def written(self) -> list[str]:
        """Return the names of everything changed since it was recorded or restored."""
        pairs = zip(self._slots, self._in_slots, strict=True)
        names = [slot.name for slot, tensor in pairs if slot.place.get(slot.key) is not tensor]
        for part in self._parts():
            names += part.written()
        return list(dict.fromkeys(names))

    # ---- between the batches of one step -------------------------------------------------------

    def pause(self) -> None:
        """Record the state after a batch, before other code writes between the step's batches."""
        for part in self._parts():
            part.pause()

    def resume(self) -> None:
        """Accept what other code wrote since: an undo must keep it, as no attempt repeats it."""
        for part in self._parts():
            part.resume()

    def _parts(self) -> list[_Group | _Holder]:
        return [*self._holders, self._large, self._small]

    # ---- where tensors are registered ----------------------------------------------------------

    def _look(self) -> None:
        """Find the modules and where they register tensors, keeping what is known of them."""
        named = list(_named_modules(self._roots()))
        self._modules = [module for _, module in named]
        known = {id(holder.module): holder for holder in self._holders}
        self._holders = [
            known.get(id(module)) or _Holder(name, module)
            for name, module in named
            # Torch's own modules keep no state in plain attributes.
            if not type(module).__module__.startswith("torch.")
        ]
        self._slots = list(_slots(named))
        self._in_slots = [_NOT_THERE] * len(self._slots)

    def _take_places(self) -> None:
        now: list[Any] = [slot.place.get(slot.key) for slot in self._slots]
        is_changed = any(map(is_not, now, self._in_slots)) or any(self._lazy)
        if is_changed:
            self._in_slots, self._lazy = now, [is_lazy(tensor) for tensor in now]
            updated = {id(parameter) for parameter in self._updated()}
            for slot, tensor in zip(self._slots, now, strict=True):
                if tensor is not None and id(tensor) not in updated:
                    group = self._large if slot.is_parameter else self._small
                    group.add(tensor, slot.name, slot.norm)
        room_bytes = _MOST_NEAR_BYTES
        for holder in self._holders:
            is_changed = holder.take(room_bytes) or is_changed
            room_bytes -= holder.num_bytes
        if is_changed:
            for name, tensor in (named for holder in self._holders for named in holder.tensors):
                if id(tensor) not in self._large.kept:
                    is_small = tensor.numel() * tensor.element_size() <= _MOST_COPIED_BYTES
                    (self._small if is_small else self._large).add(tensor, name)
            ids = set(map(id, self._in_slots))
            ids.update(id(tensor) for holder in self._holders for _, tensor in holder.tensors)
            for group in (self._large, self._small):
                group.keep_only(ids)


def cannot_be_undone(names: list[str]) -> OomphError:
    rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return NotRecovered(
        "oomph cannot undo the attempt that ran out of memory",
        because=f"its forward changed {names[0]}{rest}, and there is no copy of the old values",
        attempt=HOW,
    )


# ---- tensors -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Kept:
    """A tensor and a copy of its content."""

    name: str
    tensor: Tensor
    norm: nn.Module | None = None  # writes it uncounted in training mode
    copy: Any = None
    moves: bool = False  # a forward has written it, so it is copied before each step
    is_near: bool = False

    @property
    def num_bytes(self) -> int:
        return int(self.tensor.numel() * self.tensor.element_size())

    @property
    def is_written_unseen(self) -> bool:
        """Return whether batch_norm writes it without counting it as a change (torch 2.13)."""
        return self.norm is not None and bool(self.norm.training)

    def put_back(self) -> None:
        with torch.no_grad(), _disable_current_modes():
            if self.tensor.shape == self.copy.shape:
                self.tensor.copy_(self.copy)
            else:
                self.tensor.data = self.copy.to(self.tensor.device, copy=True)


@dataclass(slots=True)
class _Group:
    """Tensors copied by one rule, and their state when last recorded."""

    kept: dict[int, _Kept] = field(default_factory=dict)  # by id of the tensor
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)  # versions and addresses
    sums: dict[int, Any] = field(default_factory=dict)  # checksums, while attempts are observed
    near_bytes: int = 0
    is_again: bool = False  # an attempt has failed since
    paused: dict[int, Any] = field(default_factory=dict)

    def add(self, tensor: Tensor, name: str, norm: nn.Module | None = None) -> None:
        if id(tensor) in self.kept or is_lazy(tensor):
            return
        # Sparse, nested and quantised tensors have no memory of their own.
        is_plain = tensor.layout is torch.strided and not tensor.is_nested
        if is_plain and not is_traceable_wrapper_subclass(tensor):
            self.kept[id(tensor)] = _Kept(name, tensor, norm)

    def keep_only(self, identities: set[int]) -> None:
        for each in [each for each in self.kept if each not in identities]:
            gone = self.kept.pop(each)
            self.near_bytes -= gone.num_bytes if gone.is_near else 0

    # ---- before a step -------------------------------------------------------------------------

    def record(self, *, with_sums: bool) -> None:
        self.is_again = False
        self.seen = {key: _seen(each.tensor) for key, each in self.kept.items()}
        self.sums = _sums(self.kept) if with_sums else {}

    def copy_moving(self) -> None:
        for each in self.kept.values():
            if each.moves:
                self._copy(each)

    def copy_changed(self) -> None:
        """Copy tensors that have changed since their last copy or are known to be written."""
        for key, each in self.kept.items():
            if each.copy is None and not self.seen:
                # On the host at first: most never change, and some are large (masks, tables).
                each.copy = _on_host(each.tensor)
            elif each.moves or each.is_written_unseen or self._is_seen(key):
                self._copy(each)

    def copy_all(self) -> None:
        left_bytes = _MOST_FIRST_BYTES
        for each in sorted(self.kept.values(), key=lambda each: each.tensor.requires_grad):
            left_bytes -= each.num_bytes
            if left_bytes >= 0:
                each.copy = _on_host(each.tensor)

    def _copy(self, kept: _Kept) -> None:
        is_there = kept.copy is not None and kept.copy.shape == kept.tensor.shape
        if is_there and kept.is_near:
            with torch.no_grad():
                kept.copy.copy_(kept.tensor)
            return
        if not kept.is_near and self.near_bytes + kept.num_bytes <= _MOST_NEAR_BYTES:
            self.near_bytes, kept.is_near = self.near_bytes + kept.num_bytes, True
        kept.copy = kept.tensor.detach().clone() if kept.is_near else _on_host(kept.tensor)

    # ---- after an attempt ----------------------------------------------------------------------

    def undo(self) -> Iterator[str]:
        """Restore what was written; yield the names of what cannot be restored."""
        sums = _sums(self.kept) if self.sums else {}
        for key, each in self.kept.items():
            if not self._has_changed(key, sums):
                continue
            if each.copy is None or (self.is_again and self._is_unseen(key)):
                each.moves = True  # so it is copied from the next step on
                yield each.name
            else:
                each.put_back()
            self.seen[key] = _seen(each.tensor)
        if not self.sums:
            self.sums, self.is_again = _sums(self.kept), True

    def _has_changed(self, key: int, sums: dict[int, Any]) -> bool:
        each = self.kept[key]
        if each.moves or each.is_written_unseen:
            return True
        if sums.get(key) is not None and self.sums.get(key) is not None:
            return bool(sums[key] != self.sums[key])
        return self._is_seen(key)

    def observe(self) -> Iterator[str]:
        """Learn what a forward writes; yield names that the failed attempt changed for good."""
        if not self.sums:
            return
        sums = _sums(self.kept)
        if not sums:
            return
        for key, each in self.kept.items():
            # Check the version too: the first write of an average may store the same values.
            is_written = key in self.seen and self.seen[key][0] != each.tensor._version
            is_written = is_written or sums.get(key) != self.sums.get(key, sums.get(key))
            if is_written and not each.moves:
                is_lost = self.is_again and self._is_unseen(key)
                each.moves = True
                if is_lost:
                    yield each.name

    def written(self) -> Iterator[str]:
        sums = _sums(self.kept) if self.sums else {}
        for key, each in self.kept.items():
            is_other = sums.get(key) != self.sums.get(key) if sums else False
            if is_other or self._is_seen(key):
                yield each.name

    # ---- between batches -----------------------------------------------------------------------

    def pause(self) -> None:
        sums = _sums(self.kept) if self.sums else {}
        self.paused = {key: (_seen(each.tensor), sums.get(key)) for key, each in self.kept.items()}

    def resume(self) -> None:
        sums = _sums(self.kept) if self.sums else {}
        paused, self.paused = self.paused, {}
        for key, (seen, total) in paused.items():
            each = self.kept[key]
            if (_seen(each.tensor), sums.get(key)) == (seen, total):
                continue
            self.seen[key] = _seen(each.tensor)
            if sums:
                self.sums[key] = sums[key]
            if each.copy is not None:
                self._copy(each)

    def _is_unseen(self, key: int) -> bool:
        """Return whether a change was undetected; then the earlier attempt made it too."""
        each = self.kept[key]
        return not (each.moves or each.is_written_unseen or self._is_seen(key))

    def _is_seen(self, key: int) -> bool:
        return self.seen.get(key) != _seen(self.kept[key].tensor)


def _on_host(tensor: Tensor) -> Tensor:
    """Copy to the host, using no GPU memory and hidden from modes that count the model's ops."""
    with _disable_current_modes():
        return tensor.detach().to("cpu", copy=True)


def _seen(tensor: Tensor) -> tuple[int, int]:
    """Return a value that changes with each write that torch counts and with each new storage."""
    return tensor._version, tensor.data_ptr()


def _version(tensor: Tensor) -> int | None:
    """Return torch's count of writes, which every kind of tensor has except those of inference."""
    return None if tensor.is_inference() else tensor._version


_PARTS = 32  # judgement: sums per tensor; values swapped between parts are noticed
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _sums(kept: dict[int, _Kept]) -> dict[int, Any]:
    """Return checksums; none if there is no memory even for these few numbers."""
    with if_memory_allows(), _disable_current_modes():
        return tried_twice(lambda: _all_sums(kept))
    return {}


def _all_sums(kept: dict[int, _Kept]) -> dict[int, Any]:
    """Compute all checksums, synchronising once per device."""
    by_device: dict[Any, dict[int, Any]] = {}
    for key, each in kept.items():
        if each.tensor.numel() and each.tensor.device.type != "meta":
            by_device.setdefault(each.tensor.device, {})[key] = _checksum(each.tensor)
    found: dict[int, Any] = dict.fromkeys(kept)
    for sums in by_device.values():
        numbers = torch.cat(list(sums.values())).tolist()
        ends = list(itertools.accumulate(len(each) for each in sums.values()))
        starts = [0, *ends[:-1]]
        for key, start, end in zip(sums, starts, ends, strict=True):
            found[key] = numbers[start:end]
    return found


@torch.no_grad()
def _checksum(tensor: Tensor) -> Tensor:
    """Return bit sums of parts of a tensor, so that values moving between parts are noticed."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        flat = tensor.view(-1)
    else:
        flat = tensor.permute(*sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
        flat = flat.reshape(-1)  # no copy if it is dense, as in channels last
    flat = flat.view(_INTEGERS.get(flat.element_size(), torch.int64))
    # Summing eight bytes at a time is several times faster than one by one.
    width = 8 // flat.element_size()
    if flat.storage_offset() % width:
        words, rest = flat, flat[:0]
    else:
        whole = len(flat) // width * width
        words, rest = flat[:whole].view(torch.int64), flat[whole:]
    num = len(words) // _PARTS
    parts, last = words[: num * _PARTS].view(_PARTS, num), words[num * _PARTS :]
    return torch.cat([parts.sum(1, dtype=torch.int64), last.long(), rest.long()])


# ---- where modules hold state ------------------------------------------------------------------


@dataclass(slots=True)
class _Slot:
    """The place where a parameter or buffer is registered."""

    place: dict[str, Any]
    key: str
    name: str
    is_parameter: bool
    norm: nn.Module | None


def _slots(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[_Slot]:
    for path, module in modules:
        for key in module._parameters:
            yield _Slot(module._parameters, key, _joined(path, key), True, None)
        for key in module._buffers:
            is_norm = isinstance(module, _NormBase) or key.startswith("running_")
            norm = module if is_norm else None
            yield _Slot(module._buffers, key, _joined(path, key), False, norm)


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


class _Holder:
    """A module's plain attributes, and the names it has registered."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.module, self._path = module, path
        self._places: tuple[Any, ...] = (module._parameters, module._buffers, module._modules)
        self._registered: list[tuple[str, ...]] = [(), (), ()]
        self._last: list[Any] = []
        self._values: dict[str, Any] = {}
        self._containers: list[Any] = []
        self._contents: list[Any] = []
        self._too_large: dict[str, Any] = {}  # tensors that are not kept alive
        self._paused: dict[str, Any] = {}
        self.tensors: list[tuple[str, Tensor]] = []
        self.num_bytes = 0  # of tensors that are kept alive

    def has_grown(self) -> bool:
        parameters, buffers, modules = self._registered
        return (
            len(self.module._buffers) != len(buffers)
            or len(self.module._parameters) != len(parameters)
            or len(self.module._modules) != len(modules)
        )

    def take(self, room_bytes: int) -> bool:
        """Record the attributes; return whether the tensors in them differ from last time."""
        if self.has_grown():
            self._registered = [tuple(place) for place in self._places]
        now, before = self.module.__dict__, self.tensors
        is_changed = len(now) != len(self._last) or any(map(is_not, now.values(), self._last))
        if is_changed or self._containers or self._too_large:
            self._values = {key: now[key] for key in now if key not in _INTERNAL}
            self._find_tensors(room_bytes)
            # Keeping these values would keep alive the tensors that are too large.
            self._last = [] if self._too_large else list(now.values())
        self._contents = [_content(each) for each in self._containers]
        return [id(each) for _, each in before] != [id(each) for _, each in self.tensors]

    def _find_tensors(self, room_bytes: int) -> None:
        self._containers, self._too_large, self.tensors, self.num_bytes = [], {}, [], 0
        for key, value in list(self._values.items()):
            if isinstance(value, _CONTAINERS):
                self._containers.append(value)
            for tensor in _tensors_in(value):
                num_bytes = int(tensor.numel() * tensor.element_size())
                is_counter = value is tensor and num_bytes <= _MOST_COUNTER_BYTES
                if is_counter or self.num_bytes + num_bytes <= room_bytes:
                    self.num_bytes += num_bytes
                    self.tensors.append((_joined(self._path, key), tensor))
                elif value is tensor:
                    del self._values[key]
                    self._too_large[key] = weakref.ref(tensor), _version(tensor)

    def pause(self) -> None:
        self._paused = self._identities()

    def resume(self) -> None:
        now, values = self._identities(), self.module.__dict__
        for key in [
            key for key in {**self._paused, **now} if self._paused.get(key) != now.get(key)
        ]:
            self._too_large.pop(key, None)
            self._values.pop(key, None)
            if key in now:
                self._values[key] = value = values[key]
                if isinstance(value, _CONTAINERS):
                    known = [each for each in self._containers if each is not value]
                    contents = zip(self._containers, self._contents, strict=True)
                    self._contents = [each for of, each in contents if of is not value]
                    self._containers = [*known, value]
                    self._contents.append(_content(value))
        self._last = []

    def _identities(self) -> dict[str, Any]:
        """Return the identities of attributes and of the entries in lists and other containers."""
        return {
            key: (id(value), _inside(value))
            for key, value in self.module.__dict__.items()
            if key not in _INTERNAL
        }

    def written(self) -> Iterator[str]:
        """Yield changed numbers. Tensors are tracked elsewhere; objects are often recreated."""
        now = self.module.__dict__
        for key, value in self._values.items():
            if isinstance(value, int | float) and now.get(key) != value:
                yield _joined(self._path, key)

    def undo(self) -> Iterator[str]:
        """Restore the attributes; yield the names of what cannot be restored."""
        for place, names in zip(self._places, self._registered, strict=True):
            for late in [name for name in place if name not in names]:
                del place[late]
        now = self.module.__dict__
        for key in [key for key in now if key not in _INTERNAL and key not in self._values]:
            if key not in self._too_large:
                del now[key]
            else:
                kept, version = self._too_large[key]
                if kept() is not now[key] or _version(now[key]) != version:
                    yield _joined(self._path, key)
        now.update(self._values)
        for container, content in zip(self._containers, self._contents, strict=True):
            _refill(container, content)


_CONTAINERS = (list, dict, set, deque, torch.Generator)


def _content(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    return list(value) if isinstance(value, deque) else value.copy()


def _inside(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, dict):
        return [(id(key), id(each)) for key, each in value.items()]
    return [id(each) for each in value] if isinstance(value, list | set | deque) else None


def _refill(value: Any, content: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(content)
    elif isinstance(value, list):
        value[:] = content
    else:
        value.clear()
        (value.extend if isinstance(value, deque) else value.update)(content)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | dict | deque | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, Tensor):
                yield each


# ---- finding modules -----------------------------------------------------------------------------


def _named_modules(roots: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules below the roots, including those hidden in lists and plain attributes."""
    seen: set[nn.Module] = set()
    waiting = [("", root) for root in roots]
    is_first = True
    while waiting:
        path, root = waiting.pop(0)
        path = path if path or is_first else type(root).__name__
        is_first = False
        for name, module in root.named_modules(seen, path):
            yield name, module
            for key, value in vars(module).items():
                if key not in _INTERNAL:
                    hidden = modules_in(value)
                    waiting += [(_joined(name, key), each) for each in hidden if each not in seen]


def modules_in(value: Any) -> Iterator[nn.Module]:
    """Yield a module, or those in a list, tuple or dict."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, list | tuple | dict) and len(value) <= _MOST_ENTRIES:
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, nn.Module):
                yield each


_LIBRARIES = ("torch", "numpy", "builtins", "functools", "oomph.")
_DEPTH = 3  # judgement: of references from a loss to a function or object and on from there


def modules_used_by(function: Any) -> Iterator[nn.Module]:
    """Yield the modules a function refers to: in its closure, globals, defaults or bound object."""
    seen: set[int] = set()
    waiting = [(function, 0)]
    while waiting:
        each, depth = waiting.pop()
        if depth == _DEPTH or id(each) in seen or _is_of_a_library(each):
            continue
        seen.add(id(each))
        for value in _named_by(each):
            yield from modules_in(value)
            if not isinstance(value, type | nn.Module):
                waiting.append((value, depth + 1))


def _is_of_a_library(value: Any) -> bool:
    home = getattr(value, "__module__", None) or type(value).__module__
    is_partial = isinstance(value, functools.partial)
    return not is_partial and str(home).startswith(_LIBRARIES)


def _named_by(function: Any) -> Iterator[Any]:
    if isinstance(function, functools.partial):
        yield from (function.func, *function.args, *function.keywords.values())
        return
    if not isinstance(function, types.FunctionType):
        # A method's object, or an object's attributes; a Python module has too many.
        yield from (getattr(function, "__self__", None), getattr(function, "__func__", None))
        is_object = not isinstance(function, types.ModuleType)
        yield from list(getattr(function, "__dict__", {}).values()) if is_object else ()
        return
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the cell is still empty
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    known = function.__globals__
    yield from (known[name] for name in _names_in(function.__code__) if name in known)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)

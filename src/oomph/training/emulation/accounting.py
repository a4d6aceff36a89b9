"""Every op that torch dispatches -> blocks of the card, taken before the op runs.

The ops run on the CPU, with the CPU's numbers. What they return is on the card if any argument
is, or if the caller asked for the card. Room is found first: where there is none,
torch.OutOfMemoryError is raised and the op has not happened.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.training.emulation.ops import KernelFacts, Op
from oomph.training.emulation.places import HOST, Places, place_of
from oomph.training.emulation.sizes import Sizes, leaves_of

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


class Known:
    """What all threads share."""

    def __init__(self, places: Places, facts: KernelFacts) -> None:
        self.places = places
        self.card = places.card
        self.facts = facts
        self.ops: dict[int, Op] = {}  # by id: torch hashes its ops slowly
        self.sizes = Sizes()
        self.has_workspace = False


class Accounting(TorchDispatchMode):
    """Counts while it is entered, in the thread that entered it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the check would be made for each op

    def __init__(self, known: Known) -> None:
        super().__init__()
        self._known = known
        self._places = known.places
        self._card = known.card
        self._ops = known.ops
        self._is_in_place = known.facts.is_in_place

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if types and not _PLAIN_TYPES.issuperset(types) and _is_made_of_others(types):
            return NotImplemented  # its parts come here
        op = self._ops.get(id(function))
        if op is None:
            op = self._ops[id(function)] = Op(function, self._known.facts)
        kwargs = kwargs or {}
        kind = op.kind
        if op.is_composite:  # only in inference mode: its parts come here
            with self:
                return function.decompose(*args, **kwargs)
        if kind == "view" and not op.lifts:
            return function(*args, **kwargs)
        if kind == "in place":
            return function(*args, **kwargs)
        if op.in_place is not None and self._is_in_place(op.name, args):
            return getattr(torch.ops.aten, op.in_place)(*args, **kwargs)
        try:
            return self._run(op, function, args, kwargs)
        except torch.OutOfMemoryError as error:
            # Whoever keeps the error keeps this frame, and the frames of its context; they must
            # not keep the tensors of the op.
            args = kwargs = None
            error.__context__ = None
            raise error.with_traceback(None) from None

    def _run(self, op: Op, function: Any, args: Any, kwargs: Any) -> Any:
        if op.is_of_host or not self._goes_to_card(args, kwargs):
            return function(*args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": HOST}
        if op.lifts or op.kind == "storage":
            out = function(*args, **kwargs)
            self._card.place(out.untyped_storage())
            return out
        return self._fresh(op, function, args, kwargs)

    def _goes_to_card(self, args: Any, kwargs: Any) -> bool:
        now = self._places.now
        if now.asked is not None:
            now.last = now.asked
            return now.asked == "card"
        found = self._places.any_on_card(args)
        if not found and kwargs:
            found = self._places.any_on_card(kwargs.values()) or found
        if found is None:
            return self._is_made_on_card(kwargs)
        now.last = "card" if found else "host"
        return found

    def _is_made_on_card(self, kwargs: Any) -> bool:
        """Of a tensor that is made from none."""
        if place_of(kwargs.get("device")) == "card":
            return True
        # Python always says whether memory is pinned. C++ does not: it makes a tensor inside of
        # an op or of backward, and means the device of the tensors that it works on.
        return "pin_memory" not in kwargs and self._places.now.last == "card"

    def _fresh(self, op: Op, function: Any, args: Any, kwargs: Any) -> Any:
        known, card = self._known, self._card
        key = known.sizes.key_of(op, args, kwargs)
        sizes = known.sizes.of(key, function, args, kwargs)
        taken = [] if sizes is None else card.take(sizes)
        try:
            if op.is_gemm or op.temporaries is not None:
                self._take_beside(op, args)
            out = function(*args, **kwargs)
        except BaseException:
            card.give_back(taken)
            raise
        leaves = leaves_of(out)
        if op.on_host is not None:
            leaves = [leaf for i, leaf in enumerate(leaves) if i not in op.on_host]
        self._hold(leaves, sizes, taken, key)
        return out

    def _take_beside(self, op: Op, args: Any) -> None:
        """What CUDA's kernel takes beside its outputs, and gives back or keeps."""
        known = self._known
        if op.is_gemm and not known.has_workspace:
            self._card.take((known.facts.workspace_bytes,))
            known.has_workspace = True
        if op.temporaries is not None:
            self._card.give_back(self._card.take(op.temporaries(args)))

    def _hold(self, leaves: Any, sizes: Any, taken: list[int], key: Any) -> None:
        """Give the blocks to the storages that the op made."""
        card, live = self._card, self._card.live
        made: list[tuple[Any, int]] = []
        for leaf in _parts_of(leaves):
            storage = leaf.untyped_storage()
            size_bytes = storage.nbytes()
            known = live.get(storage._cdata)
            if not size_bytes:
                card.hold_nothing(storage)
            elif (known is None or not known.size_bytes) and not _is_among(storage, made):
                made.append((storage, size_bytes))
        real = tuple(size for _, size in made)
        if sizes != real:
            card.give_back(taken)
            if sizes is not None:
                self._known.sizes.correct(key, real)
            taken = card.take(real)
        for (storage, size_bytes), address in zip(made, taken, strict=True):
            card.hold(storage, size_bytes, address)


def _is_among(storage: Any, made: list[tuple[Any, int]]) -> bool:
    return bool(made) and storage._cdata in {other._cdata for other, _ in made}


def _is_made_of_others(types: Any) -> bool:
    plain = torch.Tensor.__torch_dispatch__
    return any(kind.__torch_dispatch__ is not plain for kind in types)


def _parts_of(leaves: Any) -> list[Any]:
    """The tensors with a storage."""
    parts: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            continue
        if leaf.layout is torch.sparse_coo:
            parts += [leaf._indices(), leaf._values()]
        elif leaf.layout is torch.strided:
            parts.append(leaf)
    return parts

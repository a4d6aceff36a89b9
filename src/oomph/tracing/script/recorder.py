"""The recorder of a script's ops: pretended tensors wherever they stand, with their true values.

Ops on real tensors alone are the host's own, and run. Ops on tensors of the GPU are recorded as
they are for a Workload. What stands on the host without memory is followed and not counted.
"""

from __future__ import annotations

from typing import Any

import torch

from oomph.tracing.behaviour import Behaviour
from oomph.tracing.host_memory import note_on_host
from oomph.tracing.known_outputs import tensors_in
from oomph.tracing.pretend import is_pretended
from oomph.tracing.recorder import Recorder
from oomph.tracing.script import by_value, elsewhere
from oomph.tracing.script.deferred import Deferred
from oomph.tracing.script.draws import Draws
from oomph.tracing.script.invention import Inventions
from oomph.tracing.script.places import ONE_AT_A_TIME, Name, Places, Wanted

_READS = frozenset({"_local_scalar_dense", "is_nonzero"})
_BLOCK_BYTES = 512  # the allocator rounds up to it (CUDACachingAllocator.cpp, kMinBlockSize)


class ScriptRecorder(Recorder):
    """Records a whole program."""

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__(capability)
        self.host: Places = Places()
        self.inventions = Inventions()
        self.draws = Draws()
        self.deferred = Deferred(self.draws)
        self.num_ops = 0
        self.live_bytes = self.peak_bytes = 0  # as a script is told
        self._num_counted = 0

    # ---- what is asked of it -------------------------------------------------------------------

    def count_bytes(self) -> None:
        """Bring `live_bytes` and `peak_bytes` up to now."""
        for event in self.events[self._num_counted :]:
            size_bytes = -(-self.sizes[abs(event) - 1] // _BLOCK_BYTES) * _BLOCK_BYTES
            self.live_bytes += size_bytes if event > 0 else -size_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._num_counted = len(self.events)

    def real(self, tensor: Any) -> Any:
        """With made-up values where the true ones do not exist."""
        known = self.shadows.of(tensor)
        return self.inventions.tensor_like(tensor) if known is None else known.clone()

    def note_unknown(self, sentence: str, value: str) -> None:  # noqa: ARG002 - it has its own
        self.inventions.note(value)

    def take_in(self, tensor: Any, op: str) -> None:
        """A tensor that torch has made where no op shows it, with values of the script's."""
        if Wanted.place in ("cpu", "meta"):
            self.host.stand(tensor, Wanted.place)
        else:
            self.track(tensor, op)

    # ---- what torch calls ----------------------------------------------------------------------

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
        behaviour = self._behaviours.get(function)
        if behaviour is None:
            behaviour = self._behaviours[function] = Behaviour(function)
        if behaviour.name in _READS:
            return self._read(args[0])
        if behaviour.name == "empty_on_host":  # of a trick that is put around the script
            return self.recorded(function, types, args, kwargs)
        if device is not None and behaviour.kind != "view":
            if is_elsewhere:
                elsewhere.refuse_sparse(args, kwargs)
            return self._placed(behaviour, function, types, args, kwargs)
        if is_elsewhere:
            return elsewhere.run(self, behaviour, function, args, kwargs)
        return self._on_gpu(behaviour, function, types, args, kwargs)

    def _look(self, args: Any, kwargs: Any) -> tuple[int, bool]:
        """How many pretended tensors there are, and whether one of them is not on the GPU.

        Nothing of what is looked at is held: the engine's holders are counted further on.
        """
        num_pretended, is_elsewhere = 0, False
        has_places = self.host._live
        for tensor in tensors_in((args, kwargs)) if kwargs else tensors_in(args):
            if is_pretended(tensor):
                num_pretended += 1
                if has_places and self.host.has(tensor):
                    is_elsewhere = True
        return num_pretended, is_elsewhere

    def _read(self, tensor: Any) -> Any:
        known = self.shadows.of(tensor)
        return self.inventions.value_of(tensor) if known is None else known.item()

    def _on_gpu(
        self, behaviour: Behaviour, function: Any, types: Any, args: Any, kwargs: Any
    ) -> Any:
        answer = by_value.decided(self, behaviour, function, args, kwargs)
        if answer is not NotImplemented:
            return answer
        out = self.recorded(function, types, args, kwargs)
        if behaviour.kind != "view":
            self.shadows.follow(function, args, kwargs, out)
        by_value.note_truth(behaviour.name, args, out)
        return out

    def _place_wanted(self) -> Name:
        """Where nobody says it, torch itself asks, for a tensor beside those that there are."""
        return Wanted.place or ("cuda" if self.events else "cpu")

    def _placed(
        self, behaviour: Behaviour, function: Any, types: Any, args: Any, kwargs: Any
    ) -> Any:
        """An op that is told where its result is to be: a factory, or a move."""
        place: Name = "cpu" if kwargs["device"].type != "meta" else self._place_wanted()
        if place != "cuda":
            return elsewhere.made_there(self, behaviour, function, args, kwargs, place)
        source = next(iter(tensors_in(args)), None)
        is_from_host = source is not None and is_pretended(source) and self.host.has(source)
        del source  # nobody but the engine is to hold it
        if is_from_host:
            out = self.fresh(behaviour, function, args, kwargs)
            note_on_host(self, "copy_from_host", [out])
        else:
            out = self.recorded(function, types, args, kwargs)
        self.shadows.follow(function, args, kwargs, out)
        return out

"""A footprint, a number of examples -> its replays on devices of so many bytes, without a Trace.

Both as the rehearsal's loop was, and where the loop keeps what the model returned. Convolutions'
workspaces are not in a footprint.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oomph.predicting.allocator import CachingAllocator
from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.device import SimulatedDevice
from oomph.predicting.footprint import PHASES, Footprint
from oomph.predicting.footprint_trace import phase_starts
from oomph.predicting.kept_outputs import Moves
from oomph.predicting.replay import Replayed, replay

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FORWARD = PHASES.index("forward")


class FootprintReplays:
    """The replays of one footprint with so many examples at a time, each done once."""

    def __init__(self, footprint: Footprint, examples: float, settings: AllocatorSettings) -> None:
        self._footprint, self._examples, self._settings = footprint, examples, settings
        self.under = functools.cache(self._under)
        self.under_with_outputs = functools.cache(self._under_with_outputs)

    def _under(self, limit_bytes: int | None) -> Replayed:
        """None: on a device that has no end."""
        return self._replayed(self._requests[1], limit_bytes)

    def _under_with_outputs(self, limit_bytes: int | None) -> Replayed:
        """Where the loop keeps what the model returned."""
        events: list[int] = self._footprint.event.tolist()
        moves = Moves.of(events, _outputs(self._footprint).tolist(), _forwards(self._footprint))
        if not moves.removed:
            return self.under(limit_bytes)
        sizes = self._requests[0]
        # What is empty goes last: where forwards begin is counted with it.
        asked = [event for event in moves.moved(events) if sizes[abs(event) - 1]]
        return self._replayed(asked, limit_bytes)

    @functools.cached_property
    def _requests(self) -> tuple[list[int], list[int], list[int] | None]:
        return self._footprint.requests(self._examples)

    def _replayed(self, events: Sequence[int], limit_bytes: int | None) -> Replayed:
        sizes, _, streams = self._requests
        device = SimulatedDevice() if limit_bytes is None else SimulatedDevice(max(limit_bytes, 0))
        return replay(CachingAllocator(self._settings, device), sizes, events, streams)


def _outputs(footprint: Footprint) -> NDArray[np.int64]:
    """The requests of what the model made and returned."""
    import numpy as np

    return np.flatnonzero((footprint.is_output != 0) & (footprint.born == _FORWARD)) + 1


def _forwards(footprint: Footprint) -> list[int]:
    return [start for start, phase in phase_starts(footprint) if phase == "forward"]

"""A recorded program -> the memory that it would have needed with other settings, or changed.

Everything is replayed with torch's own allocator, from the recorded start to the moment that is
explained. What happens after an out-of-memory error was never recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from oomph.explaining.holdings import BEFORE
from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.recorded import Record, StartingState, recorded_requests
from oomph.predicting.replay import Replayed, Requests, replay_requests
from oomph.units import MIB

# Budgets are searched this finely: as a share of the budget, and in bytes.
_RESOLUTION_RATIO = 0.0025
_RESOLUTION_BYTES = 2 * MIB
# A longer recording is searched more coarsely, so that the answer comes within a minute.
_MANY_EVENTS = 400_000
_COARSE_RATIO = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The requests of a recording up to the moment that is explained."""

    requests: Requests
    settings: AllocatorSettings
    births: tuple[int, ...]  # of each request, in events; BEFORE the first one

    @classmethod
    def of(
        cls,
        before: StartingState,
        events: Sequence[Record],
        settings: AllocatorSettings,
        failed: Record | None,
    ) -> Program:
        """Read the requests before `failed`, the event at which memory ran out, and that one."""
        requests = recorded_requests(before.segments, events)
        num_before = sum(len(held.live) for held in before.segments)
        births = [BEFORE] * num_before
        births += [at for at, event in enumerate(events) if event["action"] == "alloc"]
        if failed is not None:
            streams = requests.streams or ()
            requests = Requests(
                (*requests.sizes, failed["size"]),
                (*requests.events, len(requests.sizes) + 1),
                (*streams, failed["stream"]),
            )
            births.append(len(events))
        return cls(requests=requests, settings=settings, births=tuple(births))

    def needs(self, settings: AllocatorSettings | None = None) -> tuple[int, Replayed]:
        """Return the smallest budget with which it completes, and the replay with that budget."""
        settings = settings or self.settings
        free = replay_requests(self.requests, settings, None)
        least, most = free.peak_allocated_bytes, free.peak_reserved_bytes
        if settings.gc_threshold_ratio:
            most = int(most / (settings.memory_fraction_ratio or 1)) + _RESOLUTION_BYTES
        ratio = _COARSE_RATIO if len(self.requests.events) > _MANY_EVENTS else _RESOLUTION_RATIO
        found = free
        while most - least > max(_RESOLUTION_BYTES, ratio * most):
            middle = (least + most) // 2
            tried = replay_requests(self.requests, settings, middle)
            if tried.ran_out_at is None:
                most, found = middle, tried
            else:
                least = middle
        return most, found

    def passes(self, budget_bytes: int, settings: AllocatorSettings | None = None) -> Replayed:
        return replay_requests(self.requests, settings or self.settings, budget_bytes)

    # ---- changes of the program

    def scaled(self, numbers: set[int], factor: float) -> Program:
        """Scale some requests, as another batch size would."""
        sizes = [
            max(int(size * factor), 1) if number in numbers else size
            for number, size in enumerate(self.requests.sizes, 1)
        ]
        return replace(self, requests=self.requests._replace(sizes=tuple(sizes)))

    def without(self, numbers: set[int]) -> Program:
        """Leave some requests out, with their frees."""
        events = tuple(event for event in self.requests.events if abs(event) not in numbers)
        return replace(self, requests=self.requests._replace(events=events))

    def freed_at(self, deaths: Mapping[int, int]) -> Program:
        """Free some requests right after another one was made, if they lived longer."""
        place = {event: at for at, event in enumerate(self.requests.events)}
        nowhere = len(self.requests.events)
        moved = {
            number: after
            for number, after in deaths.items()
            if place[after] < place.get(-number, nowhere)
        }
        waiting: dict[int, list[int]] = {}
        for number, after in moved.items():
            waiting.setdefault(after, []).append(-number)
        events: list[int] = []
        for event in self.requests.events:
            if event < 0 and -event in moved:
                continue
            events.append(event)
            events += waiting.get(event, ())
        return replace(self, requests=self.requests._replace(events=tuple(events)))


def settings_to_try(recorded: AllocatorSettings) -> list[tuple[str, AllocatorSettings, str]]:
    """Return settings that the run did not have: their name, themselves, what they cost."""
    plain = AllocatorSettings()
    found = []
    if not recorded.expandable_segments:
        expandable = replace(plain, expandable_segments=True)
        found.append(("expandable_segments:True", expandable, "Linux, not with IPC"))
        for size_mb in (128, 512):
            if recorded.max_split_bytes != size_mb * MIB:
                split = replace(plain, max_split_bytes=size_mb * MIB)
                found.append((f"max_split_size_mb:{size_mb}", split, ""))
    if not recorded.gc_threshold_ratio:
        collects = replace(recorded, gc_threshold_ratio=0.8, memory_fraction_ratio=0.999)
        found.append(("garbage_collection_threshold:0.8", collects, "needs a memory fraction"))
    if not recorded.divisions_by_interval():
        rounded = replace(recorded, roundup_power2_divisions=8)
        found.append(("roundup_power2_divisions:8", rounded, "larger blocks"))
    return found

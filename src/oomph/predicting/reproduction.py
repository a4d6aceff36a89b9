"""A recorded trace -> whether the replayed allocator matches torch's, address by address.

The recording provides the addresses that CUDA returned, the moments of empty_cache() and those at
which pending frees completed. All else is predicted: when segments are taken and how large, which
block each request gets, and what a release gives back. Without a budget CUDA also fails when the
recording says so; with a budget that is predicted, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from oomph.errors import UsageError
from oomph.predicting.allocator import CachingAllocator, OutOfMemory, PlacedBlock
from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.recorded import (
    RESERVES,
    Contradiction,
    Record,
    blocks_of,
    releases,
    state_before,
    synchronized_at,
)
from oomph.predicting.segments import UNLIMITED_BYTES
from oomph.units import TIB

_SIGNS = {**RESERVES, "oom": 0}  # CUDA's answers; running out of memory changes nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """How far a replay agrees with the recording. It stops at the first difference."""

    num_allocs: int
    num_exact_allocs: int  # at their recorded address
    num_segment_events: int
    num_exact_segment_events: int  # same memory taken or released, in the same order
    num_blocks: int  # after the last event
    num_exact_blocks: int
    recorded_peak_reserved_bytes: int
    peak_reserved_bytes: int
    begin_allocated_bytes: int  # before the first event
    peak_allocated_bytes: int
    num_retries: int
    ran_out_at: tuple[int, ...]  # the events
    # Bounds on the memory available to this process: it had the first (or CUDA said so), and was
    # refused the second.
    budget_bytes: int
    too_much_bytes: int | None
    problem: str | None  # the first difference

    @property
    def is_exact(self) -> bool:
        return self.problem is None


class _Difference(Exception):
    """The replay did something that the recording does not show."""


class RecordedDevice:
    """A GPU that repeats its recorded answers."""

    def __init__(self, answers: Sequence[Record], reserved_bytes: int, budget_bytes: int | None):
        self._answers = answers
        self._budget_bytes = budget_bytes
        self.reserved_bytes = self.least_budget_bytes = reserved_bytes
        self.too_much_bytes: int | None = None
        self.next = 0  # index of the next answer
        self.end = 0  # answers before this index belong to the current request
        self.free_bytes = UNLIMITED_BYTES  # as of the last recorded failure
        self.total_bytes = TIB  # not recorded

    def malloc(self, size_bytes: int) -> int | None:
        if not self._has_room("segment_alloc", size_bytes):
            return None
        return int(self._confirm("segment_alloc", None, size_bytes)["addr"])

    def free(self, address: int, size_bytes: int) -> None:
        self._confirm("segment_free", address, size_bytes)

    def reserve(self, size_bytes: int) -> int:  # noqa: ARG002
        answer = self._answer()
        return int(answer["addr"]) if answer and answer["action"] == "segment_map" else 0

    def map(self, address: int, size_bytes: int) -> bool:
        if not self._has_room("segment_map", size_bytes):
            return False
        self._confirm("segment_map", address, size_bytes)
        return True

    def unmap(self, address: int, size_bytes: int) -> None:
        self._confirm("segment_unmap", address, size_bytes)

    def pass_failure(self) -> None:
        """Confirm that the recording also ran out of memory here."""
        self._confirm("oom", None, None)

    def _answer(self) -> Record | None:
        return self._answers[self.next] if self.next < self.end else None

    def _has_room(self, action: str, size_bytes: int) -> bool:
        answer = self._answer()
        if answer and answer["action"] == "oom":
            self.free_bytes = answer["device_free"]
            self._had(self.reserved_bytes + self.free_bytes)
        needed = self.reserved_bytes + size_bytes
        if self._budget_bytes is not None:
            has_room = needed <= self._budget_bytes
        else:  # the release that follows shows that it had no room
            has_room = answer is None or answer["action"] == action
        if not has_room:
            self.too_much_bytes = min(needed, self.too_much_bytes or needed)
        return has_room

    def _confirm(self, action: str, address: int | None, size_bytes: int | None) -> Record:
        answer = self._answer()
        if answer is None:
            raise _Difference(f"{action} of {size_bytes} bytes is not recorded")
        is_same = (
            answer["action"] == action
            and address in (None, answer.get("addr"))
            and size_bytes in (None, answer["size"])
        )
        if not is_same:
            recorded = f"{answer['action']} of {answer['size']} bytes"
            raise _Difference(f"{action} of {size_bytes} bytes, where {recorded} is recorded")
        self.next += 1
        self.reserved_bytes += _SIGNS[action] * answer["size"]
        self._had(self.reserved_bytes)
        return answer

    def _had(self, size_bytes: int) -> None:
        self.least_budget_bytes = max(self.least_budget_bytes, size_bytes)


def reproduce(
    segments: Sequence[Record],
    trace: Sequence[Record],
    settings: AllocatorSettings,
    *,
    budget_bytes: int | None = None,
) -> Reproduction:
    """Replay one device's trace and compare it with the recording."""
    replayer = _Replayer(segments, trace, settings, budget_bytes)
    problem = replayer.run()
    return replayer.report(problem)


class _Replayer:
    def __init__(
        self,
        segments: Sequence[Record],
        trace: Sequence[Record],
        settings: AllocatorSettings,
        budget_bytes: int | None,
    ) -> None:
        self.segments = segments
        self.trace = trace
        self.settings = settings
        self.answers = [event for event in trace if event["action"] in _SIGNS]
        changes = [_SIGNS[answer["action"]] * answer["size"] for answer in self.answers]
        final_bytes = sum(segment["total_size"] for segment in segments)
        reserved_bytes = final_bytes - sum(changes)
        self.recorded_peak_bytes = reserved_bytes + max(accumulate(changes, initial=0))
        self.device = RecordedDevice(self.answers, reserved_bytes, budget_bytes)
        self.allocator = CachingAllocator(settings, self.device)
        self.begin_allocated_bytes = 0
        self.num_exact_allocs = 0
        self.ran_out_at: list[int] = []

    def run(self) -> str | None:
        """Replay to the end or to the first difference, and return that."""
        at = 0
        try:
            self._adopt()
            emptied = {run.end - 1 for run in releases(self.trace) if not run.is_retry}
            synchronized = synchronized_at(self.trace)
            for at, event in enumerate(self.trace):
                if at not in synchronized:  # the replayed allocator does that itself
                    self._step(at, event)
                if at in emptied:
                    self.allocator.empty_cache()
                    self._check_answers()
        except Contradiction as error:
            return f"before the first event: {error}"
        except OutOfMemory:
            return f"event {at}: memory runs out, which is not recorded"
        except (_Difference, UsageError) as error:
            return f"event {at}: {error}"
        except LookupError:  # a block is missing from its pool
            return f"event {at}: the recording contradicts itself"
        return self._compare_ends()

    def _adopt(self) -> None:
        if any(
            tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0) for segment in self.segments
        ):
            raise Contradiction("private pools are not modelled")
        before = state_before(self.segments, self.trace, self.settings)
        self.device.total_bytes = before.total_bytes or self.device.total_bytes
        for held in before.segments:
            self.allocator.adopt(
                held.blocks,
                stream=held.stream,
                is_small=held.is_small,
                reservation=held.reservation,
            )
        self.begin_allocated_bytes = self.allocator.allocated_bytes

    def _step(self, at: int, event: Record) -> None:
        action = event["action"]
        if action in _SIGNS:
            self.device.end += 1
            if action == "oom":
                self._run_out(at, event)
        elif action == "alloc":
            self._allocate(event)
        elif action == "free_requested":
            self.allocator.free_requested(event["addr"])
        elif action == "free_completed":
            self.allocator.free_completed(event["addr"])

    def _allocate(self, event: Record) -> None:
        address = self.allocator.malloc(event["size"], event["stream"])
        self._check_answers()
        if address != event["addr"]:
            raise _Difference(f"{event['size']} bytes are not at their recorded address")
        self.num_exact_allocs += 1

    def _run_out(self, at: int, event: Record) -> None:
        try:
            self.allocator.malloc(event["size"], event["stream"])
        except OutOfMemory:
            self.device.pass_failure()
            self.ran_out_at.append(at)
            self._check_answers()
        else:
            raise _Difference(f"there is room for {event['size']} bytes, where it ran out")

    def _check_answers(self) -> None:
        if self.device.next < self.device.end:
            answer = self.answers[self.device.next]
            raise _Difference(f"{answer['action']} of {answer['size']} bytes is not reproduced")

    # ---- the end ---------------------------------------------------------------------------------

    def _compare_ends(self) -> str | None:
        if self.allocator.peak_reserved_bytes != self.recorded_peak_bytes:
            return "after the last event: the peak of reserved memory differs"
        if _layout(self.allocator.blocks()) != _layout(self._recorded_blocks()):
            return "after the last event: the blocks differ"
        return None

    def _recorded_blocks(self) -> list[PlacedBlock]:
        return [block for segment in self.segments for block in blocks_of(segment)]

    def _num_exact_blocks(self) -> int:
        return len(_layout(self._recorded_blocks()) & _layout(self.allocator.blocks()))

    def report(self, problem: str | None) -> Reproduction:
        num_failures = sum(answer["action"] == "oom" for answer in self.answers)
        return Reproduction(
            num_allocs=sum(event["action"] == "alloc" for event in self.trace),
            num_exact_allocs=self.num_exact_allocs,
            num_segment_events=len(self.answers) - num_failures,
            num_exact_segment_events=self.device.next - len(self.ran_out_at),
            num_blocks=len(self._recorded_blocks()),
            num_exact_blocks=self._num_exact_blocks(),
            recorded_peak_reserved_bytes=self.recorded_peak_bytes,
            peak_reserved_bytes=self.allocator.peak_reserved_bytes,
            begin_allocated_bytes=self.begin_allocated_bytes,
            peak_allocated_bytes=self.allocator.peak_allocated_bytes,
            num_retries=self.allocator.num_retries,
            ran_out_at=tuple(self.ran_out_at),
            budget_bytes=self.device.least_budget_bytes,
            too_much_bytes=self.device.too_much_bytes,
            problem=problem,
        )


def _layout(blocks: list[PlacedBlock]) -> set[tuple[int, int, str]]:
    return {(block.address, block.size_bytes, block.state) for block in blocks}

"""Requests and frees, many at once -> the peaks, their moments, and where memory ran out."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from oomph.predicting.allocator import CachingAllocator, OutOfMemory, Shortage

_NOWHERE = -1  # the address of what was done without
EMPTY_CACHE = 0  # the event that is torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What became of a sequence of requests and frees. Events are counted from 0.

    The peaks and counts are the allocator's, so they include what it had done before; an event is
    None where the peak was reached before the first one.
    """

    peak_allocated_bytes: int
    peak_allocated_at: int | None
    peak_reserved_bytes: int
    peak_reserved_at: int | None
    num_retries: int
    num_cuda_mallocs: int
    num_cuda_frees: int
    ran_out_at: int | None = None  # the event at which the replay ended; None: it passed
    shortage: Shortage | None = None


def replay(
    allocator: CachingAllocator,
    sizes: Sequence[int],
    events: Iterable[int],
    streams: Sequence[int] | None = None,
    dispensable: Container[int] = (),
) -> Replayed:
    """Put requests and frees to an allocator, up to the first that does not fit.

    The event i+1 asks for sizes[i] bytes (on streams[i], else all on one), -(i+1) frees them
    again, and EMPTY_CACHE is what it says. What is in `dispensable` (i+1) is done without where
    there is no room.
    """
    addresses = [_NOWHERE] * len(sizes)
    free = allocator.free if not dispensable else functools.partial(_free_if_had, allocator)
    peak_allocated, peak_reserved = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
    allocated_at = reserved_at = ran_out_at = shortage = None
    num_cuda_mallocs = allocator.num_cuda_mallocs
    at = 0
    try:
        for at, event in enumerate(events):
            if event < 0:
                free(addresses[-event - 1])
            elif event == EMPTY_CACHE:
                allocator.empty_cache()
            else:
                stream = streams[event - 1] if streams else 0
                ask = _if_there_is_room if event in dispensable else CachingAllocator.malloc
                addresses[event - 1] = ask(allocator, sizes[event - 1], stream)
                if allocator.peak_allocated_bytes > peak_allocated:
                    peak_allocated, allocated_at = allocator.peak_allocated_bytes, at
                if allocator.num_cuda_mallocs > num_cuda_mallocs:
                    num_cuda_mallocs = allocator.num_cuda_mallocs
                    if allocator.peak_reserved_bytes > peak_reserved:
                        peak_reserved, reserved_at = allocator.peak_reserved_bytes, at
    except OutOfMemory as error:
        ran_out_at, shortage = at, error.shortage
    return Replayed(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_allocated_at=allocated_at,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_reserved_at=reserved_at,
        num_retries=allocator.num_retries,
        num_cuda_mallocs=allocator.num_cuda_mallocs,
        num_cuda_frees=allocator.num_cuda_frees,
        ran_out_at=ran_out_at,
        shortage=shortage,
    )


def _if_there_is_room(allocator: CachingAllocator, size_bytes: int, stream: int) -> int:
    try:
        return allocator.malloc(size_bytes, stream)
    except OutOfMemory:
        return _NOWHERE


def _free_if_had(allocator: CachingAllocator, address: int) -> None:
    if address != _NOWHERE:
        allocator.free(address)

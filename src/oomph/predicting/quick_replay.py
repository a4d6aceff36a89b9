"""The replay of a whole list of requests with torch's own settings, in one loop without objects.

The same rules as in `allocator.py`, which is the reference: tests compare the two on random lists.
What is rare is left to the reference: the answer is then None.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Sequence

from oomph.predicting.allocator_settings import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    segment_bytes,
)
from oomph.predicting.segments import UNLIMITED_BYTES
from oomph.units import TIB

# Sizes and addresses are counted in units of 512 bytes, of which every block is a multiple. A free
# block is one number: its size, then its address, which is the order of the search for the best
# fit.
_UNIT_BITS = MIN_BLOCK_BYTES.bit_length() - 1
_ROUND = MIN_BLOCK_BYTES - 1
_SMALL = SMALL_BYTES >> _UNIT_BITS
_ADDRESS_BITS = 42
_ADDRESS = (1 << _ADDRESS_BITS) - 1
_REGION_BITS = 36  # of the addresses of one expandable segment: 32 TiB
# No block that can grow comes near the end of its addresses if at most this much is reserved.
_MOST_EXPANDABLE_BYTES = 8 * TIB
_MOST_EXPANDABLE = _MOST_EXPANDABLE_BYTES >> _UNIT_BITS
_NOWHERE = -1  # the address of a request that is not live
_PAGES = (SMALL_SEGMENT_BYTES >> _UNIT_BITS, LARGE_SEGMENT_BYTES >> _UNIT_BITS)  # small, large


def replay_quickly(  # noqa: C901 - one loop: calls would cost what it saves
    sizes: Sequence[int],
    events: Sequence[int],
    streams: Sequence[int] | None,
    dispensable: Container[int],
    limit_bytes: int,
    *,
    is_expandable: bool,
) -> tuple[int, int, int, int | None] | None:
    """Return peaks of allocated and reserved bytes, retries, and where memory ran out.

    The arguments are those of `replay`. None: ask the reference.
    """
    if is_expandable and _MOST_EXPANDABLE_BYTES < limit_bytes < UNLIMITED_BYTES:
        return None
    units = [0, *((size + _ROUND >> _UNIT_BITS) or 1 for size in sizes)]
    # A stream has two pools: an even number for small requests, and the next one for large ones.
    pools: list[int]
    if streams is None:
        pools = [size > _SMALL for size in units]
        num_pools = 2
    else:
        numbers = {stream: 2 * place for place, stream in enumerate(sorted(set(streams)))}
        pools = [0, *(numbers[s] + (u > _SMALL) for s, u in zip(streams, units[1:], strict=True))]
        num_pools = 2 * len(numbers)
    if num_pools >> (_ADDRESS_BITS - _REGION_BITS):
        return None
    free_of: list[list[int]] = [[] for _ in range(num_pools)]  # in order
    # Sizes of free blocks by where they start, and their starts by where they end. Segments never
    # touch, so blocks that do are of one segment.
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    segments: dict[int, int] = {}  # sizes by where they start; expandable ones have none
    tops = [pool << _REGION_BITS for pool in range(num_pools)]  # the ends of expandable segments
    addresses, held = [_NOWHERE] * len(units), [0] * len(units)
    limit = limit_bytes >> _UNIT_BITS
    least_rest = (1, 1 if is_expandable else _SMALL + 1)  # that is split off: small, large
    allocated = peak = reserved = peak_reserved = retries = 0
    next_address = 0

    for at, event in enumerate(events):
        if event > 0:
            size, pool = units[event], pools[event]
            free = free_of[pool]
            place = bisect_left(free, size << _ADDRESS_BITS)
            if is_expandable and place + 1 < len(free):
                # What can grow counts with the size it can grow to, so others are filled first.
                key = free[place]
                whole = key >> _ADDRESS_BITS
                if (key & _ADDRESS) + whole == tops[pool]:
                    reach = whole + _unmapped(pool, tops[pool], limit_bytes)
                    place += free[place + 1] >> _ADDRESS_BITS < reach
            if place < len(free):
                key = free.pop(place)
                address = key & _ADDRESS
                whole = key >> _ADDRESS_BITS
                del starts[address]
            elif is_expandable:
                top = tops[pool]
                address = ends.get(top, top)
                page = _PAGES[pool & 1]
                mapped = -(-(size - top + address) // page) * page
                has_room = size <= top - address + _unmapped(pool, top, limit_bytes)
                if not has_room or reserved + mapped > min(limit, _MOST_EXPANDABLE):
                    return None  # another segment, or pages are released
                if address < top:
                    del starts[address], ends[top]
                    del free[bisect_left(free, (top - address) << _ADDRESS_BITS | address)]
                tops[pool] = top + mapped
                whole = top + mapped - address
                reserved += mapped
                if reserved > peak_reserved:
                    peak_reserved = reserved
            else:
                whole = segment_bytes(size << _UNIT_BITS) >> _UNIT_BITS
                if reserved + whole > limit:
                    retries += 1
                    reserved -= _release(free_of, starts, ends, segments)
                    if reserved + whole > limit:
                        if event in dispensable:
                            continue
                        return _figures(peak, peak_reserved, retries, at)
                address = next_address
                next_address += whole + 1  # so that segments do not touch
                if next_address > _ADDRESS:
                    return None
                segments[address] = whole
                reserved += whole
                if reserved > peak_reserved:
                    peak_reserved = reserved
            rest = whole - size
            if rest >= least_rest[size > _SMALL]:
                begin = address + size
                insort(free, rest << _ADDRESS_BITS | begin)
                starts[begin] = rest
                ends[begin + rest] = begin
                whole = size
            else:
                ends.pop(address + whole, None)
            addresses[event] = address
            held[event] = whole
            allocated += whole
            if allocated > peak:
                peak = allocated
        else:
            address = addresses[-event]
            if address < 0:  # so it is for EMPTY_CACHE, which frees request 0
                if event == 0 and not is_expandable:
                    reserved -= _release(free_of, starts, ends, segments)
                elif -event not in dispensable:
                    return None
                continue
            addresses[-event] = _NOWHERE
            whole = held[-event]
            allocated -= whole
            free = free_of[pools[-event]]
            end = address + whole
            before = ends.pop(address, None)
            if before is not None:
                del free[bisect_left(free, (address - before) << _ADDRESS_BITS | before)]
                address = before
            after = starts.pop(end, 0)
            if after:
                del free[bisect_left(free, after << _ADDRESS_BITS | end)]
                end += after
            whole = end - address
            insort(free, whole << _ADDRESS_BITS | address)
            starts[address] = whole
            ends[end] = address
    return _figures(peak, peak_reserved, retries, None)


def _figures(
    peak: int, peak_reserved: int, retries: int, ran_out_at: int | None
) -> tuple[int, int, int, int | None]:
    return peak << _UNIT_BITS, peak_reserved << _UNIT_BITS, retries, ran_out_at


def _unmapped(pool: int, top: int, limit_bytes: int) -> int:
    """Return how far an expandable segment can still grow: torch reserves 9/8 of the GPU."""
    if limit_bytes == UNLIMITED_BYTES:
        return 1 << _REGION_BITS
    page = _PAGES[pool & 1]
    num_pages = max(-(-(limit_bytes * 9 // 8) // (page << _UNIT_BITS)), 1)
    return num_pages * page - (top - (pool << _REGION_BITS))


def _release(
    free_of: list[list[int]],
    starts: dict[int, int],
    ends: dict[int, int],
    segments: dict[int, int],
) -> int:
    """Release every segment that is entirely free, and return their size."""
    released = 0
    for free in free_of:
        kept = []
        for key in free:
            address, whole = key & _ADDRESS, key >> _ADDRESS_BITS
            if segments.get(address) == whole:
                del segments[address], starts[address], ends[address + whole]
                released += whole
            else:
                kept.append(key)
        free[:] = kept
    return released

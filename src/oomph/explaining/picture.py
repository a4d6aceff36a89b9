"""One GPU of a snapshot -> what a page draws, in a few thousand figures however long it is."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from oomph.explaining.holdings import Allocation, Naming
from oomph.predicting.recorded import RESERVES, Record
from oomph.records.picture import Held, Picture, Piece
from oomph.records.snapshot import DeviceSnapshot, Snapshot

_NUM_COLUMNS = 4000  # moments of the timeline: a page of 12 categories stays below 1 MB
_MOST_PIECES = 4000
_MOST_DEPTH = 24
_LEAST_RATIO = 0.002  # of all that is held: less is not drawn


def picture_of(
    snapshot: Snapshot,
    device: DeviceSnapshot,
    allocations: Sequence[Allocation],
    naming: Naming,
    *,
    at: int,
    live: Sequence[Allocation],
    budget_bytes: int | None,
    requested_bytes: int | None,
) -> Picture:
    """Draw a device at one moment, and how it came to it."""
    events = device.events()
    sums: dict[str, int] = {}
    for one in allocations:
        sums[naming.category(one)] = sums.get(naming.category(one), 0) + one.size_bytes
    categories = sorted(sums, key=lambda name: -sums[name])
    numbers = {name: number for number, name in enumerate(categories)}
    of = [numbers[naming.category(one)] for one in allocations]
    columns, by_category = _timeline(allocations, of, len(categories), len(events))
    reserved = _reserved(device, events)
    segments = _segments(device, events, at, live, [numbers[naming.category(o)] for o in live])
    holes = (p.size_bytes for pieces in segments for p in pieces if p.category is None)
    return Picture(
        categories=tuple(categories),
        events=tuple(columns),
        live_bytes=tuple(by_category),
        reserved_bytes=tuple(reserved[column + 1] for column in columns),
        num_events=len(events),
        at=at,
        budget_bytes=budget_bytes,
        requested_bytes=requested_bytes,
        segments=tuple(segments),
        largest_hole_bytes=max(holes, default=0),
        by_category=_tree(((naming.category(o), naming.line(o.stack)), o.size_bytes) for o in live),
        by_stack=_tree((_path(snapshot, o.stack), o.size_bytes) for o in live),
    )


# ---- memory over time


def _timeline(
    allocations: Sequence[Allocation], of: Sequence[int], num_categories: int, num_events: int
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return the columns' events, and the live bytes of each category in them."""
    changes = [0] * (num_events + 1)  # the first: before all events
    for one in allocations:
        changes[one.birth + 1] += one.size_bytes
        if one.death is not None:
            changes[one.death + 1] -= one.size_bytes
    totals = list(accumulate(changes))[1:] or [0]
    width = max(-(-len(totals) // _NUM_COLUMNS), 1)
    starts = range(0, len(totals), width)
    columns = [
        max(range(start, min(start + width, len(totals))), key=totals.__getitem__)
        for start in starts
    ]
    steps = [[0] * (len(columns) + 1) for _ in range(num_categories)]
    for one, category in zip(allocations, of, strict=True):
        steps[category][bisect_left(columns, one.birth)] += one.size_bytes
        if one.death is not None:
            steps[category][bisect_left(columns, one.death)] -= one.size_bytes
    return columns, [tuple(accumulate(row[:-1])) for row in steps]


def _reserved(device: DeviceSnapshot, events: Sequence[Record]) -> list[int]:
    """Return the reserved bytes before the first event and after each."""
    changes = [RESERVES.get(event["action"], 0) * event["size"] for event in events]
    begin = sum(segment["total_size"] for segment in device.segments) - sum(changes)
    return list(accumulate(changes, initial=begin))


# ---- the layout at the moment


def _segments(
    device: DeviceSnapshot,
    events: Sequence[Record],
    at: int,
    live: Sequence[Allocation],
    of: Sequence[int],
) -> list[tuple[Piece, ...]]:
    """Return the segments at the moment as pieces, the largest first."""
    blocks = sorted(
        (one.address, one.size_bytes, number) for one, number in zip(live, of, strict=True)
    )
    starts = [address for address, _, _ in blocks]
    found = []
    for begin, end in _ranges(device, events[at + 1 :]):
        first, last = bisect_left(starts, begin), bisect_left(starts, end)
        found.append((end - begin, tuple(_pieces(blocks[first:last], begin, end))))
    found.sort(key=lambda segment: -segment[0])
    kept, num = [], 0
    for _, pieces in found:
        num += len(pieces)
        if num > _MOST_PIECES:
            break
        kept.append(pieces)
    return kept


def _ranges(device: DeviceSnapshot, after: Sequence[Record]) -> list[tuple[int, int]]:
    """Return the reserved ranges of addresses before some last events."""
    ranges = {s["address"]: s["address"] + s["total_size"] for s in device.segments}
    for event in reversed(after):
        sign = RESERVES.get(event["action"], 0)
        begin = event.get("addr", 0)
        end = begin + event["size"]
        if sign > 0:
            _take_out(ranges, begin, end)
        elif sign < 0:
            ranges[begin] = end
    return sorted(ranges.items())


def _take_out(ranges: dict[int, int], begin: int, end: int) -> None:
    for first, last in list(ranges.items()):
        if first < end and begin < last:
            del ranges[first]
            if first < begin:
                ranges[first] = begin
            if end < last:
                ranges[end] = last


def _pieces(blocks: Sequence[tuple[int, int, int]], begin: int, end: int) -> Iterator[Piece]:
    """Yield neighbouring blocks of one category as one, and the holes between them."""
    at, size, category = begin, 0, None
    for address, block_bytes, number in blocks:
        if address - at >= 1 << 20 or (number != category and size):
            if size:
                yield Piece(size_bytes=size, category=category)
            if address - at >= 1 << 20:
                yield Piece(size_bytes=address - at, category=None)
            size = 0
        else:
            size += max(address - at, 0)
        size += block_bytes
        category, at = number, address + block_bytes
    if size:
        yield Piece(size_bytes=size, category=category)
    if end > at:
        yield Piece(size_bytes=end - at, category=None)


# ---- who held it


def _path(snapshot: Snapshot, number: int) -> tuple[str, ...]:
    """Return the Python lines of a stack, outermost first."""
    frames = [frame for frame in snapshot.stack(number) if frame.is_python]
    names = tuple(
        f"{frame.name} {frame.file.rpartition('/')[2]}:{frame.line}" for frame in reversed(frames)
    )
    return names[:_MOST_DEPTH] or ("no Python stack",)


def _tree(held: Iterable[tuple[tuple[str, ...], int]]) -> tuple[Held, ...]:
    return _level(list(held), 0, None)


def _level(
    held: list[tuple[tuple[str, ...], int]], depth: int, total: int | None
) -> tuple[Held, ...]:
    groups: dict[str, list[tuple[tuple[str, ...], int]]] = {}
    for path, size in held:
        if depth < len(path):
            groups.setdefault(path[depth], []).append((path, size))
    whole = sum(size for _, size in held) if total is None else total
    found = []
    for name, group in groups.items():
        size = sum(size for _, size in group)
        if size > _LEAST_RATIO * whole:
            parts = _level(group, depth + 1, whole)
            found.append(Held(name=name, size_bytes=size, parts=parts))
    return tuple(sorted(found, key=lambda one: -one.size_bytes))

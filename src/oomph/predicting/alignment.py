"""Two sequences of requests -> what they have in common, in order, and what only one of them has.

Blocks match by their size. The longest common subsequence is exact: it is computed with one bit per
block of the predicted side and one addition of whole rows per block of the recorded side (Hyyrö,
"Bit-parallel LCS-length computation revisited", 2004). 10^5 blocks on each side take seconds,
however different they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate

from oomph.records.alignment import Alignment, Block, Difference, Unmatched
from oomph.records.trace import Trace

_MOST_BITS = 64 << 23  # 64 MiB of rows are kept to walk back; longer sequences are halved first

# ---- programs -> blocks --------------------------------------------------------------------------


def blocks_of(sizes: Sequence[int], events: Iterable[int], labels: Sequence[str]) -> list[Block]:
    """Return the blocks that events request, in order.

    Event i+1 requests sizes[i] bytes, -(i+1) frees them; 0 and frees of earlier blocks count as
    nothing, as does a request of 0 bytes.
    """
    order: list[int] = []
    freed: dict[int, int] = {}
    for event in events:
        if event > 0 and sizes[event - 1]:
            order.append(event - 1)
        elif event < 0:
            freed[-event - 1] = len(order)
    return [
        Block(size_bytes=sizes[each], label=labels[each], freed_at=freed.get(each))
        for each in order
    ]


def blocks_of_trace(trace: Trace, begin: int = 0, end: int | None = None) -> list[Block]:
    """Return the blocks that a trace's events from `begin` to `end` request."""
    return blocks_of(
        [allocation.size_bytes for allocation in trace.allocations],
        trace.events[begin:end],
        [allocation.op for allocation in trace.allocations],
    )


# ---- blocks -> alignment -------------------------------------------------------------------------


def align(predicted: Sequence[Block], recorded: Sequence[Block]) -> Alignment:
    """Match two sequences of blocks in order."""
    pairs = matched_pairs(
        [block.size_bytes for block in predicted], [block.size_bytes for block in recorded]
    )
    return Alignment(
        num_predicted=len(predicted),
        num_recorded=len(recorded),
        num_matched=len(pairs),
        num_freed_elsewhere=_num_freed_elsewhere(predicted, recorded, pairs),
        only_predicted=_unmatched(predicted, {mine for mine, _ in pairs}),
        only_recorded=_unmatched(recorded, {other for _, other in pairs}),
        first_difference=_first_difference(predicted, recorded),
    )


def _unmatched(blocks: Sequence[Block], matched: set[int]) -> tuple[Unmatched, ...]:
    counts = Counter(
        (block.label, block.size_bytes) for at, block in enumerate(blocks) if at not in matched
    )
    found = [
        Unmatched(label=label, size_bytes=size_bytes, num_blocks=num_blocks)
        for (label, size_bytes), num_blocks in counts.items()
    ]
    return tuple(sorted(found, key=lambda each: (-each.total_bytes, each.label)))


def _num_freed_elsewhere(
    predicted: Sequence[Block], recorded: Sequence[Block], pairs: Sequence[tuple[int, int]]
) -> int:
    """Count the pairs of which one is freed before a matched block, and the other after it."""
    mine = [at for at, _ in pairs]
    others = [at for _, at in pairs]

    def moment(freed_at: int | None, places: list[int]) -> int | None:
        """Return how many matched blocks were requested by then."""
        return None if freed_at is None else bisect_left(places, freed_at)

    return sum(
        moment(predicted[one].freed_at, mine) != moment(recorded[other].freed_at, others)
        for one, other in pairs
    )


def _first_difference(predicted: Sequence[Block], recorded: Sequence[Block]) -> Difference | None:
    same = _num_same([b.size_bytes for b in predicted], [b.size_bytes for b in recorded])
    if same == len(predicted) == len(recorded):
        return None
    return Difference(
        at=same,
        predicted=predicted[same] if same < len(predicted) else None,
        recorded=recorded[same] if same < len(recorded) else None,
    )


# ---- the longest common subsequence --------------------------------------------------------------


def matched_pairs(one: Sequence[Hashable], other: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return the places of a longest common subsequence in both sequences, in order."""
    begin = _num_same(one, other)
    most = min(len(one), len(other)) - begin
    end = min(_num_same(one[::-1], other[::-1]), most)
    last, other_last = len(one) - end, len(other) - end
    pairs = [(at, at) for at in range(begin)]
    for mine, others in _subsequence(one[begin:last], other[begin:other_last]):
        pairs.append((begin + mine, begin + others))
    pairs += [(last + at, other_last + at) for at in range(end)]
    return pairs


def _num_same(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Return how many items are the same from the start on."""
    for at, (mine, others) in enumerate(zip(one, other, strict=False)):
        if mine != others:
            return at
    return min(len(one), len(other))


def _subsequence(one: Sequence[Hashable], other: Sequence[Hashable]) -> list[tuple[int, int]]:
    if not one or not other:
        return []
    if len(one) * len(other) <= _MOST_BITS or len(other) == 1:
        return _walked_back(one, other)
    # Hirschberg: where does the best path cross the middle of the other sequence?
    middle = len(other) // 2
    before = _lengths(_rows(one, other[:middle])[-1], len(one))
    after = _lengths(_rows(one[::-1], other[middle:][::-1])[-1], len(one))[::-1]
    cut = max(range(len(one) + 1), key=lambda at: before[at] + after[at])
    return [
        *_subsequence(one[:cut], other[:middle]),
        *((cut + a, middle + b) for a, b in _subsequence(one[cut:], other[middle:])),
    ]


def _walked_back(one: Sequence[Hashable], other: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Follow the rows from the end to the start, and collect the matches."""
    rows = _rows(one, other, keeps_all=True)
    pairs: list[tuple[int, int]] = []
    column, row = len(one), len(other)
    while column and row:
        if rows[row] >> (column - 1) & 1:
            column -= 1
        elif rows[row - 1] >> (column - 1) & 1:
            column, row = column - 1, row - 1
            pairs.append((column, row))
        else:
            row -= 1
    return pairs[::-1]


def _rows(
    one: Sequence[Hashable], other: Sequence[Hashable], *, keeps_all: bool = False
) -> list[int]:
    """Return a row of bits after each item of `other`, or the last row alone.

    A bit is 0 where one more item of `one` makes the common subsequence longer.
    """
    places: dict[Hashable, int] = {}
    for value, found in _places(one).items():
        bits = bytearray(len(one) // 8 + 1)
        for at in found:
            bits[at >> 3] |= 1 << (at & 7)
        places[value] = int.from_bytes(bits, "little")
    every = (1 << len(one)) - 1
    row = every
    rows = [row]
    for value in other:
        matches = row & places.get(value, 0)
        if matches:
            row = ((row + matches) | (row - matches)) & every
        if keeps_all:
            rows.append(row)
    return rows if keeps_all else [row]


def _places(values: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = {}
    for at, value in enumerate(values):
        found.setdefault(value, []).append(at)
    return found


def _lengths(row: int, num_items: int) -> list[int]:
    """Return the length of the common subsequence with each beginning of the sequence."""
    bits = format(row, f"0{num_items}b")[::-1]
    return list(accumulate((bit == "0" for bit in bits), initial=0))

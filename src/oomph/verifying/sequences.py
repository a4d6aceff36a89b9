"""A rehearsal's trace, a recorded run -> how far they request the same, where they first part."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

from oomph.predicting.alignment import blocks_of, matched_pairs
from oomph.records.alignment import Block, Unmatched
from oomph.records.trace import Allocation, Trace
from oomph.records.verification import FirstDifference, Located, Recorded
from oomph.records.verification import Sequence as Compared

# cuDNN's kernels as torch dispatches them: aten::convolution, aten::cudnn_convolution, backward.
_CONVOLVES = "convolution"
_WORKSPACE = "workspace of a convolution"


def compare(trace: Trace, recorded: Recorded) -> Compared:
    """Match the requests of the model's build and of two steps."""
    allocations = _in_order(trace)
    mine = [allocation.size_bytes for allocation in allocations]
    blocks = blocks_of(recorded.sizes, recorded.events, recorded.lines)
    pairs = matched_pairs(mine, [block.size_bytes for block in blocks])
    partners = {theirs: number for number, theirs in pairs}
    lonely = [number for number in range(len(blocks)) if number not in partners]
    workspaces = {each for each in lonely if _is_workspace(each, blocks, partners, allocations)}
    unexplained = [number for number in lonely if number not in workspaces]
    matched = {number for number, _ in pairs}
    mine_alone = [number for number in range(len(allocations)) if number not in matched]
    return Compared(
        num_predicted=len(allocations),
        num_recorded=len(blocks),
        num_matched=len(pairs),
        explained=_grouped((_WORKSPACE, blocks[each].size_bytes) for each in sorted(workspaces)),
        only_predicted=_grouped(
            (_label(allocations[each]), allocations[each].size_bytes) for each in mine_alone
        ),
        only_recorded=_grouped(
            (blocks[each].label, blocks[each].size_bytes) for each in unexplained
        ),
        first_difference=_first(trace, recorded, allocations, blocks, pairs, workspaces),
    )


def _in_order(trace: Trace) -> list[Allocation]:
    """Return the allocations as they are requested, without those of 0 bytes."""
    requested = (trace.allocations[event - 1] for event in trace.events if event > 0)
    return [allocation for allocation in requested if allocation.size_bytes]


def _is_workspace(
    number: int,
    blocks: Sequence[Block],
    partners: Mapping[int, int],
    allocations: Sequence[Allocation],
) -> bool:
    """Return whether a recorded block is what cuDNN borrows for one call.

    It is requested right after the result of a convolution, or after another try, and freed before
    anything else is requested.
    """
    if blocks[number].freed_at != number + 1:
        return False
    before = number - 1
    while before >= 0 and before not in partners and blocks[before].freed_at == before + 1:
        before -= 1
    owner = partners.get(before)
    return owner is not None and _CONVOLVES in allocations[owner].op


def _label(allocation: Allocation) -> str:
    return f"{allocation.op} in {allocation.module}" if allocation.module else allocation.op


def _grouped(found: Iterable[tuple[str, int]]) -> tuple[Unmatched, ...]:
    counts = Counter(found)
    groups = [
        Unmatched(label=label, size_bytes=size_bytes, num_blocks=num_blocks)
        for (label, size_bytes), num_blocks in counts.items()
    ]
    return tuple(sorted(groups, key=lambda each: (-each.total_bytes, each.label)))


# ---- the first difference ------------------------------------------------------------------------


def _first(
    trace: Trace,
    recorded: Recorded,
    allocations: Sequence[Allocation],
    blocks: Sequence[Block],
    pairs: Sequence[tuple[int, int]],
    explained: Container[int],
) -> FirstDifference | None:
    """Return where the two first part; an explained block is no difference."""
    mine = theirs = 0
    last: int | None = None
    for number, partner in [*pairs, (len(allocations), len(blocks))]:
        extra = next((each for each in range(theirs, partner) if each not in explained), None)
        if mine < number or extra is not None:
            return FirstDifference(
                when=_when(trace, recorded, mine if mine < number else None, extra),
                predicted=_located(allocations[mine]) if mine < number else None,
                recorded_bytes=None if extra is None else blocks[extra].size_bytes,
                recorded_at=None if extra is None else blocks[extra].label or None,
                after=None if last is None else _located(allocations[last]),
            )
        mine, theirs, last = number + 1, partner + 1, number
    return None


def _located(allocation: Allocation) -> Located:
    return Located(
        op=allocation.op,
        module=allocation.module,
        phase=allocation.phase,
        size_bytes=allocation.size_bytes,
    )


def _when(trace: Trace, recorded: Recorded, mine: int | None, theirs: int | None) -> str:
    """Return during which step the block is requested."""
    if mine is not None:
        places = [at for at, event in enumerate(trace.events) if _is_request(trace, event)]
        step = bisect_right(trace.step_starts, places[mine])
    else:
        # The requests of the build come before the first mark, those of step 1 before the second.
        places = [at for at, event in enumerate(recorded.events) if event > 0]
        step = bisect_right(recorded.marks, places[theirs or 0])
    return f"in step {step}" if step else "while the model is built"


def _is_request(trace: Trace, event: int) -> bool:
    return event > 0 and trace.allocations[event - 1].size_bytes > 0

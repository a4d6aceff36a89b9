"""What to recompute in backward, as text <-> which blocks that are.

"none": nothing. "blocks": every block. "every-3": every third. "blocks:0-3,6": these, counted from
0. "selective": in every block what is cheap to recompute; matmuls and attention are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.errors import UsageError

_MOST_DIGITS = 4


def check_checkpointing(text: str) -> str:
    """The text itself, if it is a way of checkpointing. Raises UsageError."""
    if text in ("none", "blocks", "selective") or _every(text) or listed_blocks(text):
        return text
    raise UsageError(
        f"{text!r:.80} is no way of checkpointing",
        because='it is "none", "blocks", "every-2" for every second block, "blocks:0-3,6" for the'
        ' first four and the seventh, or "selective"',
        attempt="blocks",
    )


def recomputed_blocks(text: str, num_blocks: int) -> list[int]:
    """The numbers of the blocks that are recomputed, in whole or selectively."""
    if check_checkpointing(text) == "none":
        return []
    listed = listed_blocks(text)
    if listed and max(listed) >= num_blocks:
        raise UsageError(
            f"there is no block {max(listed)} to recompute",
            because=f"the model has {num_blocks} blocks, counted from 0",
            attempt=f"blocks:0 to blocks:{num_blocks - 1}",
        )
    return listed or list(range(0, num_blocks, _every(text) or 1))


def as_text(blocks: Sequence[int], num_blocks: int) -> str:
    """The shortest text for a set of blocks."""
    numbers = sorted(set(blocks))
    if not numbers:
        return "none"
    for every in range(1, num_blocks):
        if numbers == list(range(0, num_blocks, every)):
            return "blocks" if every == 1 else f"every-{every}"
    return "blocks:" + ",".join(_ranges(numbers))


def _ranges(numbers: Sequence[int]) -> list[str]:
    """Runs of numbers, as 3-6."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found]


def _every(text: str) -> int | None:
    number = text.removeprefix("every-")
    is_number = text != number and number.isdecimal() and len(number) <= _MOST_DIGITS
    return int(number) or None if is_number else None


def listed_blocks(text: str) -> list[int] | None:
    """The numbers of "blocks:LIST"; None for every other text."""
    if not text.startswith("blocks:"):
        return None
    found: set[int] = set()
    for part in text.removeprefix("blocks:").split(","):
        first, _, last = part.partition("-")
        ends = (first, last if "-" in part else first)
        if not all(end.isdecimal() and len(end) <= _MOST_DIGITS for end in ends):
            return None
        found.update(range(int(ends[0]), int(ends[1]) + 1))
    return sorted(found) or None

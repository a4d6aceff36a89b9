"""A command's end and what was seen before it -> Ending: did it run out of memory?

What the script says itself is certain. So is the kernel's count of processes that it killed for
want of host memory. A GPU that was nearly full when the command failed is a likeliness, and is
called one.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from oomph.records.run import Ending, Event, GpuSpan, WatchedGpu
from oomph.running.wrapping import Ended
from oomph.units import format_bytes

# torch asks the driver for whole segments: what does not fit any more is mostly less than this.
_NEARLY_FULL = 0.95
RECENT_S = 30.0  # a traceback and the end of an interpreter with large tensors take seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known when a command has ended."""

    at_s: float
    gpus: Sequence[WatchedGpu]
    recent: Sequence[GpuSpan]  # of the last seconds
    says_out_of_memory: bool  # the script itself
    killed_in_group: bool  # by the kernel, for want of host memory
    killed_on_machine: bool


def judge(ended: Ended, evidence: Evidence) -> tuple[Ending, Event | None]:
    """How it ended, and what is only likely about that, in words."""
    is_failure = not ended.was_stopped and ended.exit_code != 0
    out_of_memory, event = _out_of_memory(ended, evidence) if is_failure else (None, None)
    ending = Ending(
        at_s=evidence.at_s,
        exit_code=ended.exit_code,
        signal=None if ended.signal is None else signal.Signals(ended.signal).name,
        out_of_memory=out_of_memory,
    )
    return ending, event


def _out_of_memory(
    ended: Ended, evidence: Evidence
) -> tuple[Literal["gpu", "host"] | None, Event | None]:
    was_killed = ended.exit_code == 128 + signal.SIGKILL
    if evidence.killed_in_group:
        return "host", None
    if evidence.killed_on_machine and was_killed:
        text = "probably killed by the kernel for want of host memory, as it did at that time"
        return "host", Event(at_s=evidence.at_s, kind="warning", text=text)
    if evidence.says_out_of_memory:
        return "gpu", None
    full = _nearly_full(evidence)
    if full is None or was_killed:
        return None, None
    return "gpu", full


def _nearly_full(evidence: Evidence) -> Event | None:
    for span in reversed(evidence.recent):
        gpu = evidence.gpus[span.gpu]
        most_bytes, total_bytes = span.most_used_bytes, gpu.total_bytes
        if not gpu.is_used or most_bytes is None or not total_bytes:
            continue
        if most_bytes >= _NEARLY_FULL * total_bytes:
            text = (
                f"probably out of GPU memory: {format_bytes(most_bytes)} of"
                f" {format_bytes(total_bytes)} were taken {evidence.at_s - span.ended_s:.0f} s"
                " before the command failed"
            )
            return Event(at_s=evidence.at_s, kind="warning", text=text, gpu=span.gpu)
    return None

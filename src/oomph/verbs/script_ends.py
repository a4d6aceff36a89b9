"""The exception that ended a training, or none -> how it ended, and whether memory had run out."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Literal

from oomph.running.wrapping import Ended

if TYPE_CHECKING:
    from oomph.records.run import EventKind

_LONGEST_TEXT = 500  # torch's words, without the advice at their end


def ended_by(error: BaseException | None) -> Ended:
    """As Python would end with it, if nobody caught it."""
    if isinstance(error, KeyboardInterrupt):
        return Ended(None, signal.SIGINT)
    if isinstance(error, SystemExit):
        code = error.code
        return Ended(code if isinstance(code, int) else int(code is not None))
    return Ended(0 if error is None else 1)


def shortage_of(error: BaseException) -> tuple[EventKind, str] | None:
    """The event that it is, if memory has run out."""
    memory, text = which_memory(error), " ".join(str(error).split())[:_LONGEST_TEXT]
    if memory == "gpu":
        return "out-of-memory", text
    return None if memory is None else ("warning", f"out of host memory: {text}")


def which_memory(error: BaseException) -> Literal["gpu", "host"] | None:
    """None if it says something else. There may be no torch in this process."""
    if "torch" not in sys.modules:
        return "host" if isinstance(error, MemoryError) else None
    from oomph.training import out_of_memory

    memory = out_of_memory.which_memory(error)
    return "host" if memory == "workers" else memory

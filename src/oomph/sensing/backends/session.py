"""Open this process's GPU library on first use, and again after a fork or a driver reload."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from oomph.errors import Unreadable
from oomph.sensing.backends import Backend
from oomph.sensing.backends.nvml import Nvml

T = TypeVar("T")

_opened: Backend | None = None


def with_backend(work: Callable[[Backend], T]) -> T:
    """Call `work` with this process's library; once more if the library was shut down meanwhile.

    Raises Unreadable if there is no library.
    """
    backend = _open()
    try:
        result = work(backend)
    except Unreadable:
        if not backend.is_stale:
            raise
    else:
        if not backend.is_stale:
            return result
    forget()
    return work(_open())


def forget() -> None:
    """Drop the session; the next question opens the library again."""
    global _opened
    _opened = None


def close() -> None:
    """Shut the session down, as a driver reload requires. Other users of NVML keep theirs."""
    if _opened is not None and _opened.pid == os.getpid():
        _opened.shut_down()
    forget()


def _open() -> Backend:
    global _opened
    if _opened is None or _opened.pid != os.getpid():
        _opened = Nvml()
    return _opened

"""Threads of a script. Dispatch modes are of one thread: each new one enters its own.

What tensors say of themselves while a kernel of `meta` runs is the business of that thread alone
(`places.is_suspended`), and the recorder hears one at a time.
"""

from __future__ import annotations

import threading
from typing import Any

from oomph.tracing import autocast


def install(recorder: Any) -> None:
    """Patch them."""
    original = threading.Thread.run

    def run(thread: Any) -> None:
        with recorder, autocast.guard():
            original(thread)

    kind: Any = threading.Thread
    kind.run = run

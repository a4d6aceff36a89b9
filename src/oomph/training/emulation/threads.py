"""Dispatch modes are of one thread: each new thread enters one of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from oomph.training.emulation.patches import Patches


def patch_threads(patches: Patches, enter: Callable[[], AbstractContextManager[Any]]) -> None:
    original = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with enter():
            original(thread)

    patches.set(threading.Thread, "run", run)

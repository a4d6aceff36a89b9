"""Patch torch, permanently or so that the patches can be undone exactly."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

_NOTHING = object()


def put(owner: object, **values: object) -> None:
    """Replace attributes of a module or class for good."""
    for name, value in values.items():
        setattr(owner, name, value)


def wrap(name: str, *owners: object) -> Callable[[Callable[..., Any]], None]:
    """Replace a function of all owners for good by one that is given the original first.

    @wrap("save", torch, torch.serialization)
    def save(original, obj, *args, **kwargs): ...
    """

    def replace(around: Callable[..., Any]) -> None:
        original = getattr(owners[0], name)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        for owner in owners:
            setattr(owner, name, replacement)

    return replace


class Patches:
    """The attributes that were changed, and their previous values."""

    def __init__(self) -> None:
        self._before: list[tuple[object, str, object]] = []

    def put(self, owner: object, **values: object) -> None:
        """Replace attributes of a module or class, or add them."""
        for name, value in values.items():
            self._before.append((owner, name, vars(owner).get(name, _NOTHING)))
            setattr(owner, name, value)

    def put_wherever_imported(self, prefix: str, replaced: Iterable[tuple[object, object]]) -> None:
        """Replace originals in every module that has imported them, under any name."""
        by_id = {id(original): value for original, value in replaced}
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith(prefix):
                for name, held in list(vars(module).items()):
                    if id(held) in by_id:
                        self.put(module, **{name: by_id[id(held)]})

    def undo(self) -> None:
        """Restore everything, last change first."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def patch_threads(patches: Patches, enter: Callable[[], AbstractContextManager[Any]]) -> None:
    """Make each new thread enter a context: a dispatch mode is active in one thread only."""
    original = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with enter():
            original(thread)

    patches.put(threading.Thread, run=run)

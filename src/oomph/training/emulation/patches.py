"""Changes to torch that can be taken back exactly."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

_NOTHING = object()


class Patches:
    """What was changed, and what stood there before."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Put a value in place of what a module or a class itself has, or does not have."""
        self._before.append((owner, name, vars(owner).get(name, _NOTHING)))
        setattr(owner, name, value)

    def set_wherever_imported(self, prefix: str, replaced: Iterable[tuple[Any, Any]]) -> None:
        """Replace functions also in the modules that imported them by name."""
        by_id = {id(original): value for original, value in replaced}
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith(prefix):
                for name, held in list(vars(module).items()):
                    if id(held) in by_id:
                        self.set(module, name, by_id[id(held)])

    def undo(self) -> None:
        """Put everything back, the last change first."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

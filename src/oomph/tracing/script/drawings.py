"""`SummaryWriter.add_graph`: a drawing of the model by torch.jit, which is passed over here.

It is of a library that a script may never import: it is patched when that is imported.
"""

from __future__ import annotations

import importlib.machinery
import sys
from typing import Any

_WRITERS = ("torch.utils.tensorboard.writer", "tensorboardX.writer")


class _WithoutDrawing:
    """A finder that finds what others find, and lets their writer draw nothing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _WRITERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def loaded(module: Any) -> None:
            load(module)
            module.SummaryWriter.add_graph = lambda *_, **__: None

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Before the script imports anything."""
    sys.meta_path.insert(0, _WithoutDrawing())
    for name in _WRITERS:
        if name in sys.modules:
            sys.modules[name].SummaryWriter.add_graph = lambda *_, **__: None

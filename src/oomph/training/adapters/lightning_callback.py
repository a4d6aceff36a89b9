"""Hooks -> a callback of the Lightning that is there, which is published under two names."""

from __future__ import annotations

import sys
from typing import Any

_LIBRARIES = ("lightning.pytorch", "pytorch_lightning")  # the same, twice


def as_callback(name: str, hooks: type, module: str) -> type:
    """A class of that name and module: the hooks, and Callback of whichever is loaded."""
    loaded = [sys.modules[library] for library in _LIBRARIES if library in sys.modules]
    bases = [library.Callback for library in loaded or [_installed()]]
    return type(name, (hooks, *bases), {"__doc__": hooks.__doc__, "__module__": module})


def _installed() -> Any:
    import importlib
    import importlib.util

    found = [name for name in _LIBRARIES if importlib.util.find_spec(name.split(".")[0])]
    return importlib.import_module(found[0] if found else _LIBRARIES[-1])

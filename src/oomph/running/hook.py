"""Code that every Python process of a command runs when it has imported a module.

A directory with a `sitecustomize.py` stands first on PYTHONPATH as long as the command runs.
Python imports that file when it starts; the one that the user has is imported after it. Nothing
is installed. Python that ignores its environment (-E, -I, -S) is not reached.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_SITECUSTOMIZE = '''\
"""Made by `oomph run` for as long as its command runs."""
import os, sys

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _here]
_mine = sys.modules.pop("sitecustomize")
try:
    import sitecustomize
except ModuleNotFoundError as error:
    if error.name != "sitecustomize":
        raise
finally:
    sys.modules.setdefault("sitecustomize", _mine)
try:
    import oomph
except ModuleNotFoundError:
    sys.path.append({home!r})
from oomph.running.hook import after_import


def _now():
    {statement}


after_import({module!r}, _now)
'''


@contextlib.contextmanager
def hooked(module: str, statement: str) -> Iterator[dict[str, str]]:
    """An environment whose Python processes run a statement after they have imported a module."""
    home = str(Path(__file__).resolve().parents[2])
    text = _SITECUSTOMIZE.format(home=home, statement=statement, module=module)
    with tempfile.TemporaryDirectory(prefix="oomph-run-") as directory:
        Path(directory, "sitecustomize.py").write_text(text)
        paths = [directory, *filter(None, [os.environ.get("PYTHONPATH")])]
        yield {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def after_import(module: str, action: Callable[[], None]) -> None:
    """Call a function when a module has been imported for the first time."""
    sys.meta_path.insert(0, _Finder(module, action))


class _Finder:
    """Finds one module as the others would, and has it followed by an action."""

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self._module, self._action = module, action

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Followed(spec.loader, self._action)
        return spec


class _Followed(Loader):
    """Loads a module, then acts."""

    def __init__(self, loader: Loader, action: Callable[[], None]) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # who asks sees the loader that it had
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action()

"""Run code in every Python process of a command, after the process has imported a module.

While the command runs, a directory with a `sitecustomize.py` comes first on PYTHONPATH. Python
imports that file at startup, and then the user's own sitecustomize. Nothing is installed. A Python
that ignores its environment (-E, -I, -S) is not affected.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_SITECUSTOMIZE = '''\
"""Made by oomph for as long as its command runs."""
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
from oomph.monitoring.startup import after_import


def _now():
    {statement}


after_import({module!r}, _now)
'''


@contextlib.contextmanager
def hooked(module: str, statement: str) -> Iterator[dict[str, str]]:
    """Yield an environment whose Python processes run a statement after importing a module."""
    home = str(Path(__file__).resolve().parents[2])
    text = _SITECUSTOMIZE.format(home=home, statement=statement, module=module)
    with tempfile.TemporaryDirectory(prefix="oomph-run-") as directory:
        Path(directory, "sitecustomize.py").write_text(text)
        paths = [directory, *filter(None, [os.environ.get("PYTHONPATH")])]
        yield {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def after_import(module: str, action: Callable[[], None]) -> None:
    """Call a function once a module has been imported for the first time."""
    # Behind those that are there: of commands in commands, the inner one's action comes first.
    num_before = sum(isinstance(finder, _Finder) for finder in sys.meta_path)
    sys.meta_path.insert(num_before, _Finder(module, action))


class _Finder:
    """Find one module as the other finders would, and run an action after it is loaded."""

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self._module, self._action = module, action

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        load = loader.exec_module

        def load_and_act(module: ModuleType) -> None:
            loader.__dict__.pop("exec_module", None)  # as if it had been loaded without us
            load(module)
            self._action()

        loader.exec_module = load_and_act

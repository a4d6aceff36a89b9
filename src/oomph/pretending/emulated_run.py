"""Run code in every Python process of a command, after the process has imported a module.

While the command runs, a directory with a `sitecustomize.py` comes first on PYTHONPATH. Python
imports that file at startup, and then the user's own sitecustomize. Nothing is installed. A Python
that ignores its environment (-E, -I, -S) is not affected.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from oomph.errors import UsageError
from oomph.records.run import EmulatedRun
from oomph.store import replace_file
from oomph.units import MIB, format_bytes, parse_bytes


def size_of(memory: str | int) -> int:
    """Parse the size of an emulated GPU; refuse a size too small for one segment."""
    size_bytes = memory if isinstance(memory, int) else parse_bytes(memory)
    if size_bytes < 2 * MIB:
        raise UsageError(
            f"a GPU of {format_bytes(size_bytes)} has room for nothing",
            because="torch's smallest segment is 2 MiB",
            attempt='oomph.emulated_gpu("2GiB")',
        )
    return size_bytes


def settings_text() -> str:
    """Return the allocator's settings from the environment."""
    # Torch reads the new name first (c10/core/AllocatorConfig.cpp).
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


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
from oomph.pretending.emulated_run import after_import


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


# ---- the memory peaks of the processes in an emulated run ----------------------------------------
# Each process writes one small file when it ends. A killed process writes none.


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The peaks of one process that had an emulated GPU."""

    allocated_bytes: int
    reserved_bytes: int
    num_out_of_memory: int


def write_peaks(directory: Path, peaks: Peaks) -> None:
    replace_file(directory / f"{os.getpid()}.json", json.dumps(asdict(peaks)))


def read_run(directory: Path, *, exit_code: int, total_bytes: int) -> EmulatedRun:
    found = [Peaks(**json.loads(path.read_text())) for path in sorted(directory.glob("*.json"))]
    most = max(found, key=lambda peaks: peaks.reserved_bytes, default=None)
    return EmulatedRun(
        exit_code=exit_code,
        total_bytes=total_bytes,
        num_processes=len(found),
        peak_allocated_bytes=None if most is None else most.allocated_bytes,
        peak_reserved_bytes=None if most is None else most.reserved_bytes,
        num_out_of_memory=sum(peaks.num_out_of_memory for peaks in found),
    )

""" "train.py:workload" -> the Workload of that name in that file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from oomph.errors import UsageError
from oomph.records.workload import Workload


def split(place: str) -> tuple[Path, str]:
    """The file and the name in it; raises UsageError where that is not a place."""
    file, colon, name = place.rpartition(":")
    path = Path(file)
    if not colon or not name.isidentifier():
        raise UsageError(
            f"{place!r:.200} does not say where the workload is",
            because="a workload is named by its file and its name in that file",
            attempt="train.py:workload",
        )
    if not path.is_file():
        raise UsageError(f"there is no file {file!r:.200}", attempt="the path of your script")
    return path, name


def load(path: Path, name: str) -> Workload:
    """Import the file, as a module and not as a program, and take the workload out of it."""
    sys.path.insert(0, str(path.parent.resolve()))
    sys.argv = [str(path)]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file", attempt="a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise UsageError(
            f"{path} has no {name!r}",
            because=f"the names in it are {', '.join(_names(module)) or 'none'}",
            attempt=f"{path}:{next(iter(_workloads(module)), 'workload')}",
        )
    return as_workload(getattr(module, name), f"{path}:{name}")


def as_workload(found: Any, called: str) -> Workload:
    """A Workload, or what a function that returns one returns."""
    made = found() if callable(found) and not isinstance(found, Workload) else found
    if not isinstance(made, Workload):
        raise UsageError(
            f"{called} is not a Workload",
            because=f"it is {made!r:.80}",
            attempt="workload = oomph.Workload(model=..., batch=..., loss=..., optimizer=...,"
            " batch_size=...)",
        )
    return made


def _names(module: Any) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_")][:12]


def _workloads(module: Any) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(value, Workload)]

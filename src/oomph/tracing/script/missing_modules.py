"""A module that a script cannot import -> where it lies after all, and what to try.

Most that are missing are the script's own: their folder is on the path when it is started from
elsewhere, or by its repository's Makefile. Of those nobody should install a stranger's package
that happens to have the name.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

_MOST_PARENTS = 4
_ROOTS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
# Packages whose modules have another name, among those that training scripts import most.
_PACKAGES = {
    "cv2": "opencv-python",
    "PIL": "pillow",
    "yaml": "pyyaml",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "torch_geometric": "torch-geometric",
    "pytorch_lightning": "pytorch-lightning",
    "attr": "attrs",
    "dotenv": "python-dotenv",
    "Levenshtein": "python-Levenshtein",
    "faiss": "faiss-cpu",
}
# Names that scripts give to modules of their own, and that are strangers' packages on PyPI.
_OWN_NAMES = frozenset(
    {
        "args", "base", "callbacks", "common", "config", "configs", "core", "criterion", "data",
        "data_utils", "dataloader", "dataloaders", "dataset", "engine", "eval", "evaluate",
        "evaluation", "helper", "helpers", "layers", "lib", "libs", "logger", "loss", "losses",
        "main", "metric", "metrics", "misc", "model", "models", "modules", "net", "nets", "network",
        "networks", "options", "optim", "params", "preprocess", "preprocessing", "sampler",
        "scheduler", "scripts", "settings", "src", "test", "tools", "train", "trainer", "trainers",
        "transforms", "util", "utils", "visualize",
    }
)  # fmt: skip


def advice(missing: str, script: Path, directory: Path) -> str:
    """What to try where `import missing` failed in a script that was started in a directory."""
    package = missing.partition(".")[0]
    folders = list(_folders(script.parent, directory))
    for folder in folders:
        if _lies_in(folder, missing):
            return f"PYTHONPATH={_short(folder)} before the command: {missing} is there"
    root = next((folder for folder in folders if _is_project(folder, package)), None)
    if root is not None:
        return f"pip install -e {_short(root)}: {package} is the project that the script belongs to"
    if missing != package and _is_there(package):
        return f"another version of {package}: the one that is installed has no {missing}"
    alike = difflib.get_close_matches(package, _names_near(folders), 1, cutoff=0.75)
    if alike:
        return f"the spelling: there is no {package} near the script, but there is {alike[0]}"
    if package in _OWN_NAMES:
        return f"PYTHONPATH=... before the command, with the folder that holds {package}"
    known = _PACKAGES.get(package)
    if known is not None:
        return f"pip install {known}"
    return f"pip install {package}, if that is the package's name"


def advice_on_relative_import(script: Path) -> str | None:
    """How to start a file that imports from its own package; None if it lies in none."""
    root, names = script.parent, [script.stem]
    while (root / "__init__.py").is_file():
        names.insert(0, root.name)
        root = root.parent
    if len(names) == 1 and root.name.isidentifier():  # a package without an __init__.py
        names.insert(0, root.name)
        root = root.parent
    return (
        None
        if len(names) == 1
        else f"-m {'.'.join(names)} instead of its path, from {_short(root)}"
    )


def _folders(*starts: Path) -> Iterator[Path]:
    """Where modules of a script may lie: above it and beside it, nearest first."""
    seen: set[Path] = set()
    for start in starts:
        own = start.resolve()
        for folder in (own, *list(own.parents)[:_MOST_PARENTS]):
            if folder in (Path.home(), Path(folder.anchor)):
                break
            for one in (folder, *_below(folder)):
                if one not in seen:
                    seen.add(one)
                    yield one
            if any((folder / mark).exists() for mark in _ROOTS):
                break


def _below(folder: Path) -> list[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []
    return [Path(e.path) for e in entries if not e.name.startswith((".", "_")) and e.is_dir()][:200]


def _lies_in(folder: Path, module: str) -> bool:
    place = folder.joinpath(*module.split("."))
    if place.with_name(f"{place.name}.py").is_file():
        return True
    return place.is_dir() and (
        (place / "__init__.py").is_file() or next(place.glob("*.py"), None) is not None
    )


def _is_project(folder: Path, package: str) -> bool:
    """Whether it is built here, perhaps of sources in another language."""
    for name in ("pyproject.toml", "setup.cfg", "setup.py"):
        try:
            text = (folder / name).read_text(encoding="utf-8", errors="replace")[:100_000]
        except OSError:
            continue
        called = re.search(r"""^\s*name\s*=\s*["']?([\w.-]+)""", text, re.MULTILINE)
        if called and re.sub(r"[-_.]+", "_", called[1]).lower() == package.lower():
            return True
    return False


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _names_near(folders: list[Path]) -> list[str]:
    found = {path.stem for folder in folders for path in folder.glob("*.py")}
    return sorted(found | {folder.name for folder in folders})


def _short(folder: Path) -> str:
    """As one would write it from here."""
    there = os.path.relpath(folder)
    return there if len(there) < len(str(folder)) else str(folder)

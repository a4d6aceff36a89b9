"""What the page "Will it fit?" may ask: a model or a workload file, a GPU, a batch -> Question.

A workload is chosen from the list of those below the served directory: what a request says is
compared with that list, and never used as a path. A file is searched for workloads as text; it is
executed only for an answer, in a sandbox (search_child.py).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomph.errors import UsageError
from oomph.records.machine import Sighting

# Judgement, all of them: a directory of workloads, and not a home directory.
_MOST_WORKLOADS = 200
_MOST_ENTRIES = 5_000
_MOST_DEPTH = 5
_LARGEST_FILE_BYTES = 1 << 20
_MOST_READ_BYTES = 64 << 20
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "build", "dist"})
# "workload = oomph.Workload(", or a function that says that it returns one.
_WORKLOAD = re.compile(
    rb"^(?:([A-Za-z_]\w{0,99})[ \t]*(?::[^=\n]{0,99})?=[ \t]*(?:oomph\.)?Workload\("
    rb"|def[ \t]+([A-Za-z_]\w{0,99})\(\)[ \t]*->[ \t]*[\"']?(?:oomph\.)?Workload\b)",
    re.MULTILINE,
)
_LARGEST = {"batch_size": 1_000_000, "seq_len": 1_000_000, "max_gpus": 64}
_NAMES = ("model", "workload", "gpu", *_LARGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to train, and on which GPU."""

    model: str | None  # of those known by name
    place: str | None  # FILE:NAME of a workload; instead of a model
    shown: str  # what is trained, as the page calls it
    gpu: str
    batch_size: int | None  # None: the workload's own, or a usual one for a model
    seq_len: int | None
    max_gpus: int

    @property
    def command(self) -> str:
        """Return the command line that gives the same answer."""
        words = ["oomph", "plan", self.place or f"hf:{self.model}"]
        words += ["--seq-len", str(self.seq_len)] if self.seq_len else []
        words += ["--batch-size", str(self.batch_size)] if self.batch_size else []
        words += ["--gpu", self.gpu]
        words += ["--max-gpus", str(self.max_gpus)] if self.max_gpus > 1 else []
        return shlex.join(words)


class Questions:
    """The choices that the page offers, and the questions made of them."""

    def __init__(self, directory: str | Path | None = None) -> None:
        self._directory = None if directory is None else Path(directory).resolve()
        if self._directory is not None and not self._directory.is_dir():
            raise UsageError(
                f"{directory} is not a directory", attempt="--workloads with one that exists"
            )

    def choices(self, sighting: Sighting) -> Mapping[str, Any]:
        """Return what may be chosen; the GPUs of this machine are named first."""
        from oomph.rehearsing.models_by_name import find, names
        from oomph.sensing.catalog import all_models, find_by_nvml_name

        seen = ((one.device.name, one.device.total_bytes) for one in sighting.gpus)
        here = (find_by_nvml_name(name, size) for name, size in seen if name)
        models = [find(name) for name in names()]
        return {
            "models": [
                {
                    "name": model.name,
                    "num_parameters": model.num_parameters,
                    "most_tokens": None if model.task == "images" else model.most_positions,
                    "is_of_images": model.task == "images",
                }
                for model in models
            ],
            "workloads": sorted(self._workloads()),
            "directory": None if self._directory is None else str(self._directory),
            "gpus": [
                {"name": gpu.name, "title": gpu.title, "memory_bytes": gpu.memory_bytes}
                for gpu in all_models()
            ],
            "here": list(dict.fromkeys(gpu.name for gpu in here if gpu)),
        }

    def question(self, asked: Mapping[str, str]) -> Question:
        """Return the question of a request. Raises UsageError."""
        from oomph.sensing.catalog import find

        strange = [name for name in asked if name not in _NAMES]
        if strange:
            raise UsageError(f"nothing is called {strange[0]!r:.40} here")
        model, workload = asked.get("model") or None, asked.get("workload") or None
        if (model is None) == (workload is None):
            raise UsageError(
                "it is not said what to train",
                attempt="one of: a model by its name, a workload in a file",
            )
        gpu = find(asked.get("gpu", "")[:100]).model.name
        batch_size, seq_len, max_gpus = (_number(asked, name) for name in _LARGEST)
        if model is not None:
            self._check_model(model, seq_len)
        elif seq_len is not None:
            raise UsageError(
                "a sequence length goes with a model by name",
                because="a workload has its own",
                attempt="leaving it empty",
            )
        return Question(
            model=model,
            place=None if workload is None else self._place(workload),
            shown=workload or f"hf:{model}",
            gpu=gpu,
            batch_size=batch_size,
            seq_len=seq_len,
            max_gpus=max_gpus or 1,
        )

    def _check_model(self, model: str, seq_len: int | None) -> None:
        from oomph.rehearsing.models_by_name import find, length_of, names

        if model not in names():  # a config.json would be a path
            raise UsageError(f"no model {model!r:.80} is offered here", attempt="one of the list")
        length_of(find(model), seq_len)

    def _place(self, workload: str) -> str:
        if workload not in self._workloads():
            raise UsageError(
                f"there is no workload {workload!r:.200} in the served directory",
                attempt="one of the list; oomph serve --workloads DIRECTORY serves others",
            )
        return f"{self._directory}/{workload}"

    def _workloads(self) -> set[str]:
        """Return the workloads below the directory, as FILE:NAME."""
        found: set[str] = set()
        left_bytes = _MOST_READ_BYTES
        for path in self._files():
            content = _content(path)
            left_bytes -= len(content)
            names = [(one[1] or one[2]).decode() for one in _WORKLOAD.finditer(content)]
            found |= {f"{path.relative_to(self._directory or path)}:{name}" for name in names}
            if left_bytes < 0 or len(found) >= _MOST_WORKLOADS:
                break
        return found

    def _files(self) -> Iterator[Path]:
        """Yield the Python files below the directory, without following links."""
        num_left = _MOST_ENTRIES
        waiting = [] if self._directory is None else [(self._directory, 0)]
        while waiting:
            directory, depth = waiting.pop(0)
            try:
                entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
            except OSError:  # deleted meanwhile, or not ours to read
                continue
            for entry in entries:
                num_left -= 1
                if num_left < 0:
                    return
                if entry.name.startswith(".") or entry.name in _SKIPPED:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    is_environment = Path(entry.path, "pyvenv.cfg").exists()
                    if depth < _MOST_DEPTH and not is_environment:
                        waiting.append((Path(entry.path), depth + 1))
                elif entry.name.endswith(".py") and entry.is_file(follow_symlinks=False):
                    yield Path(entry.path)


def _content(path: Path) -> bytes:
    """Return a file's text, or nothing if it is too large or cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE_BYTES + 1)
    except OSError:
        return b""
    return content if len(content) <= _LARGEST_FILE_BYTES else b""


def _number(asked: Mapping[str, str], name: str) -> int | None:
    text, most = asked.get(name, ""), _LARGEST[name]
    if not text:
        return None
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
    if not is_number or not 1 <= int(text) <= most:
        called = name.replace("_", " ")
        raise UsageError(f"{text!r:.40} is no {called}", attempt=f"a number from 1 to {most:,}")
    return int(text)

"""The texts of edited files -> a process that reads them in place of what is on the disk.

So a patch is tried without writing to the user's files: Python imports and runs the edited text,
and what opens such a file for reading gets it, too (a YAML file, for instance). It holds for the
whole process, which is thrown away.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import linecache
import os
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

from oomph.pretending.patches import put, wrap


def read_instead(edited: Sequence[tuple[str, str]]) -> None:
    """Let this process read these texts, by the path of their files."""
    if not edited:
        return
    texts = {os.path.realpath(path): text for path, text in edited}
    _patch_open(texts)
    _patch_import(texts)
    for path, text in edited:  # what shows or parses source lines must find the edited ones
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)


def _patch_open(texts: Mapping[str, str]) -> None:
    true_open, true_open_code = io.open, io.open_code

    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        text = None if set(mode) & set("wax+") else _text_of(texts, file)
        if text is None:
            return true_open(file, mode, *args, **kwargs)
        return io.BytesIO(text.encode()) if "b" in mode else io.StringIO(text, newline=None)

    def open_code(path: str) -> Any:
        text = _text_of(texts, path)
        return true_open_code(path) if text is None else io.BytesIO(text.encode())

    put(builtins, open=open_)
    put(io, open=open_, open_code=open_code)


def _patch_import(texts: Mapping[str, str]) -> None:
    """Compile the edited text of a module: Python would take the compiled file beside the old."""

    @wrap("get_code", importlib.machinery.SourceFileLoader)
    def get_code(original: Any, loader: Any, name: str) -> CodeType | None:
        text = _text_of(texts, loader.get_filename(name))
        if text is None:
            found: CodeType | None = original(loader, name)
            return found
        return compile(text.encode(), loader.get_filename(name), "exec", dont_inherit=True)


def _text_of(texts: Mapping[str, str], file: Any) -> str | None:
    if not isinstance(file, str | bytes | os.PathLike):
        return None  # a descriptor
    return texts.get(os.path.realpath(os.fsdecode(file)))

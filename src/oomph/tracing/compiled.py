"""torch.compile -> the same, not compiled: what its kernels would keep is unknown.

Models and functions that were compiled before run as they were written, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

COMPILE = "torch.compile: rehearsed without it; a compiled model takes other memory, mostly less"


def pass_over(note: Callable[[str], None]) -> None:
    """Patch torch.compile in this process; `note` is told when it is used."""

    def compiled(model: Any = None, *_: Any, **kwargs: Any) -> Any:
        if model is None:
            return lambda function: compiled(function, **kwargs)
        if isinstance(model, FunctionType):
            return _noting_calls(model, note)
        note(COMPILE)
        return model

    module: Any = torch.nn.Module
    vars(torch)["compile"] = compiled
    module.compile = lambda *_, **__: note(COMPILE)
    compiler: Any = torch.compiler
    compiler.set_stance("force_eager")
    compiler.cudagraph_mark_step_begin = lambda: None  # of graphs that only a compiled model has


def _noting_calls(function: Any, note: Callable[[str], None]) -> Any:
    """Libraries compile functions while they are imported: it matters where one is called."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        note(COMPILE)
        return function(*args, **kwargs)

    return called


def note_if_compiled(model: Any, note: Callable[[str], None]) -> None:
    """A model that was compiled where nothing was patched yet."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        note(COMPILE)

"""In each rank that `oomph launch` starts, once it has imported torch: its error, and its steps.

A rank writes down the exception that ends it, dies with torchrun, and keeps a diary of its steps
and its waits for data, unless its script does so with `oomph.watching()`. The script is unchanged.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from oomph.launching.failures import RankError, write_error
from oomph.monitoring.in_script import Watching
from oomph.monitoring.recording import say
from oomph.sensing.live import number_in
from oomph.sensing.ownership import RUN_DIRECTORY

AGENT = "OOMPH_AGENT"  # torchrun's process, whose direct children are the ranks
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG, prctl(2)


def watch_this_process() -> None:
    """Watch this process if it is a rank: not torchrun itself, and no child of a rank."""
    directory, rank = os.environ.get(RUN_DIRECTORY), number_in(os.environ, "RANK")
    if directory is None or rank is None or "LOCAL_RANK" not in os.environ:
        return
    agent = number_in(os.environ, AGENT)
    if agent is not None and not _is_child_of(agent):
        return
    if agent is None and number_in(os.environ, _WATCHED) is not None:
        return  # a child of a rank, under the user's own torchrun
    os.environ[_WATCHED] = str(os.getpid())
    try:
        _note_error(Path(directory), rank)
        _Steps().begin()
    except Exception as error:  # noqa: BLE001 - the training goes on, whatever fails here
        say(f"rank {rank} keeps no diary ({type(error).__name__}: {error})")


_WATCHED = "OOMPH_WATCHED_RANK"  # the process of the rank, for its children


def _is_child_of(agent: int) -> bool:
    """Return whether torchrun started this process, which then dies with it."""
    with contextlib.suppress(OSError, AttributeError):  # no Linux
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0)
    return os.getppid() == agent


# ---- the exception that ends this rank -----------------------------------------------------------


def _note_error(directory: Path, rank: int) -> None:
    """Write the uncaught exception, as soon as Python has it."""
    before, pid = sys.excepthook, os.getpid()
    path = directory / f"error-{rank}.json"
    with contextlib.suppress(OSError):  # of an earlier attempt, which torchrun restarted
        path.unlink(missing_ok=True)

    def note(error: BaseException) -> None:
        if os.getpid() == pid and not path.exists():
            said = "".join(traceback.format_exception_only(error)).strip()
            text = "".join(traceback.format_exception(error))
            with contextlib.suppress(OSError):  # a full disk: torchrun still tells which rank
                write_error(directory, RankError(rank, time.monotonic(), said, text))

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            note(error)
        before(kind, error, trace)

    def note_at_exit() -> None:
        """Note it late, if a library has replaced the hook."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if isinstance(error, Exception):
            note(error)

    sys.excepthook = hook
    atexit.register(note_at_exit)


# ---- its steps -----------------------------------------------------------------------------------


class _Steps:
    """Steps of the first optimizer that steps, and the waits for the DataLoader in between."""

    def __init__(self) -> None:
        self._watching: Watching | None = None
        self._optimizer: int | None = None
        self._pid = os.getpid()

    def begin(self) -> None:
        """Follow every optimizer of torch and every DataLoader from now on."""
        # torch is complete when this runs: it follows the import of torch.
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from torch.utils.data import dataloader

        register_optimizer_step_post_hook(self._step)
        base = dataloader._BaseDataLoaderIter
        base.__next__ = self._timed(base.__next__)  # type: ignore[method-assign, assignment]

    def _step(self, optimizer: Any, *_: object) -> None:
        if os.getpid() != self._pid:
            return
        if self._optimizer is None:
            self._optimizer = id(optimizer)
            if Watching.current() is None:  # else the script reports its steps itself
                self._watching = Watching(prints=False).start()
        if self._watching is not None and id(optimizer) == self._optimizer:
            self._watching.step()

    def _timed(self, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(loader: Any) -> Any:
            watching = self._watching
            if watching is None or os.getpid() != self._pid:
                return fetch(loader)
            began = time.monotonic()
            batch = fetch(loader)
            watching.waited(began, time.monotonic(), batch)
            return batch

        return timed

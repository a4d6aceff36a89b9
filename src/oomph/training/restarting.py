"""A step that cannot be recovered in place -> a file with a smaller micro-batch for the next start.

A process that has to end says how far it had come down. `torchrun --max-restarts` starts all of
them again; each finds the file and begins with the smaller micro-batch, at the last checkpoint.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from oomph.errors import OomphError, UsageError
from oomph.store import check_writable, write_whole

HOW = (
    "starting again from the last checkpoint with a smaller micro-batch: restart_file= and"
    " torchrun --max-restarts do that by themselves (docs/training.md)"
)


class NotRecovered(OomphError):
    """This process cannot go on after it ran out of memory: all have to start again."""


class RestartFile:
    """The largest micro-batch that the next start may try, on a disk that all ranks share."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._path = None if path is None else Path(path)
        if self._path is not None:
            check_writable(self._path)

    def micro_batch(self) -> int | None:
        """Return the largest micro-batch to try; None if no process has noted one."""
        if self._path is None or not self._path.exists():
            return None
        try:
            noted = json.loads(self._path.read_text())["micro_batch"]
        except (ValueError, TypeError, KeyError) as error:
            raise _no_restart_file(self._path, f"{type(error).__name__}: {error}") from error
        if not isinstance(noted, int) or noted < 1:
            raise _no_restart_file(self._path, f"its micro_batch is {noted!r:.40}")
        return noted

    def note(self, failed: int) -> None:
        """Note half of what failed, unless another rank has noted less."""
        if self._path is None or failed < 1:
            return
        known = self.micro_batch()
        smaller = max(failed // 2, 1)
        if known is None or smaller < known:
            write_whole(self._path, json.dumps({"micro_batch": smaller}))


def _no_restart_file(path: Path, because: str) -> UsageError:
    return UsageError(
        f"{path} is not a restart file of a Stepper",
        because=because,
        attempt="deleting it, or another restart_file=",
    )

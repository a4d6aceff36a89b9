"""Lines -> files that only grow: written each second, never waited for, never the end of a run.

What cannot be written (a full disk, a limit, a directory that is gone) is kept for the next try,
up to a limit. A line that was cut off goes on where it stopped.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

MOST_PENDING_BYTES = 4 << 20  # of one file; what comes after that is lost


@dataclass(slots=True, eq=False)
class Appender:
    """One file that lines are appended to."""

    path: Path
    header: str = ""  # the first line
    problem: str | None = None  # why the last try failed
    num_lost: int = 0
    _pending: bytearray = field(default_factory=bytearray)
    _file: int | None = None
    _has_begun: bool = False

    def add(self, line: str) -> None:
        """A line for the next `flush`."""
        if len(self._pending) > MOST_PENDING_BYTES:
            self.num_lost += 1
            return
        if not self._has_begun:
            self._has_begun = True
            self._pending += self.header.encode()
        self._pending += line.encode()

    def flush(self) -> bool:
        """Write what is pending; False if something of it is left."""
        try:
            if self._pending and self._file is None:
                self._open()
            while self._pending and self._file is not None:
                written = os.write(self._file, self._pending)
                del self._pending[:written]
        except OSError as error:
            self.problem = error.strerror or str(error)
            return False
        return True

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self.path, flags, 0o600)

    def pending(self) -> bytes:
        """What no file has yet."""
        return bytes(self._pending)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None

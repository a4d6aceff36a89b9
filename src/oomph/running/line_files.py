"""A file that somebody may still be writing, or have made to hurt us -> its whole lines.

Only a regular file is opened; a line that is too long is skipped in pieces and never held; and
all files of one run together may be so large and no larger.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from oomph.running.run_lines import LONGEST_LINE_BYTES

# Eight GPUs leave about 60 MB, however long they are watched.
MOST_BYTES = 1 << 29


@dataclass(slots=True)
class Complaints:
    """What could not be read, told once for each file."""

    left_bytes: int = MOST_BYTES
    _counts: dict[str, int] = field(default_factory=dict)
    _reasons: dict[str, str] = field(default_factory=dict)

    def add(self, file: str, reason: str) -> None:
        self._counts[file] = self._counts.get(file, 0) + 1
        self._reasons.setdefault(file, reason)

    def told(self) -> list[str]:
        """A sentence a file."""
        return [
            f"{count} {'line' if count == 1 else 'lines'} of {file[:80]} left out:"
            f" {self._reasons[file][:200]}"
            for file, count in self._counts.items()
        ]


def whole_lines(path: Path, complaints: Complaints, unwritten: bytes = b"") -> Iterator[bytes]:
    """The lines of a file, and those that its writer could not write yet. A torn end is no line."""
    torn = b""
    try:
        file = _open(path)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            complaints.add(path.name, error.strerror or str(error))
    else:
        with file:
            for line in _read(file, path.name, complaints):
                if line.endswith(b"\n"):
                    yield line
                else:
                    torn = line
    yield from (torn + unwritten).splitlines(keepends=True) if unwritten else ()


def _open(path: Path) -> BinaryIO:
    # Without O_NONBLOCK a pipe would be waited for, before anybody can see that it is one.
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(number, "rb")
    if not stat.S_ISREG(os.fstat(number).st_mode):
        file.close()
        raise OSError(0, "it is no regular file")
    return file


def _read(file: BinaryIO, name: str, complaints: Complaints) -> Iterator[bytes]:
    while line := file.readline(LONGEST_LINE_BYTES):
        complaints.left_bytes -= len(line)
        if complaints.left_bytes < 0:
            complaints.add(name, f"a run has no more than {MOST_BYTES} bytes")
            return
        if line.endswith(b"\n") or len(line) < LONGEST_LINE_BYTES:
            yield line
            continue
        complaints.add(name, f"it is longer than {LONGEST_LINE_BYTES} bytes")
        while line and not line.endswith(b"\n"):
            line = file.readline(LONGEST_LINE_BYTES)
            complaints.left_bytes -= len(line)

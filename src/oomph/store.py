"""A path and its content -> a file on the disk, whole or not at all.

Long work asks `check_writable` before it begins, so that nobody waits minutes for an answer that
then has no place to go.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from oomph.errors import UsageError


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise UsageError if `write_whole` could not write there."""
    target = Path(path)
    if target.is_dir():
        raise _unwritable(target, "it is a directory")
    if not target.parent.is_dir():
        raise _unwritable(target, f"there is no directory {target.parent}")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise _unwritable(target, f"you may not write to {target.parent}")


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write beside the place first, then move: whoever opens it sees the old file or the new one.

    Raises UsageError.
    """
    target = Path(path)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(target)
    except OSError as error:
        raise _unwritable(target, error.strerror or str(error)) from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()


def _unwritable(path: Path, because: str) -> UsageError:
    return UsageError(
        f"{path} cannot be written",
        because=because,
        attempt="a file in a directory that exists and is yours",
    )

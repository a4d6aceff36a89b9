"""A path and its content -> a file on disk, complete or not at all; and the store of results.

Long work calls `check_writable` before it begins, so that no answer is lost after minutes because
it cannot be written. Rehearsals are kept in `Store`, under a digest of everything that decides
them.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomph.errors import UsageError

# An entry has kilobytes to megabytes. Judgement: a file near this size was not written by oomph, or
# would take longer to read than to make again.
_LARGEST_ENTRY_BYTES = 256 << 20
_GONE = ""  # instead of a file's hash
# The packages whose code decides what a rehearsal finds.
_DECIDING_ROOMS = ("records", "predicting", "tricks", "sandbox", "pretending", "rehearsing")


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
    """Write a file that the user asked for, completely or not at all. Raises UsageError."""
    try:
        replace_file(path, text)
    except OSError as error:
        raise _unwritable(Path(path), error.strerror or str(error)) from error


def replace_file(
    path: str | os.PathLike[str], content: str | bytes, *, permissions: int = 0o666
) -> None:
    """Write to a scratch file, then rename: a reader sees the old or the new. Raises OSError.

    `permissions` are those of a new file, before the umask.
    """
    target = Path(path)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    written = content.encode() if isinstance(content, str) else content
    # No link: anyone who can write to the directory could redirect the file with one.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(scratch, flags, permissions), "wb") as file:
            file.write(written)
        scratch.replace(target)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()


def _unwritable(path: Path, because: str) -> UsageError:
    return UsageError(
        f"{path} cannot be written",
        because=because,
        attempt="a file in a directory that exists and is yours",
    )


# ---- results of earlier work ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Store:
    """Results of one kind, each in a file named by a digest of everything that decides it.

    An unreadable entry is None and is made again; an unwritable one is not kept. Neither stops an
    answer.
    """

    kind: str
    most_entries: int  # beyond this, the oldest are deleted

    @property
    def directory(self) -> Path:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(base) / "oomph" / self.kind

    def read(self, name: str) -> bytes | None:
        try:
            path = self.directory / name
            is_small = path.stat().st_size <= _LARGEST_ENTRY_BYTES
            return path.read_bytes() if is_small else None
        except OSError:
            return None

    def write(self, name: str, content: bytes) -> None:
        if len(content) > _LARGEST_ENTRY_BYTES:
            return
        with contextlib.suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            replace_file(self.directory / name, content)
            entries = sorted(self.directory.iterdir(), key=lambda path: path.stat().st_mtime)
            for path in entries[: -self.most_entries]:
                path.unlink(missing_ok=True)

    def read_json(self, name: str) -> Any:
        """Return what `write_json` wrote; None also if it is damaged."""
        content = self.read(name)
        try:
            return None if content is None else json.loads(gzip.decompress(content))
        except (OSError, EOFError, ValueError, RecursionError, zlib.error):
            return None

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, gzip.compress(json.dumps(value).encode(), compresslevel=1))


def digest(*decided_by: Any) -> str:
    """Return a name for everything that decides a result, as far as JSON can write it."""
    return hashlib.sha256(json.dumps(decided_by).encode()).hexdigest()[:32]


def surroundings() -> tuple[Any, ...]:
    """Return what decides every rehearsal: oomph's own code, the Python, and its packages.

    Packages are identified by name and version, including those in the user's own directory.
    """
    found = (name for place in sys.path if Path(place).is_dir() for name in Path(place).iterdir())
    packages = sorted(str(path) for path in found if path.suffix in (".dist-info", ".egg-info"))
    return _own_code(), sys.version, packages


@functools.cache
def _own_code() -> tuple[str, ...]:
    rooms = (Path(__file__).parent / name for name in _DECIDING_ROOMS)
    return tuple(_hashes(sorted(str(path) for room in rooms for path in room.rglob("*.py"))))


def as_they_are(files: Iterable[str]) -> dict[str, list[str]]:
    """Return files with the hashes of their content, to store with a result."""
    names = sorted(set(files))
    return {"files": names, "hashes": _hashes(names)}


def are_unchanged(entry: Mapping[str, Any]) -> bool:
    """Return whether all files of an entry still exist with the same content."""
    try:
        found = _hashes(entry["files"])
        return found == entry["hashes"] and _GONE not in found
    except (KeyError, TypeError, ValueError):
        return False


def _hashes(files: Sequence[str]) -> list[str]:
    return list(map(_hash, files))


def _hash(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return _GONE

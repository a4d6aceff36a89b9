"""Where rehearsals keep what they have found, and what decides whether it is still true."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "oomph" / "traces"


def hashes_of_the_tracer() -> list[str]:
    """Of what decides a trace of ours: the tracer, and what puts the tricks on."""
    return hashes_of_rooms("records", "tracing", "training")


def hashes_of_rooms(*names: str) -> list[str]:
    rooms = Path(__file__).parents[1]
    files = (path for name in names for path in (rooms / name).rglob("*.py"))
    return hashes(sorted(map(str, files)))


def hashes(files: Sequence[str]) -> list[str]:
    return [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files]


def write(path: Path, content: bytes) -> bool:
    """Write a file whole or not at all. A cache that cannot be written is no error."""
    scratch = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(content)
        scratch.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink()
        return False
    return True


def drop_oldest(directory: Path, most: int) -> None:
    """Keep the newest entries of a directory of the cache."""
    with contextlib.suppress(OSError):
        entries = sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in entries[:-most]:
            path.unlink(missing_ok=True)

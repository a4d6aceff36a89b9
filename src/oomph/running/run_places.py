"""Where runs are kept, and what one of them is called."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from oomph.errors import UsageError

RUNS = "OOMPH_RUNS"  # the environment variable that names another place
META = "meta.json"


def runs_directory() -> Path:
    """OOMPH_RUNS, or the place for what a program keeps between its runs."""
    if os.environ.get(RUNS):
        return Path(os.environ[RUNS])
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "oomph" / "runs"


def new_id(now: float, end: str | None = None) -> str:
    """By time, so that names sort as runs do; two runs of one second differ at the end."""
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + f"-{end or os.urandom(2).hex()}"


def make_directory(run_id: str) -> Path:
    """A directory of its own, which nobody else may read: command lines may hold secrets.

    Where it cannot be made, the diary will say so once it writes.
    """
    directory = (runs_directory() / run_id).absolute()
    with contextlib.suppress(OSError):
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
    return directory


def newest_first() -> Iterator[Path]:
    """Those that are kept. Who stops early has not looked at the others."""
    yield from (path for path in _named(lambda _: True) if (path / META).is_file())


def run_directories() -> list[Path]:
    """All that are kept, the oldest first."""
    return list(newest_first())[::-1]


def directory_of(run_id: str) -> Path | None:
    """Of a run that is kept; the id is no path."""
    found = (path for path in _named(lambda known: known == run_id) if (path / META).is_file())
    return next(found, None)


def find_directory(name: str) -> Path:
    """The run of that id, of the beginning or the end of one, "last", or of a path."""
    given = Path(name)
    if (given / META).is_file():
        return given
    if name == "last" and (newest := next(newest_first(), None)):
        return newest
    alike = _named(lambda known: known.startswith(name) or known.endswith(name))
    found = [path for path in alike if (path / META).is_file()]
    exact = [path for path in found if path.name == name]
    if name and len(exact or found) == 1:
        return (exact or found)[0]
    raise UsageError(
        f"{len(found)} runs are called {name!r:.80}" if found else f"there is no run {name!r:.80}",
        because=f"the runs are in {runs_directory()}",
        attempt="oomph runs, or oomph report last",
    )


def _named(is_wanted: Callable[[str], bool]) -> list[Path]:
    """Of ten thousand, only the names are read."""
    runs = runs_directory()
    try:
        names = os.listdir(runs)  # noqa: PTH208 - no object for each
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [runs / name for name in sorted(filter(is_wanted, names), reverse=True)]

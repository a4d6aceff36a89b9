"""What a script prints -> the last of it, for when it ends itself and only that says why."""

from __future__ import annotations

import sys
from typing import Any

_MOST_KEPT = 2000  # characters
_MOST_TOLD = 300


class LastWords:
    """A stream that is another in everything, and remembers what was written last."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._kept = stream, ""

    def write(self, text: str) -> Any:
        self._kept = (self._kept + text)[-_MOST_KEPT:]
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def told(self) -> str | None:
        """The last line that says something, which a progress bar does not."""
        said = without_bars(self._kept)
        return said[-1].strip()[-_MOST_TOLD:] if said else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        return iter(self._stream)

    def __enter__(self) -> LastWords:
        self._stream.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)


def without_bars(text: str) -> list[str]:
    """The lines that say something, as they are last seen."""
    lines = [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]
    return [line for line in lines if line.strip() and not _is_bar(line.strip())]


def _is_bar(line: str) -> bool:
    """One of tqdm's, `3%|# | 3/100 [...]`, which is drawn once more when its loop is left."""
    return "%|" in line and line.endswith("]")


def listen() -> LastWords:
    """To both streams of the script, which are one here: why it ends, many print."""
    words = LastWords(sys.stderr)
    stream: Any = words
    sys.stdout = sys.stderr = stream
    return words

"""Data -> one HTML file that needs no network: a page of `web/`, with its data put into it.

The pages are built by `make web` and lie in `page/`; a wheel carries them. Whatever a model, a
command or a user is called, it arrives as data: nothing of it is read as HTML or as code.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oomph.errors import OomphError

PAGES = Path(__file__).with_name("page")
_DATA = '"the data of this page"'  # a JSON string, where the data comes
_WORDS = "the words of this page"  # where the text comes that is shown without JavaScript
# A browser ends a script at "</" and reads "<!--" inside it, whatever JSON says.
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def write_page(
    name: str, data: Mapping[str, Any], path: Path | str, *, words: str | None = None
) -> None:
    """Write the page of that name, whole or not at all; `words` are its text without JavaScript."""
    page = _built(name)
    if words is not None:  # first: escaped, they cannot look like the place of the data
        page = _put(page, _WORDS, _as_text(words), name)
    page = _put(page, _DATA, _as_script(data), name)
    _write_whole(Path(path), page)


def read_parts(name: str, endings: Sequence[str]) -> dict[str, bytes]:
    """The files of a page that is served in parts, by their names. Raises OomphError."""
    try:
        return {f"{name}.{end}": (PAGES / f"{name}.{end}").read_bytes() for end in endings}
    except OSError as error:
        raise _unusable(name, f"{error.filename}: {error.strerror}") from error


def _as_script(data: Mapping[str, Any]) -> str:
    import json

    written = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character, escaped in _UNSAFE.items():
        written = written.replace(character, escaped)
    return written


def _as_text(words: str) -> str:
    import html

    return html.escape(words.encode("utf-8", "replace").decode("utf-8"))  # a lone surrogate


def _put(page: str, place: str, content: str, name: str) -> str:
    if page.count(place) != 1:
        raise _unusable(name, f"it has no one place for {place.strip(chr(34))}")
    return page.replace(place, content)


def _built(name: str) -> str:
    path = PAGES / f"{name}.html"
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _unusable(name, f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _unusable(name: str, because: str) -> OomphError:
    return OomphError(
        f"the page for a {name} is not in this installation",
        because=because,
        attempt="make web, or installing a wheel: it carries the page",
    )


def _write_whole(path: Path, text: str) -> None:
    """Beside its place first, then moved: whoever opens it sees the old page or the new one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise OomphError(
            f"{path} cannot be written",
            because=error.strerror or str(error),
            attempt="--html with a file in a directory that exists and is yours",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()

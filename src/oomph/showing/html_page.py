"""Data -> one HTML file that needs no network: a page of `web/` with its data inserted.

The pages are in `page/`: `make web` builds them from `web/`; git and the wheel contain them. Names
of models, commands and users are inserted as data and never read as HTML or code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oomph.errors import OomphError
from oomph.store import check_writable

PAGES = Path(__file__).with_name("page")
_DATA = '"the data of this page"'  # a JSON string, replaced by the data
_FRAME_HEIGHT = "42em"  # of a page in a notebook; judgement: the answer and the table below it
_WORDS = "the words of this page"  # replaced by the text shown without JavaScript
# A browser ends a script at "</" and interprets "<!--" inside it, regardless of JSON.
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def check_page(name: str, path: Path | str) -> None:
    """Raise OomphError if the page of that name could not be written to `path`.

    Call it before the work that fills the page, which may take minutes.
    """
    _built(name)
    check_writable(path)


def filled_page(name: str, data: Mapping[str, Any], *, words: str | None = None) -> str:
    """Return the page with its data; `words` is its text without JavaScript."""
    page = _built(name)
    if words is not None:  # first: once escaped, the words cannot contain the data's placeholder
        page = _put(page, _WORDS, _as_text(words), name)
    return _put(page, _DATA, _as_script(data), name)


def inline(page: str) -> str:
    """Return a page as an element of a notebook, in a frame that sees nothing of the notebook."""
    # JSON is full of double quotes: between single ones they stay as short as they are.
    written = page.replace("&", "&amp;").replace("'", "&#39;")
    style = f"width: 100%; height: {_FRAME_HEIGHT}; border: 0; resize: vertical"
    return f"<iframe srcdoc='{written}' sandbox='allow-scripts' style='{style}'></iframe>"


def read_parts(name: str, endings: Sequence[str]) -> dict[str, bytes]:
    """Return the files of a page that is served in parts, by name. Raises OomphError."""
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

    return html.escape(words.encode("utf-8", "replace").decode("utf-8"))  # for lone surrogates


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
        attempt="installing oomph again (pip install --force-reinstall), or `make web` in a clone",
    )

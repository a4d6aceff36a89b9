"""Plans -> one HTML file that needs no network: the page of `web/`, with the plans put into it.

The page is built by `make web` and lies in `page/`; a wheel carries it. Whatever a model or a
module is called, it arrives as data: nothing of it is read as HTML or as code.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oomph.errors import OomphError
from oomph.records.plan import Plans, Timeline
from oomph.records.stored import SCHEMA, to_jsonable

_PAGE = Path(__file__).with_name("page") / "plan.html"
_PLACE = '"the data of this page"'  # a JSON string, where the data comes
_DIGITS = 6  # of a position: a step has fewer events than a million
# A browser ends a script at "</" and reads "<!--" inside it, whatever JSON says.
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def write_plan_page(
    plans: Plans, timelines: Sequence[Timeline | None], code: Sequence[str], path: Path | str
) -> None:
    """Write the page, whole or not at all. `timelines` and `code` are those of each plan."""
    _write_whole(Path(path), _page_with(_data(plans, timelines, code)))


def _data(
    plans: Plans, timelines: Sequence[Timeline | None], code: Sequence[str]
) -> dict[str, Any]:
    """What the page is given: the record, and with each plan its timeline and its code."""
    from oomph import __version__

    drawn = [
        {**to_jsonable(plan), "timeline": _drawable(timeline), "code": text}
        for plan, timeline, text in zip(plans.plans, timelines, code, strict=True)
    ]
    return {"schema": SCHEMA, "version": __version__, **to_jsonable(plans), "plans": drawn}


def _drawable(timeline: Timeline | None) -> dict[str, Any] | None:
    """The timeline with each op named once: there are far fewer names than positions."""
    if timeline is None:
        return None
    names = {op: number for number, op in enumerate(dict.fromkeys(timeline.ops))}
    return {
        **to_jsonable(timeline),
        "positions": [round(position, _DIGITS) for position in timeline.positions],
        "phases": [[round(position, _DIGITS), phase] for position, phase in timeline.phases],
        "ops": [names[op] for op in timeline.ops],
        "op_names": list(names),
    }


def _page_with(data: dict[str, Any]) -> str:
    import json

    written = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character, escaped in _UNSAFE.items():
        written = written.replace(character, escaped)
    page = _built_page()
    if page.count(_PLACE) != 1:
        raise _unusable("it has no one place for the data")
    return page.replace(_PLACE, written)


def _built_page() -> str:
    try:
        return _PAGE.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _unusable(f"{_PAGE}: {getattr(error, 'strerror', None) or error}") from error


def _unusable(because: str) -> OomphError:
    return OomphError(
        "the page for plans is not in this installation",
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

"""A record -> what a notebook shows of it, once `verbs/notebook.py` has said how to draw its kind.

Records know no pages, so the drawing is registered from above.
"""

from __future__ import annotations

from functools import singledispatch


@singledispatch
def html_of(record: object) -> str | None:
    """Return the drawing; None if there is none for its kind: the notebook then shows its text."""
    del record
    return None

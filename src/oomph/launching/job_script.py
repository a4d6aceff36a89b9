"""Head, settings and commands -> the text of a job script.

Scheduler options are written as comments, where nothing can be quoted, so values with anything but
plain characters are refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from oomph.errors import UsageError

_PLAIN = re.compile(r"[A-Za-z0-9_.:@+%/][A-Za-z0-9_.:@+%/-]*")


def job_script(
    head: Sequence[str], what: str, exports: Mapping[str, str], run: Sequence[str]
) -> str:
    """Return a bash script: directives, a comment that says what runs, variables, commands."""
    settings = [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    lines = ["#!/bin/bash", *head, f"# {what}", "set -euo pipefail", *settings, *run]
    return "\n".join(lines) + "\n"


def plain(what: str, value: str) -> str:
    """Return a value that can stand in a directive. Raises UsageError."""
    if not _PLAIN.fullmatch(value):
        raise UsageError(
            f"{what}={value!r:.80} cannot stand in a job script",
            because="schedulers read it from a comment, where nothing can be quoted",
            attempt="letters, digits and _ . : @ + % / -",
        )
    return value

"""Calibrations <-> the file that keeps them: $XDG_DATA_HOME/oomph/calibration.json.

One entry for each GPU, driver, torch and CUDA; measuring again replaces it. A home that several
machines share is no trouble: a figure is used only for what it was measured with.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from oomph.errors import Unreadable
from oomph.records.calibration import Calibration, from_jsonable
from oomph.records.stored import SCHEMA, as_json


def path() -> Path:
    """Where they are kept."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "oomph" / "calibration.json"


def kept() -> tuple[Calibration, ...]:
    """All that are kept, the newest last. Raises Unreadable."""
    try:
        stored = json.loads(path().read_text("utf-8"))
        if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
            raise ValueError(f"it is not of schema {SCHEMA}, which this oomph reads")
        found = [from_jsonable(entry) for entry in stored["calibrations"]]
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unreadable(
            f"the calibrations in {path()} cannot be read",
            because=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            attempt="oomph calibrate --forget, then oomph calibrate",
        ) from error
    return tuple(sorted(found, key=lambda calibration: calibration.measured_at))


def keep(calibration: Calibration) -> None:
    """Keep one, in the place of an earlier one for the same."""
    others = tuple(each for each in kept() if each.key != calibration.key)
    _write(as_json({"calibrations": (*others, calibration)}))


def forget() -> bool:
    """Remove the file, readable or not. Was there one?"""
    try:
        path().unlink()
    except FileNotFoundError:
        return False
    return True


def _write(text: str) -> None:
    """Whole or not at all: a reader sees the old file or the new one."""
    target = path()
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        scratch.write_text(text + "\n", "utf-8")
        scratch.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise

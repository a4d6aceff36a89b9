"""The verbs around a plan that was made: load, save, export it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from oomph.exporting.planned import Planned
    from oomph.records.plan import Plan


def load_plan(path: Path | str) -> Planned:
    """Load a plan that was saved with -o or plan.save(). Raises Unreadable."""
    from oomph.exporting.planned import load_plan as load

    return load(path)


def save_plan(plan: Plan, path: Path | str) -> None:
    """Write one plan as plan.json."""
    from oomph.exporting.planned import Planned

    Planned.of(plan).save(path)


def export_of(plan: Plan, target: str, script: str = "", arguments: Sequence[str] = ()) -> str:
    """Return a plan as the settings of a tool, or as "code", in text."""
    from oomph.exporting.planned import Planned

    return Planned.of(plan).exported(target, script or "train.py", arguments)


def trick_names() -> tuple[str, ...]:
    """Return the trick names that `allow` and `forbid` accept."""
    from oomph.tricks.trick import NAMES

    return NAMES

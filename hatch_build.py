"""A build of oomph -> the same, or an error where it would lack the pages of `plan --html`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PAGES = (
    "plan.html",
    "report.html",
    "explain.html",
    "dashboard.html",
    "dashboard.js",
    "dashboard.css",
    "dashboard.svg",
)


class PagesAreThere(BuildHookInterface[Any]):
    """Refuses to build without the pages; git carries them, `make web` builds them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        folder = Path(self.root, "src", "oomph", "showing", "page")
        missing = [name for name in PAGES if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}: run `make web` first")

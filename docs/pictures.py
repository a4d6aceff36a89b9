"""`python -m docs.pictures`: draws the pictures of the README from what the commands print.

The terminal is an SVG made of the command's own output; tests/test_docs.py holds it against the
command. The page is a screenshot in the Chromium of this machine.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

from docs.generate import ROOT, inside

PICTURES = ROOT / "docs" / "pictures"
TERMINAL, PAGE = PICTURES / "plan-terminal.svg", PICTURES / "plan-page.png"
EXAMPLE = "plan examples/small_gpt.py:workload --gpu rtx4090"
LARGEST_BYTES = 200_000
_COLUMNS, _MOST_LINES = 100, 34
_CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")


def terminal() -> str:
    """Return the picture of a terminal in which the example was asked."""
    from rich.console import Console
    from rich.text import Text

    lines = printed().splitlines()
    shown = [f"$ oomph {EXAMPLE}", *lines[:_MOST_LINES]]
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in shown:
        console.print(Text.from_ansi(line), soft_wrap=True)
    drawn = console.export_svg(title="oomph plan", unique_id="oomph")
    return "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"


def printed() -> str:
    """Return what the example prints on a terminal with colours."""
    from oomph.cli import main

    output = io.StringIO()
    colours = {"COLUMNS": str(_COLUMNS), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    with inside(ROOT), mock.patch.dict(os.environ, colours), contextlib.redirect_stdout(output):
        os.environ.pop("NO_COLOR", None)
        main(EXAMPLE.split())
    return output.getvalue()


def draw_page(path: Path) -> None:
    """Write a screenshot of the page of plans."""
    from playwright.sync_api import sync_playwright

    from oomph.cli import main

    chromium = next(filter(None, map(shutil.which, _CHROMIUMS)), None)
    if chromium is None:
        raise SystemExit("there is no Chromium here: make test-web installs Debian's")
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        page_file = Path(directory) / "plan.html"
        with inside(ROOT), contextlib.redirect_stdout(io.StringIO()):
            main([*EXAMPLE.split(), "--html", str(page_file)])
        browser = playwright.chromium.launch(executable_path=chromium, args=as_root)
        page = browser.new_page(viewport={"width": 1180, "height": 1040})
        page.goto(page_file.as_uri())
        page.wait_for_timeout(500)
        page.screenshot(path=str(path))
        browser.close()


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    TERMINAL.write_text(terminal(), "utf-8")
    draw_page(PAGE)
    for path in (TERMINAL, PAGE):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()

"""The pages, opened in the Chromium that is on this machine. None is downloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from oomph.explaining.diagnose import diagnose
from oomph.records.plan import Plans, Timeline
from oomph.records.run import Run
from oomph.showing.plan import write_plan_page
from oomph.showing.report import write_report_page
from web import report_sample
from web.sample import sample

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Nothing but the page may ask for anything.
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("there is no Chromium here: make test-web installs Debian's")
    # Chromium's sandbox refuses to run as root.
    as_root = ("--no-sandbox",) if os.geteuid() == 0 else ()
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=[*QUIET, *as_root])
        yield running
        running.close()


@dataclass
class Opened:
    """A page, and what went wrong in it."""

    page: Page
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


Open = Callable[..., Page]
OpenReport = Callable[..., Page]
OpenFile = Callable[..., Page]


@pytest.fixture
def open_file(browser: Browser) -> Iterator[OpenFile]:
    """Open a page; at the end, it must have had no error and asked for nothing."""
    opened: list[Opened] = []

    def enter(path: Path, *, width: int = 1280, address: str = "", **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        one = Opened(context.new_page())
        one.page.on("console", lambda message: one.problems.append(message.text))
        one.page.on("pageerror", lambda error: one.problems.append(str(error)))
        context.on("request", lambda request: one.requests.append(request.url))
        one.page.goto(path.as_uri() + address)
        opened.append(one)
        return one.page

    yield enter
    for one in opened:
        one.page.context.close()
        assert one.problems == []
        assert [url for url in one.requests if not url.startswith(("file://", "data:"))] == []


@pytest.fixture
def open_page(open_file: OpenFile, tmp_path: Path) -> Open:
    """Open a page of plans."""

    def enter(given: tuple[Plans, list[Timeline], list[str]] | None = None, **options: Any) -> Page:
        path = tmp_path / "plan.html"
        write_plan_page(*(given or sample()), path)
        return open_file(path, **options)

    return enter


@pytest.fixture
def open_report(open_file: OpenFile, tmp_path: Path) -> OpenReport:
    """Open the page of a run's report."""

    def enter(run: Run | None = None, **options: Any) -> Page:
        path = tmp_path / "report.html"
        run = run or report_sample.sample()
        write_report_page(diagnose(run), run, path)
        return open_file(path, **options)

    return enter

"""The page of `oomph explain --html` in a real browser; it must log and ask for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page
from snapshots.written import training, write

from oomph.cli import main
from oomph.units import MIB
from web.conftest import OpenFile

HOSTILE = "</script><script>document.title='hacked'</script><img src=x onerror=hacked()>"


def opened(open_file: OpenFile, tmp_path: Path, content: Any, **options: Any) -> Page:
    path = write(tmp_path / "oom.pickle", content)
    assert main(["explain", str(path), "--html", str(tmp_path / "page.html")]) == 0
    return open_file(tmp_path / "page.html", **options)


@pytest.fixture
def content() -> Any:
    return training(layers=8, free_bytes=500 * MIB).snapshot()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_is_drawn(
    open_file: OpenFile, tmp_path: Path, content: Any, scheme: str
) -> None:
    page = opened(open_file, tmp_path, content, color_scheme=scheme)
    assert page.locator("h1").inner_text().startswith("too much at once")
    titles = page.locator("h2").all_inner_texts()
    assert titles[:4] == [
        "Memory over the recording",
        "Where it lay",
        "Who held it",
        "Who held it, by call",
    ]
    shapes = page.locator("svg.drawn").evaluate_all(
        "all => all.map((s) => s.querySelectorAll('path, rect').length)"
    )
    assert len(shapes) == 4
    assert min(shapes) >= 3


def test_the_request_is_drawn_to_scale_beside_the_largest_hole(
    open_file: OpenFile, tmp_path: Path, content: Any
) -> None:
    page = opened(open_file, tmp_path, content)
    asked, hole = (page.locator(f".scale b.{kind}").bounding_box() for kind in ("asked", "hole"))
    assert asked
    assert hole
    assert asked["width"] > hole["width"] > 0


def test_a_narrow_window_has_no_second_scroll_bar(
    open_file: OpenFile, tmp_path: Path, content: Any
) -> None:
    page = opened(open_file, tmp_path, content, width=400)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_names_from_the_file_are_never_read_as_html(
    open_file: OpenFile, tmp_path: Path, content: Any
) -> None:
    for event in content["device_traces"][0]:
        event["frames"] = [{"filename": HOSTILE + ".py", "line": 1, "name": HOSTILE}]
    page = opened(open_file, tmp_path, content)
    assert page.title().startswith("too much at once")
    assert page.locator("img").count() == 0

"""The page of `oomph explain --html` in a real browser; it must log and ask for nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
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


# ---- zooming and moving --------------------------------------------------------------------------

TIMELINE, SEGMENTS = 0, 1


class Zoomed:
    """One of the charts that zoom."""

    def __init__(self, page: Page, number: int) -> None:
        self.page = page
        self._chart = page.locator(".zoomable").nth(number)
        self.stage = self._chart.locator(".stage")

    def range(self) -> str:
        return self._chart.locator(".range").inner_text()

    def reading(self) -> str:
        return self._chart.locator(".read").inner_text()

    def press(self, *keys: str) -> None:
        self.stage.focus()
        for key in keys:
            self.page.keyboard.press(key)

    def click(self, name: str) -> None:
        self._chart.get_by_role("button", name=name, exact=True).click()

    def spot(self, x: float, y: float) -> tuple[float, float]:
        box = self.stage.bounding_box()
        assert box
        return box["x"] + x * box["width"], box["y"] + y * box["height"]

    def waits_for(self, pattern: str) -> str:
        expect(self._chart.locator(".range")).to_have_text(re.compile(pattern))
        return self.range()

    def waits_for_another(self, before: str) -> str:
        expect(self._chart.locator(".range")).not_to_have_text(before)
        return self.range()

    def events(self) -> tuple[int, int]:
        """The first and the last event of the timeline's view."""
        found = re.match(r"Events ([\d,]+) to ([\d,]+) of", self.waits_for("^Events"))
        assert found
        first, last = (int(text.replace(",", "")) for text in found.groups())
        return first, last


@pytest.mark.parametrize("number", [TIMELINE, SEGMENTS])
def test_the_keyboard_zooms_moves_and_goes_back_to_the_whole(
    open_file: OpenFile, tmp_path: Path, content: Any, number: int
) -> None:
    chart = Zoomed(opened(open_file, tmp_path, content), number)
    whole = chart.waits_for("^All ")
    shapes = chart.stage.locator("svg").inner_html()
    chart.press("+", "+")
    closer = chart.waits_for_another(whole)
    assert chart.stage.locator("svg").inner_html() != shapes
    chart.press("ArrowLeft", "Escape")
    chart.waits_for(f"^{re.escape(whole)}$")
    assert chart.stage.locator("svg").inner_html() == shapes
    assert closer != whole


@pytest.mark.parametrize("number", [TIMELINE, SEGMENTS])
def test_buttons_do_what_the_keyboard_does(
    open_file: OpenFile, tmp_path: Path, content: Any, number: int
) -> None:
    chart = Zoomed(opened(open_file, tmp_path, content), number)
    whole = chart.waits_for("^All ")
    chart.click("zoom in")
    chart.waits_for_another(whole)
    chart.click("move right")
    chart.click("zoom out")
    chart.waits_for(f"^{re.escape(whole)}$")
    chart.click("zoom in")
    chart.waits_for_another(whole)
    chart.click(("whole recording", "all segments")[number])
    chart.waits_for(f"^{re.escape(whole)}$")


def test_the_wheel_zooms_in_where_the_pointer_is_a_drag_moves_and_a_double_click_resets(
    open_file: OpenFile, tmp_path: Path, content: Any
) -> None:
    page = opened(open_file, tmp_path, content)
    chart = Zoomed(page, TIMELINE)
    whole = chart.waits_for("^All ")
    total = content_events(content)
    page.mouse.move(*chart.spot(0.75, 0.5))
    page.mouse.wheel(0, -300)
    first, last = chart.events()
    assert last - first < total - 1
    assert first + 0.75 * (last - first) == pytest.approx(0.75 * total, abs=3)
    page.mouse.down()
    page.mouse.move(*chart.spot(0.95, 0.5), steps=5)
    page.mouse.up()
    chart.waits_for(rf"^Events (?!{first:,} )")
    earlier = chart.events()
    assert earlier[0] < first
    assert earlier[1] - earlier[0] == pytest.approx(last - first, abs=1)
    page.mouse.dblclick(*chart.spot(0.5, 0.5))
    chart.waits_for(f"^{re.escape(whole)}$")


def test_a_wheel_that_cannot_zoom_out_further_scrolls_the_page(
    open_file: OpenFile, tmp_path: Path, content: Any
) -> None:
    page = opened(open_file, tmp_path, content)
    chart = Zoomed(page, TIMELINE)
    whole = chart.waits_for("^All ")
    page.mouse.move(*chart.spot(0.5, 0.5))
    page.mouse.wheel(0, 1200)
    expect(page.locator("h1")).not_to_be_in_viewport()
    assert chart.range() == whole


def test_two_fingers_zoom_and_one_moves(open_file: OpenFile, tmp_path: Path, content: Any) -> None:
    page = opened(open_file, tmp_path, content, width=390, has_touch=True, is_mobile=True)
    chart = Zoomed(page, TIMELINE)
    whole = chart.waits_for("^All ")
    touch = page.context.new_cdp_session(page)

    def fingers(kind: str, *places: float) -> None:
        points = [
            {"x": x, "y": y, "id": number}
            for number, (x, y) in enumerate(chart.spot(place, 0.5) for place in places)
        ]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    fingers("touchStart", 0.4, 0.6)
    for apart in (0.15, 0.2, 0.3, 0.4):
        fingers("touchMove", 0.5 - apart, 0.5 + apart)
    fingers("touchEnd")
    chart.waits_for_another(whole)
    first, last = chart.events()
    assert last - first == pytest.approx(content_events(content) / 4, rel=0.2)
    fingers("touchStart", 0.5)
    for place in (0.6, 0.7, 0.8):
        fingers("touchMove", place)
    fingers("touchEnd")
    chart.waits_for(rf"^Events (?!{first:,} )")
    assert chart.events()[0] < first


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (TIMELINE, r"^Event [\d,]+: .* live \(.*\), .* reserved$"),
        (SEGMENTS, r"^.+: .*B, in segment \d+ of .*B$"),
    ],
)
def test_what_is_under_the_pointer_is_told_in_words(
    open_file: OpenFile, tmp_path: Path, content: Any, number: int, says: str
) -> None:
    chart = Zoomed(opened(open_file, tmp_path, content), number)
    chart.stage.hover()
    assert re.match(says, chart.reading()), chart.reading()


def test_each_event_of_a_short_recording_is_drawn_and_a_long_one_says_what_it_leaves_out(
    open_file: OpenFile, tmp_path: Path
) -> None:
    short = opened(open_file, tmp_path, training(layers=8, free_bytes=500 * MIB).snapshot())
    note = short.locator(".note").first
    assert re.match(r"Each of the [\d,]+ recorded events is drawn", note.inner_text())
    long = training(steps=180, layers=24).snapshot()
    page = opened(open_file, tmp_path, long)
    number = f"{content_events(long):,}"
    said = page.locator(".note").first.inner_text()
    assert said.startswith(f"The recording has {number} events, this page ")
    assert (tmp_path / "page.html").stat().st_size < 1e6
    chart = Zoomed(page, TIMELINE)
    whole = chart.waits_for(f"^All {number} events")
    chart.press(*"+" * 40)
    first, last = chart.events()
    assert last - first <= 12
    chart.press("0")
    chart.waits_for(f"^{re.escape(whole)}$")


def content_events(content: Any) -> int:
    return len(content["device_traces"][0])

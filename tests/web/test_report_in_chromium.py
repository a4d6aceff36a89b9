"""A report in a real browser. Every test also holds that it logged and asked nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from explaining.runs import event, run_of, spans
from playwright.sync_api import Page, expect

from web.conftest import OpenReport
from web.ink import NEARLY
from web.report_sample import sample

SCHEMES = ["light", "dark"]
HOSTILE = "</script><script>document.title='hacked'</script><img src=x onerror=hacked()>\"'&amp;"
CHARTS = ["Kernel-active time", "Memory in use", "Power", "Time of a step, rank 0"]
CHARTS += ["CPUs kept busy"]

# Of each chart, how many pixels are nearly of the colour that its line has in the style sheet.
INK = f"""(names) => [...document.querySelectorAll(".plot canvas")].map(
  (canvas, i) => ({NEARLY})(canvas, names[i]))"""
LINES = ["s-busy", "s-memory", "s-power", "s-step", "s-cpu"]
WHOLE = "document.documentElement.scrollWidth"


def ink(page: Page) -> list[int]:
    counts: list[int] = page.evaluate(INK, LINES)
    return counts


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_chart_is_drawn_in_its_colour(open_report: OpenReport, scheme: str) -> None:
    page = open_report(color_scheme=scheme)
    assert page.locator(".run-chart h3").all_inner_texts() == CHARTS
    counts = ink(page)
    assert len(counts) == 5
    assert min(counts) > 300


def test_the_title_says_whether_memory_sufficed_and_findings_follow(
    open_report: OpenReport,
) -> None:
    page = open_report()
    assert page.locator("h1").inner_text() == ("Did not run out of memory in 25 min; it ended well")
    kinds = page.locator(".finding").evaluate_all("all => all.map((e) => e.dataset.kind)")
    assert kinds == ["no-out-of-memory", "shared-gpu", "input-bound", "phases", "head-room"]
    expect(page.locator("[data-kind='input-bound']")).to_contain_text("both GPUs")
    expect(page.locator("[data-kind='input-bound'] .confidence")).to_have_text("measured")
    top = page.locator(".findings").bounding_box()
    charts = page.locator(".run-charts").bounding_box()
    assert top
    assert charts
    assert top["y"] < charts["y"]


def test_the_time_in_which_the_command_was_halted_is_hatched(open_report: OpenReport) -> None:
    run = sample()
    halted = (event(400, "halted", "SIGTSTP"), event(700, "resumed", "SIGCONT"))
    page = open_report(replace(run, events=(*run.events, *halted)))
    told = page.locator(".run-chart", has_text="Time of a step").locator(".note")
    expect(told).to_contain_text("Hatched: the command was halted")
    hatched: list[int] = page.evaluate(INK, ["line"] * 5)
    plain = open_report()
    assert plain.get_by_text("Hatched").count() == 0
    without: list[int] = plain.evaluate(INK, ["line"] * 5)
    assert all(more > 1.2 * less for more, less in zip(hatched, without, strict=True))


def test_another_gpu_is_chosen_by_its_button(open_report: OpenReport) -> None:
    page = open_report()
    before = page.locator(".tiles").inner_text()
    page.locator(".pill").nth(1).focus()
    page.keyboard.press("Enter")
    assert page.locator(".pill[aria-pressed='true']").inner_text().startswith("GPU 3, rank 1")
    assert page.locator(".tiles").inner_text() != before
    expect(page.locator(".run-charts")).to_contain_text("Time of a step, rank 1")
    expect(page.locator(".tiles")).to_contain_text("3186 steps")  # rank 0 has made 3195
    assert min(ink(page)) > 300


def test_the_mouse_reads_all_charts_at_the_same_time(open_report: OpenReport) -> None:
    page = open_report()
    over = page.locator(".plot .u-over").nth(1)
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] * 600 / 1500, box["y"] + 50)
    readings = page.locator(".at")
    expect(readings.nth(1)).to_contain_text("GiB")
    expect(readings.nth(0)).to_contain_text("10:0")
    expect(readings.nth(0)).to_contain_text("%")
    expect(readings.nth(2)).to_contain_text("W")
    expect(readings.nth(3)).to_contain_text("data")
    page.mouse.move(5, 5)
    expect(readings.nth(1)).to_be_empty()


def test_dragging_zooms_all_charts_and_a_double_click_shows_all_again(
    open_report: OpenReport,
) -> None:
    page = open_report()
    before = ink(page)
    over = page.locator(".plot .u-over").first
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box
    page.mouse.move(box["x"] + 0.10 * box["width"], box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.30 * box["width"], box["y"] + 60, steps=5)
    page.mouse.up()
    page.wait_for_function(f"(was) => ({INK})({LINES!r})[4] !== was", arg=before[4])
    over.dblclick(position={"x": 50, "y": 50})
    page.wait_for_function(f"(was) => ({INK})({LINES!r})[4] === was", arg=before[4])


def test_gaps_are_shaded(open_report: OpenReport) -> None:
    page = open_report()
    assert page.evaluate(INK, ["gap"] * 5)[0] > 1000
    without = open_report(run_of(spans((600, 0.5))))
    assert without.evaluate(INK, ["gap"] * 5)[0] == 0


@pytest.mark.parametrize("width", [320, 400, 768, 1280])
def test_it_is_readable_at_any_width(open_report: OpenReport, width: int) -> None:
    page = open_report(width=width)
    assert page.evaluate(WHOLE) <= width
    cut = page.evaluate(
        """() => [...document.querySelectorAll("main *")]
          .filter((e) => !e.closest(".pills, .unseen, .u-wrap"))
          .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
          .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert cut == []
    assert min(ink(page)) > 100


def test_it_follows_the_system_into_the_dark(open_report: OpenReport) -> None:
    page = open_report(color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(background) != light
    page.wait_for_function(f"() => Math.min(...({INK})({LINES!r})) > 300")


CONTRASTS = """() => {
  const style = getComputedStyle(document.documentElement);
  const light = (name) => {
    const hex = style.getPropertyValue(`--${name}`).trim().slice(1);
    const [r, g, b] = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return ["ink", "muted", "accent", "limit", "warn", "good", "s-busy", "s-memory", "s-power",
    "s-step", "s-wait", "s-cpu"].map((name) => {
    const [x, y] = [light(name), light("surface")];
    return [name, (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05)];
  });
}"""


@pytest.mark.parametrize("scheme", SCHEMES)
def test_texts_and_lines_have_the_contrast_that_wcag_asks_for(
    open_report: OpenReport, scheme: str
) -> None:
    pairs: list[tuple[str, float]] = open_report(color_scheme=scheme).evaluate(CONTRASTS)
    assert [pair for pair in pairs if pair[1] < 4.5] == []  # WCAG 2.2, 1.4.3, level AA


def test_hostile_names_are_only_text(open_report: OpenReport) -> None:
    run = sample(("python", HOSTILE))
    events = tuple(replace(event, text=HOSTILE) for event in run.events)
    page = open_report(replace(run, events=events, host=HOSTILE, user=HOSTILE, id=HOSTILE))
    assert HOSTILE in page.locator(".why").inner_text()
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hacked === undefined")
    assert page.title().startswith("Did not run out")


def test_a_run_of_which_nothing_is_known_says_so(open_report: OpenReport) -> None:
    page = open_report(run_of(gpus=[], host_spans=[]), width=400)
    expect(page.locator("main")).to_contain_text("The run was not seen to use a GPU")
    expect(page.locator("main")).to_contain_text("Nothing was sampled that could be drawn")
    assert page.evaluate(WHOLE) <= 400


def test_a_single_span_is_still_seen(open_report: OpenReport) -> None:
    page = open_report(run_of(spans((1, 0.5))))
    assert page.evaluate(INK, ["s-busy", "s-memory", "s-power", "s-cpu"])[0] > 5


def test_without_javascript_the_findings_are_text(open_report: OpenReport) -> None:
    page = open_report(java_script_enabled=False)
    expect(page.locator(".words")).to_contain_text("did not run out of memory in 25 min")


def test_it_prints_on_white_paper_with_everything_open(open_report: OpenReport) -> None:
    page = open_report(color_scheme="dark")
    page.evaluate(
        """() => addEventListener("beforeprint", () => { window.seen = {
          closed: document.querySelectorAll("details:not([open])").length,
          surface: getComputedStyle(document.documentElement).getPropertyValue("--surface"),
        }; })"""
    )
    assert page.pdf().startswith(b"%PDF")
    seen: dict[str, Any] = page.evaluate("window.seen")
    assert seen == {"closed": 0, "surface": "#ffffff"}


def test_every_button_and_chart_has_a_name(open_report: OpenReport) -> None:
    page = open_report()
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, [role], section, nav")]
          .filter((e) => !(e.getAttribute("aria-label") || e.textContent.trim()))
          .map((e) => e.outerHTML)"""
    )
    assert unnamed == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    assert page.locator("h1").count() == 1

"""The page of plans in a real browser. Every test also holds that it logged and asked nothing."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from web.conftest import Open
from web.sample import nothing_fits, sample

SCHEMES = ["light", "dark"]
HOSTILE = "</script><script>document.title='hacked'</script><img src=x onerror=hacked()>\"'&amp;"

# How many pixels of the chart are of each colour.
PIXELS = """() => {
  const canvas = document.querySelector(".chart canvas");
  const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  [copy.canvas.width, copy.canvas.height] = [canvas.width, canvas.height];
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  const counts = {};
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] < 255) continue;
    const colour = `rgb(${data[i]}, ${data[i + 1]}, ${data[i + 2]})`;
    counts[colour] = (counts[colour] ?? 0) + 1;
  }
  return counts;
}"""
SWATCHES = """() => Object.fromEntries([...document.querySelectorAll(".reading tbody th")].map(
  (row) => [row.textContent, getComputedStyle(row.querySelector(".swatch")).backgroundColor]))"""


def title(page: Page) -> str:
    return page.locator("h1").inner_text()


def pixels(page: Page) -> dict[str, int]:
    counts: dict[str, int] = page.evaluate(PIXELS)
    return counts


def test_the_title_states_the_answer(open_page: Open) -> None:
    page = open_page()
    assert title(page).startswith("Fits on v100-16gb: micro-batch 8 × 8, fp16")  # noqa: RUF001
    assert title(page).endswith("of 15.8 GiB.")  # the others' times are against this one's
    assert page.title() == title(page)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_large_category_is_drawn_in_the_colour_of_its_legend(
    open_page: Open, scheme: str
) -> None:
    page = open_page(color_scheme=scheme)
    drawn, swatches = pixels(page), page.evaluate(SWATCHES)
    assert list(swatches)[-1] == "CUDA context"
    for category in ("CUDA context", "parameters", "optimizer", "gradients", "activations"):
        assert drawn.get(swatches[category], 0) > 500, category


def test_the_layers_are_as_high_as_their_bytes(open_page: Open) -> None:
    """Parameters and optimizer states stay, so that their areas are as their bytes: 1 to 2."""
    page = open_page(device_scale_factor=2)
    drawn, swatches = pixels(page), page.evaluate(SWATCHES)
    ratio = drawn[swatches["optimizer"]] / drawn[swatches["parameters"]]
    assert 1.85 < ratio < 2.2


@pytest.mark.parametrize(
    "way", [".pill[data-plan='1']", ".plans tr[data-plan='1'] td:nth-child(4)", ".point >> nth=1"]
)
def test_a_click_on_the_second_plan_shows_it_everywhere(open_page: Open, way: str) -> None:
    page = open_page()
    before, code = pixels(page), page.locator("pre").inner_text()
    page.locator(way).click()
    expect(page.locator("h1")).to_contain_text("micro-batch 4 × 16, fp32")  # noqa: RUF001
    assert pixels(page) != before
    assert page.locator("pre").inner_text() != code
    chosen = page.locator(".plans tr.chosen")
    assert chosen.count() == 1
    assert "2. micro-batch 4" in chosen.inner_text()
    pressed = page.locator("[aria-pressed='true'][data-plan]")
    assert [pressed.nth(i).get_attribute("data-plan") for i in range(2)] == ["1", "1"]
    page.reload()
    expect(page.locator("h1")).to_contain_text("micro-batch 4")


def test_an_address_that_names_no_plan_shows_one_that_exists(open_page: Open) -> None:
    assert "micro-batch 2" in title(open_page(address="#plan-99"))
    assert "micro-batch 8" in title(open_page(address="#plan-0"))
    assert "micro-batch 8" in title(open_page(address="#anything"))


def test_the_mouse_reads_the_chart(open_page: Open) -> None:
    page = open_page()
    expect(page.locator(".where")).to_contain_text("At the peak: forward")
    peak = float(page.locator(".reading .sum td").inner_text())
    box = page.locator(".chart .u-over").bounding_box()
    assert box
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 50)
    expect(page.locator(".where b")).to_have_text("backward")
    there = float(page.locator(".reading .sum td").inner_text())
    rows = page.locator(".reading tbody td").all_inner_texts()
    assert sum(map(float, rows)) == pytest.approx(there, abs=0.05 * len(rows))
    assert there < peak
    page.mouse.move(5, 5)
    expect(page.locator(".where")).to_contain_text("At the peak")


def test_everything_can_be_done_with_the_keyboard(open_page: Open) -> None:
    page = open_page()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert "micro-batch 4" in title(page)
    chart = page.locator(".chart")
    chart.focus()
    page.keyboard.press("Home")
    first = chart.get_attribute("aria-valuetext")
    page.keyboard.press("PageUp")
    assert chart.get_attribute("aria-valuetext") != first
    assert int(chart.get_attribute("aria-valuenow") or 0) > 0
    page.keyboard.press("End")
    assert chart.get_attribute("aria-valuenow") == chart.get_attribute("aria-valuemax")
    page.locator(".point").nth(3).focus()
    page.keyboard.press("Enter")
    assert "every block recomputed" in title(page)
    page.locator(".row-name").nth(2).focus()
    page.keyboard.press("Space")
    assert "every second block" in title(page)


def test_the_bars_of_the_table_are_to_scale(open_page: Open) -> None:
    page = open_page()
    plans, _, _ = sample()
    for row, plan in zip(page.locator(".plans tbody tr").all(), plans, strict=True):
        wide = row.locator(".memory .fill").evaluate("e => e.getBoundingClientRect().width")
        track = row.locator(".memory .bar").evaluate("e => e.getBoundingClientRect().left")
        limit = row.locator(".memory .end").evaluate("e => e.getBoundingClientRect().left")
        told = plan.prediction.device_bytes / plans.capacity_bytes
        assert wide / (limit - track) == pytest.approx(told, abs=0.01)


def test_the_code_is_copied(open_page: Open) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    page.locator(".copy").click()
    expect(page.locator(".copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == sample()[2][0]


def test_where_the_clipboard_is_refused_the_code_is_selected(open_page: Open) -> None:
    page = open_page()
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error()); }")
    page.locator(".copy").click()
    expect(page.locator(".copy")).to_have_text("Press Ctrl+C")
    assert page.evaluate("getSelection().toString()").strip() == sample()[2][0].strip()


# In pixels of the screen: a drawing may be scaled.
SMALLEST_TEXT = """() => Math.min(...[...document.querySelectorAll("main *")]
  .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
  .map((e) => {
    const svg = e.ownerSVGElement;
    const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
    return parseFloat(getComputedStyle(e).fontSize) * scale;
  }))"""


@pytest.mark.parametrize("width", [320, 400, 768, 1280])
def test_it_is_readable_at_any_width(open_page: Open, width: int) -> None:
    page = open_page(width=width)
    for place in range(6):
        page.locator(".pill").nth(place).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Nothing is cut off but what scrolls by itself, or is for screen readers only.
    cut = page.evaluate(
        """() => [...document.querySelectorAll("main *")]
          .filter((e) => !e.closest(".pills, pre, .unseen, .u-wrap"))
          .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
          .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert cut == []
    assert page.evaluate(SMALLEST_TEXT) >= 11


CONTRASTS = """() => {
  const style = getComputedStyle(document.documentElement);
  const light = (name) => {
    const hex = style.getPropertyValue(`--${name}`).trim().slice(1);
    const [r, g, b] = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const categories = ["cuda-context", "parameters", "optimizer", "workspace", "inputs",
    "gradients", "activations", "temporaries", "other"].map((name) => `c-${name}`);
  const pairs = [
    ...["ink", "muted", "accent", "limit", "warn"].flatMap((a) =>
      ["surface", "page", "accent-soft"].map((b) => [a, b])),
    ...categories.map((b) => ["on-fill", b]),
    ...["same", "rounding", "changes"].map((b) => ["on-mark", b]),
    ...["phase-a", "phase-b", "phase-c"].map((b) => ["ink", b]),
  ];
  return pairs.map(([a, b]) => {
    const [x, y] = [light(a), light(b)];
    return [`${a} on ${b}`, (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05)];
  });
}"""


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_text_has_the_contrast_that_wcag_asks_for(open_page: Open, scheme: str) -> None:
    pairs: list[tuple[str, float]] = open_page(color_scheme=scheme).evaluate(CONTRASTS)
    assert [pair for pair in pairs if pair[1] < 4.5] == []  # WCAG 2.2, 1.4.3, level AA


def test_it_follows_the_system_into_the_dark(open_page: Open) -> None:
    page = open_page(color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light, drawn = page.evaluate(background), pixels(page)
    was = page.evaluate(SWATCHES)["activations"]
    assert drawn.get(was, 0) > 500
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(background) != light
    page.wait_for_function(f"() => !(({PIXELS})()['{was}'] > 500)")
    assert pixels(page).get(page.evaluate(SWATCHES)["activations"], 0) > 500


def test_it_prints_on_white_paper_with_everything_open(open_page: Open) -> None:
    page = open_page(color_scheme="dark")
    page.evaluate(
        """() => addEventListener("beforeprint", () => { window.seen = {
          closed: document.querySelectorAll("details:not([open])").length,
          surface: getComputedStyle(document.documentElement).getPropertyValue("--surface"),
        }; })"""
    )
    assert page.pdf().startswith(b"%PDF")
    seen: dict[str, Any] = page.evaluate("window.seen")
    assert seen == {"closed": 0, "surface": "#ffffff"}
    assert page.locator("details[open]").count() == 0


def test_hostile_names_are_only_text(open_page: Open) -> None:
    plans, timelines, code = sample(HOSTILE)
    page = open_page((plans, timelines, [HOSTILE, *code[1:]]))
    assert HOSTILE in page.locator(".eyebrow").inner_text()
    assert page.locator("pre").inner_text() == HOSTILE
    assert "hacked" not in page.title()
    assert page.locator("img").count() == 0


def test_where_nothing_fits_it_says_what_would(open_page: Open) -> None:
    page = open_page((nothing_fits(), [], []), width=400)
    assert title(page) == "Nothing fits on v100-16gb: 3.0 GiB are missing"
    expect(page.locator(".why")).to_contain_text("a100-40gb")
    assert page.locator(".bars li").count() >= 4
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_without_times_and_timelines_the_rest_is_still_there(open_page: Open) -> None:
    plans, _, code = sample(timed=False)
    page = open_page((plans, [None] * len(plans), code))
    assert "time" not in title(page)
    expect(page.locator("main")).to_contain_text("this file has no timeline")
    expect(page.locator("main")).to_contain_text("No time is known for this GPU")
    page.locator(".pill").nth(1).click()
    assert "micro-batch 4" in title(page)


def test_every_mark_and_button_has_a_name(open_page: Open) -> None:
    page = open_page()
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, [role], section, nav")]
          .filter((e) => e.getAttribute("role") !== "status")
          .filter((e) => !(e.getAttribute("aria-label") || e.textContent.trim()))
          .map((e) => e.outerHTML)"""
    )
    assert unnamed == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    assert page.locator("h1").count() == 1

"""The dashboard in a real browser, from a real server. Every test also holds that the page logged
nothing and asked nobody but that server."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nvml.machine import GIB, Gpu, Mig, Proc
from playwright.sync_api import Browser, Page, expect
from serving.served import Server, serving

from oomph.exporting.planned import Planned
from oomph.monitoring.diary import Diary, RunStart
from oomph.records.run import Run
from oomph.showing.plan import write_plan_page
from web import report_sample
from web.ink import NEARLY
from web.sample import sample

SCHEMES = ["light", "dark"]
HOSTILE = "</script><img src=x onerror=hacked()>\"'&amp;"
RUN = "20261116-050000-ab12"

# How many pixels of each chart are nearly of a colour of the style sheet.
INK = f"""(name) => [...document.querySelectorAll(".live-plot, .plot")].map(
  (plot) => ({NEARLY})(plot.querySelector("canvas"), name))"""
Open = Callable[..., Page]


@pytest.fixture
def server(tmp_path: Path, start_process: Callable[..., int]) -> Iterator[Server]:
    told = {"OOMPH_RUN_DIR": f"/runs/{RUN}", "RANK": "1", "WORLD_SIZE": "4"}
    mine = start_process(f"train.py {HOSTILE}", env=told)
    gpus = [
        Gpu(util=90, used_bytes=61 * GIB, processes=[Proc(mine, 60 * GIB)], power_mw=300_000),
        Gpu(util=40, used_bytes=20 * GIB, processes=[Proc(4_000_000, 19 * GIB)]),
        Gpu(name=f"A {HOSTILE}"),
        Gpu(lost=True),
    ]
    (tmp_path / "plans").mkdir()
    write_plan_page(*sample(), tmp_path / "plans" / "bert large.html")
    with serving(tmp_path, gpus, "--plans", str(tmp_path / "plans")) as running:
        yield running


@pytest.fixture
def opened(browser: Browser, server: Server) -> Iterator[Open]:
    """Open a page of the server; at the end, it must have had no error."""
    pages: list[tuple[Page, list[str], list[str]]] = []

    def enter(address: str = "", *, width: int = 1280, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        page, problems, requests = context.new_page(), list[str](), list[str]()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        context.on("request", lambda request: requests.append(request.url))
        page.goto(server.url + address)
        pages.append((page, problems, requests))
        return page

    yield enter
    for page, problems, requests in pages:
        page.context.close()
        assert problems == []
        assert [url for url in requests if not url.startswith(server.url)] == []


def test_slices_of_a_gpu_are_named_by_their_numbers(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path, [Gpu(), Gpu(migs=[Mig(), Mig()])]) as running:
        page = browser.new_context().new_page()
        page.goto(running.url)
        expect(page.locator(".gpu h3")).to_have_text(["GPU 0", "GPU 1, slice 0", "GPU 1, slice 1"])
        page.context.close()


def keep_run(directory: Path, run: Run, *, has_ended: bool = True, name: str = RUN) -> Diary:
    """A run as `oomph watch` keeps it."""
    place = directory / "runs" / name
    place.mkdir(parents=True)
    start = RunStart(
        id=name,
        command=run.command,
        directory=None,
        host=run.host,
        user=run.user,
        started_at=time.time() - 1500,
        clock_s=0.0,
        pid=1,
        oomph_version="0.1.0",
        num_cpus=8,
    )
    diary = Diary(place, start)
    diary.add_gpus(run.gpus)
    diary.add_spans(run.gpu_spans, run.host_spans)
    for record in (*run.peaks, *run.events, *((run.ending,) if run.ending and has_ended else ())):
        diary.add(record)
    diary.flush()
    return diary


def scaled(run: Run, factor: float) -> Run:
    """The same run with less of everything."""
    spans = [
        replace(
            span,
            used_bytes=int((span.used_bytes or 0) * factor),
            most_used_bytes=int((span.most_used_bytes or 0) * factor),
            busy_ratio=(span.busy_ratio or 0.0) * factor,
            power_w=(span.power_w or 0.0) * factor,
        )
        for span in run.gpu_spans
    ]
    return replace(run, gpu_spans=tuple(spans), peaks=())


def wait_for_charts(page: Page, colour: str = "s-busy", least: int = 30, count: int = 2) -> None:
    page.wait_for_function(
        f"([name, least, count]) => ({INK})(name).filter((n) => n > least).length >= count",
        arg=[colour, least, count],
        timeout=60_000,
    )


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_charts_are_drawn_and_grow_as_seconds_go_by(opened: Open, scheme: str) -> None:
    page = opened(color_scheme=scheme)
    expect(page.locator(".link")).to_have_text("live")
    wait_for_charts(page)
    wait_for_charts(page, "s-memory")
    before: list[int] = page.evaluate(INK, "s-busy")
    page.wait_for_function(
        f"(was) => ({INK})('s-busy')[0] > was", arg=before[0] + 5, timeout=60_000
    )


def test_it_says_whose_each_gpu_is(opened: Open) -> None:
    page = opened()
    whose = page.locator(".gpu .whose-badge")
    expect(whose.nth(0)).to_have_attribute("data-whose", "mine")
    expect(whose.nth(2)).to_have_attribute("data-whose", "free")
    expect(whose.nth(3)).to_have_attribute("data-whose", "lost")
    expect(page.locator("h1")).to_contain_text("1 of 4 GPUs is free; 1 yours")
    expect(page.locator(".gpu").nth(0)).to_contain_text("61.0 of 80.0 GiB")
    expect(page.locator(".gpu").nth(0)).to_contain_text("90 %")
    expect(page.locator(".gpu").nth(3)).to_contain_text("lost")
    shares = page.locator(".gpu").nth(0).locator(".mem-bar i")
    assert shares.evaluate_all("all => all.map((e) => e.className)") == ["held-mine", "held-nobody"]
    assert shares.first.evaluate("e => e.style.width") == "75%"


def test_what_changes_on_the_machine_arrives_by_itself(opened: Open, server: Server) -> None:
    page = opened()
    first = page.locator(".gpu").nth(0)
    expect(first).to_contain_text("61.0 of 80.0 GiB")
    server.machine.gpus[0].used_bytes = 33 * GIB
    server.machine.gpus[0].util = 7
    server.machine.gpus[0].processes.clear()
    server.machine.write()
    expect(first).to_contain_text("33.0 of 80.0 GiB")
    expect(first).to_contain_text("7 %")
    expect(page.locator(".processes tbody tr")).to_have_count(1)


def test_processes_are_listed_and_hostile_names_are_only_text(opened: Open) -> None:
    page = opened()
    rows = page.locator(".processes tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text(f"train.py {HOSTILE}")
    expect(rows.nth(0)).to_contain_text(f"rank 1 of 4, run {RUN}")
    assert rows.nth(0).locator("a").get_attribute("href") == f"?run={RUN}"
    expect(page.locator(".gpu").nth(2)).to_contain_text(f"A {HOSTILE}")
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hacked === undefined")


@pytest.mark.parametrize(
    "address", ["", "?runs", f"?run={RUN}", "?plans", "?plan=bert%20large.html", "?fit"]
)
@pytest.mark.parametrize("width", [320, 400, 768, 1280])
def test_every_page_is_readable_at_any_width(
    opened: Open, tmp_path: Path, width: int, address: str
) -> None:
    keep_run(tmp_path, report_sample.sample())
    page = opened(address, width=width)
    page.locator("h1").wait_for()
    if not address:
        wait_for_charts(page, least=5)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = page.evaluate(
        """() => [...document.querySelectorAll("main *, .top *, .asking *")]
          .filter((e) => !e.closest(".pills, .unseen, .u-wrap, pre, table.plans, .pareto"))
          .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
          .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert cut == []


def test_runs_lead_to_their_reports(opened: Open, tmp_path: Path) -> None:
    keep_run(tmp_path, replace(report_sample.sample(), command=("python", HOSTILE)))
    page = opened()
    page.locator(".top a", has_text="Runs").click()
    expect(page.locator("h1")).to_have_text("1 run")
    expect(page.locator(".runs tbody tr")).to_contain_text(f"python {HOSTILE}")
    expect(page.locator(".how")).to_have_text("exit 0")
    page.locator(".runs tbody a").click()
    expect(page.locator("h1")).to_contain_text("Did not run out of memory")
    wait_for_charts(page, "s-power", 300, count=1)
    expect(page.locator(".under-way")).to_be_hidden()
    assert page.locator(".top a[aria-current]").inner_text() == "Runs"


def test_runs_are_sorted_by_their_figures(opened: Open, tmp_path: Path) -> None:
    run = report_sample.sample()
    keep_run(tmp_path, run, name="20261116-050000-000a")
    keep_run(tmp_path, scaled(run, 0.5), name="20261116-050000-000b", has_ended=False)
    page = opened("?runs")
    rows = page.locator(".runs tbody tr")
    expect(rows).to_have_count(2)
    expect(page.locator("td[data-name=Peak]", has_text="41.0 GiB (51 %)")).to_have_count(1)
    for key in ("peak", "active"):
        page.locator(".sort", has_text=key.capitalize()).click()
        expect(page).to_have_url(re.compile(f"sort={key}$"))
        expect(page.locator("[aria-sort=descending]")).to_have_text(key.capitalize())
        expect(rows.first).to_have_attribute("data-run", "20261116-050000-000a")
        page.locator(".sort", has_text=key.capitalize()).click()
        expect(rows.first).to_have_attribute("data-run", "20261116-050000-000b")
    page.reload()
    expect(page.locator("[aria-sort=ascending]")).to_have_text("Active")
    expect(rows.first).to_have_attribute("data-run", "20261116-050000-000b")


def test_chosen_runs_are_laid_over_each_other(opened: Open, tmp_path: Path) -> None:
    run = report_sample.sample()
    for letter, factor in (("a", 1.0), ("b", 0.8), ("c", 0.6)):
        command = ("python", "train.py", f"--seed={letter}{HOSTILE}")
        one = replace(scaled(run, factor), command=command)
        keep_run(tmp_path, one, name=f"20261116-050000-000{letter}")
    page = opened("?runs")
    boxes = page.locator(".runs input")
    expect(boxes).to_have_count(3)
    lay = page.locator(".choice button")
    boxes.nth(0).check()
    expect(lay).to_be_disabled()
    boxes.nth(2).check()
    expect(lay).to_have_text("Lay 2 runs over each other")
    lay.click()
    expect(page.locator("h1")).to_have_text("2 runs over each other")
    rows = page.locator(".compared tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0).locator("code")).to_contain_text(HOSTILE)
    expect(rows.nth(0).locator("code")).not_to_contain_text("train.py")
    wait_for_charts(page, "run-1", 30, count=3)
    wait_for_charts(page, "run-2", 30, count=3)
    assert page.locator(".top a[aria-current]").inner_text() == "Runs"
    assert page.evaluate("window.hacked === undefined")


def test_power_beyond_its_limit_stays_within_the_chart(opened: Open, tmp_path: Path) -> None:
    run = report_sample.sample()
    spans = tuple(replace(span, power_w=900.0) for span in run.gpu_spans)  # of 400 W
    keep_run(tmp_path, replace(run, gpu_spans=spans))
    page = opened(f"?run={RUN}")
    wait_for_charts(page, "s-power", 300, count=1)


def test_a_run_under_way_is_shown_as_it_goes_on(opened: Open, tmp_path: Path) -> None:
    run = report_sample.sample()
    seconds = [span for span in run.gpu_spans if span.ended_s <= 600]
    diary = keep_run(tmp_path, replace(run, gpu_spans=tuple(seconds)), has_ended=False)
    page = opened()
    expect(page.locator("section", has_text="Runs under way")).to_be_visible()
    page.locator(".runs tbody a").click()
    expect(page.locator(".under-way")).to_contain_text("This is the run so far")
    page.locator(".pill").nth(1).click()
    assert run.ending
    diary.add_spans([span for span in run.gpu_spans if span.ended_s > 600], [])
    diary.add(run.ending)
    diary.close()
    expect(page.locator(".under-way")).to_be_hidden(timeout=30_000)
    expect(page.locator("h1")).to_contain_text("Did not run out of memory in 25 min")
    expect(page.locator(".pill[aria-pressed='true']")).to_contain_text("GPU 3")


def test_plans_of_a_directory_are_shown_as_their_page_shows_them(opened: Open) -> None:
    page = opened("?plans")
    expect(page.locator(".plan-files tbody tr")).to_have_count(1)
    page.locator(".plan-files a").click()
    expect(page.locator("h1")).to_contain_text("Fits on v100-16gb")
    expect(page.locator(".pill")).to_have_count(6)
    page.locator(".pill").nth(1).click()
    expect(page).to_have_url(re.compile(r"\?plan=bert%20large\.html#plan-2$"))
    assert page.locator(".chart canvas").count() == 1


def test_a_single_plan_is_shown_without_what_it_does_not_know(opened: Open, tmp_path: Path) -> None:
    Planned.of(sample()[0].plans[0]).save(tmp_path / "plans" / "plan.json")
    page = opened("?plan=plan.json")
    expect(page.locator("h1")).to_contain_text("Fits on v100-16gb")
    expect(page.locator("main")).not_to_contain_text("As given")
    expect(page.locator(".peak-bar i")).to_have_count(7)  # the context, and six categories
    expect(page.locator(".reading")).to_contain_text("At the peak: forward")
    expect(page.locator(".pill")).to_have_count(0)
    expect(page.locator("footer")).not_to_contain_text("compared")


def test_a_server_that_goes_away_is_told_and_what_was_seen_stays(
    browser: Browser, server: Server
) -> None:
    """The browser itself logs that it cannot connect."""
    page = browser.new_page()
    page.goto(server.url)
    expect(page.locator(".gpu").nth(0)).to_contain_text("61.0 of 80.0 GiB")
    assert server.end()[0] == 0
    expect(page.locator(".link")).to_have_text("not connected, trying again")
    expect(page.locator(".gpu").nth(0)).to_contain_text("61.0 of 80.0 GiB")
    page.close()


def test_a_token_in_the_address_is_taken_once_and_gone(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path, [Gpu(util=5)], "--token") as server:
        page = browser.new_page()
        page.goto(server.url)
        expect(page.locator(".link")).to_have_text("live")
        assert "token" not in page.url
        page.reload()
        expect(page.locator(".link")).to_have_text("live")
        assert page.evaluate("document.cookie") == ""
        stranger = browser.new_context().new_page()
        answer = stranger.goto(page.url)
        assert answer
        assert answer.status == 401
        stranger.context.close()
        page.close()


def test_what_does_not_exist_is_told_in_words(browser: Browser, server: Server) -> None:
    """The browser itself logs each 404."""
    page = browser.new_page()
    page.goto(f"{server.url}?run=nothing")
    expect(page.locator("main")).to_contain_text("there is nothing of this name")
    page.goto(f"{server.url}?plan=nothing.json")
    expect(page.locator("main")).to_contain_text("there is nothing of this name")
    page.close()


@pytest.mark.slow
def test_the_page_follows_the_system_into_the_dark(opened: Open) -> None:
    page = opened(color_scheme="light")
    wait_for_charts(page)
    page.emulate_media(color_scheme="dark")
    wait_for_charts(page)


CONTRASTS = """() => {
  const style = getComputedStyle(document.documentElement);
  const light = (name) => {
    const hex = style.getPropertyValue(`--${name}`).trim().slice(1);
    const [r, g, b] = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return ["mine", "others", "good", "limit", "muted"].flatMap((name) =>
    ["surface", "page"].map((behind) => {
      const [x, y] = [light(name), light(behind)];
      return [name, behind, (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05)];
    }));
}"""


@pytest.mark.parametrize("scheme", SCHEMES)
def test_words_have_the_contrast_that_wcag_asks_for(opened: Open, scheme: str) -> None:
    found: list[tuple[str, str, float]] = opened(color_scheme=scheme).evaluate(CONTRASTS)
    assert [one for one in found if one[2] < 4.5] == []  # WCAG 2.2, 1.4.3, level AA

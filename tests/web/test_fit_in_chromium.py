""" "Will it fit?" in a real browser, from a real server.

What a search answers is given by these tests; tests/serving/test_searches.py has real answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nvml.machine import Gpu
from playwright.sync_api import Browser, Page, Route, expect
from sandbox.insiders import needs_namespaces
from serving.served import Server, serving
from serving.test_questions import WORKLOAD
from serving.test_searches import NEVER_ENDS, searching_below, wait_until

from oomph.showing.plan import plan_data
from web.sample import sample

COMMAND = "oomph plan hf:openai-community/gpt2 --gpu rtx4090"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    workloads = tmp_path / "workloads"
    workloads.mkdir()
    (workloads / "train.py").write_text(WORKLOAD)
    gpus = [Gpu(name="NVIDIA A100-SXM4-80GB")]
    with serving(tmp_path, gpus, "--workloads", str(workloads)) as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened, problems = context.new_page(), list[str]()
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.goto(f"{server.url}?fit")
    expect(opened.locator("h1")).to_have_text("Will it fit?")
    yield opened
    context.close()
    assert problems == []


def answer(page: Page, *lines: dict[str, Any], status: int = 200) -> list[str]:
    """Give the next searches these lines; return the addresses that were asked."""
    asked: list[str] = []

    def give(route: Route) -> None:
        assert route.request.headers["x-oomph"] == "fit"
        asked.append(route.request.url.partition("?")[2])
        body = "".join(f"{json.dumps(line)}\n" for line in lines)
        route.fulfill(status=status, body=body, content_type="application/x-ndjson")

    page.route("**/api/fit?*", give)
    return asked


def found() -> dict[str, Any]:
    return {"kind": "plans", "plans": plan_data(*sample())}


def test_the_answer_is_the_page_of_plans_and_its_command_line(page: Page) -> None:
    asked = answer(page, {"kind": "asked", "command": COMMAND}, found())
    page.get_by_label("What to train").select_option("openai-community/gpt2")
    page.locator("#gpu").select_option("rtx4090")
    page.get_by_label("Batch size").fill("16")
    page.get_by_label("Tokens in a sequence").fill("512")
    page.get_by_label("GPUs, at most").fill("2")
    page.get_by_role("button", name="Will it fit?").click()
    expect(page.locator("#answer")).to_contain_text("Fits on v100-16gb")
    expect(page.locator(".command pre")).to_have_text(COMMAND)
    expect(page.locator(".chart canvas")).to_have_count(1)
    query = "model=openai-community%2Fgpt2&gpu=rtx4090&batch_size=16&seq_len=512&max_gpus=2"
    assert asked == [query]
    assert page.url.endswith(f"?fit&{query}")
    page.locator(".pill").nth(1).click()
    expect(page).to_have_url(re.compile("#plan-2$"))
    page.get_by_role("button", name="Will it fit?").click()  # again: one page of plans, not two
    expect(page.locator(".plans-found main")).to_have_count(1)
    page.locator(".pill").nth(2).click()
    expect(page.locator(".pill[aria-pressed=true]")).to_have_count(1)


def test_a_link_fills_the_form_and_asks_nothing(page: Page, server: Server) -> None:
    asked = answer(page, found())
    page.goto(f"{server.url}?fit&model=google-bert/bert-base-uncased&gpu=h100-80gb&batch_size=32")
    expect(page.get_by_label("What to train")).to_have_value("google-bert/bert-base-uncased")
    expect(page.locator("#gpu")).to_have_value("h100-80gb")
    expect(page.get_by_label("Batch size")).to_have_value("32")
    page.goto(f"{server.url}?fit&model=</select><img>&gpu=x&batch_size=-1&seq_len=abc")
    expect(page.get_by_label("Batch size")).to_have_value("")
    expect(page.get_by_label("What to train")).to_have_value("file:train.py:workload")
    assert asked == []


def test_the_form_offers_what_there_is(page: Page) -> None:
    expect(page.locator("#gpu")).to_have_value("a100-80gb")  # of this machine
    expect(page.get_by_label("What to train")).to_have_value("file:train.py:workload")
    expect(page.get_by_label("Tokens in a sequence")).to_be_disabled()
    page.get_by_label("What to train").select_option("openai-community/gpt2")
    expect(page.get_by_label("Tokens in a sequence")).to_be_enabled()
    expect(page.get_by_label("Tokens in a sequence")).to_have_attribute("max", "1024")
    page.get_by_label("What to train").select_option("google/vit-base-patch16-224")
    expect(page.get_by_label("Tokens in a sequence")).to_be_disabled()


def test_an_error_says_what_because_and_try_as_text(page: Page) -> None:
    fault = {"what": "<img src=x>", "because": "a <b>reason", "try": "<i>this"}
    answer(page, {"kind": "asked", "command": COMMAND}, {"kind": "error", **fault})
    page.get_by_role("button", name="Will it fit?").click()
    for text in fault.values():
        expect(page.locator(".fault")).to_contain_text(text)
    assert page.locator("img").count() == 0
    expect(page.get_by_role("button", name="Will it fit?")).to_be_visible()


def test_an_answer_that_is_cut_off_is_told(page: Page) -> None:
    answer(page, {"kind": "asked", "command": COMMAND})
    page.get_by_role("button", name="Will it fit?").click()
    expect(page.locator(".fault")).to_contain_text("the server ended without an answer")


@needs_namespaces
def test_a_search_ends_with_the_button_and_with_the_page(
    page: Page, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "workloads" / "train.py").write_text(NEVER_ENDS)
    for ends in (page.get_by_role("button", name="Stop").click, page.context.close):
        page.get_by_role("button", name="Will it fit?").click()
        expect(page.locator(".progress")).to_contain_text(re.compile("[Ss]andbox|[Ss]tarting"))
        wait_until(lambda: searching_below(server))
        ends()
        wait_until(lambda: not searching_below(server))

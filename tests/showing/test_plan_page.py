"""The page of plans as a file: whole or not at all, and nothing in it but data is data."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from web.sample import nothing_fits, sample

from oomph.errors import OomphError
from oomph.showing import html_page
from oomph.showing.plan import write_plan_page

ROOT = Path(__file__).parents[2]
HOSTILE = "</script><script>hacked()</script><!--<script>\"'`\\\u2028\ud800${x}%policy%"


def data_of(path: Path) -> Any:
    """What a browser would find in the page: a script ends at the first </script."""
    html = path.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script', html, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_has_every_plan_with_its_timeline_and_its_code(tmp_path: Path) -> None:
    plans, timelines, code = sample()
    write_plan_page(plans, timelines, code, tmp_path / "plan.html")
    data = data_of(tmp_path / "plan.html")
    assert (data["gpu"], data["batch_size"]) == ("v100-16gb", 64)
    assert [plan["code"] for plan in data["plans"]] == code
    for plan, timeline in zip(data["plans"], timelines, strict=True):
        drawn = plan["timeline"]
        assert drawn["live_bytes"] == [list(layer) for layer in timeline.live_bytes]
        assert [drawn["op_names"][op] for op in drawn["ops"]] == list(timeline.ops)


def test_names_cannot_leave_the_data(tmp_path: Path) -> None:
    plans, timelines, code = sample(HOSTILE)
    code[0] = HOSTILE
    write_plan_page(plans, timelines, code, tmp_path / "plan.html")
    html = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "<script>hacked" not in html
    assert "<!--" not in html.split('id="data">')[1].split("</script")[0]
    data = data_of(tmp_path / "plan.html")
    assert data["workload"] == data["plans"][0]["code"] == HOSTILE


def test_a_plan_without_a_timeline_is_no_error(tmp_path: Path) -> None:
    plans, timelines, code = sample()
    write_plan_page(plans, [None, *timelines[1:]], code, tmp_path / "plan.html")
    assert data_of(tmp_path / "plan.html")["plans"][0]["timeline"] is None


def test_every_plan_has_its_own_timeline_and_code_or_it_is_an_error(tmp_path: Path) -> None:
    plans, timelines, code = sample()
    with pytest.raises(ValueError, match="argument"):
        write_plan_page(plans, timelines[:-1], code, tmp_path / "plan.html")
    assert list(tmp_path.iterdir()) == []


def test_the_answer_no_has_a_page_too(tmp_path: Path) -> None:
    write_plan_page(nothing_fits(), [], [], tmp_path / "plan.html")
    assert data_of(tmp_path / "plan.html")["shortfall"]["smallest_gpu"] == "a100-40gb"


def test_a_page_that_is_there_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    path.write_text("the old page")
    plans, timelines, code = sample()
    impossible = replace(plans, batch_size=float("nan"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="JSON"):
        write_plan_page(impossible, timelines, code, path)
    assert path.read_text() == "the old page"
    write_plan_page(plans, timelines, code, path)
    assert data_of(path)["batch_size"] == 64
    assert [file.name for file in tmp_path.iterdir()] == ["plan.html"]


@pytest.mark.parametrize("place", ["nowhere/plan.html", "."])
def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path, place: str) -> None:
    with pytest.raises(OomphError, match="cannot be written") as error:
        write_plan_page(nothing_fits(), [], [], tmp_path / place)
    assert error.value.because
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_was_not_built_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html_page, "PAGES", tmp_path / "page")
    with pytest.raises(OomphError, match="not in this installation") as error:
        write_plan_page(nothing_fits(), [], [], tmp_path / "plan.html")
    assert "No such file" in str(error.value)
    assert "installing oomph again" in str(error.value)
    assert list(tmp_path.iterdir()) == []

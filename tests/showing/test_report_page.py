"""The page of a report as a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from explaining.runs import run_of
from web.report_sample import sample

from oomph.errors import OomphError
from oomph.explaining.diagnose import diagnose
from oomph.records.run import Run
from oomph.showing.report import write_report_page
from showing.test_plan_page import HOSTILE, data_of

MEGABYTE = 1_000_000


def written(run: Run, path: Path) -> str:
    write_report_page(diagnose(run), run, path)
    return path.read_text(encoding="utf-8")


def test_the_page_has_the_report_and_its_series(tmp_path: Path) -> None:
    run = sample()
    written(run, tmp_path / "report.html")
    data = data_of(tmp_path / "report.html")
    assert data["report"]["run"] == run.id
    assert len(data["gpus"]) == len(data["steps"]) == 2
    series = data["gpus"][0]["busy_series"]
    assert 0 < len(series["times"]) <= 2000
    assert {len(series[name]) for name in ("low", "mean", "high")} == {len(series["times"])}


def test_a_long_run_of_eight_gpus_stays_below_two_megabytes(tmp_path: Path) -> None:
    page = written(sample(num_gpus=8, lasted_s=4000), tmp_path / "report.html")
    assert len(page) < 2 * MEGABYTE
    for gpu in data_of(tmp_path / "report.html")["gpus"]:
        for name in ("memory_series", "busy_series", "power_series"):
            assert len(gpu[name]["times"]) <= 2000


def test_names_cannot_leave_the_data_nor_the_text(tmp_path: Path) -> None:
    html = written(sample(("python", HOSTILE)), tmp_path / "report.html")
    assert "<script>hacked" not in html
    assert data_of(tmp_path / "report.html")["report"]["command"][1] == HOSTILE


@pytest.mark.parametrize("place", ["the words of this page", '"the data of this page"'])
def test_a_command_that_looks_like_a_place_of_the_page_is_only_text(
    tmp_path: Path, place: str
) -> None:
    written(sample(("python", place)), tmp_path / "report.html")
    assert data_of(tmp_path / "report.html")["report"]["command"][1] == place


def test_without_javascript_the_findings_are_there_as_text(tmp_path: Path) -> None:
    html = written(sample(), tmp_path / "report.html")
    found = re.search(r"<noscript>(.*?)</noscript>", html, re.DOTALL)
    assert found
    assert "did not run out of memory in 25 min" in found[1]
    assert "do: more loader workers" in found[1]
    assert "38.4 samples a second" in found[1]


def test_a_run_of_which_nothing_is_known_has_a_page(tmp_path: Path) -> None:
    assert "not seen to use a GPU" in written(run_of(gpus=[], host_spans=[]), tmp_path / "r.html")


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(OomphError, match="cannot be written"):
        written(sample(), tmp_path / "nowhere" / "report.html")
    assert list(tmp_path.iterdir()) == []

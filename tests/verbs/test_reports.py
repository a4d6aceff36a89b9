"""oomph.report and oomph.runs, as a notebook has them."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from explaining.kept import keep
from explaining.runs import peak, run_of, spans

import oomph
from oomph.monitoring.diary import RunStart
from oomph.monitoring.diary_reader import read_start
from oomph.records.run import RunSummary
from oomph.serving import application
from oomph.units import GIB

OLD = replace(run_of(spans((10, 0.0), (80, 0.25))), id="20261116-060000-aaaa")
NEW = replace(
    run_of(spans((90, 0.95)), peaks=[peak(60 * GIB)]),
    id="20261116-070000-bbbb",
    command=("python", "train.py", "\x1b[2J"),
)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOMPH_RUNS", str(tmp_path))
    for run in (OLD, NEW):
        keep(run, tmp_path)


def test_the_report_of_the_newest_run_needs_no_name() -> None:
    assert oomph.report().run == NEW.id
    assert oomph.report("aaaa").run == OLD.id


def test_each_run_of_the_list_can_be_reported() -> None:
    assert [oomph.report(run).run for run in oomph.runs()] == [NEW.id, OLD.id]
    assert oomph.report(oomph.runs()[0]).gpus[0].memory.peak_bytes == 60 * GIB


def test_the_dashboard_reads_as_many_runs_as_it_lists_and_counts_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(replace(OLD, id="20261115-060000-cccc"), tmp_path)
    monkeypatch.setattr(application, "MAX_RUNS", 2)
    read = list[str]()

    def noted(directory: Path) -> RunStart:
        read.append(directory.name)
        return read_start(directory)

    monkeypatch.setattr("oomph.monitoring.diary_reader.read_start", noted)
    listed = application.Content().runs()
    assert [run["id"] for run in listed["runs"]] == [NEW.id, OLD.id]
    assert listed["num_runs"] == 3
    assert set(read) == {NEW.id, OLD.id}  # the third was not read
    page = application.Content().run("20261115-060000-cccc")
    assert page is not None
    assert page["state"] == "ended"
    assert application.Content().run("20261115") is None
    assert application.Content().run("../20261115-060000-cccc") is None


def test_a_run_that_is_not_there_is_an_error_with_a_cure() -> None:
    with pytest.raises(oomph.OomphError, match="try"):
        oomph.report("nothing of that name")


def test_a_report_and_a_run_show_themselves_in_a_few_safe_lines() -> None:
    report = repr(oomph.report())
    assert report.startswith(f"<Report of {NEW.id}: ")
    assert "exit 0" in report
    assert "did not run out of memory" in report
    assert len(report.splitlines()) == 1 + len(oomph.report().findings)
    (line,) = repr(oomph.runs()[0]).splitlines()
    assert re.fullmatch(rf"<RunSummary {NEW.id}: .*, 1 min 30 s, exit 0>", line)
    assert "\x1b" not in report + line


def test_the_fields_of_a_run_are_documented() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "reports.md").read_text()
    told = manual.partition("## In Python")[2].partition("## As JSON")[0]
    assert {f"`{field.name}`" for field in fields(RunSummary)} <= set(re.findall(r"`\w+`", told))


def test_a_notebook_draws_the_page_of_a_report(tmp_path: Path) -> None:
    report = oomph.report("aaaa")
    drawn = report._repr_html_()
    assert drawn is not None
    assert drawn.startswith("<iframe srcdoc='")
    assert '"memory_series"' in drawn
    assert drawn.count("'") == 6  # the page is one attribute: its script runs in the frame alone
    (tmp_path / OLD.id).rename(tmp_path / "elsewhere")
    drawn = report._repr_html_()  # in words: the run with its series is gone
    assert drawn is not None
    assert drawn.startswith("<pre")
    assert report.findings[0].sentence.split(";")[0] in drawn

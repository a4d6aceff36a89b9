"""Files of plans, as a server reads them: only what oomph wrote, and only as data."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from web.sample import sample

from oomph.errors import Unreadable
from oomph.explaining.diagnose import diagnose
from oomph.exporting.planned import Planned
from oomph.records.stored import LARGEST_FILE_BYTES
from oomph.showing.plan import plan_data, plan_files, read_plan_file, summary_of, write_plan_page
from oomph.showing.report import write_report_page
from web import report_sample


def test_a_page_of_plans_gives_back_what_was_put_into_it(tmp_path: Path) -> None:
    plans, timelines, code = sample()
    write_plan_page(plans, timelines, code, tmp_path / "plan.html")
    read = read_plan_file(tmp_path / "plan.html")
    assert read == json.loads(json.dumps(plan_data(plans, timelines, code)))
    line = summary_of(tmp_path / "plan.html", read)
    assert (line["name"], line["gpu"], line["num_plans"]) == ("plan.html", plans.gpu, len(plans))


def test_a_page_of_an_older_oomph_without_offers_is_read(tmp_path: Path) -> None:
    write_plan_page(*sample(), tmp_path / "plan.html")
    changed(tmp_path / "plan.html", ',"offers":[]', "")
    assert len(read_plan_file(tmp_path / "plan.html")["plans"]) == len(sample()[0])


def test_a_single_plan_is_shown_alone_and_claims_nothing_of_others(tmp_path: Path) -> None:
    plan = sample()[0].plans[1]
    Planned.of(plan).save(tmp_path / "plan.json")
    read = read_plan_file(tmp_path / "plan.json")
    assert len(read["plans"]) == 1
    assert read["plans"][0]["why"] == plan.why
    assert read["batch_size"] == plan.batch_size
    assert (read["as_is"], read["fits_as_is"], read["num_candidates"]) == (None, None, None)


def changed(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"schema":1', '"schema":2'),
        ('"workload":', '"work":'),
        ('"batch_size":', '"unknown":1,"batch_size":'),
        ('"plans":[', '"plans":[3,'),
        ('"relative_time":', '"relative_time":NaN,"was":'),
        ('id="data"', 'id="other"'),
    ],
)
def test_a_page_that_is_not_wholly_understood_is_refused(
    tmp_path: Path, before: str, after: str
) -> None:
    path = tmp_path / "plan.html"
    write_plan_page(*sample(), path)
    changed(path, before, after)
    with pytest.raises(Unreadable, match="is not a plan"):
        read_plan_file(path)


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "null", '{"schema": 1}', '{"schema": 1, "x": NaN}', "[" * 100_000]
)
@pytest.mark.parametrize("name", ["a.json", "a.html"])
def test_other_files_are_no_plans(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(Unreadable):
        read_plan_file(path)


def test_a_report_a_huge_file_and_one_that_is_gone_are_no_plans(tmp_path: Path) -> None:
    run = report_sample.sample()
    write_report_page(diagnose(run), run, tmp_path / "report.html")
    with (tmp_path / "huge.json").open("wb") as huge:
        huge.truncate(LARGEST_FILE_BYTES + 1)
    (tmp_path / "binary.html").write_bytes(bytes(range(256)))
    for name in ("report.html", "huge.json", "binary.html", "gone.json"):
        with pytest.raises(Unreadable):
            read_plan_file(tmp_path / name)


def test_the_newest_files_come_first_and_there_are_not_too_many(tmp_path: Path) -> None:
    for number, name in enumerate(["a.html", "b.json", "c.html", "d.txt", ".e.html"]):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (number, number))
    (tmp_path / "f.html").mkdir()
    assert [path.name for path in plan_files(tmp_path, 9)] == ["c.html", "b.json", "a.html"]
    assert [path.name for path in plan_files(tmp_path, 2)] == ["c.html", "b.json"]

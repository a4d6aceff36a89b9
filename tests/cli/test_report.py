"""`oomph report` and `oomph compare`, as typed, on directories that a watched run leaves."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from explaining.kept import keep
from explaining.runs import peak, run_of, spans, steps
from nvml.machine import Gpu, NvmlMachine

from oomph.cli import main
from oomph.explaining.diagnose import diagnose
from oomph.records.report import Report
from oomph.records.run import Run
from oomph.records.stored import from_json
from oomph.units import GIB

SLOW = run_of(
    spans((10, 0.0), (80, 0.25), most_used_bytes=41 * GIB),
    step_spans=[steps(0.4, step_s=0.8)],
    peaks=[peak(40 * GIB)],
    id="20261116-060000-aaaa",
)
FAST = replace(
    run_of(spans((90, 0.95)), step_spans=[steps(0.01, step_s=0.4)], peaks=[peak(60 * GIB)]),
    id="20261116-070000-bbbb",
)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OOMPH_RUNS", str(tmp_path / "runs"))
    for run in (SLOW, FAST):
        keep(run, tmp_path / "runs")
    return tmp_path / "runs"


@pytest.mark.parametrize("name", [SLOW.id, "20261116-06", "aaaa", "path"])
def test_a_run_is_found_by_its_id_a_part_of_it_or_its_directory(
    runs: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["report", str(runs / SLOW.id) if name == "path" else name]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{SLOW.id}: python train.py --epochs 3")
    assert "the GPU waits for data for 40% of each step [measured]" in text


@pytest.mark.usefixtures("runs")
def test_last_is_the_newest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "last"]) == 0
    assert capsys.readouterr().out.startswith(FAST.id)


def test_without_any_run_the_way_to_the_first_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OOMPH_RUNS", str(tmp_path / "none"))
    assert main(["report", "last"]) == 2
    told = capsys.readouterr().err
    assert "no run is recorded yet" in told
    assert "oomph watch -- python train.py" in told


@pytest.mark.usefixtures("runs")
def test_json_is_the_report_that_can_be_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "aaaa", "--json"]) == 0
    report = from_json(Report, capsys.readouterr().out)
    in_memory = diagnose(SLOW)
    assert [found.kind for found in report.findings] == [one.kind for one in in_memory.findings]
    assert report.steps == in_memory.steps
    assert report.gpus[0].memory == in_memory.gpus[0].memory


@pytest.mark.usefixtures("runs")
def test_the_page_is_written_beside_what_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["report", "aaaa", "--html", str(tmp_path / "report.html")]) == 0
    assert capsys.readouterr().out
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    data = re.search(r'id="data">(.*?)</script', html, re.DOTALL)
    assert data
    assert json.loads(data[1])["report"]["run"] == SLOW.id


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("name", ["nothing-like-it", "2026", ""])
def test_a_name_of_no_run_or_of_two_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["report", name]) == 2
    assert "try: oomph runs" in capsys.readouterr().err


def test_a_run_that_was_cut_off_is_still_told(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut: Run = replace(SLOW, id="20261116-080000-cccc", ending=None)
    keep(cut, runs)
    assert main(["report", "cccc"]) == 0
    assert "no end was seen" in capsys.readouterr().out


@pytest.mark.usefixtures("runs")
def test_two_runs_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "aaaa", "last"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"time of a step +800 ms +400 ms +-50% +better", text)
    assert "gone: the GPU waits for data" in text
    assert main(["compare", "aaaa", "last", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["before"], told["after"]) == (SLOW.id, FAST.id)


@pytest.mark.usefixtures("runs")
def test_a_compared_run_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "aaaa", "nothing"]) == 2
    assert "there is no run 'nothing'" in capsys.readouterr().err


@pytest.mark.parametrize("vanishes", [False, True])
def test_a_watched_command_ends_with_its_report_and_its_own_exit_code(
    tmp_path: Path, vanishes: bool
) -> None:
    machine = NvmlMachine(tmp_path, [Gpu()])
    folder = tmp_path / "folder"
    folder.mkdir()
    page = folder / "report.html"
    command = [sys.executable, "-m", "oomph", "watch", "--html", str(page), "--", "sh", "-c"]
    runs = {"OOMPH_RUNS": str(tmp_path / "runs")}
    script = f"echo hello; {f'rmdir {folder};' if vanishes else ''} exit 3"
    done = machine.run([*command, script], env=runs)
    assert (done.returncode, done.stdout) == (3, "hello\n")
    assert "did not run out of memory in" in done.stderr
    assert "it failed with 3" in done.stderr
    assert page.exists() != ("cannot be written" in done.stderr)
    assert page.exists() != vanishes


def test_a_command_does_not_start_when_its_page_could_not_be_written(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu()])
    page = tmp_path / "nowhere" / "report.html"
    command = [sys.executable, "-m", "oomph", "watch", "--html", str(page), "--", "echo", "hello"]
    done = machine.run(command, env={"OOMPH_RUNS": str(tmp_path / "runs")})
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot be written" in done.stderr

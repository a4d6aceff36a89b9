"""`oomph explain`, as typed."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from explaining.kept import keep
from explaining.runs import run_of, spans

import oomph
from oomph.cli import main
from oomph.records.explanation import Explanation
from oomph.records.run import Event
from oomph.records.stored import from_json

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"
    " capacity of 24.00 GiB of which 100.00 MiB is free. Of the allocated memory 18.00 GiB is"
    " allocated by PyTorch, and 5.00 GiB is reserved by PyTorch but unallocated."
)


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_log_gets_the_verdict_first_and_the_next_command_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.log").write_text(f"step 1\n{OOM}\n")
    assert main(["explain", str(tmp_path / "train.log")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fragmentation: 2.0 GiB were requested, and 5.1 GiB were there")
    assert lines[-1].startswith("next: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python")


def test_standard_input_is_read_with_a_dash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(OOM.encode())))
    assert main(["explain", "-"]) == 0
    assert printed(capsys).startswith("fragmentation:")


def test_json_can_be_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.log").write_text(OOM)
    assert main(["explain", str(tmp_path / "train.log"), "--json"]) == 0
    found = from_json(Explanation, capsys.readouterr().out)
    assert found.verdict == "fragmentation"
    assert found == oomph.explain(tmp_path / "train.log")


def test_a_log_without_one_is_answered_by_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.log").write_text("step 1\n")
    assert main(["explain", str(tmp_path / "train.log")]) == 1
    assert "nothing ran out of memory" in capsys.readouterr().err


def test_what_does_not_exist_is_refused_with_an_example(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OOMPH_RUNS", str(tmp_path))
    assert main(["explain", "no-such.log"]) == 2
    assert "neither a file nor a run" in capsys.readouterr().err


def test_the_last_run_is_explained_by_the_message_of_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OOMPH_RUNS", str(tmp_path))
    event = Event(kind="out-of-memory", at_s=9.0, text=OOM)
    run = replace(run_of(spans((10, 0.5))), events=(event,), id="20261116-070000-bbbb")
    keep(run, tmp_path)
    assert main(["explain"]) == 0
    assert printed(capsys).startswith("fragmentation: 2.0 GiB were requested")


def test_an_exception_is_explained_in_python() -> None:
    found = oomph.explain(RuntimeError(OOM))
    assert found is not None
    assert found.verdict == "fragmentation"
    assert oomph.explain(ValueError("shapes do not match")) is None


# ---- with plans of what died --------------------------------------------------------------------

TRAIN = """
import argparse, torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=8)
width = parser.parse_args().width
layers = [part for _ in range(6) for part in (nn.Linear(width, width), nn.GELU())]
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for x in torch.utils.data.DataLoader(torch.rand(65536, width), batch_size=16384):
    optimizer.zero_grad()
    model(x.cuda()).square().mean().backward()
    optimizer.step()
"""
SMALL = (
    "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 1.25 GiB of"
    " which 19.00 MiB is free. Including non-PyTorch memory, this process has 1.23 GiB memory in"
    " use. Of the allocated memory 850.00 MiB is allocated by PyTorch, and 20.00 MiB is reserved"
    " by PyTorch but unallocated."
)


def test_with_the_script_that_died_its_plans_lead_what_would_have_avoided_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, log = tmp_path / "train.py", tmp_path / "train.log"
    script.write_text(TRAIN)
    log.write_text(SMALL)
    asked = ["explain", str(log), "--script", str(script), "--json", "--", "--width", "1024"]
    assert main(asked) == 0
    found = from_json(Explanation, capsys.readouterr().out)
    by_plan = [remedy for remedy in found.remedies if remedy.source == "planner"]
    assert by_plan
    assert found.remedies[: len(by_plan)] == tuple(by_plan)
    plans = oomph.plan(
        oomph.Script(path=str(script), arguments=("--width", "1024")), gpu_memory="1280MiB"
    )
    assert [one.needed_bytes for one in by_plan] == [one.prediction.reserved_bytes for one in plans]
    assert by_plan[0].helps is True
    assert found.next_command is not None
    assert found.next_command.endswith("--gpu-memory 1280MiB --diff -- --width 1024")
    assert any("as it is needs" in caveat for caveat in found.caveats)


@pytest.mark.parametrize(
    ("log", "words", "what"),
    [
        (OOM, ["--", "--width", "8"], "belong to a script"),
        (OOM, ["--gpu", "t4"], "--gpu plans a script"),
        (OOM, ["--script", "train.py", "--html", "x.html"], "--script goes with one log"),
        (OOM, ["--script", "train.ipynb"], "notebook"),
        ("CUDA error: out of memory", ["--script", "train.py"], "how much memory the GPU has"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    log: str, words: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.log").write_text(log)
    assert main(["explain", str(tmp_path / "train.log"), *words]) == 2
    assert what in capsys.readouterr().err

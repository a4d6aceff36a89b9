"""`oomph.record` on the emulated GPU: the files that it leaves, and what `oomph explain` says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import oomph
from oomph.cli import main
from oomph.monitoring.memory_history import MemoryHistory
from oomph.records.recording_facts import RecordingFacts, facts_path
from oomph.records.stored import from_json_file
from oomph.snapshots.loading import load
from oomph.units import MIB


def run_out() -> None:
    kept = [torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
    with pytest.raises(torch.OutOfMemoryError):
        kept.append(torch.zeros(60 * MIB, dtype=torch.uint8, device="cuda"))


def facts_of(path: Path) -> RecordingFacts:
    return from_json_file(RecordingFacts, facts_path(path), what="file of oomph.record")


def test_running_out_leaves_a_snapshot_and_the_facts_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "oom.pickle"
    with oomph.emulated_gpu("64MiB"), oomph.record(path):
        run_out()
    assert f"next: oomph explain {path}" in capsys.readouterr().err
    facts = facts_of(path)
    assert (facts.has_run_out, facts.total_bytes, facts.rank) == (True, 64 * MIB, 0)
    assert facts.torch_version == torch.__version__
    (device,) = load(path).devices
    assert [event["action"] for event in device.events()].count("oom") == 1
    found = oomph.explain(path)
    assert found is not None
    assert found.verdict == "capacity"
    assert found.gate is not None
    assert found.gate.is_exact
    line = next(one for one in found.holders if one.kind == "line")
    assert line.name.startswith(__file__)
    assert line.size_bytes == 32 * MIB


def test_nothing_is_written_if_memory_is_enough(tmp_path: Path) -> None:
    with oomph.emulated_gpu("64MiB"), oomph.record(tmp_path / "oom.pickle"):
        torch.zeros(MIB, device="cuda")
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_can_be_taken_at_any_time(tmp_path: Path) -> None:
    with oomph.emulated_gpu("64MiB"), oomph.record(tmp_path / "oom.pickle") as recording:
        kept = torch.zeros(MIB, device="cuda")
        assert recording.dump() == tmp_path / "oom.pickle"
        del kept
    assert not facts_of(tmp_path / "oom.pickle").has_run_out
    found = oomph.explain(tmp_path / "oom.pickle")
    assert found is not None
    assert found.verdict == "full"


def test_after_it_is_stopped_it_writes_nothing(tmp_path: Path) -> None:
    with oomph.emulated_gpu("64MiB"):
        with oomph.record(tmp_path / "oom.pickle"):
            pass
        run_out()
    assert list(tmp_path.iterdir()) == []


def test_only_the_newest_events_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "oom.pickle"
    with oomph.emulated_gpu("64MiB"), oomph.record(path, max_events=50) as recording:
        for _ in range(100):
            torch.zeros(1000, device="cuda")
        recording.dump()
    assert load(path).devices[0].num_events == 50


def test_a_script_that_recovers_again_and_again_is_not_slowed_for_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with oomph.emulated_gpu("64MiB"), oomph.record(tmp_path / "oom.pickle"):
        for _ in range(9):
            run_out()
    assert capsys.readouterr().err.count("next: oomph explain") == 5


def test_other_ranks_write_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert MemoryHistory(tmp_path / "oom.pickle").path == tmp_path / "oom-rank3.pickle"


def test_a_disk_that_is_full_does_not_hide_torchs_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with oomph.emulated_gpu("64MiB"), oomph.record(tmp_path / "file" / "oom.pickle"):
        run_out()
    assert "the snapshot could not be written" in capsys.readouterr().err


def test_without_a_gpu_it_does_nothing_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with oomph.record(tmp_path / "oom.pickle"):
        pass
    assert "there is no CUDA GPU" in capsys.readouterr().err


_SCRIPT = """
import torch
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = []
for step in range(40):
    loss = model(torch.randn(64, 512, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(torch.zeros(1 << 20, device="cuda"))
"""


def test_an_unchanged_script_that_leaks_is_explained_from_start_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import subprocess
    import sys

    (tmp_path / "train.py").write_text(_SCRIPT)
    monkeypatch.setenv("OOMPH_RUNS", str(tmp_path / "runs"))
    inner = [sys.executable, "-m", "oomph", "run", "--emulate", "64MiB", "--"]
    watch = [sys.executable, "-m", "oomph", "watch", "--record", "--quiet", "--", *inner]
    done = subprocess.run([*watch, sys.executable, "train.py"], cwd=tmp_path, check=False)
    assert done.returncode == 1
    capfd.readouterr()
    assert main(["explain"]) == 0
    printed = capfd.readouterr().out
    assert printed.startswith("a leak: memory grew by 4.0 MiB a step until it ran out")
    assert "train.py:11 in <module>" in printed

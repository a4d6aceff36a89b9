"""`oomph verify`, as typed: on the emulated GPU, where a prediction can be right and wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # once, for all the children  # noqa: F401
from conftest import OnMachine
from nvml.machine import Gpu

from oomph.cli import main

MODEL = """
import torch, oomph
from torch import nn

kept = []

def model():
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))

def is_rehearsed():
    return torch.cuda.get_device_name() != "oomph's emulated GPU"
"""
WORKLOAD = (
    MODEL
    + """
def loss(model, batch):
    out = model(batch["x"])
    if EXTRA and not is_rehearsed():
        kept.append(out.detach().repeat(1, 1000))
    return nn.functional.cross_entropy(out, batch["y"])

def made(extra):
    global EXTRA
    EXTRA = extra
    return oomph.Workload(
        model=model,
        batch=lambda n: {"x": torch.randn(n, 256), "y": torch.randint(10, (n,))},
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
        batch_size=64,
    )

honest = lambda: made(False)
deceitful = lambda: made(True)
"""
)
SCRIPT = (
    MODEL
    + """
import sys
net = model().cuda()
optimizer = torch.optim.AdamW(net.parameters())
for step in range(int(sys.argv[1])):
    x, y = torch.randn(64, 256).cuda(), torch.randint(10, (64,)).cuda()
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if "keep" in sys.argv and not is_rehearsed():
        kept.append(torch.empty(3_000_000, device="cuda"))
    torch.save(net.state_dict(), "checkpoint.pt")
"""
)
EMULATE = ("--emulate", "1GiB")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a workload and a script, in which the test runs."""
    (tmp_path / "work.py").write_text(WORKLOAD)
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def verified(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["verify", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


# ---- a workload ------------------------------------------------------------------------------


@pytest.mark.usefixtures("project")
def test_a_workload_that_trains_as_it_is_rehearsed_is_right(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, found = verified(capsys, "work.py:honest", *EMULATE)
    assert code == 0
    (one,) = found["verified"]
    assert one["predicted"]["allocated_bytes"] == one["measured"]["allocated_bytes"]
    assert one["predicted"]["reserved_bytes"] == one["measured"]["reserved_bytes"]
    assert one["measured"]["step_s"] is None
    assert one["sequence"]["num_matched"] == one["sequence"]["num_recorded"] > 40
    assert one["sequence"]["first_difference"] is None


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    "settings",
    [
        ("--precision", "bf16"),
        ("--precision", "fp16", "--micro-batch", "16"),
        ("--precision", "pure-bf16"),
        ("--optimizer", "for-loop"),
        ("--micro-batch", "32", "--expandable-segments"),
    ],
    ids=" ".join,
)
def test_settings_are_trained_as_they_are_rehearsed(
    capsys: pytest.CaptureFixture[str], settings: tuple[str, ...]
) -> None:
    code, found = verified(capsys, "work.py:honest", *EMULATE, *settings)
    assert code == 0
    assert found["verified"][0]["sequence"]["first_difference"] is None
    assert found["verified"][0]["sequence"]["num_matched"] > 40


@pytest.mark.usefixtures("project")
def test_a_loss_that_keeps_more_than_it_shows_is_found_and_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify", "work.py:deceitful", *EMULATE]) == 1
    text = capsys.readouterr().out
    assert text.startswith("oomph is wrong on oomph's emulated GPU: work.py:deceitful is outside")
    assert "First difference, in step 1: the GPU requests 2.4 MiB (2,560,000 B) at work.py:" in text
    assert "that oomph does not, after aten.addmm.default in 2 (forward)." in text


@pytest.mark.usefixtures("project")
def test_running_out_of_memory_as_predicted_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "work.py:honest", "--emulate", "16MiB"]) == 0
    assert "ran out of memory, and oomph said that it does not fit" in capsys.readouterr().out


@pytest.mark.usefixtures("project")
def test_an_error_of_the_users_code_names_its_line(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = WORKLOAD.replace(
        "    if EXTRA", "    if not is_rehearsed(): raise KeyError('x')\n    if EXTRA"
    )
    (project / "work.py").write_text(broken)
    assert main(["verify", "work.py:honest", *EMULATE]) == 2
    error = capsys.readouterr().err
    assert "work.py:" in error
    assert "KeyError" in error


# ---- a script --------------------------------------------------------------------------------


def test_a_script_is_stopped_after_a_few_steps_and_leaves_no_file(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = verified(capsys, "train.py", *EMULATE, "--", "1000000")
    assert code == 0
    (one,) = found["verified"]
    assert one["measured"]["num_steps"] == 3
    assert one["sequence"]["first_difference"] is None
    assert one["sequence"]["num_matched"] == one["sequence"]["num_recorded"] > 40
    assert sorted(path.name for path in project.iterdir()) == ["train.py", "work.py"]


@pytest.mark.usefixtures("project")
def test_a_script_that_does_more_than_in_its_rehearsal_is_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify", "train.py", *EMULATE, "--", "9", "keep"]) == 1
    text = capsys.readouterr().out
    assert "the GPU requests 11.4 MiB (12,000,000 B) at train.py:" in text
    assert "only on the GPU: 1 x 11.4 MiB (train.py:" in text
    assert "note: memory went on growing: at most" in text


def test_steps_that_a_scripts_loss_scaler_skips_are_left_out(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scaled = SCRIPT.replace("loss.backward()", "scaler.scale(1000 * loss).backward()").replace(
        "optimizer.step()", "scaler.step(optimizer)\n    scaler.update()"
    )
    made = 'scaler = torch.amp.GradScaler("cuda", init_scale=2.0**127)\nfor step in'
    (project / "train.py").write_text(scaled.replace("for step in", made))
    code, found = verified(capsys, "train.py", *EMULATE, "--", "100")
    assert code == 0
    (one,) = found["verified"]
    assert "the loss scaler skipped" in one["measured"]["notes"][0]
    assert one["measured"]["num_steps"] == 3
    assert one["sequence"]["num_matched"] > 40


@pytest.mark.usefixtures("project")
def test_a_script_that_ends_too_early_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "train.py", *EMULATE, "--", "1"]) == 2
    assert "the script ended after 1 optimizer steps on the GPU" in capsys.readouterr().err


@pytest.mark.usefixtures("project")
def test_settings_for_a_script_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "train.py", *EMULATE, "--precision", "bf16"]) == 2
    assert "a script is verified as it is, without precision" in capsys.readouterr().err


# ---- the zoo ---------------------------------------------------------------------------------


def test_the_zoo_prints_a_table_and_writes_a_file_that_can_be_printed_again(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--zoo", "--only", "mlp,unet", *EMULATE]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("oomph is right on oomph's emulated GPU: 2 of 2 models")
    assert "Written to oomph-verify.json" in printed
    assert main(["verify", "--show", "oomph-verify.json"]) == 0
    again = capsys.readouterr().out
    assert again.splitlines()[:5] == printed.splitlines()[:5]
    text = (project / "oomph-verify.json").read_text()
    assert str(project) not in text
    assert json.loads(text)["scale"] == "tiny"


def test_ctrl_c_keeps_what_was_measured(project: Path) -> None:
    command = [sys.executable, "-m", "oomph", "verify", "--zoo", *EMULATE, "-o", "zoo.json"]
    # Not the test's own process group: Ctrl-C reaches all processes of a terminal's.
    child = subprocess.Popen(
        [sys.executable, "-c", WATCHED, *command[2:]],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stderr is not None
    for line in child.stderr:
        if "3 of" in line:
            os.killpg(child.pid, signal.SIGINT)
            break
    printed, _ = child.communicate()
    assert child.returncode == 130
    found = json.loads((project / "zoo.json").read_text())
    assert found["was_interrupted"] is True
    assert [one["name"] for one in found["verified"]][:2] == ["mlp", "mlp-bf16"]
    assert f"Interrupted: {len(found['verified'])} of {found['num_asked']} models" in printed


# `say` is silent unless a person can see it.
WATCHED = """
import sys
sys.stderr.isatty = lambda: True
from oomph.cli import main
sys.exit(main(sys.argv[2:]))
"""


# ---- what cannot be verified -----------------------------------------------------------------


@pytest.mark.usefixtures("project")
def test_without_a_gpu_there_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--zoo"]) == 4
    error = capsys.readouterr().err
    assert error.startswith("oomph: there is no GPU here to verify on\n  because: ")
    assert "--emulate 16GiB" in error
    assert main(["verify", "work.py:honest"]) == 4


@pytest.mark.usefixtures("project")
def test_a_gpu_that_torch_cannot_use_is_one_clear_error(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    on_machine([Gpu()])
    assert main(["verify", "--zoo"]) == 4
    assert "cannot use a GPU" in capsys.readouterr().err
    assert main(["verify", "train.py", "--", "9"]) == 4
    assert "cannot use a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing to verify was given"),
        (("--zoo", "work.py:honest"), "--zoo has models and settings of its own"),
        (("--zoo", "--precision", "bf16"), "--zoo has models and settings of its own"),
        (("--zoo", "--only", "gtp", *EMULATE), "the zoo has no 'gtp'"),
        (("--only", "gpt"), "--only is for --zoo"),
        (("nowhere.py:workload", *EMULATE), "there is no file 'nowhere.py'"),
        (("work.py:honest", "--emulate", "1"), "has room for nothing"),
        (("work.py:honest", *EMULATE, "-o", "no/where.json"), "cannot be written"),
    ],
)
@pytest.mark.usefixtures("project")
def test_a_wrong_question_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert main(["verify", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_exit_4(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "bad.json").write_text('{"schema": 1}')
    for name in ("bad.json", "missing.json"):
        assert main(["verify", "--show", name]) == 4
        assert name in capsys.readouterr().err


def test_without_torch_there_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main(["verify", "--zoo", *EMULATE]) == 4
    assert "nothing can be trained without torch" in capsys.readouterr().err

"""Where Python cannot fork, a new Python rehearses. Tried on a Linux without what others lack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import oomph

# What Windows lacks, taken away before anything of oomph is imported, in children as well.
LACKING = """
import os, platform, select, shutil, subprocess, sys, sysconfig, tempfile
sysconfig.get_config_vars(), platform.uname()
for name in (
    "fork", "forkpty", "getuid", "geteuid", "getgid", "getegid", "killpg", "setpgid", "setsid",
    "waitid", "getpgid", "sched_getaffinity", "getloadavg",
):
    if hasattr(os, name):
        delattr(os, name)
del select.poll
for name in ("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty"):
    sys.modules[name] = None
sys.platform = "elsewhere"
"""
TRAIN = """
import torch, oomph

def batch(n):
    print("a print of the workload's own")
    return torch.zeros(n, 64)

def loss(model, batch):
    return model(batch).mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 1)

def workload():
    return oomph.Workload(
        model=Net, batch=batch, loss=loss, optimizer=optimizer, batch_size=8,
    )
"""


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(LACKING)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def python(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    package = str(Path(oomph.__file__).parents[1])
    paths = {"PYTHONPATH": os.pathsep.join([str(where), package])}
    state = {"XDG_CACHE_HOME": str(where / "cache"), "XDG_STATE_HOME": str(where / "state")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=where,
        env={**os.environ, **paths, **state},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_workload_in_a_file_is_planned_as_on_linux(elsewhere: Path) -> None:
    asked = ("plan", "train.py:workload", "--gpu", "rtx4090", "--json")
    done = python(elsewhere, "-m", "oomph", *asked)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    here = oomph.plan(f"{elsewhere}/train.py:workload", gpu="rtx4090", fresh=True)
    assert found["plans"][0]["device_bytes"] == here[0].prediction.device_bytes
    assert found["num_candidates"] == here.num_candidates
    assert "a print of the workload's own" in done.stderr


def test_functions_of_a_module_are_sent_and_lambdas_are_refused_in_words(elsewhere: Path) -> None:
    told = python(
        elsewhere,
        "-c",
        "import dataclasses, oomph, train\n"
        "made = train.workload()\n"
        "print(oomph.predict(made, gpu='rtx4090').fits)\n"
        "local = dataclasses.replace(made, model=lambda: train.Net())\n"
        "oomph.predict(local, gpu='rtx4090')",
    )
    assert told.stdout.splitlines()[0] == "yes", told.stderr
    assert "a workload that is not in a file needs Linux" in told.stderr
    assert "a workload in a file, by its name: oomph.plan('train.py:workload', ...)" in told.stderr


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        (("--help",), 0, ""),
        (("--env",), 0, ""),
        (("gpus", "--catalog", "rtx4090"), 0, ""),
        (("runs",), 0, ""),
        (("predict", "train.py", "--gpu", "rtx4090"), 2, "rehearsing a script needs Linux"),
        (("watch", "--", "true"), 2, "oomph watch needs Linux"),
        (("check", "train.py:workload"), 2, "oomph check needs Linux"),
    ],
)
def test_every_command_works_or_says_that_it_needs_linux(
    elsewhere: Path, asked: tuple[str, ...], code: int, said: str
) -> None:
    done = python(elsewhere, "-m", "oomph", *asked)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert said in done.stderr


def test_a_file_that_asks_while_it_is_imported_does_not_start_children_without_end(
    elsewhere: Path,
) -> None:
    (elsewhere / "asks.py").write_text(
        f"{TRAIN}\nprint(oomph.predict(workload(), gpu='rtx4090').fits)"
    )
    done = python(elsewhere, "-c", "import asks")
    assert "importing the workload's file asks oomph again" in done.stderr
    assert '`if __name__ == "__main__":`' in done.stderr

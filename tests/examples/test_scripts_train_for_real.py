"""Every example script trains when it is run for real, small, on the CPU."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from examples.commands import COMMANDS, SCRIPTS

pytestmark = pytest.mark.slow

_LOSS = re.compile(r"loss\D{0,25}?[=: ] ?'?(-?\d+\.\d+|nan|inf)", re.IGNORECASE)
_HAS_GPU = torch.cuda.is_available()
RUNNABLE = [name for name, command in COMMANDS.items() if _HAS_GPU or not command.needs_gpu]


@dataclass(frozen=True)
class Run:
    exit_code: int
    printed: str

    @property
    def losses(self) -> list[float]:
        return [float(found) for found in _LOSS.findall(self.printed)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Run]:
    """All of them, run in a copy of their directory."""
    at = tmp_path_factory.mktemp("scripts")
    directory = shutil.copytree(SCRIPTS, at / "scripts")
    jobs = {
        name: {
            "directory": str(directory),
            "words": words_of(name),
            "output": str(at / f"{name}.txt"),
        }
        for name in RUNNABLE
    }
    done = subprocess.run(
        [sys.executable, "-m", "examples.starting"],
        input=json.dumps(jobs),
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    codes = json.loads(done.stdout)
    return {name: Run(codes[name], (at / f"{name}.txt").read_text()) for name in jobs}


def words_of(name: str) -> list[str]:
    command = COMMANDS[name]
    return [*command.program.split(), *command.tiny, *(() if _HAS_GPU else command.on_cpu)]


@pytest.mark.parametrize("name", RUNNABLE)
def test_it_trains_and_its_losses_are_finite(runs: Mapping[str, Run], name: str) -> None:
    run = runs[name]
    assert run.exit_code == 0, run.printed[-3000:]
    assert run.losses, run.printed[-3000:]
    assert all(map(math.isfinite, run.losses)), run.losses


@pytest.mark.parametrize("name", [name for name in RUNNABLE if COMMANDS[name].loss_falls])
def test_its_loss_falls(runs: Mapping[str, Run], name: str) -> None:
    losses = runs[name].losses
    assert losses[-1] < losses[0], losses


def test_few_scripts_need_a_gpu_to_run_at_all() -> None:
    assert sum(command.needs_gpu for command in COMMANDS.values()) <= 2


def test_every_script_has_a_command_and_a_line_in_the_readme() -> None:
    programs = {
        *(path.name for path in SCRIPTS.glob("*.py") if path.name != "nano_gpt_model.py"),
        *(f"-m {path.parent.name}.train" for path in SCRIPTS.glob("*/train.py")),
    }
    assert {command.program for command in COMMANDS.values()} == programs
    readme = (SCRIPTS / "README.md").read_text()
    for command in COMMANDS.values():
        tiny = " ".join(["python", command.program, *command.tiny])
        assert tiny in readme

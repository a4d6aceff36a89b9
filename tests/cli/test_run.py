"""`oomph run --emulate`: the user's command, unchanged, with a GPU that is not there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import oomph

HOME = str(Path(oomph.__file__).parents[1])

TRAINING = """
import sys
import torch
model = torch.nn.Linear(512, 512).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(int(sys.argv[1]), 512, device="cuda")).mean().backward()
    optimizer.step()
print("trained", torch.cuda.get_device_name(), flush=True)
"""


def run(*arguments: str, home: str = HOME, **how: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": home, **how}
    command = [sys.executable, "-m", "oomph", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def emulated(code: str, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return run("--emulate", "64MiB", "--", sys.executable, "-c", code, *arguments, **how)


def test_what_fits_trains_and_the_last_line_says_how_much_it_took() -> None:
    done = emulated(TRAINING, "8")
    assert done.returncode == 0
    assert done.stdout == "trained oomph's emulated GPU\n"
    assert done.stderr.startswith("oomph: fits: the emulated GPU of 64.0 MiB had at most ")


def test_what_does_not_fit_fails_with_torchs_own_error() -> None:
    done = emulated(TRAINING, "40000")
    assert done.returncode == 1
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 80.00 MiB." in done.stderr
    assert "oomph: does not fit: the emulated GPU of 64.0 MiB ran out of memory once" in done.stderr


def test_a_command_that_recovers_by_itself_is_told_from_one_that_fails() -> None:
    code = (
        "import torch\n"
        "try: torch.zeros(2**30, device='cuda')\n"
        "except torch.OutOfMemoryError: torch.zeros(2**10, device='cuda')"
    )
    done = emulated(code)
    assert done.returncode == 0
    assert "oomph: went on with less: the emulated GPU of 64.0 MiB ran out of" in done.stderr


def test_the_answer_is_json_if_asked() -> None:
    done = run("--emulate", "64MiB", "--json", "--", sys.executable, "-c", TRAINING, "8")
    answer = json.loads(done.stdout.partition("\n")[2])
    assert answer["fits"] is True
    assert answer["run"]["num_processes"] == 1
    assert 0 < answer["run"]["peak_allocated_bytes"] <= answer["run"]["peak_reserved_bytes"]


def test_the_exit_code_is_that_of_the_command() -> None:
    assert emulated("import torch, sys; sys.exit(7)").returncode == 7
    killed = emulated("import os; os.kill(os.getpid(), 9)")
    assert killed.returncode == 128 + signal.SIGKILL
    assert "was not used" in killed.stderr


def test_processes_that_the_command_starts_have_the_gpu_too() -> None:
    code = (
        "import subprocess, sys\n"
        "child = 'import torch; print(torch.zeros(9, device=\"cuda\").device)'\n"
        "subprocess.run([sys.executable, '-c', child], check=True)"
    )
    done = emulated(code)
    assert done.stdout == "cuda:0\n"
    assert "fits" in done.stderr


def test_what_the_user_has_in_sitecustomize_and_pythonpath_still_counts(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = 5")
    (tmp_path / "other.py").write_text("")
    code = (
        "import other, sys, sitecustomize, torch\n"
        "print(mine, 'oomph-run' in ' '.join(sys.path), sitecustomize.__file__)\n"
        "print(type(torch.__spec__.loader).__name__)"
    )
    done = emulated(code, home=f"{HOME}{os.pathsep}{tmp_path}")
    seen = f"5 False {tmp_path / 'sitecustomize.py'}\nSourceFileLoader\n"
    assert done.stdout == seen


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    emulated("import torch", TMPDIR=str(tmp_path))
    assert list(tmp_path.glob("oomph-*")) == []


def test_a_signal_to_oomph_reaches_the_command() -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.1)"
    )
    command = [sys.executable, "-m", "oomph", "run", "--emulate", "1GiB", "--", sys.executable]
    environment = {**os.environ, "PYTHONPATH": HOME}
    with subprocess.Popen(
        [*command, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--emulate", "1GiB"], "there is no command"),
        (["--emulate", "1GiB", "--", "no-such-program"], "cannot be started"),
        (["--emulate", "much", "--", "true"], "is not a size"),
        (["--", "true"], "--emulate"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "try: " in done.stderr


def test_settings_of_the_allocator_that_torch_refuses_are_refused_once() -> None:
    done = run("--emulate", "1GiB", "--", "true", PYTORCH_ALLOC_CONF="nonsense:1")
    assert done.returncode == 2
    assert "'nonsense' is not a setting" in done.stderr

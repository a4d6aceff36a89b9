"""The command line as a whole: help, versions, errors, completion, exit codes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

import oomph
from oomph.cli import _COMMANDS, main

OOMPH = [sys.executable, "-m", "oomph"]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*OOMPH, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_version_is_the_packages() -> None:
    assert run("--version").stdout == f"oomph {oomph.__version__}\n"


def test_the_environment_for_an_issue_has_versions_and_settings_and_no_secret() -> None:
    hidden = dict.fromkeys(("OOMPH_TOKEN", "HF_TOKEN"), "hush")
    done = run("--env", PYTORCH_ALLOC_CONF="expandable_segments:True", **hidden)
    assert done.returncode == 0
    assert f"oomph: {oomph.__version__}" in done.stdout
    assert f"torch: {version('torch')}" in done.stdout
    assert "PYTORCH_ALLOC_CONF: expandable_segments:True" in done.stdout
    assert "hush" not in done.stdout
    assert str(Path.home()) not in done.stdout.replace("/", " /").split()


def test_help_lists_every_verb_and_the_exit_codes() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "gpus" in done.stdout
    assert "exit codes:" in done.stdout


def test_without_a_verb_it_shows_the_help_and_says_that_this_was_no_answer() -> None:
    done = run()
    assert done.returncode == 2
    assert "usage: oomph" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said", "tried"),
    [
        (["gpsu"], "there is no command 'gpsu'", "oomph gpus"),
        (["gpus", "--free", "--count"], "expected one argument", "oomph gpus --help"),
        (["gpus", "--free", "--count", "0"], "'0' is not a number of GPUs", "oomph gpus --help"),
        (["gpus", "--version"], "there is no --version", "oomph gpus --help"),
        (["gpus", "--visble"], "there is no --visble", "oomph gpus --visible"),
        (["gpus", "--count", "many", "--free"], "'many' is not a number of GPUs", "oomph gpus"),
        (["gpus", "--count", "2"], "--count makes sense only with --free", "gpus --free --count 2"),
        (["gpus", "--catalog", "--free"], "--catalog cannot be combined", "--catalog"),
        (["gpus", "--vis"], "there is no --vis", "oomph gpus --visible"),
        (["gpus", "--emulate", "8xa1000"], "no GPU 'a1000'", "a100"),
    ],
)
def test_a_wrong_flag_is_one_clear_error_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str, tried: str
) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("oomph: ")
    assert said in told.err
    assert tried in told.err.rpartition("try: ")[2]


def test_every_verb_can_answer_in_json() -> None:
    for verb in _COMMANDS:
        assert "--json" in run(verb, "--help").stdout, verb


def test_a_reader_that_stops_early_is_no_error() -> None:
    line = f"{sys.executable} -m oomph gpus --catalog | head -1"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path) -> None:
    from nvml.machine import Gpu, NvmlMachine

    machine = NvmlMachine(tmp_path, [Gpu()])
    machine.latency(us=20_000_000, function="nvmlDeviceGetName")
    process = subprocess.Popen(
        [*OOMPH, "gpus"], env={**os.environ, **machine.env()}, stderr=subprocess.PIPE, text=True
    )
    while not machine.calls("nvmlDeviceGetUUID"):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    machine.clear_latencies()
    _, complaint = process.communicate()
    assert process.returncode == 130
    assert complaint == ""


def test_a_reader_that_has_seen_enough_is_not_the_answer_no() -> None:
    line = f"{sys.executable} -m oomph gpus --emulate 64xt4 | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.stdout == "0\n"
    assert done.stderr == ""


@pytest.mark.parametrize("where", [">&-", "> /dev/full"])
def test_an_answer_that_cannot_be_written_is_one_line_and_exit_4(where: str) -> None:
    line = f"{sys.executable} -m oomph gpus --emulate 8xt4 {where}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert done.stderr.startswith("oomph: ")
    assert done.stderr.count("\n") == 1


def test_a_terminal_without_unicode_gets_plain_characters() -> None:
    done = run("gpus", "--emulate", "2xt4", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "####" in done.stdout
    assert done.stdout.isascii()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_verbs_flags_and_gpu_names(tmp_path: Path) -> None:
    command = tmp_path / "oomph"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m oomph "$@"\n')
    command.chmod(0o755)
    assert complete(tmp_path, "oomph gp") == ["gpus"]
    assert complete(tmp_path, "oomph gpus --vis") == ["--visible"]
    assert "rtx4090" in complete(tmp_path, "oomph gpus --catalog rtx40")
    assert "4xrtx4090" in complete(tmp_path, "oomph gpus --emulate 4xrtx40")


def complete(directory: Path, line: str) -> list[str]:
    """What bash offers after this line and a tab."""
    script = f"""
        eval "$(oomph --completion bash)"
        complete_with=$(complete -p oomph | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        COMP_LINE={line!r} COMP_POINT={len(line)} COMP_TYPE=9
        read -ra COMP_WORDS <<< "$COMP_LINE"
        COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
        "$complete_with" oomph
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": f"{directory}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    return re.findall(r"\S+", done.stdout)

"""Whose process is it: this run's, mine, others', or nobody can tell."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from oomph.sensing import ownership
from oomph.sensing.ownership import facts_about

Start = Callable[..., int]
UNUSED_PID = 4_194_303  # the largest that Linux gives; nobody has it on a test machine

as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to start another user's process")


def can_make_namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "--user", "--map-root-user", "--pid", "--mount", "--fork", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


in_container = pytest.mark.skipif(not can_make_namespaces(), reason="needs user namespaces")


def test_this_process_is_this_run() -> None:
    facts = facts_about(os.getpid())
    assert facts.owner == "this-run"
    assert facts.command
    assert "python" in facts.command or "pytest" in facts.command
    assert facts.started_at is not None
    assert facts.started_at <= time.time()


def test_a_child_is_this_run(start_process: Start) -> None:
    assert facts_about(start_process("train.py")).owner == "this-run"


def test_a_process_of_this_user_outside_this_run_is_mine(
    start_process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = start_process("train.py")
    monkeypatch.setattr(
        os, "getpid", lambda: UNUSED_PID
    )  # seen by a process that is not its parent
    facts = facts_about(pid)
    assert facts.owner == "mine"
    assert "train.py" in (facts.command or "")


def test_a_process_that_carries_the_runs_token_is_this_run(
    start_process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ownership.RUN_TOKEN, "run-7")
    pid = start_process()
    stranger = start_process(env={**os.environ, ownership.RUN_TOKEN: "run-8"})
    monkeypatch.setattr(os, "getpid", lambda: UNUSED_PID)
    assert facts_about(pid).owner == "this-run"
    assert facts_about(stranger).owner == "mine"


@as_root
def test_a_process_of_another_user_is_others_and_named(start_process: Start) -> None:
    pid = start_process(user="nobody")
    facts = read_as_another_process(pid)
    assert facts["owner"] == "others"
    assert facts["user"] == "nobody"


def read_as_another_process(pid: int) -> dict[str, str]:
    code = (
        "import json, dataclasses; from oomph.sensing.ownership import facts_about;"
        f"print(json.dumps(dataclasses.asdict(facts_about({pid}))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    facts: dict[str, str] = json.loads(done.stdout)
    return facts


def test_a_process_that_has_ended_is_unknown() -> None:
    facts = facts_about(UNUSED_PID)
    assert facts.owner == "unknown"
    assert "ended" in (facts.note or "")


def test_a_number_that_another_process_has_got_is_looked_at_again(
    start_process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = start_process("first")
    assert "first" in (facts_about(pid).command or "")
    # The number goes to another process: same number, another identity.
    monkeypatch.setattr(ownership, "_identity", lambda _: (1, 2))
    monkeypatch.setattr(ownership, "_look", lambda _: ownership.Facts("mine", command="second"))
    assert facts_about(pid).command == "second"


CONTAINER = """
import os, sys, subprocess
from oomph.sensing.ownership import facts_about, pids_are_the_hosts
assert pids_are_the_hosts()
innocent = subprocess.Popen(["sleep", "60"])
print(facts_about(os.getpid()).owner, facts_about(innocent.pid).owner, facts_about(4194303).owner)
device = open("/dev/nvidia0")
from oomph.sensing import ownership; ownership.forget()
print(facts_about(os.getpid()).owner, facts_about(innocent.pid).owner, facts_about(4194303).note)
innocent.kill()
"""


@in_container
def test_in_a_container_a_pid_counts_only_with_an_nvidia_device_open(tmp_path: Path) -> None:
    (tmp_path / "read.py").write_text(CONTAINER)
    # A PID namespace of its own, and a /dev with an NVIDIA device in it.
    setup = (
        "mount -t proc proc /proc && mount -t tmpfs tmpfs /dev && touch /dev/nvidia0 /dev/null"
        f" && exec {sys.executable} {tmp_path / 'read.py'}"
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--pid", "--mount", "--fork", "sh", "-c", setup],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    without_device, with_device = done.stdout.splitlines()
    assert without_device == "unknown unknown unknown"
    assert with_device.startswith("this-run unknown a PID of the host")

"""Commands with and without `oomph watch --` in front, on a machine of the test library."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvml.machine import NvmlMachine

from oomph.monitoring.diary import META
from oomph.monitoring.diary_reader import read_run
from oomph.records.run import Run

OOMPH = (sys.executable, "-m", "oomph")


@dataclass
class Bench:
    """A machine, and a place for its runs."""

    machine: NvmlMachine
    runs: Path

    def env(self, **more: str) -> dict[str, str]:
        return {**os.environ, **self.machine.env(), "OOMPH_RUNS": str(self.runs), **more}

    def wrapped(self, command: Sequence[str], *flags: str) -> list[str]:
        return [*OOMPH, "watch", *flags, "--", *command]

    def run(
        self, command: Sequence[str], *flags: str, **options: Any
    ) -> subprocess.CompletedProcess[bytes]:
        options = {"capture_output": True, "env": self.env(), **options}
        return subprocess.run(self.wrapped(command, *flags), check=False, **options)

    def bare(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        options = {"capture_output": True, "env": self.env(), **options}
        return subprocess.run(command, check=False, **options)

    def start(self, command: Sequence[str], *flags: str, **options: Any) -> subprocess.Popen[bytes]:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen(self.wrapped(command, *flags), env=self.env(), **options)

    def directory(self) -> Path:
        """Of the only run, once it is there."""
        wait_for(lambda: bool(list(self.runs.glob(f"*/{META}"))))
        (meta,) = self.runs.glob(f"*/{META}")
        return meta.parent

    def read(self) -> Run:
        return read_run(self.directory())


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def wait_for(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.05)


def told(done: subprocess.CompletedProcess[bytes]) -> list[str]:
    """What oomph says itself, on standard error."""
    lines = done.stderr.decode().splitlines()
    return [line.removeprefix("oomph: ") for line in lines if line.startswith("oomph: ")]


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# Tells what it gets, and all of it when it is told to end by SIGUSR2.
COUNTING = """
import os, signal, sys, time
got = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT):
    signal.signal(number, lambda n, _: (got.append(n), os.write(1, b"got %d\\n" % n)))
def end(*_):
    os.write(1, b"all: %s\\n" % " ".join(map(str, got)).encode())
    os._exit(7)
signal.signal(signal.SIGUSR2, end)
print("ready", os.getpid(), flush=True)
while True:
    time.sleep(0.05)
"""


def read_ready(process: subprocess.Popen[bytes]) -> int:
    """The pid of the command, which has said that it is ready."""
    assert process.stdout is not None
    word, pid = process.stdout.readline().split()
    assert word == b"ready"
    return int(pid)

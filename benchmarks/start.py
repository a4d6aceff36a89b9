"""How long it takes until a command says something: CPU time of the whole process."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.reading import busy_machine
from benchmarks.tables import Measured, as_table

ROUNDS = 15
BIN = Path(sys.executable).parent
FLOOR = "python -c pass (floor)"


def measure() -> str:
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, **busy_machine(Path(directory)).env()}
        # The peers come compiled from their wheels; let oomph's first run compile it too.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        best = {name: float("inf") for name in COMMANDS}
        for _ in range(ROUNDS):  # in turns, so that a noisy moment hits all of them
            for name, command in COMMANDS.items():
                best[name] = min(best[name], cpu_ms(command, environment))
    rows = [Measured(name, milliseconds) for name, milliseconds in best.items()]
    return as_table(f"a start, best of {ROUNDS}", FLOOR, rows)


COMMANDS: Mapping[str, list[str]] = {
    FLOOR: [sys.executable, "-c", "pass"],
    "import oomph": [sys.executable, "-c", "import oomph"],
    "oomph --help": [str(BIN / "oomph"), "--help"],
    "gpustat --help": [str(BIN / "gpustat"), "--help"],
    "nvitop --help": [str(BIN / "nvitop"), "--help"],
    "oomph gpus": [str(BIN / "oomph"), "gpus"],
    "nvitop -1": [str(BIN / "nvitop"), "-1"],
    "gpustat": [str(BIN / "gpustat")],
}


def cpu_ms(command: list[str], environment: Mapping[str, str]) -> float:
    """User and system time of one run, its output thrown away."""
    nowhere = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
    pid = os.posix_spawn(command[0], command, environment, file_actions=[nowhere])
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return (usage.ru_utime + usage.ru_stime) * 1000

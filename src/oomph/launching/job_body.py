"""A request and a training -> the lines of a job script that run `oomph launch` on the node.

The script stands beside its run and can be read, edited and submitted by hand. The job itself
writes how it ended into `exit-code`, because a scheduler without accounting forgets it.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from oomph.launching.torchrun import split_of
from oomph.records.launch import Request, Training
from oomph.records.workload import Variant

EXIT_CODE, STARTED, OUTPUT, SCRIPT = "exit-code", "started", "output.txt", "job.sh"

_ENDING = """\
# The job writes how it ended: the scheduler may forget it.
ended() { echo $? > "$OOMPH_JOB/.code"; mv "$OOMPH_JOB/.code" "$OOMPH_JOB/exit-code"; }
trap ended EXIT
trap : TERM USR1 USR2  # the training gets these too, and ends before this script
rm -f "$OOMPH_JOB/exit-code"
hostname > "$OOMPH_JOB/started"\
"""


def body(directory: Path, start: Sequence[str]) -> list[str]:
    """Return the commands of a job, around those that start the training."""
    return [
        f"export OOMPH_JOB={shlex.quote(str(directory))}",
        f"cd {shlex.quote(os.getcwd())}",  # noqa: PTH109 - the text, as the user sees it
        *_ENDING.splitlines(),
        *start,
    ]


def launch_words(training: Training, request: Request, *, meeting: str = "") -> str:
    """Return the command that runs on each node; `meeting` is for a shell, already quoted."""
    words = [*_oomph(), "launch", "--nproc", str(request.gpus_each)]
    if training.module is not None:
        words += ["-m", training.module]
    if training.own_script is not None:
        words += ["--script", training.own_script]
    rest = [*([training.script] if training.script is not None else []), *training.arguments]
    return " ".join(filter(None, [shlex.join(words), meeting, shlex.join(["--", *rest])]))


def _oomph() -> list[str]:
    """Return this very oomph: the job runs in the environment that submitted it."""
    command = Path(sys.executable).with_name("oomph")
    return [str(command)] if command.is_file() else [sys.executable, "-m", "oomph"]


def told(training: Training, request: Request, variant: Variant | None) -> str:
    """Return a line that says what the job is, for the head of its script."""
    machines = "1 machine" if request.num_nodes == 1 else f"{request.num_nodes} machines"
    what = f"Written by oomph launch: {machines} with {request.gpus_each} GPUs each"
    split = f"; {split_of(variant)}" if variant is not None else ""
    return f"{what}, running {training.name!r}{split}"


def as_clock(seconds: float) -> str:
    """Return a time limit as schedulers take it: "12:00:00"."""
    whole = max(60, -(-int(seconds) // 1))
    return f"{whole // 3600:02}:{whole % 3600 // 60:02}:{whole % 60:02}"

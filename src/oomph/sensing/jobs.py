"""Processes on the GPUs -> Jobs: who launched them, and which worker of it each one is.

The launcher is the nearest ancestor that is one by its command line, which every user may read.
Rank and run are in the environment, which is looked into for this user's own processes only. What
a process is part of does not change while it lives, so a process costs its /proc files once.

Limits: Linux; a rank that a script gives itself after its start cannot be seen from outside.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from oomph.records.live import Job
from oomph.records.machine import Process
from oomph.sensing.ownership import RUN_TOKEN, pids_are_the_hosts
from oomph.sensing.process_files import ancestors_of, environment_of, words_of

# By the program's name, or by the module after `python -m`.
_LAUNCHERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate": "accelerate",
    "accelerate-launch": "accelerate",
    "accelerate.commands.launch": "accelerate",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed.launcher.launch": "deepspeed",
    "raylet": "ray",
}
_RAY_WORKER = "ray::"  # how ray renames the processes that it starts
_SPAWNED = "multiprocessing.spawn"  # in the code that Python gives a child it spawns
_RUN_DIRECTORY = "OOMPH_RUN_DIR"  # set by `oomph watch -- COMMAND`, beside the token
_TORCHRUN_WAS_HERE = "TORCHELASTIC_RUN_ID"
_TAKE_A_WORD = {"-W", "-X"}  # options of Python that are two words


class Jobs:
    """Remembers what it has found out of each process, for as long as that is on a GPU."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, float | None], Job] = {}

    def of(self, processes: Iterable[Process]) -> tuple[Job, ...]:
        """What they are part of, as far as they can be seen."""
        if pids_are_the_hosts():  # the numbers would lead to innocent processes
            return ()
        found = {(p.pid, p.started_at): p for p in processes if p.started_at is not None}
        self._known = {
            key: self._known[key] if key in self._known else find_job(process)
            for key, process in found.items()
        }
        return tuple(self._known.values())


def find_job(process: Process) -> Job:
    """What a process is part of."""
    is_mine = process.owner in ("this-run", "mine")
    environment = environment_of(process.pid) if is_mine else {}
    launcher, launcher_pid = _launcher(process.pid)
    if launcher is None and _TORCHRUN_WAS_HERE in environment:
        launcher = "torchrun"  # which has ended, or gave its workers away
    return Job(
        pid=process.pid,
        parent_pid=next(ancestors_of(process.pid), None),
        launcher=launcher,
        launcher_pid=launcher_pid,
        run_id=_run_id(environment),
        rank=_number(environment, "RANK"),
        local_rank=_number(environment, "LOCAL_RANK"),
        world_size=_number(environment, "WORLD_SIZE"),
    )


def _run_id(environment: Mapping[str, str]) -> str | None:
    """What `oomph runs` calls it: the name of its directory; else the bare token."""
    directory = environment.get(_RUN_DIRECTORY, "").rstrip("/")
    return directory.rpartition("/")[2] or environment.get(RUN_TOKEN)


def _launcher(pid: int) -> tuple[str | None, int | None]:
    """The nearest launcher above a process, and its PID."""
    below = words_of(pid)
    for ancestor in ancestors_of(pid):
        words = words_of(ancestor)
        launcher = launcher_of(words)
        if launcher:
            return launcher, ancestor
        if any(_SPAWNED in word for word in below):
            return "multiprocessing", ancestor
        below = words
    return None, None


def launcher_of(words: Sequence[str]) -> str | None:
    """The launcher that a command line starts.

    >>> launcher_of(["/usr/bin/python3", "-u", "/opt/bin/torchrun", "--nproc-per-node=4", "a.py"])
    'torchrun'
    >>> launcher_of(["python", "-m", "torch.distributed.run", "a.py"])
    'torchrun'
    >>> launcher_of(["python", "train.py", "torchrun"])
    """
    program = _program(words)
    if program == "accelerate" and "launch" not in words:
        return None  # `accelerate config` starts nobody
    if program.startswith(_RAY_WORKER):
        return "ray"
    return _LAUNCHERS.get(program)


def _program(words: Sequence[str]) -> str:
    """What is run: the script or module if it is Python's, else the command."""
    rest = iter(words)
    command = next(rest, "")
    if not os.path.basename(command).startswith(("python", "pypy")):  # noqa: PTH119 - not a path yet
        return _name(command)
    for word in rest:
        if word == "-m":
            return next(rest, "")
        if word in _TAKE_A_WORD:
            next(rest, "")
        elif not word.startswith("-"):
            return _name(word)
    return ""


def _name(command: str) -> str:
    is_title = command.startswith(_RAY_WORKER)
    return command if is_title else os.path.basename(command)  # noqa: PTH119


def _number(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name, "")
    return int(value) if value.isdecimal() and len(value) < 9 else None

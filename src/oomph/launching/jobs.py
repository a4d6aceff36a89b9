"""A training and a request -> a job of a scheduler, in a directory beside its run.

    job.sh       the script, as submitted
    job.json     which job of which scheduler it is
    output.txt   what it printed
    started      the host, once it runs
    exit-code    how it ended, written by the job itself

The job runs `oomph launch` on its machine, which records the run in the same directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from oomph.errors import UsageError
from oomph.launching.grid_engine import GridEngine
from oomph.launching.job_body import EXIT_CODE, OUTPUT, SCRIPT
from oomph.launching.kubernetes import job_manifest, trainjob_manifest
from oomph.launching.own_script import directives_of, refuse_named_gpus, refuse_other_gpus
from oomph.launching.pbs import pbs_script
from oomph.launching.slurm import Slurm
from oomph.monitoring.diary import META, make_directory, new_id, runs_directory
from oomph.records.launch import Job, JobState, Request, Training, Via
from oomph.records.stored import as_json, from_json_file
from oomph.records.workload import Variant
from oomph.store import replace_file

JOB_FILE = "job.json"
_POLL_S = 1.0  # between looks at the output; the scheduler is asked every tenth time
_ASKED_EVERY = 10


class Queue(Protocol):
    """A scheduler that jobs are handed to."""

    via: Via
    directive: str  # how a line begins that it reads from a script

    def is_here(self) -> bool:
        """Return whether it answers."""

    def script(
        self,
        training: Training,
        request: Request,
        variant: Variant | None,
        directory: Path,
        own: tuple[str, ...] = (),
    ) -> str:
        """Return the job's script."""

    def preflight(self, script: Path, request: Request) -> None:
        """Raise UsageError for a job that could never run."""

    def submit(self, script: Path) -> str:
        """Return the number of the job."""

    def says(self, number: str) -> str | None:
        """Return the job's state in the scheduler's words."""

    def is_waiting(self, says: str) -> bool:
        """Return whether these words mean that it has not begun."""

    def is_running(self, says: str) -> bool:
        """Return whether these words mean that it runs."""

    def cancel(self, number: str) -> None:
        """End the job."""


# What is written for schedulers that oomph does not talk to.
PRINTED: dict[str, Callable[[Training, Request, Variant | None], str]] = {
    "pbs": pbs_script,
    "kubernetes": job_manifest,
    "trainjob": trainjob_manifest,
}
_QUEUES: dict[str, type[Queue]] = {"slurm": Slurm, "sge": GridEngine}


def queue_of(via: str) -> Queue:
    """Return a scheduler by its name; "found": the one that answers here. Raises UsageError."""
    if via in _QUEUES:
        return _QUEUES[via]()
    here = [queue for queue in (kind() for kind in _QUEUES.values()) if queue.is_here()]
    if len(here) == 1:
        return here[0]
    names = ", ".join(queue.via for queue in here)
    raise UsageError(
        f"two schedulers answer here: {names}" if here else "no scheduler answers here",
        because=None if here else "neither sinfo (Slurm) nor qconf (Grid Engine) does",
        attempt=f"--via {here[0].via}" if here else "a machine from which jobs are submitted",
    )


# ---- submitting ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to hand to which scheduler."""

    training: Training
    request: Request
    via: str  # "found": the one that answers here
    variant: Variant | None = None


def render(order: Order, directory: Path | None = None) -> str:
    """Return the job's script or manifest, as it would be submitted. Raises OomphError."""
    request = order.request
    refuse_named_gpus(f"-N {request.name}")
    for option in request.options:
        refuse_named_gpus(option)
    refuse_other_gpus(request.options, request, "--option")
    if order.via in PRINTED:
        return PRINTED[order.via](order.training, request, order.variant)
    queue, own_script = queue_of(order.via), order.training.own_script
    own = () if own_script is None else directives_of(own_script, queue.directive, request)
    where = directory or runs_directory().absolute() / "RUN"
    return queue.script(order.training, request, order.variant, where, own)


def submit(order: Order) -> Job:
    """Write the script, let the scheduler check it, and hand it over. Raises OomphError."""
    queue = queue_of(order.via)
    now = time.time()
    run_id = new_id(now)
    text = render(order, runs_directory().absolute() / run_id)
    directory = make_directory(run_id)
    script = directory / SCRIPT
    training = order.training
    words = (training.name, *training.arguments)
    job = Job(
        id=run_id,
        directory=str(directory),
        via=queue.via,
        number=None,
        command=words,
        request=order.request,
        submitted_at=None,
    )
    try:
        replace_file(script, text, permissions=0o700)
        queue.preflight(script, order.request)
        # Written before and after: a job that was submitted is never without its file.
        _write(job)
        job = dataclasses.replace(job, number=queue.submit(script), submitted_at=now)
        _write(job)
    except BaseException:
        if job.number is None:
            _remove(directory)
        raise
    return job


def _write(job: Job) -> None:
    replace_file(Path(job.directory) / JOB_FILE, as_json(job) + "\n", permissions=0o600)


def _remove(directory: Path) -> None:
    with contextlib.suppress(OSError):
        for name in (SCRIPT, JOB_FILE):
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()


# ---- afterwards ----------------------------------------------------------------------------------


def find_job(name: str) -> Job:
    """Return the job of a run: its id, a part of it, the scheduler's number, or "last"."""
    jobs = list(_jobs())
    if name == "last":
        found = jobs[:1]
    else:
        found = [job for job in jobs if name == job.number]
        found = found or [job for job in jobs if job.id.startswith(name) or job.id.endswith(name)]
    if len(found) == 1:
        return found[0]
    raise UsageError(
        f"{len(found)} jobs are called {name!r:.60}" if found else f"there is no job {name!r:.60}",
        because=f"the jobs are in {runs_directory()}",
        attempt="oomph launch --status last",
    )


def _jobs() -> Iterator[Job]:
    """Yield the jobs that were submitted from here, newest first."""
    try:
        names = sorted(os.listdir(runs_directory()), reverse=True)  # noqa: PTH208
    except OSError:
        return
    for name in names:
        path = runs_directory() / name / JOB_FILE
        if path.is_file():
            yield from_json_file(Job, path, what="job")


def state_of(job: Job) -> JobState:
    """Return where a job is: what it wrote itself goes before what the scheduler says."""
    has_run = (Path(job.directory) / META).is_file()
    state = JobState(job=job, state="unknown", exit_code=None, scheduler_says=None, has_run=has_run)
    if job.number is not None and _exit_code(job) is None:
        queue = queue_of(job.via)
        says = queue.says(job.number)
        state = dataclasses.replace(state, state=_under_way(queue, says), scheduler_says=says)
    exit_code = _exit_code(job)  # it may have ended while the scheduler was asked
    return (
        state
        if exit_code is None
        else dataclasses.replace(state, state="ended", exit_code=exit_code)
    )


def _under_way(queue: Queue, says: str | None) -> Literal["waiting", "running", "killed"]:
    """Return what a scheduler's words mean for a job that has written no exit code."""
    if says is not None and queue.is_waiting(says):
        return "waiting"
    return "running" if says is not None and queue.is_running(says) else "killed"


def _exit_code(job: Job) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int((Path(job.directory) / EXIT_CODE).read_text())
    return None


def cancel(job: Job) -> JobState:
    """End a job; return its state after that."""
    state = state_of(job)
    if state.state in ("ended", "killed") or job.number is None:
        return state
    queue_of(job.via).cancel(job.number)
    job = dataclasses.replace(job, is_cancelled=True)
    _write(job)
    return state_of(job)


def follow(job: Job) -> JobState:
    """Print what a job prints, until it has ended. An interrupt leaves the job alone."""
    position, looks = 0, 0
    while True:
        has_ended = _exit_code(job) is not None
        if not has_ended and looks % _ASKED_EVERY == 0:
            has_ended = state_of(job).state == "killed"
        looks += 1
        position = _copy(Path(job.directory) / OUTPUT, position)
        if has_ended:  # and all that it printed before was copied after that
            return state_of(job)
        time.sleep(_POLL_S)


def _copy(path: Path, position: int) -> int:
    """Copy what is new in a file to standard output; return where it ends."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(position)
        while piece := file.read(1 << 16):
            sys.stdout.buffer.write(piece)
            position += len(piece)
        sys.stdout.flush()
    return position

"""RankFailure, Job -> lines on a terminal."""

from __future__ import annotations

import shlex
import sys
import time

from oomph.records.launch import Job, JobState, RankFailure
from oomph.showing.terminal import printable

_MOST_LINES = 40  # of a traceback; judgement: a screen


def print_failure(failure: RankFailure) -> None:
    """Print the rank that failed first and its own error, on standard error."""
    for line in failure_lines(failure):
        print(line, file=sys.stderr)
    sys.stderr.flush()


def failure_lines(failure: RankFailure) -> list[str]:
    lines = [f"oomph: rank {failure.rank} failed first: {_ended(failure)}"]
    if failure.is_consequence:
        lines.append("  this error blames another rank, which left no error of its own here")
    if failure.traceback is not None:
        traceback = failure.traceback.rstrip().splitlines()
        if len(traceback) > _MOST_LINES:
            left_out = len(traceback) - _MOST_LINES
            half = _MOST_LINES // 2
            traceback = [*traceback[:half], f"... {left_out} lines ...", *traceback[-half:]]
        lines += [f"  {printable(line)}" for line in traceback]
    elif failure.signal == "SIGKILL":
        lines.append(
            "  try: dmesg, if nobody killed it: the kernel kills when host memory runs out"
        )
    return lines


def _ended(failure: RankFailure) -> str:
    if failure.error is not None:
        return printable(failure.error.splitlines()[0][:300]) if failure.error else "an error"
    if failure.signal is not None:
        return f"ended by {failure.signal}"
    if failure.exit_code is None:
        return "how is not known"
    return f"exit code {failure.exit_code}; what it printed is above"


_SCHEDULERS = {"slurm": "Slurm", "sge": "Grid Engine", "pbs": "PBS"}


def print_submitted(job: Job) -> None:
    """Print what was submitted and how to go on, on standard error: output is the job's."""
    name = job.id
    print(
        f"oomph: submitted to {_SCHEDULERS.get(job.via, job.via)} as {job.number}: {_words(job)}\n"
        f"  script and output: {printable(job.directory)}\n"
        f"  next: oomph launch --status {name}, --follow {name}, or --cancel {name}",
        file=sys.stderr,
    )


def print_state(state: JobState) -> None:
    """Print where a job is, and what to do next."""
    job = state.job
    scheduler = _SCHEDULERS.get(job.via, job.via)
    submitted = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.submitted_at))
    print(f"{job.id}: {_state(state, scheduler)}")
    print(f"  {scheduler} {job.number or 'without a number'}, submitted {submitted}: {_words(job)}")
    print(f"  script and output: {printable(job.directory)}")
    if state.has_run:
        print(f"  next: oomph report {job.id}")


def _state(state: JobState, scheduler: str) -> str:
    said = f" ({scheduler} says {printable(state.scheduler_says)})" if state.scheduler_says else ""
    if state.state == "ended":
        cancelled = ", cancelled" if state.job.is_cancelled else ""
        return f"ended with exit code {state.exit_code}{cancelled}"
    if state.state == "killed":
        if state.job.is_cancelled:
            return f"cancelled{said}"
        return f"ended without an exit code: it was killed, or its machine failed{said}"
    if state.state == "unknown":
        return "not known: oomph was ended while it submitted this"
    return f"{state.state}{said}"


def _words(job: Job) -> str:
    return printable(shlex.join(job.command))

"""The verb launch: a training -> its processes here, or a scheduler's job."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oomph.exporting.planned import Planned
    from oomph.launching.here import Launched as Launched
    from oomph.records.launch import Job, JobState, Wanted


def launch(wanted: Wanted, *, alerts: bool = True) -> Launched:
    """Start the training on this machine and watch it to its end. Raises OomphError."""
    from oomph.launching.here import launch as start
    from oomph.launching.requests import here_of

    return start(here_of(wanted, _plan(wanted)), alerts=alerts)


def submit(wanted: Wanted) -> Job:
    """Let a scheduler check the training's job, and hand it over. Raises OomphError."""
    from oomph.launching import jobs
    from oomph.launching.requests import order_of

    return jobs.submit(order_of(wanted, _plan(wanted)))


def dry_run(wanted: Wanted) -> str:
    """Return the command that `launch` would start, or the script that `submit` would submit."""
    from oomph.launching.here import in_words
    from oomph.launching.jobs import render
    from oomph.launching.requests import here_of, order_of

    plan = _plan(wanted)
    if wanted.via is None:
        return in_words(here_of(wanted, plan))
    return render(order_of(wanted, plan)).rstrip("\n")


def _plan(wanted: Wanted) -> Planned | None:
    from oomph.exporting.planned import load_plan

    return None if wanted.plan is None else load_plan(wanted.plan)


def status(name: str) -> JobState:
    """Return where a job is, by its run, its number, or "last"."""
    from oomph.launching import jobs

    return jobs.state_of(jobs.find_job(name))


def cancel(name: str) -> JobState:
    """End a job, and return where it is then."""
    from oomph.launching import jobs

    return jobs.cancel(jobs.find_job(name))


def follow(name: str) -> JobState:
    """Print what a job prints, until it has ended."""
    from oomph.launching import jobs

    return jobs.follow(jobs.find_job(name))

"""A command -> its run: start it untouched, watch it to its end, and find the run again later."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from oomph import __version__
from oomph.errors import OomphError
from oomph.monitoring.diary import (
    Diary,
    RunStart,
    find_directory,
    make_directory,
    new_id,
    newest_first,
    this_host,
    this_user,
)
from oomph.monitoring.diary_reader import read_run, summarise
from oomph.monitoring.recording import Recorder, say
from oomph.monitoring.wrapping import Child, Ended, NotStarted, Stopping, held_signals
from oomph.records.run import Probe, Run, RunSummary
from oomph.sensing.host import num_cpus
from oomph.sensing.ownership import RUN_DIRECTORY, RUN_TOKEN


@dataclass(frozen=True, slots=True)
class Watched:
    """A command that was watched to its end."""

    ended: Ended
    run: Run | None  # None: nothing could be recorded
    directory: Path


def watch(
    command: Sequence[str],
    probe: Probe | None = None,
    *,
    alerts: bool = True,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    typed: Sequence[str] | None = None,
) -> Watched:
    """Run a command to its end, or until the probe has seen enough, and record what happened.

    Problems such as a hang are reported in a line on standard error, unless `alerts` is False.
    `environment` is the command's (default: this one's), `directory` that of the run (default: a
    new one), `typed` what a person would type for it. Raises NotStarted if it cannot be started.
    Call it from the main thread.
    """
    start, token = run_start(typed or command), os.urandom(16).hex()
    if directory is None:
        directory = make_directory(start.id)
    else:
        start = replace(start, id=directory.name)
    # Set here too: any process with this process's token belongs to its run.
    os.environ[RUN_TOKEN] = token
    given = os.environ if environment is None else environment
    environment = {**given, RUN_TOKEN: token, RUN_DIRECTORY: str(directory)}
    with held_signals() as mask:
        try:
            child = Child(command, environment, mask)
        except NotStarted:
            with contextlib.suppress(OSError):  # it could not be created either
                directory.rmdir()
            raise
        diary = Diary(directory, start)
        recorder = _recorder(child.pid, token, diary, probe or Probe(), alerts=alerts)
        if recorder is None:
            ended = child.wait(Stopping(tuple))
        else:
            ended = child.wait(recorder.stopping, recorder.note)
        # What could not be written in time could not be read in time either.
        is_written = recorder is not None and recorder.finish(ended)
    return Watched(ended, _read(diary) if is_written else None, directory)


def run_start(command: Sequence[str]) -> RunStart:
    """Return the start of a run that begins now."""
    now = time.time()
    return RunStart(
        id=new_id(now),
        command=tuple(command),
        directory=_current_directory(),
        host=this_host(),
        user=this_user(),
        started_at=now,
        clock_s=time.monotonic(),
        pid=os.getpid(),
        oomph_version=__version__,
        num_cpus=num_cpus(),
    )


def _current_directory() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - the text, as the command sees it
    except FileNotFoundError:
        return None


def _recorder(
    pid: int,
    token: str,
    diary: Diary,
    probe: Probe,
    *,
    alerts: bool,
) -> Recorder | None:
    """Start recording; None if that fails. The command runs in any case."""
    try:
        recorder = Recorder(pid, token, diary, probe, alerts=alerts)
        recorder.start()
    except Exception as error:  # noqa: BLE001 - no new thread is possible, for example
        say(f"the command is not watched ({type(error).__name__}: {error})")
        return None
    return recorder


def _read(diary: Diary) -> Run | None:
    try:
        return read_run(diary.directory, diary.start, diary.unwritten())
    except (OomphError, OSError) as error:
        say(f"the run cannot be read again: {error}")
        return None


# ---- the runs on disk ----


def runs(last: int | None = None) -> tuple[RunSummary, ...]:
    """Return all runs on disk, newest first, or only the `last` so many."""
    found = (summary for path in newest_first() if (summary := summarise(path)) is not None)
    return tuple(islice(found, None if last is None else max(last, 0)))


def load_run(name: str) -> Run:
    """Load the run with that id, a part of an id, "last", or a directory. Raises OomphError."""
    return read_run(find_directory(name))

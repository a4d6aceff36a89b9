"""oomph watch -- COMMAND: runs it untouched, and keeps what the GPUs and its processes did.

And what is kept: `runs`, `load_run`. `Sampler` is for whoever shows the machine live.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from oomph.records.probe import Probe
    from oomph.records.run import Run
    from oomph.records.run_summary import RunSummary
    from oomph.running.diary import Diary, RunStart
    from oomph.running.wrapping import Child, Ended
    from oomph.sensing.sampling import Sampler
    from oomph.verbs.recording import Recorder


@dataclass(frozen=True, slots=True)
class Watched:
    """A command that was watched to its end."""

    ended: Ended
    run: Run | None  # None: nothing could be kept of it
    directory: Path


def sampler(which: Literal["visible", "all"] = "all") -> Sampler:
    """The GPUs of this machine at a steady pace; see oomph/sensing/sampling.py."""
    from oomph.sensing.sampling import Sampler

    return Sampler(which)


def watch(command: Sequence[str], probe: Probe | None = None, *, alerts: bool = True) -> Watched:
    """Run a command to its end, or until the probe has seen enough, and keep what happened.

    What goes wrong meanwhile, as a hang, is told in a line on standard error unless not `alerts`.
    Raises NotStarted where it cannot be started. Call it from the main thread.
    """
    import time

    from oomph.records.probe import Probe
    from oomph.running.diary import Diary
    from oomph.running.run_places import make_directory
    from oomph.running.step_log import RUN_DIRECTORY
    from oomph.running.stopping import Stopping
    from oomph.running.wrapping import held_signals
    from oomph.sensing.ownership import RUN_TOKEN

    start = run_start(command)
    directory, token = make_directory(start.id), os.urandom(16).hex()
    # Here too: whoever carries this process's token belongs to its run.
    os.environ[RUN_TOKEN] = token
    environment = {**os.environ, RUN_DIRECTORY: str(directory)}
    with held_signals() as mask:
        child = _started(command, environment, mask, directory)
        diary = Diary(directory, start)
        clock: Callable[[], float] = lambda: time.monotonic() - start.clock_s  # noqa: E731
        recorder = _recorder(child.pid, token, diary, clock, probe or Probe(), alerts=alerts)
        if recorder is None:
            ended = child.wait(Stopping(tuple))
        else:
            ended = child.wait(recorder.stopping, recorder.note)
        # What could not be written in time would not be read in time, either.
        is_written = recorder is not None and recorder.finish(ended)
    return Watched(ended, _read(diary) if is_written else None, directory)


def end_like(ended: Ended) -> int:
    """End this process as the command ended: by the same signal, or with the exit code returned."""
    from oomph.running.wrapping import end_like

    return end_like(ended)


def run_start(command: Sequence[str]) -> RunStart:
    """What is known of a run that starts now."""
    import time

    from oomph import __version__
    from oomph.running.diary import RunStart, this_host, this_user
    from oomph.running.run_places import new_id
    from oomph.sensing.host import num_cpus

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


def _started(
    command: Sequence[str],
    environment: Mapping[str, str],
    mask: set[signal.Signals],
    directory: Path,
) -> Child:
    from oomph.running.wrapping import Child, NotStarted

    try:
        return Child(command, environment, mask)
    except NotStarted:
        with contextlib.suppress(OSError):  # it could not be made, either
            directory.rmdir()
        raise


def _recorder(
    pid: int,
    token: str,
    diary: Diary,
    clock: Callable[[], float],
    probe: Probe,
    *,
    alerts: bool,
) -> Recorder | None:
    """None where nothing can be watched: the command goes on all the same."""
    from oomph.verbs.recording import Recorder, say

    try:
        recorder = Recorder(pid, token, diary, clock, probe, alerts=alerts)
        recorder.start()
    except Exception as error:  # noqa: BLE001 - no thread to be had, say
        say(f"the command is not watched ({type(error).__name__}: {error})")
        return None
    return recorder


def _read(diary: Diary) -> Run | None:
    from oomph.errors import OomphError
    from oomph.running.diary_reader import read_run
    from oomph.verbs.recording import say

    try:
        return read_run(diary.directory, diary.start, diary.unwritten())
    except (OomphError, OSError) as error:
        say(f"the run cannot be read again: {error}")
        return None


# ---- what is kept --------------------------------------------------------------------------------


def runs(last: int | None = None) -> tuple[RunSummary, ...]:
    """Every run that is kept, the newest first; or only the `last` so many."""
    from itertools import islice

    from oomph.running.run_places import newest_first
    from oomph.running.run_summaries import summarise

    found = (summary for path in newest_first() if (summary := summarise(path)) is not None)
    return tuple(islice(found, None if last is None else max(last, 0)))


def load_run(name: str) -> Run:
    """The run of that id, of a part of one, "last", or of a directory. Raises OomphError."""
    from oomph.running.diary_reader import read_run
    from oomph.running.run_places import find_directory

    return read_run(find_directory(name))

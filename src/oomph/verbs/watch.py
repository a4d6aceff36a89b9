"""The verb watch: the live view of the GPUs, a watched command, and the recorded runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from oomph.monitoring.command import Watched as Watched
    from oomph.monitoring.wrapping import Ended
    from oomph.records.machine import Look, Machine
    from oomph.records.run import Probe, Run, RunSummary
    from oomph.showing.live_view import Filter
    from oomph.showing.terminal import Glyphs


# In every Python process of a command, once it has imported torch.
_RECORD = "from oomph.monitoring.memory_history import record_this_process; record_this_process()"


def watch(
    command: Sequence[str],
    probe: Probe | None = None,
    *,
    alerts: bool = True,
    records: bool = False,
) -> Watched:
    """Run a command to its end, or until the probe has seen enough, and record what happened.

    Problems such as a hang are reported in a line on standard error, unless `alerts` is False.
    With `records` its allocations are recorded, too, and kept if the GPU runs out of memory.
    Raises NotStarted if the command cannot be started. Call it from the main thread.
    """
    import os

    from oomph.monitoring import command as watched

    if not records:
        return watched.watch(command, probe, alerts=alerts)
    from oomph.monitoring.startup import hooked

    before = os.environ.get("PYTHONPATH")
    with hooked("torch", _RECORD) as environment:
        os.environ["PYTHONPATH"] = environment["PYTHONPATH"]
        try:
            return watched.watch(command, probe, alerts=alerts)
        finally:
            os.environ.pop("PYTHONPATH")
            if before is not None:
                os.environ["PYTHONPATH"] = before


def memory_snapshots(name: str) -> tuple[Path, ...]:
    """Return the memory snapshots of a run, as it ran out of memory; the earliest first."""
    from oomph.monitoring.diary import find_directory
    from oomph.monitoring.memory_history import RECORDS

    found = find_directory(name).glob(f"{RECORDS}-*.pickle")
    return tuple(sorted(found, key=lambda path: path.stat().st_mtime))


def end_like(ended: Ended) -> int:
    """End this process as the command ended: by the same signal, or with the exit code returned."""
    from oomph.monitoring import wrapping

    return wrapping.end_like(ended)


def runs(last: int | None = None) -> tuple[RunSummary, ...]:
    """Return all recorded runs, newest first, or only the `last` so many."""
    from oomph.monitoring import command

    return command.runs(last)


def load_run(name: str) -> Run:
    """Return the run with that id, a part of an id, "last", or a directory. Raises OomphError."""
    from oomph.monitoring import command

    return command.load_run(name)


def watch_live(
    *,
    interval_s: float,
    filter: Filter,  # noqa: A002 - as the command line calls it
    colours: bool,
    glyphs: Glyphs,
    emulate: str | None = None,
) -> Machine | None:
    """Show the live view until the user ends it; return the machine if it cannot be read."""
    from oomph.monitoring import live

    return live.watch_live(
        interval_s=interval_s, filter=filter, colours=colours, glyphs=glyphs, emulate=emulate
    )


def look_once(*, emulate: str | None = None) -> Look:
    """Return a single look at everything."""
    from oomph.monitoring import live

    return live.look_once(emulate=emulate)


def looks(interval_s: float, *, emulate: str | None = None) -> Iterator[Look]:
    """Yield looks for as long as the caller iterates."""
    from oomph.monitoring import live

    return live.looks(interval_s, emulate=emulate)

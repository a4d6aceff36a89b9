"""Sighting -> what the page of `oomph serve` is sent each second, and first of all.

Command lines of other users are left out unless they were asked for: everybody on a machine may
see them, but not everybody who opens a page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from oomph.records.live import Job
from oomph.records.machine import Device, Process
from oomph.records.sighting import Past, SeenGpu, Sighting

_MOST_COMMAND = 300  # characters: a row of a table shows fewer
_DIGITS = 4  # significant, of shares and watts
_RUN = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")  # as oomph/running/run_places.py names it
_OWNERS = {"this-run": "mine", "mine": "mine", "others": "others", "unknown": "unknown"}


def as_frame(
    sighting: Sighting, jobs: Iterable[Job] = (), *, shows_commands: bool
) -> dict[str, Any]:
    """The machine as it is now; `jobs` are what its processes are part of."""
    by_pid = {job.pid: job for job in jobs}
    return {
        "number": sighting.number,
        "at": round(sighting.at, 2),
        "problem": sighting.problem,
        "notes": list(sighting.notes),
        "gpus": [_gpu(seen, by_pid, shows_commands) for seen in sighting.gpus],
    }


def as_history(sighting: Sighting, past: Sequence[Past]) -> dict[str, Any]:
    """The last quarter of an hour, in columns. A GPU that was not there yet has no values."""
    return {
        "times": [round(one.at, 2) for one in past],
        "gpus": [
            {
                "used_bytes": [_at(one.used_bytes, place) for one in past],
                "busy_ratio": [_short(_at(one.busy_ratios, place)) for one in past],
                "power_w": [_short(_at(one.power_w, place)) for one in past],
            }
            for place in range(len(sighting.gpus))
        ],
    }


def _gpu(seen: SeenGpu, jobs: Mapping[int, Job], shows_commands: bool) -> dict[str, Any]:
    device, span, watched = seen.device, seen.span, seen.watched
    return {
        "index": watched.index,  # of a slice, that of its GPU
        "uuid": device.uuid,
        "name": device.name,
        "is_slice": device.is_slice,
        "slice": device.index if device.is_slice else None,  # its number on its GPU
        "is_free": device.is_free if span else None,
        "problem": device.problem if span or device.problem else "it does not answer",
        "total_bytes": watched.total_bytes,
        "used_bytes": span.used_bytes if span else None,
        "held_bytes": held_bytes(device) if span else None,
        "busy_ratio": _short(span.busy_ratio if span else None),
        "busy_source": watched.busy_source,
        "sm_active_ratio": _short(span.sm_active_ratio if span else None),
        "power_w": _short(span.power_w if span else None),
        "power_limit_w": watched.power_limit_w,
        "temperature_c": span.temperature_c if span else None,
        "throttled_by": list(span.throttled_by) if span else [],
        "processes": _processes(device, jobs, shows_commands) if span else None,
    }


def held_bytes(device: Device) -> dict[str, int] | None:
    """By whose processes; None where nobody could list them, or say what they hold."""
    if device.processes is None:
        return None
    held: dict[str, int] = {}
    for process in device.processes:
        if process.used_bytes is None:
            return None
        owner = owner_of(process)
        held[owner] = held.get(owner, 0) + process.used_bytes
    return held


def owner_of(process: Process) -> str:
    """ "mine", "others" or "unknown": the server itself is nobody's run."""
    return _OWNERS[process.owner]


def _processes(
    device: Device, jobs: Mapping[int, Job], shows_commands: bool
) -> list[dict[str, Any]] | None:
    if device.processes is None:
        return None
    return [
        {**_process(one, shows_commands), "job": _job(jobs.get(one.pid))}
        for one in device.processes
    ]


def _job(job: Job | None) -> dict[str, Any] | None:
    if job is None:
        return None
    # A run that nobody keeps has no name but its token, which is nobody's to see.
    is_kept = bool(job.run_id and _RUN.fullmatch(job.run_id))
    return {
        "run": job.run_id if is_kept else None,
        "rank": job.rank,
        "world_size": job.world_size,
        "launcher": job.launcher,
    }


def _process(process: Process, shows_commands: bool) -> dict[str, Any]:
    owner = owner_of(process)
    is_shown = shows_commands or owner == "mine"
    command = process.command if is_shown else None
    return {
        "pid": process.pid,
        "owner": owner,
        "user": process.user,
        "command": command and command[:_MOST_COMMAND],
        "is_hidden": not is_shown and process.command is not None,
        "used_bytes": process.used_bytes,
        "started_at": process.started_at,
        "kind": process.kind,
        "note": process.note,
    }


def _at(values: Sequence[Any], place: int) -> Any:
    return values[place] if place < len(values) else None


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")

"""GPUs of this machine -> those that one job takes, with a lock on each until it ends.

A lock is flock(2) on an empty file in a directory that all users share. The kernel frees it when
the last process that holds it has ended, however it ended, so a file that was left behind locks
nothing. The launcher hands the lock down to torchrun: if the launcher alone is killed, the training
goes on and keeps its GPUs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from oomph.errors import EXIT_NO, OomphError, Unreadable, UsageError
from oomph.records.machine import Device, Machine
from oomph.sensing.devices import read_machine
from oomph.sensing.mapping import find_free, only_visible
from oomph.sensing.ownership import find_process

LOCKS = "OOMPH_LOCKS"  # the environment variable for another directory
# Not TMPDIR: schedulers give every job its own, and the jobs of a machine must meet.
_DIRECTORY = "/tmp"  # noqa: S108 - the files are empty, never followed and never written to
# Variables that a scheduler sets in its jobs. Grid Engine is not among them: with -V a job's
# CUDA_VISIBLE_DEVICES may be that of the shell that submitted it.
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")


class NotEnoughGpus(OomphError):
    """Fewer GPUs are free here than the job needs; exit code 1, as of every "no"."""

    exit_code = EXIT_NO


@dataclass(frozen=True, slots=True)
class Taken:
    """The GPUs of one job, as CUDA_VISIBLE_DEVICES names them."""

    names: tuple[str, ...]
    given_by: str | None = None  # the scheduler's variable, if it gave them


@contextlib.contextmanager
def taking(num_gpus: int, wanted: Sequence[str] = ()) -> Iterator[Taken]:
    """Take GPUs that nobody uses and no other job holds, or the wanted ones, and lock them.

    GPUs that a scheduler gave are taken as they are. Raises NotEnoughGpus and OomphError.
    """
    given = given_by_scheduler(os.environ)
    if given is not None and not wanted:
        yield _of_given(given, num_gpus)
        return
    machine = _machine()
    candidates = _wanted(machine, wanted) if wanted else _free(machine, num_gpus)
    with contextlib.ExitStack() as held:
        taken: list[Device] = []
        for gpu in candidates:
            if len(taken) < num_gpus and held.enter_context(_lock(_uuid(gpu))):
                taken.append(gpu)
        if len(taken) < num_gpus:
            raise _too_few(machine, candidates, taken, num_gpus, wanted)
        yield Taken(tuple(_uuid(gpu) for gpu in taken))


def given_by_scheduler(environment: Mapping[str, str]) -> Taken | None:
    """Return the GPUs that the scheduler of this job has chosen; None if it chose none."""
    if granted := environment.get("SGE_HGR_gpu"):
        return Taken(tuple(granted.split()), "SGE_HGR_gpu")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible and any(name in environment for name in _JOBS):
        return Taken(tuple(visible.split(",")), "CUDA_VISIBLE_DEVICES")
    return None


def _of_given(given: Taken, num_gpus: int) -> Taken:
    if len(given.names) < num_gpus:
        raise NotEnoughGpus(
            f"this job has {len(given.names)} of the {num_gpus} GPUs it needs",
            because=f"the scheduler set {given.given_by} to {' '.join(given.names)}",
            attempt=f"asking it for {num_gpus}",
        )
    return Taken(given.names[:num_gpus], given.given_by)


def _machine() -> Machine:
    """Return this machine, or what CUDA_VISIBLE_DEVICES leaves of it."""
    machine = read_machine()
    if machine.is_readable and machine.gpus and "CUDA_VISIBLE_DEVICES" in os.environ:
        machine = only_visible(machine)
    if not machine.gpus:
        raise Unreadable(
            "there is no GPU here to train on",
            because=machine.problem or "the driver lists none",
            attempt="--gpus none to train on the CPU, or --via to submit a job",
        )
    return machine


def _free(machine: Machine, num_gpus: int) -> Sequence[Device]:
    found = find_free(machine)
    if found.are_slices and num_gpus > 1:
        raise NotEnoughGpus(
            "these GPUs are divided into MIG slices",
            because="CUDA gives a process only one slice",
            attempt="--nproc 1",
        )
    return [gpu for gpu in found.free if gpu.uuid]


def _wanted(machine: Machine, wanted: Sequence[str]) -> Sequence[Device]:
    devices = [device for gpu in machine.gpus for device in (gpu, *gpu.slices)]
    return [_named(devices, name) for name in wanted]


def _named(devices: Sequence[Device], name: str) -> Device:
    if name.isdecimal():
        found = [one for one in devices if not one.is_slice and str(one.index) == name]
    else:
        found = [one for one in devices if one.uuid and one.uuid.startswith(name)]
    if len(found) == 1 and found[0].uuid:
        return found[0]
    raise UsageError(
        f"--gpus names {name!r:.60}, which is {len(found)} GPUs here",
        because="a name is nvidia-smi's number, or the beginning of a UUID",
        attempt="oomph gpus",
    )


def _uuid(gpu: Device) -> str:
    return gpu.uuid or str(gpu.index)


def _too_few(
    machine: Machine,
    candidates: Sequence[Device],
    taken: Sequence[Device],
    num_gpus: int,
    wanted: Sequence[str],
) -> NotEnoughGpus:
    reasons = [
        _why_not(gpu, is_locked=gpu in candidates) for gpu in machine.gpus if gpu not in taken
    ]
    held = [reason for reason in reasons if reason] if not wanted else []
    if wanted:
        held = [_why_not(gpu, is_locked=True) for gpu in candidates if gpu not in taken]
    return NotEnoughGpus(
        f"{len(taken)} of the {num_gpus} GPUs that are needed can be taken here",
        because="; ".join(held) or f"this machine shows {len(machine.gpus)} GPUs",
        attempt="oomph gpus, to see who uses them",
    )


def _why_not(gpu: Device, *, is_locked: bool) -> str:
    if is_locked:
        return f"GPU {gpu.index} is locked by {_holders(_uuid(gpu))}"
    if gpu.is_free is None:
        return f"GPU {gpu.index} may be in use (--gpus takes it all the same)"
    return f"GPU {gpu.index} is in use"


# ---- locks ---------------------------------------------------------------------------------------


def lock_path(uuid: str) -> Path:
    """Return the file that stands for a GPU; exported job scripts lock the same one."""
    return Path(os.environ.get(LOCKS) or _DIRECTORY, f"gpu-{uuid}.lock")


@contextlib.contextmanager
def _lock(uuid: str) -> Iterator[bool]:
    """Hold the lock of a GPU, and hand it down to children; yield whether it could be had."""
    descriptor = _open(lock_path(uuid))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        yield False
        return
    os.set_inheritable(descriptor, True)
    try:
        yield True
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """Open the file of a lock, which may be another user's: reading is enough for flock."""
    reading = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, reading | os.O_CREAT | os.O_EXCL, 0o644))
        descriptor = os.open(path, reading)
    except OSError as error:
        raise Unreadable(
            f"the GPU's lock {path} cannot be opened",
            because=error.strerror or str(error),
            attempt=f"{LOCKS}=a directory of this machine that its users share",
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Unreadable(f"{path} is not a file", attempt="removing it")
    return descriptor


def _holders(uuid: str) -> str:
    """Return who holds a lock, from the kernel's own list."""
    with contextlib.suppress(OSError):
        inode = lock_path(uuid).stat().st_ino
        rows = (line.split() for line in Path("/proc/locks").read_text().splitlines())
        pids = {int(row[4]) for row in rows if len(row) > 5 and row[5].endswith(f":{inode}")}
        known = sorted(pid for pid in pids if pid > 0)
        if known:
            process = find_process(known[0])
            what = f" ({process.command:.80})" if process.command else ""
            return f"process {known[0]}{what}"
    return "another job"

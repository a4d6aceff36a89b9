"""The run that a script tells its steps to: that of `oomph watch`, or one of its own.

Under `oomph watch` the directory is there, and GPUs are watched from outside. Alone, a daemon
thread looks at the memory of this process's GPU once a second and fetches what the driver has
gathered every five: no CUDA call, no synchronisation. Each time it wakes beside a training, its
code has left the processor's caches: to do five times as much at once costs little more. Of the
ranks that a launcher starts on a machine, the first keeps the run, the others each a part of it.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oomph.records.run import GpuSpan, WatchedGpu
    from oomph.running.diary import RunStart
    from oomph.running.step_log import StepLog
    from oomph.running.wrapping import Ended

# A list of all processes takes some milliseconds on a busy machine, of the CPU that trains.
_PROCESSES_S = 10.0
_LOOK_S = 1.0  # torch knows the exact peak: no need to look for it
_NONE_AT_WORK = "none was seen at work yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Which of the processes of a training this one is."""

    rank: int
    local_rank: int | None = None  # on this machine, where the launcher is their common parent
    num_local: int = 1


def ranks_of_environment() -> Ranks:
    """As the launcher tells it: torchrun, which is also accelerate's; Slurm; or torch itself."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return Ranks(
            rank=_number("RANK") or 0,
            local_rank=_number("LOCAL_RANK"),
            num_local=_number("LOCAL_WORLD_SIZE") or 1,
        )
    rank = _number("RANK")
    if rank is None and "SLURM_STEP_ID" in os.environ:  # srun's; a batch script alone has none
        rank = _number("SLURM_PROCID")
    return Ranks(rank=_torch_rank() if rank is None else rank)


def _number(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() and len(value) < 10 else None


def _torch_rank() -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0
    return int(distributed.get_rank())


class JoinedRun:
    """Inside `oomph watch`: it looks at the GPUs, this only reads what it wrote."""

    told_s = 1.0  # how late it hears of a step, which it may count

    def __init__(self, log: StepLog, directory: Path) -> None:
        self.log, self.directory = log, directory

    @property
    def problem(self) -> str:
        return _NONE_AT_WORK if self.gpus() else "oomph watch has seen none yet"

    def gpus(self) -> tuple[WatchedGpu, ...]:
        from oomph.running.diary_reader import read_gpus

        return read_gpus(self.directory)

    def spans(self) -> Sequence[GpuSpan]:
        from oomph.running.last_spans import read_last_spans

        return read_last_spans(self.directory)

    def finish(self, ended: Ended) -> None:  # noqa: ARG002 - `oomph watch` sees by itself how
        """`oomph watch` tells the rest. The script may go on, and no step is to be expected."""
        self.log.event("phase", "after training")
        self.log.close()


class OwnRun:
    """Without `oomph watch`: a run directory, and a thread that looks."""

    told_s = 5.0  # as late as of the GPU

    def __init__(self, ranks: Ranks, num_before: int, *, prints: bool = True) -> None:
        from oomph.records.probe import Probe
        from oomph.running.diary import Diary
        from oomph.running.step_log import StepLog
        from oomph.sensing.sampling import Sampler
        from oomph.verbs.recording import Recorder

        start, part, pid = _start(ranks, num_before)
        self._id = start.id
        self.directory = _make_directory(start.id, part)
        self.log = StepLog(self.directory, ranks.rank)
        diary = Diary(self.directory, start)
        clock = lambda: time.monotonic() - start.clock_s  # noqa: E731
        is_one_of_many = ranks.num_local > 1
        sampler = Sampler(
            clock=clock,
            cuda_index=ranks.local_rank if is_one_of_many else None,
            look_s=_LOOK_S,
        )
        self._recorder = Recorder(
            pid, None, diary, clock, Probe(), sampler, _PROCESSES_S, alerts=prints
        )
        self._recorder.start()

    @property
    def problem(self) -> str:
        return self._recorder.sampler.problem or _NONE_AT_WORK

    def gpus(self) -> tuple[WatchedGpu, ...]:
        return self._recorder.sampler.gpus()

    def spans(self) -> Sequence[GpuSpan]:
        return self._recorder.recent

    def finish(self, ended: Ended) -> str | None:
        """What it is kept as; None where a disk hangs."""
        self.log.close()
        return self._id if self._recorder.finish(ended) else None


def open_run(ranks: Ranks, num_before: int, *, prints: bool = True) -> JoinedRun | OwnRun:
    """The run of this process, which has had so many before. `prints` alerts, where it is alone."""
    from oomph.running.step_log import RUN_DIRECTORY, StepLog

    directory = os.environ.get(RUN_DIRECTORY)
    if directory:
        return JoinedRun(StepLog(Path(directory), ranks.rank), Path(directory))
    return OwnRun(ranks, num_before, prints=prints)


def _start(ranks: Ranks, num_before: int) -> tuple[RunStart, str | None, int | None]:
    """What is started, the part of it that this process keeps, and whose processes are watched."""
    from oomph.verbs.watching import run_start

    start = run_start(sys.orig_argv)
    if ranks.num_local <= 1:
        return start, None, os.getpid()
    launched = replace(start, id=_shared_id(num_before))
    if ranks.local_rank == 0:
        return launched, None, os.getppid()  # all ranks, and their loaders' workers
    return launched, f"rank-{ranks.rank}", None


def _shared_id(num_before: int) -> str:
    """One that every rank of a launcher finds by itself: when that was started, and which it is."""
    import hashlib

    import psutil

    from oomph.running.run_places import new_id

    launcher = psutil.Process(os.getppid())
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    named = f"{launcher.pid} {launcher.create_time()} {restart} {num_before}"
    return new_id(launcher.create_time(), hashlib.sha256(named.encode()).hexdigest()[:4])


def _make_directory(run_id: str, part: str | None) -> Path:
    from oomph.running.run_places import make_directory

    directory = make_directory(run_id)
    if part is not None:
        directory = directory / part
        if not directory.is_dir():
            directory.mkdir(mode=0o700)
    return directory

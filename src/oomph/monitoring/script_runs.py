"""The run that a training script records (that of `oomph watch`, or its own), and its GPU.

Under `oomph watch` the directory exists and the GPUs are watched from outside. Otherwise a daemon
thread reads the memory of this process's GPU once a second and fetches the driver's samples every
five seconds: no CUDA call, no synchronisation. Between two readings its code drops out of the CPU
caches, so fetching five times as much at once costs little more. If a launcher starts several ranks
on a machine, the first records the run, and each other rank a part of it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from oomph.monitoring.command import run_start
from oomph.monitoring.diary import Diary, RunStart, make_directory, new_id
from oomph.monitoring.diary_reader import read_gpus, read_last_spans
from oomph.monitoring.recording import Recorder
from oomph.monitoring.step_log import StepLog, Tally
from oomph.monitoring.wrapping import Ended
from oomph.records.run import GpuSpan, Pace, Peak, Probe, WatchedGpu
from oomph.records.run_spans import merge_gpu_spans
from oomph.sensing.live import number_in
from oomph.sensing.mapping import bare_uuid
from oomph.sensing.ownership import RUN_DIRECTORY
from oomph.sensing.running_torch import (
    TorchMemory,
    current_cuda_index,
    read_torch_memory,
    torch_gpu,
    uuid_of,
)
from oomph.sensing.sampling import Sampler

# Listing all processes takes some milliseconds on a busy machine, on the CPU that trains.
_PROCESSES_S = 10.0
_LOOK_S = 1.0  # torch knows the exact peak, so frequent readings are not needed
_NONE_AT_WORK = "this process has not used a GPU yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's ranks in the training job."""

    rank: int
    local_rank: int | None = None  # on this machine, if the launcher is the ranks' common parent
    num_local: int = 1


def ranks_of_environment() -> Ranks:
    """Read the ranks from the launcher: torchrun (also accelerate's), Slurm, or torch itself."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return Ranks(
            rank=number_in(os.environ, "RANK") or 0,
            local_rank=number_in(os.environ, "LOCAL_RANK"),
            num_local=number_in(os.environ, "LOCAL_WORLD_SIZE") or 1,
        )
    rank = number_in(os.environ, "RANK")
    if rank is None and "SLURM_STEP_ID" in os.environ:  # srun's; a plain batch script has none
        rank = number_in(os.environ, "SLURM_PROCID")
    return Ranks(rank=_torch_rank() if rank is None else rank)


def _torch_rank() -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0
    return int(distributed.get_rank())


class JoinedRun:
    """Join the run of `oomph watch`, which samples the GPUs; this class only reads its files."""

    write_every_s = 1.0  # `oomph watch` may count steps, and sees a step this late

    def __init__(self, log: StepLog, directory: Path) -> None:
        self.log, self.directory = log, directory

    @property
    def problem(self) -> str:
        return _NONE_AT_WORK if self.gpus() else "oomph watch has seen no GPU yet"

    def gpus(self) -> tuple[WatchedGpu, ...]:
        return read_gpus(self.directory)

    def spans(self) -> Sequence[GpuSpan]:
        return read_last_spans(self.directory)

    def finish(self, ended: Ended) -> None:  # noqa: ARG002 - `oomph watch` sees by itself how
        """Stop recording steps; `oomph watch` writes the rest. The script may go on."""
        self.log.event("phase", "after training")
        self.log.close()


class OwnRun:
    """Record a run without `oomph watch`: its own directory, and a thread that samples."""

    write_every_s = 5.0  # as often as the GPU is sampled

    def __init__(self, ranks: Ranks, num_before: int, *, prints: bool = True) -> None:
        start, part, pid = _start(ranks, num_before)
        self._id = start.id
        self.directory = _make_directory(start.id, part)
        self.log = StepLog(self.directory, ranks.rank)
        diary = Diary(self.directory, start)
        is_one_of_many = ranks.num_local > 1
        sampler = Sampler(
            clock=start.now_s,
            cuda_index=ranks.local_rank if is_one_of_many else None,
            look_s=_LOOK_S,
        )
        self._recorder = Recorder(pid, None, diary, Probe(), sampler, _PROCESSES_S, alerts=prints)
        self._recorder.start()

    @property
    def problem(self) -> str:
        return self._recorder.sampler.problem or _NONE_AT_WORK

    def gpus(self) -> tuple[WatchedGpu, ...]:
        return self._recorder.sampler.gpus()

    def spans(self) -> Sequence[GpuSpan]:
        return self._recorder.recent

    def finish(self, ended: Ended) -> str | None:
        """Return the id of the run; None if a disk hangs."""
        self.log.close()
        return self._id if self._recorder.finish(ended) else None


def open_run(ranks: Ranks, num_before: int, *, prints: bool = True) -> JoinedRun | OwnRun:
    """Open a run for this process after `num_before` others. `prints` alerts, if it is its own."""
    directory = os.environ.get(RUN_DIRECTORY)
    if directory:
        return JoinedRun(StepLog(Path(directory), ranks.rank), Path(directory))
    return OwnRun(ranks, num_before, prints=prints)


def _start(ranks: Ranks, num_before: int) -> tuple[RunStart, str | None, int | None]:
    """Return the start, the part this process records, and the PID whose processes it watches."""
    start = run_start(sys.orig_argv)
    if ranks.num_local <= 1:
        return start, None, os.getpid()
    launched = replace(start, id=_shared_id(num_before))
    if ranks.local_rank == 0:
        return launched, None, os.getppid()  # all ranks, and their loaders' workers
    return launched, f"rank-{ranks.rank}", None


def _shared_id(num_before: int) -> str:
    """Return an id that each rank derives by itself: from the launcher's start time and PID."""
    import psutil

    launcher = psutil.Process(os.getppid())
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    named = f"{launcher.pid} {launcher.create_time()} {restart} {num_before}"
    return new_id(launcher.create_time(), hashlib.sha256(named.encode()).hexdigest()[:4])


def _make_directory(run_id: str, part: str | None) -> Path:
    directory = make_directory(run_id)
    if part is not None:
        directory = directory / part
        if not directory.is_dir():
            directory.mkdir(mode=0o700)
    return directory


# ---- the GPU of the training process: torch's peaks, and recent readings ----

Reader = Literal["log", "epoch"]  # each reader gets what is new to it


class ScriptGpus:
    """The GPUs of the training process. Call it only from the training thread."""

    def __init__(self, run: JoinedRun | OwnRun) -> None:
        self._run = run
        self._before_steps: dict[int, int] | None = None  # bytes by CUDA's index
        self._peaks: dict[int, Peak] = {}  # by CUDA's index
        self._uuids: dict[int, str | None] = {}
        self._seen_s: dict[Reader, float] = {}  # until when each reader has received spans

    # ---- torch's memory ------------------------------------------------------------------------

    def note_before_steps(self) -> None:
        """Record what is allocated before the first step; only the first call counts."""
        if self._before_steps is None:
            read = read_torch_memory()
            self._before_steps = {one.cuda_index: one.allocated_bytes for one in read}

    def note_peaks(self) -> None:
        """Write the peaks that have grown, or whose GPU has become known since."""
        for memory in read_torch_memory():
            index = memory.cuda_index
            peak, was_known = self._peak(memory), self._uuids.get(index) is not None
            is_found = self._uuid(index) is not None and not was_known
            if peak != self._peaks.get(index) or is_found:
                self._peaks[index] = peak
                self._run.log.peak(peak, gpu_uuid=self._uuid(index), gpu=torch_gpu(index))

    def _peak(self, memory: TorchMemory) -> Peak:
        """Return the maximum of all readings, since the script may reset torch's own peak."""
        before = self._peaks.get(memory.cuda_index)
        return Peak(
            source="torch",
            gpu=None,  # the reader of the run finds the position by UUID
            allocated_bytes=max(
                memory.peak_allocated_bytes, (before and before.allocated_bytes) or 0
            ),
            used_bytes=max(memory.peak_reserved_bytes, before.used_bytes if before else 0),
            before_steps_bytes=(self._before_steps or {}).get(memory.cuda_index),
        )

    def _uuid(self, cuda_index: int) -> str | None:
        if self._uuids.get(cuda_index) is None:
            known = [gpu.uuid for gpu in self._run.gpus() if gpu.cuda_index == cuda_index]
            self._uuids[cuda_index] = uuid_of(cuda_index) or (known[0] if known else None)
        return self._uuids[cuda_index]

    # ---- readings of the GPU -------------------------------------------------------------------

    def pace(self, tally: Tally, reader: Reader) -> Pace:
        """Return the steps, with the GPU's readings since this reader's last call."""
        cuda_index = current_cuda_index()
        gpus = self._run.gpus()
        place = self._place(gpus, cuda_index)
        return Pace(
            num_steps=tally.num_steps,
            step_s=tally.step_s,
            samples_per_s=tally.samples_per_s,
            data_wait_ratio=tally.data_wait_ratio,
            gpu=None if place is None else gpus[place],
            span=None if place is None else self._span(place, reader),
            gpu_problem=None if place is not None else self._run.problem,
            peak=None if cuda_index is None else self._peaks.get(cuda_index),
        )

    def _place(self, gpus: tuple[WatchedGpu, ...], cuda_index: int | None) -> int | None:
        """Return the position of torch's current GPU; before CUDA runs, that of the GPU in use."""
        if cuda_index is None:
            used = [place for place, gpu in enumerate(gpus) if gpu.is_used]
            return used[0] if len(used) == 1 else None
        bare = bare_uuid(self._uuid(cuda_index))
        places = (place for place, gpu in enumerate(gpus) if bare and bare in (gpu.uuid or ""))
        return next(places, None)

    def _span(self, place: int, reader: Reader) -> GpuSpan | None:
        seen_s = self._seen_s.get(reader, 0.0)
        spans = [s for s in self._run.spans() if s.gpu == place]
        fresh = [s for s in spans if s.began_s >= seen_s]
        if fresh:
            self._seen_s[reader] = fresh[-1].ended_s
        # Very short steps may be logged twice a second: then use the last second.
        seen = fresh or spans[-1:]
        return merge_gpu_spans(seen) if seen else None

"""A script's run -> what is known of its own GPU: torch's peaks, and what was seen of it lately."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from oomph.records.pace import Pace
    from oomph.records.run import GpuSpan, Peak, WatchedGpu
    from oomph.running.step_clock import Tally
    from oomph.sensing.torch_memory import TorchMemory
    from oomph.verbs.script_runs import JoinedRun, OwnRun

Reader = Literal["log", "epoch"]  # who asks: each is told what is new to it


class ScriptGpus:
    """The GPUs of the process that trains. All of it is called by the thread that does."""

    def __init__(self, run: JoinedRun | OwnRun) -> None:
        self._run = run
        self._before_steps: dict[int, int] | None = None  # bytes by CUDA's index
        self._peaks: dict[int, Peak] = {}  # by CUDA's index
        self._uuids: dict[int, str | None] = {}
        self._seen_s: dict[Reader, float] = {}  # until when spans were told to whom

    # ---- torch's memory ------------------------------------------------------------------------

    def note_before_steps(self) -> None:
        """What is held now is held before the first step, if this is the first call."""
        if self._before_steps is None:
            from oomph.sensing.torch_memory import read_torch_memory

            read = read_torch_memory()
            self._before_steps = {held.cuda_index: held.allocated_bytes for held in read}

    def note_peaks(self) -> None:
        """Tell the run what has grown."""
        from oomph.sensing.torch_memory import read_torch_memory, torch_gpu

        for memory in read_torch_memory():
            index = memory.cuda_index
            peak = self._peak(memory)
            if peak != self._peaks.get(index):
                self._peaks[index] = peak
                self._run.log.peak(peak, gpu_uuid=self._uuid(index), gpu=torch_gpu(index))

    def _peak(self, memory: TorchMemory) -> Peak:
        """The most of all readings: the script may make torch forget its own."""
        from oomph.records.run import Peak

        before = self._peaks.get(memory.cuda_index)
        return Peak(
            source="torch",
            gpu=None,  # the reader of the run finds its place by the UUID
            allocated_bytes=max(
                memory.peak_allocated_bytes, (before and before.allocated_bytes) or 0
            ),
            used_bytes=max(memory.peak_reserved_bytes, before.used_bytes if before else 0),
            before_steps_bytes=(self._before_steps or {}).get(memory.cuda_index),
        )

    def _uuid(self, cuda_index: int) -> str | None:
        from oomph.sensing.torch_memory import uuid_of

        if self._uuids.get(cuda_index) is None:
            known = [gpu.uuid for gpu in self._run.gpus() if gpu.cuda_index == cuda_index]
            self._uuids[cuda_index] = uuid_of(cuda_index) or (known[0] if known else None)
        return self._uuids[cuda_index]

    # ---- the GPU meanwhile ---------------------------------------------------------------------

    def pace(self, tally: Tally, reader: Reader) -> Pace:
        """The steps, with what was seen of the GPU since this reader asked before."""
        from oomph.records.pace import Pace
        from oomph.sensing.torch_memory import current_cuda_index

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
        """Of the GPU that torch works on; before CUDA runs, of the one that the run uses."""
        if cuda_index is None:
            used = [place for place, gpu in enumerate(gpus) if gpu.is_used]
            return used[0] if len(used) == 1 else None
        uuid = self._uuid(cuda_index) or ""
        bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
        places = (place for place, gpu in enumerate(gpus) if bare and bare in (gpu.uuid or ""))
        return next(places, None)

    def _span(self, place: int, reader: Reader) -> GpuSpan | None:
        from oomph.records.run_spans import merge_gpu_spans

        seen_s = self._seen_s.get(reader, 0.0)
        spans = [s for s in self._run.spans() if s.gpu == place]
        fresh = [s for s in spans if s.began_s >= seen_s]
        if fresh:
            self._seen_s[reader] = fresh[-1].ended_s
        # Steps of a few milliseconds may be logged twice a second: then the last second stands.
        told = fresh or spans[-1:]
        return merge_gpu_spans(told) if told else None

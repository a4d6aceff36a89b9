"""Record what the GPU's memory is used for; when it runs out, write a snapshot for `oomph explain`.

torch's own recorder does the work, with limits that a training can live with: the newest events
only, and Python stacks, which cost microseconds. What a snapshot lacks goes into a file beside it.
Nothing here may end a training: what fails is one line on standard error.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomph.monitoring.script_runs import ranks_of_environment
from oomph.records.recording_facts import RecordingFacts, facts_path
from oomph.records.stored import as_json
from oomph.store import replace_file

if TYPE_CHECKING:
    from types import TracebackType

# Judgement: tens of steps of most trainings; about 100 MB in a snapshot, and 50 MB in the process.
MAX_EVENTS = 200_000
# A script that recovers from running out may do so often; writing takes seconds each time.
_MOST_DUMPS = 5


def record(
    path: str | os.PathLike[str] = "oom.pickle", *, max_events: int = MAX_EVENTS
) -> MemoryHistory:
    """Record allocations from now on; write a snapshot to `path` when the GPU runs out of memory.

    oomph.record("oom.pickle")              # before the model is made
    with oomph.record("oom.pickle") as r:   # or around a part, and whenever you like:
        r.dump()

    Other ranks than 0 write beside it, as oom-rank3.pickle. `oomph explain oom.pickle` reads it.
    Without a GPU it does nothing.
    """
    history = MemoryHistory(Path(path), max_events)
    history.start()
    return history


class MemoryHistory:
    """A recording that is on until it is stopped, or the process ends."""

    def __init__(self, path: Path, max_events: int = MAX_EVENTS) -> None:
        rank = ranks_of_environment().rank
        beside = f"{path.stem}-rank{rank}{path.suffix}"
        self.path = (path.with_name(beside) if rank else path).absolute()
        self._max_events = max_events
        self._rank = rank
        self._num_dumps = 0
        self._is_on = self._is_attached = False
        self._started_at = time.time()

    def __enter__(self) -> MemoryHistory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Switch recording on, as soon as CUDA is used: it does not start CUDA itself."""
        import torch

        if torch.cuda.is_available():
            torch.cuda._lazy_call(self._start)  # type: ignore[no-untyped-call]
        else:
            _say("there is no CUDA GPU, so no memory is recorded")

    def _start(self) -> None:
        import torch

        try:
            _switch_on(self._max_events)
            if not self._is_attached:  # an observer cannot be taken off again
                observe = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
                observe(self._ran_out)
            self._is_on = self._is_attached = True
        except Exception as error:  # noqa: BLE001 - the training goes on without a recording
            _say(f"memory is not recorded ({type(error).__name__}: {error})")

    def stop(self) -> None:
        """Switch recording off."""
        if self._is_on:
            self._is_on = False
            _switch_off()

    def dump(self) -> Path | None:
        """Write a snapshot now; None if it could not be written."""
        return self._write(None, None, None)

    def _ran_out(self, device: int, _wanted: int, total: int, free: int) -> None:
        """Called by torch when it gives up, before it raises."""
        if not self._is_on or self._num_dumps >= _MOST_DUMPS:
            return
        self._num_dumps += 1
        if self._write(device, total, free) is not None:
            _say(f"out of memory; next: oomph explain {self.path}")

    def _write(self, device: int | None, total: int | None, free: int | None) -> Path | None:
        import pickle

        import torch

        try:
            # Protocol 4, which torch's own viewer reads as well, on any Python.
            content = pickle.dumps(torch.cuda.memory._snapshot(), protocol=4)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, content)
            replace_file(facts_path(self.path), as_json(self._facts(device, total, free)))
        except Exception as error:  # noqa: BLE001 - the error that the user needs is torch's
            _say(f"the snapshot could not be written ({type(error).__name__}: {error})")
            return None
        return self.path

    def _facts(self, device: int | None, total: int | None, free: int | None) -> RecordingFacts:
        import torch

        at = torch.cuda.current_device() if device is None else device
        properties = torch.cuda.get_device_properties(at)
        if free is None:
            free, total = torch.cuda.mem_get_info(at)
        return RecordingFacts(
            torch_version=torch.__version__,
            gpu=properties.name,
            device=at,
            has_run_out=device is not None,
            total_bytes=properties.total_memory,
            allowed_bytes=total,
            free_bytes=free,
            rank=self._rank,
            step=_step(),
            script=os.path.abspath(sys.argv[0]) if sys.argv and sys.argv[0] else None,  # noqa: PTH100
            after_s=time.time() - self._started_at,
            alloc_conf=_alloc_conf(),
        )


def _switch_on(max_events: int) -> None:
    import inspect

    import torch

    # Annotations name the optimizer's steps; torch before 2.8 always records them.
    known = inspect.signature(torch.cuda.memory._record_memory_history_impl).parameters
    more: dict[str, Any] = {}
    if "global_record_annotations" in known:
        more["global_record_annotations"] = True
    torch.cuda.memory._record_memory_history(max_entries=max_events, stacks="python", **more)


def _switch_off() -> None:
    import torch

    try:
        torch.cuda.memory._record_memory_history(enabled=None)
    except Exception as error:  # noqa: BLE001 - as above
        _say(f"recording could not be switched off ({type(error).__name__}: {error})")


def _step() -> int | None:
    """Return the step of `oomph.watching`, if the script uses it."""
    in_script = sys.modules.get("oomph.monitoring.in_script")
    watching = None if in_script is None else in_script.Watching.current()
    return None if watching is None else watching.num_steps


def _alloc_conf() -> str:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _say(text: str) -> None:
    print(f"oomph: {text}", file=sys.stderr, flush=True)


# ---- `oomph watch --record`: in every process of a command ---------------------------------------

RECORDS = "memory"  # the beginning of the files' names in the run's directory


def record_this_process() -> None:
    """Record this process into the directory of its run. Called once torch is imported."""
    from oomph.sensing.ownership import RUN_DIRECTORY

    directory = os.environ.get(RUN_DIRECTORY)
    if directory is None:
        return
    import torch

    if torch.cuda.is_available():
        record(Path(directory) / f"{RECORDS}-{os.getpid()}.pickle")

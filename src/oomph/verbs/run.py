"""oomph.emulated_gpu and `oomph run --emulate`: train on an emulated GPU."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from collections.abc import Sequence

    from oomph.pretending.emulated import EmulatedGpu
    from oomph.records.run import EmulatedRun

_SIZE, _REPORTS = "OOMPH_EMULATED_BYTES", "OOMPH_EMULATED_REPORTS"
_STATEMENT = "from oomph.verbs.run import emulate_this_process; emulate_this_process()"


def emulated_gpu(
    memory: str | int, *, allocator: str | None = None, capability: tuple[int, int] | None = None
) -> EmulatedGpu:
    """Train for real on the CPU, with an emulated GPU of the given memory.

    with oomph.emulated_gpu("2GiB") as gpu:
        model.cuda()
        ...                                 # torch.OutOfMemoryError where a real one would raise
    print(gpu.peak_reserved_bytes)

    `memory` is what PyTorch can use, without what the CUDA context takes on a real card.
    `allocator` is as in PYTORCH_ALLOC_CONF, which is the default. `capability` defaults to an
    A100's, (8, 0).
    """
    from oomph.pretending.emulated import EmulatedGpu

    return EmulatedGpu(memory, allocator, capability)


def run_emulated(memory: str | int, command: Sequence[str]) -> EmulatedRun:
    """Run a command with an emulated GPU in every Python process that imports torch."""
    import tempfile
    from pathlib import Path

    from oomph.errors import UsageError
    from oomph.monitoring.startup import hooked
    from oomph.monitoring.wrapping import Child, NotStarted, Stopping, held_signals
    from oomph.predicting.allocator_settings import parse_settings
    from oomph.pretending.emulated_run import read_run, settings_text, size_of

    total_bytes = size_of(memory)
    parse_settings(settings_text())  # refuse invalid settings here, not in each process
    with tempfile.TemporaryDirectory(prefix="oomph-peaks-") as reports:
        given = {_SIZE: str(total_bytes), _REPORTS: reports}
        with hooked("torch", _STATEMENT) as environment, held_signals() as mask:
            try:
                child = Child(command, {**environment, **given}, mask)
            except NotStarted as error:
                attempt = "oomph run --emulate 2GiB -- python train.py"
                raise UsageError(error.what, because=error.because, attempt=attempt) from None
            code = child.wait(Stopping(tuple)).exit_code
        return read_run(Path(reports), exit_code=code, total_bytes=total_bytes)


def emulate_this_process() -> None:
    """Emulate the GPU for good. Called in processes of `run_emulated` once torch is imported."""
    import atexit
    from pathlib import Path

    from oomph.pretending.emulated_run import Peaks, write_peaks

    gpu = emulated_gpu(int(os.environ[_SIZE])).__enter__()
    process, reports = os.getpid(), Path(os.environ[_REPORTS])

    def report() -> None:
        if os.getpid() == process:  # not in a forked process that inherited this function
            peaks = Peaks(
                allocated_bytes=gpu.peak_allocated_bytes,
                reserved_bytes=gpu.peak_reserved_bytes,
                num_out_of_memory=gpu.num_out_of_memory,
            )
            write_peaks(reports, peaks)

    atexit.register(report)

"""oomph.emulated_gpu and `oomph run --emulate`.

The replica of the allocator and what tracing knows of kernels, handed to the emulated GPU.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from collections.abc import Sequence

    from oomph.predicting.allocator_settings import AllocatorSettings
    from oomph.records.emulated_run import EmulatedRun
    from oomph.training.emulated import EmulatedGpu
    from oomph.training.emulation.card import Memory
    from oomph.training.emulation.ops import KernelFacts

_CAPABILITY = (8, 0)  # an A100's: bfloat16, and cuBLAS's workspace of 8.1 MiB


def emulated_gpu(
    memory: str | int, *, allocator: str | None = None, capability: tuple[int, int] = _CAPABILITY
) -> EmulatedGpu:
    """Train for real on the CPU, with a GPU of so much memory that is not there.

    with oomph.emulated_gpu("2GiB") as gpu:
        model.cuda()
        ...                                 # torch.OutOfMemoryError where a real one would raise
    print(gpu.peak_reserved_bytes)

    `memory` is what PyTorch can have: what the CUDA context takes of a real card is not in it.
    `allocator` is what stands in PYTORCH_ALLOC_CONF, which is read where it is not given.
    """
    from oomph.tracing import autocast, streams
    from oomph.tracing.attention_kernels import attention_on
    from oomph.training.emulated import Cuda, EmulatedGpu

    cuda = Cuda(
        capability=capability,
        facts=_facts(capability),
        attention=attention_on(lambda: capability),
        streams=streams,
        casts=autocast.installed,
        casts_here=autocast.guard,
    )
    return EmulatedGpu(_memory(_bytes(memory), _settings(allocator)), cuda)


def _bytes(memory: str | int) -> int:
    from oomph.errors import UsageError
    from oomph.units import MIB, format_bytes, parse_bytes

    size_bytes = memory if isinstance(memory, int) else parse_bytes(memory)
    if size_bytes < 2 * MIB:
        raise UsageError(
            f"a GPU of {format_bytes(size_bytes)} has room for nothing",
            because="torch's smallest segment is 2 MiB",
            attempt='oomph.emulated_gpu("2GiB")',
        )
    return size_bytes


def _settings(text: str | None) -> AllocatorSettings:
    from oomph.predicting.allocator_settings import parse_settings

    if text is None:
        # Torch reads the new name first (c10/core/AllocatorConfig.cpp).
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        text = next((os.environ[name] for name in names if os.environ.get(name)), "")
    return parse_settings(text)


def _memory(total_bytes: int, settings: AllocatorSettings) -> Memory:
    from oomph.predicting.allocator import CachingAllocator, OutOfMemory
    from oomph.predicting.allocator_settings import round_size, segment_bytes
    from oomph.predicting.device import SimulatedDevice
    from oomph.tracing.streams import Now
    from oomph.training.emulation.card import Memory

    device = SimulatedDevice(total_bytes)
    divisions = settings.divisions_by_interval()
    return Memory(
        allocator=CachingAllocator(settings, device),
        total_bytes=total_bytes,
        shortage=OutOfMemory,
        free_bytes=lambda: device.free_bytes,
        segment_bytes=lambda size: segment_bytes(
            round_size(size, divisions), settings.large_segment_bytes
        ),
        current_stream=lambda: Now.stream,
    )


def _facts(capability: tuple[int, int]) -> KernelFacts:
    from oomph.tracing import in_place, kernels
    from oomph.training.emulation.ops import KernelFacts

    in_place.calibrate()
    return KernelFacts(
        in_place_names=in_place.IN_PLACE,
        is_in_place=in_place.is_in_place,
        gemms=kernels.GEMMS,
        workspace_bytes=kernels.cublas_workspace_bytes(capability),
        temporaries=kernels.TEMPORARIES,
    )


# ---- a whole command -----------------------------------------------------------------------------

_SIZE, _REPORTS = "OOMPH_EMULATED_BYTES", "OOMPH_EMULATED_REPORTS"
_STATEMENT = "from oomph.verbs.emulation import emulate_this_process; emulate_this_process()"


def run_emulated(memory: str | int, command: Sequence[str]) -> EmulatedRun:
    """Run a command with an emulated GPU in every Python process that imports torch."""
    import tempfile
    from pathlib import Path

    from oomph.running.hook import hooked
    from oomph.running.peaks import read_run
    from oomph.running.spawn import run_command

    total_bytes = _bytes(memory)
    _settings(None)  # what makes no sense is refused here, not in each process
    with tempfile.TemporaryDirectory(prefix="oomph-peaks-") as reports:
        with hooked("torch", _STATEMENT) as environment:
            told = {_SIZE: str(total_bytes), _REPORTS: reports}
            code = run_command(command, {**environment, **told})
        return read_run(Path(reports), exit_code=code, total_bytes=total_bytes)


def emulate_this_process() -> None:
    """Called in the processes of `run_emulated` when they have imported torch; for good."""
    import atexit
    from pathlib import Path

    from oomph.running.peaks import Peaks, write_peaks

    gpu = emulated_gpu(int(os.environ[_SIZE])).__enter__()
    process, reports = os.getpid(), Path(os.environ[_REPORTS])

    def report() -> None:
        if os.getpid() == process:  # and not a fork that came by this function
            peaks = Peaks(
                allocated_bytes=gpu.peak_allocated_bytes,
                reserved_bytes=gpu.peak_reserved_bytes,
                num_out_of_memory=gpu.num_out_of_memory,
            )
            write_peaks(reports, peaks)

    atexit.register(report)

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
    text = _settings_text() if allocator is None else allocator
    return EmulatedGpu(_memory(_bytes(memory), text), cuda)


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


def _settings_text() -> str:
    # Torch reads the new name first (c10/core/AllocatorConfig.cpp).
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _memory(total_bytes: int, settings_text: str) -> Memory:
    from oomph.predicting.allocator import CachingAllocator, OutOfMemory
    from oomph.predicting.allocator_settings import parse_settings, round_size, segment_bytes
    from oomph.predicting.device import SimulatedDevice
    from oomph.tracing.streams import Now
    from oomph.training.emulation.card import Memory

    settings = parse_settings(settings_text)
    device = SimulatedDevice(total_bytes)
    divisions = settings.divisions_by_interval()
    return Memory(
        allocator=CachingAllocator(settings, device),
        device=device,
        total_bytes=total_bytes,
        shortage=OutOfMemory,
        rounded_bytes=lambda size: round_size(size, divisions),
        segment_bytes=lambda size: segment_bytes(
            round_size(size, divisions), settings.large_segment_bytes
        ),
        current_stream=lambda: Now.stream,
        settings=_recorded(settings, settings_text),
        max_split_bytes=settings.max_split_bytes,
        with_settings=lambda text: _memory(total_bytes, text),
    )


def _recorded(settings: AllocatorSettings, text: str) -> dict[str, object]:
    """The settings as a snapshot has them."""
    from oomph.predicting.allocator_settings import NUM_ROUNDUP_INTERVALS

    divisions = settings.divisions_by_interval() or (0,) * NUM_ROUNDUP_INTERVALS
    return {
        "PYTORCH_CUDA_ALLOC_CONF": text,
        "max_split_size": -1 if settings.max_split_bytes is None else settings.max_split_bytes,
        "garbage_collection_threshold": settings.gc_threshold_ratio,
        "expandable_segments": settings.expandable_segments,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {str(1 << at): one for at, one in enumerate(divisions)},
    }


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

    from oomph.predicting.allocator_settings import parse_settings
    from oomph.running.hook import hooked
    from oomph.running.peaks import read_run
    from oomph.running.spawn import run_command

    total_bytes = _bytes(memory)
    parse_settings(_settings_text())  # what makes no sense is refused here, not in each process
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

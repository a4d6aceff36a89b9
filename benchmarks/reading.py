"""What one reading costs on a machine with 8 GPUs and 20 processes, after the first one.

All in one process on the same stub of NVML, so it is each tool's own cost, not the driver's.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
from nvml.machine import MIB, Gpu, NvmlMachine, Proc

import oomph

# gpustat replaces this function of the binding for everybody; the floor is the original's.
memory_info = pynvml.nvmlDeviceGetMemoryInfo

import gpustat  # noqa: E402
import nvitop  # noqa: E402

from benchmarks.tables import Measured, as_table  # noqa: E402

NUM_GPUS, NUM_PROCESSES = 8, 20
ROUNDS = 7
FLOOR = "bare nvidia-ml-py, 8 GPUs (floor)"


def busy_machine(directory: Path, pids: tuple[int, ...] = ()) -> NvmlMachine:
    gpus = [Gpu(util=50) for _ in range(NUM_GPUS)]
    for i, pid in enumerate(pids or range(4000, 4000 + NUM_PROCESSES)):
        gpus[i % NUM_GPUS].processes.append(Proc(pid, used_bytes=500 * MIB))
    return NvmlMachine(directory, gpus, log=False)


def measure() -> str:
    with (
        tempfile.TemporaryDirectory() as directory,
        sleeping(NUM_PROCESSES) as pids,
        busy_machine(Path(directory), pids).active(),
    ):
        pynvml.nvmlInit()
        rows = [Measured(name, cpu_ms(reading)) for name, reading in READINGS.items()]
    return as_table(f"a reading, best of {ROUNDS}", FLOOR, rows)


@contextlib.contextmanager
def sleeping(count: int) -> Iterator[tuple[int, ...]]:
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(count)]
    try:
        yield tuple(process.pid for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def cpu_ms(reading: Callable[[], Any]) -> float:
    """Of one call: the best of some rounds, each long enough to measure."""
    reading()  # the first one looks things up that are then known
    best = float("inf")
    for _ in range(ROUNDS):
        calls, began_s = 0, time.process_time()
        while time.process_time() - began_s < 0.1:
            reading()
            calls += 1
        best = min(best, (time.process_time() - began_s) / calls)
    return best * 1000


def bare_binding() -> None:
    for index in range(NUM_GPUS):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory_info(handle, version=pynvml.nvmlMemory_v2)
        pynvml.nvmlDeviceGetUtilizationRates(handle)
        pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
        pynvml.nvmlDeviceGetPowerUsage(handle)
        pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)


def printed_line() -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        oomph.print_gpu_utilisation()


def nvitop_one() -> None:
    device = nvitop.Device(0)
    device.as_snapshot()
    nvitop.GpuProcess.take_snapshots(device.processes().values())


READINGS: dict[str, Callable[[], Any]] = {
    FLOOR: bare_binding,
    "oomph.print_gpu_utilisation(), its GPU": printed_line,
    "nvitop snapshot of one GPU": nvitop_one,
    "oomph.gpus(), 8 GPUs": oomph.gpus,
    "nvitop take_snapshots(), 8 GPUs": nvitop.take_snapshots,
    "gpustat new_query(), 8 GPUs": gpustat.new_query,
}

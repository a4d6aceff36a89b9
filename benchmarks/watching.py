"""What watching costs: one look at 8 GPUs with 20 processes, and a second of it.

All on the same stub of NVML, so it is each tool's own cost, not the driver's; on a real machine
the number of calls is the cost, and is counted here. A sample is everything that is asked once a
second of each GPU: memory, kernel-active time, power, temperature or graphics, processes, clocks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pynvml
from nvml.machine import NvmlMachine

from benchmarks.reading import (
    FLOOR,
    NUM_GPUS,
    NUM_PROCESSES,
    READINGS,
    ROUNDS,
    bare_binding,
    busy_machine,
    cpu_ms,
    sleeping,
)
from benchmarks.tables import Measured, as_table
from oomph.sensing.sampling import Sampler

SECONDS = 10
PEERS = ("nvitop take_snapshots(), 8 GPUs", "gpustat new_query(), 8 GPUs")


def measure() -> str:
    with (
        tempfile.TemporaryDirectory() as directory,
        sleeping(NUM_PROCESSES) as pids,
    ):
        machine = busy_machine(Path(directory), pids)
        with machine.active():
            pynvml.nvmlInit()
            table = as_table(f"a sample, best of {ROUNDS}", FLOOR, samples())
        machine.log = True
        machine.write()
        return f"{table}\n\n{a_run(machine)}"


def samples() -> list[Measured]:
    """In this process, without its thread: the CPU time of one sample."""
    sampler = Sampler("all")
    sampler.open()
    looks = {
        "oomph, a sample of everything": lambda: sampler.look(is_last_of_span=True),
        "oomph, a look at the memory (4 a second)": lambda: sampler.look(is_last_of_span=False),
        **{name: READINGS[name] for name in PEERS},
    }
    floor = Measured(FLOOR, cpu_ms(bare_binding))
    return [floor, *(Measured(name, cpu_ms(look)) for name, look in looks.items())]


def a_run(machine: NvmlMachine) -> str:
    """`oomph watch -- sleep`: its own CPU time a second, its memory and its NVML calls."""
    (short_s, _, _), (long_s, rss_mib, calls) = watch(machine, 2), watch(machine, 2 + SECONDS)
    per_gpu = calls / NUM_GPUS / (2 + SECONDS)
    cpu_ms_a_second = (long_s - short_s) / SECONDS * 1000
    return "\n".join(
        [
            "| oomph watch -- COMMAND, 8 GPUs, 20 processes |       |",
            "|----------------------------------------------|------:|",
            f"| CPU ms a second                              | {cpu_ms_a_second:5.2f} |",
            f"| NVML calls a GPU and second, start included  | {per_gpu:5.2f} |",
            f"| RSS, MiB                                     | {rss_mib:5.1f} |",
        ]
    )


def watch(machine: NvmlMachine, seconds: int) -> tuple[float, float, int]:
    """CPU seconds and peak MiB of the wrapper without its command, and NVML calls."""
    machine.clear_calls()
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-c", MEASURED, "watch", "--", "sleep", str(seconds)]
        environment = {**os.environ, **machine.env(), "OOMPH_RUNS": runs}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    cpu_s, rss_kib = done.stdout.split()
    return float(cpu_s), int(rss_kib) / 1024, len(machine.calls())


# The command line itself; its figures are taken when all is done.
MEASURED = """
import resource, sys
from oomph.cli import main
main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, used.ru_maxrss)
"""

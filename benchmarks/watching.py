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
import time
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

START_S, SECONDS = 4, 10
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
        return f"{table}\n\n{a_run(machine)}"


def samples() -> list[Measured]:
    """In this process, without its thread: the CPU time of one sample."""
    sampler = Sampler("all")
    sampler.open()
    looks = {
        "oomph, a sample of everything": lambda: sampler.look(ends_turn=True),
        "oomph, a look at the memory (4 a second)": lambda: sampler.look(ends_turn=False),
        **{name: READINGS[name] for name in PEERS},
    }
    floor = Measured(FLOOR, cpu_ms(bare_binding))
    return [floor, *(Measured(name, cpu_ms(look)) for name, look in looks.items())]


def a_run(machine: NvmlMachine) -> str:
    """`oomph watch -- sleep`, once it has started: CPU time, NVML calls and memory."""
    cpu_ms_a_second, rss_mib, _ = a_stretch(machine, log=False)
    *_, num_calls = a_stretch(machine, log=True)  # a call that is logged costs more
    rows = {
        "CPU ms a second": cpu_ms_a_second,
        "NVML calls a GPU and second": num_calls / NUM_GPUS / SECONDS,
        "RSS, MiB": rss_mib,
    }
    title = f"oomph watch -- COMMAND, {NUM_GPUS} GPUs, {NUM_PROCESSES} processes"
    lines = [f"| {title} |       |", f"|{'-' * (len(title) + 2)}|------:|"]
    lines += [f"| {name:<{len(title)}} | {value:5.1f} |" for name, value in rows.items()]
    return "\n".join(lines)


def a_stretch(machine: NvmlMachine, *, log: bool) -> tuple[float, float, int]:
    """CPU milliseconds a second of a wrapper that has started, its peak in MiB, its calls."""
    machine.log = log
    command = [sys.executable, "-m", "oomph", "watch", "--quiet", "--", "sleep", "600"]
    with tempfile.TemporaryDirectory() as runs:
        environment = {**os.environ, **machine.env(), "OOMPH_RUNS": runs}
        with subprocess.Popen(command, env=environment) as process:
            time.sleep(START_S)
            machine.clear_calls()
            began_ns = cpu_ns(process.pid)
            time.sleep(SECONDS)
            used_ns = cpu_ns(process.pid) - began_ns
            rss_mib, num_calls = peak_mib(process.pid), len(machine.calls())
            process.terminate()
    return used_ns / 1e6 / SECONDS, rss_mib, num_calls


def cpu_ns(pid: int) -> int:
    """Of all threads, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def peak_mib(pid: int) -> float:
    words = Path(f"/proc/{pid}/status").read_text().split()
    return int(words[words.index("VmHWM:") + 1]) / 1024

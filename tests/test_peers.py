"""nvitop and gpustat, unmodified, on the same machine: they and oomph must agree."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from nvml.machine import GIB, MIB, Gpu, NvmlMachine, Proc

NVITOP = """
import json
from nvitop import Device
print(json.dumps([
    [d.index, d.uuid(), d.name(), d.memory_total(), d.memory_used(), d.gpu_utilization(),
     d.temperature(), d.power_usage(),
     {str(pid): p.gpu_memory() for pid, p in d.processes().items()}]
    for d in Device.all()
]))
"""


def machine_of_eight(directory: Path, pids: list[int]) -> NvmlMachine:
    gpus = [
        Gpu(util=10 * i, temperature=40 + i, power_mw=100_000 + 1000 * i, used_bytes=(5 + i) * GIB)
        for i in range(8)
    ]
    for i, pid in enumerate(pids):
        gpus[i % 8].processes.append(Proc(pid, used_bytes=(100 + i) * MIB))
    return NvmlMachine(directory, gpus)


def ours(machine: NvmlMachine) -> list[dict[str, object]]:
    done = machine.run([sys.executable, "-m", "oomph", "gpus", "--json"])
    assert done.returncode == 0, done.stderr
    gpus: list[dict[str, object]] = json.loads(done.stdout)["gpus"]
    return gpus


def test_nvitop_reads_the_same(tmp_path: Path, start_process: Callable[..., int]) -> None:
    machine = machine_of_eight(tmp_path, [start_process() for _ in range(20)])
    done = machine.run([sys.executable, "-c", NVITOP])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        [
            gpu["index"],
            gpu["uuid"],
            gpu["name"],
            gpu["total_bytes"],
            gpu["used_bytes"],
            round(float(str(gpu["busy_ratio"])) * 100),
            gpu["temperature_c"],
            float(str(gpu["power_w"])) * 1000,
            {str(p["pid"]): p["used_bytes"] for p in as_list(gpu["processes"])},
        ]
        for gpu in ours(machine)
    ]


def test_gpustat_reads_the_same(tmp_path: Path, start_process: Callable[..., int]) -> None:
    machine = machine_of_eight(tmp_path, [start_process() for _ in range(20)])
    done = machine.run([sys.executable, "-m", "gpustat", "--json"])
    assert done.returncode == 0, done.stderr
    theirs = [
        [
            gpu["index"],
            gpu["uuid"],
            gpu["memory.used"],
            gpu["memory.total"],
            gpu["utilization.gpu"],
            {p["pid"]: p["gpu_memory_usage"] for p in gpu["processes"]},
        ]
        for gpu in json.loads(done.stdout)["gpus"]
    ]
    assert theirs == [
        [
            gpu["index"],
            gpu["uuid"],
            int(str(gpu["used_bytes"])) // MIB,
            int(str(gpu["total_bytes"])) // MIB,
            round(float(str(gpu["busy_ratio"])) * 100),
            {p["pid"]: p["used_bytes"] // MIB for p in as_list(gpu["processes"])},
        ]
        for gpu in ours(machine)
    ]


def test_where_gpustat_loses_processes_we_do_not(tmp_path: Path) -> None:
    pids = [os.getpid(), os.getppid(), 1]
    machine = NvmlMachine(tmp_path, [Gpu(processes=[Proc(pid) for pid in pids])], process_stride=32)
    done = machine.run([sys.executable, "-m", "gpustat", "--json"])
    theirs = json.loads(done.stdout)["gpus"][0]["processes"]
    assert len(theirs) < 3  # if this fails gpustat has been mended: then the test has done its work
    assert {p["pid"] for p in as_list(ours(machine)[0]["processes"])} == set(pids)


def as_list(value: object) -> list[dict[str, int]]:
    assert isinstance(value, list)
    return value


def test_we_read_the_same_in_a_process_where_the_peers_have_replaced_functions_of_the_binding(
    tmp_path: Path,
) -> None:
    machine = NvmlMachine(tmp_path, [Gpu(used_bytes=5 * GIB, processes=[Proc(4100)])])
    code = "import gpustat, nvitop, oomph; print(oomph.gpu_utilisation().used_bytes)"
    done = machine.run([sys.executable, "-c", code])
    assert done.stdout.strip() == str(5 * GIB), done.stderr

"""The test machine is itself tested: through nvidia-ml-py, raw ctypes, nvitop and gpustat."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pynvml
import pytest

from nvml import machine as machine_module
from nvml.machine import (
    ERRORS,
    GIB,
    MIB,
    NA,
    BuildError,
    Gpu,
    Mig,
    NvmlMachine,
    Proc,
    build,
    gpu_uuid,
    mig_uuid,
    preload,
    symbols,
)

UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION = 1, 2, 3, 4
NOT_FOUND, INSUFFICIENT_SIZE, DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, LOST = 6, 7, 9, 13, 15

BIN = Path(sys.executable).parent
CLOCKS_DIFFER_S = 0.01  # the stub counts from the monotonic clock
A_DAY_MS = 86_400_000  # none ends while a test runs, but at midnight


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[NvmlMachine]:
    """A machine with two GPUs that this process is on, with NVML initialised."""
    made = NvmlMachine(tmp_path, [Gpu(), Gpu()])
    with made.active():
        pynvml.nvmlInit()
        made.clear_calls()
        yield made
        made.write_script("")
        while _code(pynvml.nvmlShutdown) == 0:
            pass


def _code(function: Callable[..., object], *arguments: object) -> int:
    """The result code of a call."""
    try:
        function(*arguments)
    except pynvml.NVMLError as error:
        return int(error.value)
    return 0


def _handle(index: int = 0) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def _library() -> ctypes.CDLL:
    preload()
    return ctypes.CDLL("libnvidia-ml.so.1")


def _python(machine: NvmlMachine, code: str, **variables: str) -> str:
    """The output of a Python program on the machine."""
    done = machine.run([sys.executable, "-c", code], variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --------------------------------------------------------------------------- the libraries


def test_the_error_codes_are_those_of_nvidia_ml_py() -> None:
    names = [name for name in dir(pynvml) if name.startswith("NVML_ERROR_")]
    assert {getattr(pynvml, name): name for name in names} == ERRORS


def test_every_error_has_a_text(machine: NvmlMachine) -> None:
    del machine
    assert pynvml.nvmlErrorString(15) == "GPU is lost"
    assert pynvml.nvmlErrorString(999) == "Unknown Error"
    texts = {pynvml.nvmlErrorString(code) for code in ERRORS}
    assert len(texts) == len(ERRORS)


def test_only_the_functions_of_the_driver_are_exported() -> None:
    assert "nvmlDeviceGetComputeRunningProcesses_v3" in symbols()
    assert "cuDeviceGetUuid_v2" in symbols()
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", "--format=posix", str(build() / "libnvidia-ml.so.1")],
        capture_output=True,
        text=True,
        check=True,
    )
    names = [line.split()[0] for line in listing.stdout.splitlines()]
    assert all(name.startswith("nvml") for name in names)


def test_two_processes_can_build_at_once(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from nvml import machine as m;"
        f"m.BUILD = pathlib.Path({str(tmp_path)!r}) / 'build'; print(m.build())"
    )
    tests = str(Path(machine_module.__file__).parents[1])
    builders = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": tests},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    directories = {builder.communicate()[0].strip() for builder in builders}
    assert len(directories) == 1
    assert sorted(path.name for path in Path(directories.pop()).iterdir()) == [
        "libcuda.so.1",
        "libnvidia-ml.so.1",
    ]
    assert [path.name for path in (tmp_path / "build").glob("building-*")] == []


def test_without_gcc_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "BUILD", tmp_path / "build")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="install gcc"):
        build.__wrapped__()
    assert [path.name for path in (tmp_path / "build").iterdir()] == [".gitignore"]


def test_a_machine_can_be_without_libcuda(tmp_path: Path) -> None:
    code = "import ctypes; ctypes.CDLL('libcuda.so.1')"
    assert NvmlMachine(tmp_path).run([sys.executable, "-c", code]).returncode == 0
    without = NvmlMachine(tmp_path, libcuda=False).run([sys.executable, "-c", code])
    assert "cannot open shared object" in without.stderr


# --------------------------------------------------------------------------- NVML's state


def test_a_call_before_init_says_uninitialized(tmp_path: Path) -> None:
    with NvmlMachine(tmp_path, [Gpu()]).active():
        assert _library().nvmlDeviceGetCount_v2(ctypes.byref(ctypes.c_uint())) == UNINITIALIZED


def test_init_is_counted_and_the_last_shutdown_ends_it(machine: NvmlMachine) -> None:
    del machine
    pynvml.nvmlInit()
    pynvml.nvmlShutdown()
    assert pynvml.nvmlDeviceGetCount() == 2
    pynvml.nvmlShutdown()
    assert _code(pynvml.nvmlDeviceGetCount) == UNINITIALIZED
    assert _code(pynvml.nvmlShutdown) == UNINITIALIZED
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 2


def test_without_a_script_there_is_no_driver(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path)
    code = "import pynvml\ntry: pynvml.nvmlInit()\nexcept pynvml.NVMLError as e: print(e.value)"
    assert _python(machine, code, OOMPH_NVML_SCRIPT="") == str(DRIVER_NOT_LOADED)
    machine.unload_driver()
    assert _python(machine, code) == str(DRIVER_NOT_LOADED)


def test_the_driver_can_go_away_and_come_back(machine: NvmlMachine) -> None:
    handle = _handle()
    machine.unload_driver()
    assert _code(pynvml.nvmlDeviceGetPowerUsage, handle) == DRIVER_NOT_LOADED
    machine.write()
    assert _code(pynvml.nvmlDeviceGetPowerUsage, handle) == 0


def test_a_forked_child_has_to_initialise_for_itself(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu()])
    code = """
import os, pynvml
def code(function, *arguments):
    try:
        function(*arguments)
    except pynvml.NVMLError as error:
        return error.value
    return 0
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
child = os.fork()
if child == 0:
    print(code(pynvml.nvmlDeviceGetPowerUsage, handle), code(pynvml.nvmlShutdown),
          code(pynvml.nvmlInit), code(pynvml.nvmlDeviceGetPowerUsage, handle), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(code(pynvml.nvmlDeviceGetPowerUsage, handle))
"""
    assert _python(machine, code) == "1 1 0 0\n0"


def test_a_wrong_handle_is_an_invalid_argument(machine: NvmlMachine) -> None:
    library, out = _library(), ctypes.c_uint()
    for address in (0, 1, 0xDEADBEEF, 2**64 - 1):
        assert library.nvmlDeviceGetPowerUsage(ctypes.c_void_p(address), ctypes.byref(out)) == 2
    assert library.nvmlDeviceGetPowerUsage(_handle(), None) == INVALID_ARGUMENT
    handle = _handle(1)
    del machine.gpus[1]
    machine.write()
    assert _code(pynvml.nvmlDeviceGetPowerUsage, handle) == INVALID_ARGUMENT


def test_devices_are_found_by_index_uuid_bus_and_serial(machine: NvmlMachine) -> None:
    machine.gpus[1].bus_id = "00000000:AF:00.0"
    machine.gpus[1].serial = "1650522000001"
    machine.write()
    for handle in (
        _handle(1),
        pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid(1)),
        pynvml.nvmlDeviceGetHandleByPciBusId("00000000:AF:00.0"),
        pynvml.nvmlDeviceGetHandleByPciBusId("0000:af:00.0"),
        pynvml.nvmlDeviceGetHandleBySerial("1650522000001"),
    ):
        assert pynvml.nvmlDeviceGetIndex(handle) == 1
    assert pynvml.nvmlDeviceGetPciInfo(_handle(1)).busId == "00000000:AF:00.0"
    assert pynvml.nvmlDeviceGetPciInfo(_handle(1)).busIdLegacy == "0000:AF:00.0"
    assert _code(_handle, 2) == INVALID_ARGUMENT
    assert _code(pynvml.nvmlDeviceGetHandleByUUID, "GPU-0") == NOT_FOUND
    assert _code(pynvml.nvmlDeviceGetHandleByPciBusId, "0000:01:02.0") == NOT_FOUND


def test_there_can_be_64_gpus(machine: NvmlMachine) -> None:
    machine.gpus = [Gpu(util=index) for index in range(64)]
    machine.write()
    assert pynvml.nvmlDeviceGetCount() == 64
    assert pynvml.nvmlDeviceGetUtilizationRates(_handle(63)).gpu == 63
    assert len({pynvml.nvmlDeviceGetUUID(_handle(index)) for index in range(64)}) == 64


# --------------------------------------------------------------------------- the script


def test_a_wrong_script_aborts_and_names_the_line(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path)
    wrong = {
        "gpu 1": 1,
        "gpu 0\nutil": 2,
        "# a comment\n\ngpu 0\n  utl 5": 4,
        "gpu 0\nutil 5 6": 2,
        "gpu 0\nutil -1": 2,
        "gpu 0\nprocess 12 kind=Q": 2,
        "error nvmlInit_v2": 1,
        "lost 0": 1,
        "gpu 0\nseries gpu=0 field=util values=1": 2,
        "util 5": 1,
        "process_stride 20": 1,
        "gpu 0\ngpu 1\ncuda_order 0": 3,
        "gpu 0\ngpu 1\ncuda_order 1 1": 3,
    }
    for text, line in wrong.items():
        machine.write_script(text + "\n")
        done = machine.run([sys.executable, "-c", "import pynvml; pynvml.nvmlInit()"])
        assert done.returncode == -signal.SIGABRT, text
        messages = done.stderr.splitlines()
        assert messages[0].startswith(f"oomph test machine: {machine.path}:{line}: "), text


def test_a_script_can_be_written_by_hand(machine: NvmlMachine) -> None:
    machine.write_script(
        """
        # One line is enough for a GPU.
        gpu 0
        gpu 1                    # and everything has a default
            name NVIDIA H100 #2  of 2
            util 0x10
        """
    )
    assert pynvml.nvmlDeviceGetName(_handle(0)) == "NVIDIA A100-SXM4-80GB"
    assert pynvml.nvmlDeviceGetName(_handle(1)) == "NVIDIA H100"
    assert pynvml.nvmlDeviceGetUtilizationRates(_handle(1)).gpu == 16


def test_a_new_script_counts_at_once_and_handles_survive_it(machine: NvmlMachine) -> None:
    handle = _handle()
    for util in range(100):
        machine.gpus[0].util = util
        machine.write()
        assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == util


def test_threads_can_call_while_the_script_changes(machine: NvmlMachine) -> None:
    machine.gpus[0].processes = [Proc(pid) for pid in range(1, 20)]
    machine.write()
    handle, stop, wrong = _handle(), threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            pids = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
            if pids != list(range(1, 20)):
                wrong.append(pids)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        machine.write()
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


# --------------------------------------------------------------------------- values


def test_the_machine_tells_its_versions(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, driver="535.1", nvml="12.535.1", cuda=12020)
    with machine.active():
        pynvml.nvmlInit()
        assert pynvml.nvmlSystemGetDriverVersion() == "535.1"
        assert pynvml.nvmlSystemGetNVMLVersion() == "12.535.1"
        assert pynvml.nvmlSystemGetCudaDriverVersion() == 12020
        assert pynvml.nvmlSystemGetCudaDriverVersion_v2() == 12020
        assert pynvml.nvmlDeviceGetCount() == 0
        pynvml.nvmlShutdown()


def _first(name: str) -> Callable[[Any], Any]:
    return lambda handle: getattr(pynvml, name)(handle)[0]


def _second(name: str) -> Callable[[Any], Any]:
    return lambda handle: getattr(pynvml, name)(handle)[1]


def _chosen(name: str, *choice: int) -> Callable[[Any], Any]:
    return lambda handle: getattr(pynvml, name)(handle, *choice)


def _field_value(field: int) -> Callable[[Any], Any]:
    def read(handle: Any) -> Any:
        value = pynvml.nvmlDeviceGetFieldValues(handle, [field])[0]
        if value.nvmlReturn != 0:
            raise pynvml.NVMLError(value.nvmlReturn)
        return value.value.ullVal

    return read


QUERIES: dict[str, Callable[[Any], Any]] = {
    "util": lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
    "mem_util": lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).memory,
    "encoder_util": _first("nvmlDeviceGetEncoderUtilization"),
    "decoder_util": _first("nvmlDeviceGetDecoderUtilization"),
    "temperature": _chosen("nvmlDeviceGetTemperature", 0),
    "memory_temperature": _field_value(82),
    "shutdown_temperature": _chosen("nvmlDeviceGetTemperatureThreshold", 0),
    "slowdown_temperature": _chosen("nvmlDeviceGetTemperatureThreshold", 1),
    "max_memory_temperature": _chosen("nvmlDeviceGetTemperatureThreshold", 2),
    "max_temperature": _chosen("nvmlDeviceGetTemperatureThreshold", 3),
    "fan": pynvml.nvmlDeviceGetFanSpeed,
    "num_fans": pynvml.nvmlDeviceGetNumFans,
    "power_mw": pynvml.nvmlDeviceGetPowerUsage,
    "power_limit_mw": pynvml.nvmlDeviceGetPowerManagementLimit,
    "enforced_power_limit_mw": pynvml.nvmlDeviceGetEnforcedPowerLimit,
    "default_power_limit_mw": pynvml.nvmlDeviceGetPowerManagementDefaultLimit,
    "min_power_limit_mw": _first("nvmlDeviceGetPowerManagementLimitConstraints"),
    "max_power_limit_mw": _second("nvmlDeviceGetPowerManagementLimitConstraints"),
    "energy_mj": pynvml.nvmlDeviceGetTotalEnergyConsumption,
    "performance_state": pynvml.nvmlDeviceGetPerformanceState,
    "compute_mode": pynvml.nvmlDeviceGetComputeMode,
    "persistence": pynvml.nvmlDeviceGetPersistenceMode,
    "display_active": pynvml.nvmlDeviceGetDisplayActive,
    "display_mode": pynvml.nvmlDeviceGetDisplayMode,
    "driver_model": pynvml.nvmlDeviceGetCurrentDriverModel,
    "event_reasons": pynvml.nvmlDeviceGetCurrentClocksEventReasons,
    "supported_event_reasons": pynvml.nvmlDeviceGetSupportedClocksEventReasons,
    "accounting_mode": pynvml.nvmlDeviceGetAccountingMode,
    "accounting_buffer": pynvml.nvmlDeviceGetAccountingBufferSize,
    "addressing_mode": pynvml.nvmlDeviceGetAddressingMode,
    "ecc_mode": _first("nvmlDeviceGetEccMode"),
    "ecc_corrected": _chosen("nvmlDeviceGetTotalEccErrors", 0, 0),
    "ecc_uncorrected": _chosen("nvmlDeviceGetTotalEccErrors", 1, 0),
    "minor_number": pynvml.nvmlDeviceGetMinorNumber,
    "architecture": pynvml.nvmlDeviceGetArchitecture,
    "cuda_cores": pynvml.nvmlDeviceGetNumGpuCores,
    "bar1_total_bytes": lambda handle: pynvml.nvmlDeviceGetBAR1MemoryInfo(handle).bar1Total,
    "bar1_used_bytes": lambda handle: pynvml.nvmlDeviceGetBAR1MemoryInfo(handle).bar1Used,
    "pcie_generation": pynvml.nvmlDeviceGetCurrPcieLinkGeneration,
    "max_pcie_generation": pynvml.nvmlDeviceGetMaxPcieLinkGeneration,
    "pcie_width": pynvml.nvmlDeviceGetCurrPcieLinkWidth,
    "max_pcie_width": pynvml.nvmlDeviceGetMaxPcieLinkWidth,
    "pcie_tx_kb_s": _chosen("nvmlDeviceGetPcieThroughput", 0),
    "pcie_rx_kb_s": _chosen("nvmlDeviceGetPcieThroughput", 1),
    "pcie_tx_bytes": _field_value(197),
    "pcie_rx_bytes": _field_value(198),
    "pcie_replays": pynvml.nvmlDeviceGetPcieReplayCounter,
    "graphics_clock": _chosen("nvmlDeviceGetClockInfo", 0),
    "sm_clock": _chosen("nvmlDeviceGetClockInfo", 1),
    "memory_clock": _chosen("nvmlDeviceGetClockInfo", 2),
    "video_clock": _chosen("nvmlDeviceGetClockInfo", 3),
    "max_graphics_clock": _chosen("nvmlDeviceGetMaxClockInfo", 0),
    "max_sm_clock": _chosen("nvmlDeviceGetMaxClockInfo", 1),
    "max_memory_clock": _chosen("nvmlDeviceGetMaxClockInfo", 2),
    "max_video_clock": _chosen("nvmlDeviceGetMaxClockInfo", 3),
    "mig_mode": _first("nvmlDeviceGetMigMode"),
    "mig_pending": _second("nvmlDeviceGetMigMode"),
    "max_mig_devices": pynvml.nvmlDeviceGetMaxMigDeviceCount,
    "total_bytes": lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle).total,
    "reserved_bytes": lambda handle: (
        pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).reserved
    ),
    "used_bytes": lambda handle: (
        pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used
    ),
    "name": pynvml.nvmlDeviceGetName,
    "uuid": pynvml.nvmlDeviceGetUUID,
    "bus_id": lambda handle: pynvml.nvmlDeviceGetPciInfo(handle).busId,
    "serial": pynvml.nvmlDeviceGetSerial,
    "vbios": pynvml.nvmlDeviceGetVbiosVersion,
    "compute_capability": pynvml.nvmlDeviceGetCudaComputeCapability,
}
OWN_VALUES: dict[str, object] = {
    "name": "NVIDIA H100 80GB HBM3",
    "uuid": "GPU-8f6c5a1e-0000-1111-2222-333344445555",
    "bus_id": "00000001:AB:10.0",
    "serial": "1234",
    "vbios": "96.00",
    "compute_capability": (9, 0),
}


def test_every_attribute_of_a_gpu_can_be_queried() -> None:
    attributes = {attribute for attribute in vars(Gpu()) if attribute not in QUERIES}
    # What GPM counts is the difference of two samples, and has tests of its own.
    assert attributes == {"processes", "migs", "lost", "sm_active", "dram_active"}


@pytest.mark.parametrize("attribute", QUERIES)
def test_a_query_answers_what_the_script_says(machine: NvmlMachine, attribute: str) -> None:
    value = OWN_VALUES.get(attribute, 12345)
    setattr(machine.gpus[1], attribute, value)
    machine.write()
    answer = QUERIES[attribute](_handle(1))
    assert (tuple(answer) if attribute == "compute_capability" else answer) == value
    untouched = QUERIES[attribute]
    assert _code(untouched, _handle(0)) in (0, NOT_SUPPORTED)


@pytest.mark.parametrize("attribute", QUERIES)
def test_a_query_for_what_is_not_available_is_not_supported(
    machine: NvmlMachine, attribute: str
) -> None:
    setattr(machine.gpus[1], attribute, NA)
    machine.write()
    assert _code(QUERIES[attribute], _handle(1)) == NOT_SUPPORTED
    assert _code(pynvml.nvmlDeviceGetIndex, _handle(1)) == 0


def test_the_older_names_of_queries_answer_the_same(machine: NvmlMachine) -> None:
    machine.gpus[0].temperature = 71
    machine.gpus[0].event_reasons = 4
    machine.gpus[0].power_mw = 333_000
    machine.gpus[0].energy_mj = 10**13
    machine.gpus[0].fan = 55
    machine.write()
    assert pynvml.nvmlDeviceGetTemperatureV(_handle(), 0) == 71
    assert pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(_handle()) == 4
    assert pynvml.nvmlDeviceGetFanSpeed_v2(_handle(), 0) == 55
    began = time.time()
    values = pynvml.nvmlDeviceGetFieldValues(_handle(), [83, 186, 9999])
    ended = time.time()
    assert (values[0].value.ullVal, values[1].value.uiVal) == (10**13, 333_000)
    assert [value.nvmlReturn for value in values] == [0, 0, NOT_SUPPORTED]
    assert began - CLOCKS_DIFFER_S <= values[0].timestamp / 1e6 <= ended + CLOCKS_DIFFER_S


def test_limits_and_clocks_follow_those_that_are_given(machine: NvmlMachine) -> None:
    machine.gpus[0].power_limit_mw = 250_000
    machine.gpus[0].graphics_clock = 900
    machine.write()
    assert pynvml.nvmlDeviceGetEnforcedPowerLimit(_handle()) == 250_000
    assert pynvml.nvmlDeviceGetPowerManagementDefaultLimit(_handle()) == 250_000
    assert pynvml.nvmlDeviceGetClockInfo(_handle(), pynvml.NVML_CLOCK_SM) == 900
    assert pynvml.nvmlDeviceGetMinorNumber(_handle(1)) == 1


def test_memory_version_1_counts_the_reserved_part_as_used(machine: NvmlMachine) -> None:
    machine.gpus[0] = Gpu(total_bytes=80 * GIB, used_bytes=30 * GIB, reserved_bytes=600 * MIB)
    machine.write()
    one = pynvml.nvmlDeviceGetMemoryInfo(_handle())
    two = pynvml.nvmlDeviceGetMemoryInfo(_handle(), version=pynvml.nvmlMemory_v2)
    assert (one.total, one.used) == (80 * GIB, 30 * GIB + 600 * MIB)
    assert (two.total, two.used, two.reserved) == (80 * GIB, 30 * GIB, 600 * MIB)
    assert one.free == two.free == 50 * GIB - 600 * MIB
    wrong_version = 0x01000028
    assert _code(pynvml.nvmlDeviceGetMemoryInfo, _handle(), wrong_version) == 25


# --------------------------------------------------------------------------- processes


class Entry(ctypes.Structure):
    """A process in the layout that nvidia-ml-py knows."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gi", ctypes.c_uint),
        ("ci", ctypes.c_uint),
    )


def _fetch(function: str, slots: int, fill: int = 0xA5) -> tuple[int, int, bytes]:
    """Call a process list with a filled buffer: result, count, bytes."""
    buffer = (ctypes.c_ubyte * (slots * 32))(*([fill] * slots * 32))
    count = ctypes.c_uint(slots)
    result = getattr(_library(), function)(_handle(), ctypes.byref(count), buffer)
    return result, count.value, bytes(buffer)


def test_processes_are_listed_by_kind(machine: NvmlMachine) -> None:
    machine.gpus[0].processes = [
        Proc(100, 2 * GIB),
        Proc(200, None),
        Proc(300, MIB, kind="G"),
        Proc(400, MIB, kind="CG"),
        Proc(500, MIB, kind="M"),
        Proc(600, MIB, kind="-"),
    ]
    machine.write()
    compute = pynvml.nvmlDeviceGetComputeRunningProcesses(_handle())
    graphics = pynvml.nvmlDeviceGetGraphicsRunningProcesses(_handle())
    mps = pynvml.nvmlDeviceGetMPSComputeRunningProcesses(_handle())
    assert [(one.pid, one.usedGpuMemory) for one in compute] == [
        (100, 2 * GIB),
        (200, None),
        (400, MIB),
    ]
    assert [one.pid for one in graphics] == [300, 400]
    assert [one.pid for one in mps] == [500]
    assert {(one.gpuInstanceId, one.computeInstanceId) for one in compute} == {(2**32 - 1,) * 2}
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(_handle(1)) == []
    detail = pynvml.nvmlDeviceGetRunningProcessDetailList(
        _handle(), pynvml.nvmlProcessDetailList_v1, 1
    )
    assert [(one.pid, one.usedGpuMemory) for one in detail] == [(300, MIB), (400, MIB)]


def test_used_memory_is_that_of_the_processes_unless_given(machine: NvmlMachine) -> None:
    machine.gpus[0].processes = [Proc(1, 2 * GIB), Proc(2, None), Proc(3, GIB, kind="-")]
    machine.write()
    assert QUERIES["used_bytes"](_handle()) == 2 * GIB


@pytest.mark.parametrize("stride", [16, 24, 32])
def test_version_3_has_the_stride_of_the_script(machine: NvmlMachine, stride: int) -> None:
    machine.process_stride = stride
    machine.gpus[0].processes = [Proc(11, 5, gi=1, ci=2), Proc(22, 6, gi=3, ci=4)]
    machine.write()
    result, count, data = _fetch("nvmlDeviceGetComputeRunningProcesses_v3", 4)
    assert (result, count) == (0, 2)
    for number, expected in enumerate([(11, 5, 1, 2), (22, 6, 3, 4)]):
        entry = Entry.from_buffer_copy(data, number * stride)
        known = (entry.pid, entry.used, entry.gi, entry.ci) if stride > 16 else ()
        assert known in ((), expected)
        assert (entry.pid, entry.used) == expected[:2]
    assert set(data[2 * stride :]) == {0xA5}


def test_the_older_versions_keep_their_stride(machine: NvmlMachine) -> None:
    machine.process_stride = 32
    machine.gpus[0].processes = [Proc(11, 5, gi=1, ci=2), Proc(22, 6, gi=3, ci=4)]
    machine.write()
    two = _fetch("nvmlDeviceGetComputeRunningProcesses_v2", 4)[2]
    assert [Entry.from_buffer_copy(two, at).pid for at in (0, 24)] == [11, 22]
    assert set(two[48:]) == {0xA5}
    one = _fetch("nvmlDeviceGetComputeRunningProcesses", 4)[2]
    assert [Entry.from_buffer_copy(one, at).pid for at in (0, 16)] == [11, 22]
    assert set(one[32:]) == {0xA5}


def test_nvidia_ml_py_misreads_the_stride_of_32(machine: NvmlMachine) -> None:
    machine.process_stride = 32
    machine.gpus[0].processes = [Proc(pid) for pid in (100, 200, 300)]
    machine.write()
    listed = pynvml.nvmlDeviceGetComputeRunningProcesses(_handle())
    assert [one.pid for one in listed] != [100, 200, 300]


def test_the_padding_of_an_entry_can_be_left_alone(machine: NvmlMachine) -> None:
    machine.gpus[0].processes = [Proc(11)]
    machine.write()
    assert _fetch("nvmlDeviceGetComputeRunningProcesses_v3", 2)[2][4:8] == bytes(4)
    machine.process_padding = False
    machine.write()
    data = _fetch("nvmlDeviceGetComputeRunningProcesses_v3", 2)[2]
    assert data[4:8] == b"\xa5" * 4
    assert Entry.from_buffer_copy(data).pid == 11


def test_the_driver_can_clear_the_whole_buffer_first(machine: NvmlMachine) -> None:
    machine.process_clear = True
    machine.gpus[0].processes = [Proc(11)]
    machine.write()
    data = _fetch("nvmlDeviceGetComputeRunningProcesses_v3", 4)[2]
    assert set(data[24 : 4 * 24]) == {0}
    assert set(data[4 * 24 :]) == {0xA5}


def test_a_buffer_that_is_too_small_is_told_the_size(machine: NvmlMachine) -> None:
    assert _fetch("nvmlDeviceGetComputeRunningProcesses_v3", 0)[:2] == (0, 0)
    machine.gpus[0].processes = [Proc(pid) for pid in range(1, 4)]
    machine.write()
    function = "nvmlDeviceGetComputeRunningProcesses_v3"
    assert _fetch(function, 0)[:2] == (INSUFFICIENT_SIZE, 3)
    assert _fetch(function, 2)[:2] == (INSUFFICIENT_SIZE, 3)
    assert _fetch(function, 3)[:2] == (0, 3)


def test_the_list_can_grow_after_its_size_was_told(machine: NvmlMachine) -> None:
    machine.gpus[0].processes = [Proc(1)]
    machine.grow(10, times=2)
    lists = [_code(pynvml.nvmlDeviceGetComputeRunningProcesses, _handle()) for _ in range(4)]
    assert lists == [INSUFFICIENT_SIZE, INSUFFICIENT_SIZE, 0, 0]
    machine.clear_growth()
    machine.grow(3)
    listed = pynvml.nvmlDeviceGetComputeRunningProcesses(_handle())
    assert [one.pid for one in listed] == [1, 900001, 900002, 900003]
    function = "nvmlDeviceGetComputeRunningProcesses_v3"
    told = [_fetch(function, slots)[:2] for slots in (0, 1, 4, 7)]
    assert told == [(7, 1), (7, 4), (7, 7), (7, 10)]


def test_a_list_that_always_grows_never_fits(machine: NvmlMachine) -> None:
    machine.gpus[1].processes = machine.gpus[0].processes = [Proc(1)]
    machine.grow(10, gpu=0)
    codes = {_code(pynvml.nvmlDeviceGetComputeRunningProcesses, _handle()) for _ in range(10)}
    assert codes == {INSUFFICIENT_SIZE}
    assert _code(pynvml.nvmlDeviceGetComputeRunningProcesses, _handle(1)) == 0
    assert _fetch("nvmlDeviceGetComputeRunningProcesses_v3", 64)[:2] == (0, 21)


def test_process_utilisation_is_there_once_per_sample(machine: NvmlMachine) -> None:
    machine.sample_period_ms = A_DAY_MS
    machine.gpus[0].processes = [Proc(1, sm_util=40, mem_util=7), Proc(2)]
    machine.write()
    samples = pynvml.nvmlDeviceGetProcessUtilization(_handle(), 0)
    assert [(one.pid, one.smUtil, one.memUtil) for one in samples] == [(1, 40, 7)]
    stamp = samples[0].timeStamp
    assert 0 <= time.time() - stamp / 1e6 < A_DAY_MS / 1000 + 60
    assert _code(pynvml.nvmlDeviceGetProcessUtilization, _handle(), stamp) == NOT_FOUND
    assert _code(pynvml.nvmlDeviceGetProcessUtilization, _handle(), stamp - 1) == 0
    assert _code(pynvml.nvmlDeviceGetProcessUtilization, _handle(1), 0) == NOT_FOUND


def test_accounting_knows_the_peak_also_of_ended_processes(machine: NvmlMachine) -> None:
    machine.gpus[0].processes = [
        Proc(1, GIB, peak_bytes=3 * GIB, sm_util=50),
        Proc(2, 0, kind="-", peak_bytes=70 * GIB, time_ms=1234),
    ]
    machine.write()
    assert _code(pynvml.nvmlDeviceGetAccountingStats, _handle(), 1) == NOT_SUPPORTED
    machine.gpus[0].accounting_mode = 1
    machine.write()
    running = pynvml.nvmlDeviceGetAccountingStats(_handle(), 1)
    ended = pynvml.nvmlDeviceGetAccountingStats(_handle(), 2)
    assert (running.maxMemoryUsage, running.gpuUtilization, running.isRunning) == (3 * GIB, 50, 1)
    assert (ended.maxMemoryUsage, ended.time, ended.isRunning) == (70 * GIB, 1234, 0)
    assert pynvml.nvmlDeviceGetAccountingPids(_handle()) == [1, 2]
    assert _code(pynvml.nvmlDeviceGetAccountingStats, _handle(), 3) == NOT_FOUND


# --------------------------------------------------------------------------- MIG


@pytest.fixture
def divided(machine: NvmlMachine) -> NvmlMachine:
    """GPU 0 has the MIG devices 0 and 2."""
    machine.gpus[0].util = 50
    machine.gpus[0].migs = [
        Mig(gi=7, ci=0, processes=[Proc(100, 2 * GIB)]),
        None,
        Mig(gi=1, ci=3, total_bytes=40 * GIB, gi_slices=4, ci_slices=2, processes=[Proc(200)]),
    ]
    machine.write()
    return machine


def _mig(index: int) -> Any:
    return pynvml.nvmlDeviceGetMigDeviceHandleByIndex(_handle(), index)


def test_mig_devices_have_indices_with_holes(divided: NvmlMachine) -> None:
    del divided
    assert pynvml.nvmlDeviceGetMigMode(_handle()) == [1, 1]
    assert pynvml.nvmlDeviceGetMigMode(_handle(1)) == [0, 0]
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(_handle()) == 7
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(_handle(1)) == 0
    codes = [_code(_mig, index) for index in range(8)]
    assert codes == [0, NOT_FOUND, 0, NOT_FOUND, NOT_FOUND, NOT_FOUND, NOT_FOUND, INVALID_ARGUMENT]


def test_a_mig_device_says_what_it_is(divided: NvmlMachine) -> None:
    assert divided.uuid(0, 2) == mig_uuid(0, 2)
    for mig in (_mig(2), pynvml.nvmlDeviceGetHandleByUUID(mig_uuid(0, 2))):
        assert pynvml.nvmlDeviceIsMigDeviceHandle(mig).value == 1
        assert pynvml.nvmlDeviceGetUUID(mig) == mig_uuid(0, 2)
        assert pynvml.nvmlDeviceGetName(mig) == "NVIDIA A100-SXM4-80GB MIG 4g.40gb"
        assert pynvml.nvmlDeviceGetIndex(mig) == 2
        assert pynvml.nvmlDeviceGetGpuInstanceId(mig) == 1
        assert pynvml.nvmlDeviceGetComputeInstanceId(mig) == 3
        parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)
        assert pynvml.nvmlDeviceGetUUID(parent) == gpu_uuid(0)
        attributes = pynvml.nvmlDeviceGetAttributes(mig)
        assert attributes.gpuInstanceSliceCount == 4
        assert attributes.computeInstanceSliceCount == 2
        assert attributes.memorySizeMB == 40 * 1024
    assert pynvml.nvmlDeviceIsMigDeviceHandle(_handle()).value == 0
    assert _code(pynvml.nvmlDeviceGetGpuInstanceId, _handle()) == NOT_SUPPORTED
    from_gpu = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle
    assert _code(from_gpu, _handle()) == INVALID_ARGUMENT


def test_a_mig_device_has_memory_and_processes_but_no_utilisation(divided: NvmlMachine) -> None:
    del divided
    memory = pynvml.nvmlDeviceGetMemoryInfo(_mig(0), version=pynvml.nvmlMemory_v2)
    assert (memory.total, memory.used) == (10 * GIB, 2 * GIB)
    assert [one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(_mig(0))] == [100]
    assert [one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(_mig(2))] == [200]
    for handle in (_mig(0), _handle()):
        assert _code(pynvml.nvmlDeviceGetUtilizationRates, handle) == NOT_SUPPORTED
        assert _code(pynvml.nvmlDeviceGetProcessUtilization, handle, 0) == NOT_SUPPORTED
        assert _code(pynvml.nvmlDeviceGetSamples, handle, 1, 0) == NOT_SUPPORTED
    assert _code(pynvml.nvmlDeviceGetPowerUsage, _mig(0)) == NOT_SUPPORTED
    assert _code(pynvml.nvmlDeviceGetPowerUsage, _handle()) == 0


def test_a_divided_gpu_lists_the_processes_of_its_instances(divided: NvmlMachine) -> None:
    del divided
    listed = pynvml.nvmlDeviceGetComputeRunningProcesses(_handle())
    seen = [(one.pid, one.gpuInstanceId, one.computeInstanceId) for one in listed]
    assert seen == [(100, 7, 0), (200, 1, 3)]
    assert QUERIES["used_bytes"](_handle()) == 3 * GIB


# --------------------------------------------------------------------------- trouble


def test_an_error_can_be_for_one_gpu_and_some_calls(machine: NvmlMachine) -> None:
    machine.error("nvmlDeviceGetPowerUsage", NO_PERMISSION, gpu=1, after=2, times=1)
    power = pynvml.nvmlDeviceGetPowerUsage
    codes = [(_code(power, _handle(0)), _code(power, _handle(1))) for _ in range(4)]
    assert codes == [(0, 0), (0, 0), (0, NO_PERMISSION), (0, 0)]
    machine.write()
    assert [_code(power, _handle(1)) for _ in range(4)] == [0, 0, NO_PERMISSION, 0]
    machine.clear_errors()
    assert [_code(power, _handle(1)) for _ in range(4)] == [0, 0, 0, 0]


def test_an_error_can_be_for_all_functions_of_a_gpu(machine: NvmlMachine) -> None:
    handle = _handle(1)
    machine.error("*", 999, gpu=1)
    assert _code(pynvml.nvmlDeviceGetName, handle) == 999
    assert _code(_handle, 1) == 999
    assert _code(pynvml.nvmlDeviceGetHandleByUUID, gpu_uuid(1)) == 999
    assert _code(pynvml.nvmlDeviceGetCount) == 0
    assert _code(pynvml.nvmlDeviceGetName, _handle(0)) == 0


def test_an_error_can_be_for_one_mig_device(divided: NvmlMachine) -> None:
    divided.error("nvmlDeviceGetMemoryInfo*", NO_PERMISSION, gpu="0:2")
    memory = pynvml.nvmlDeviceGetMemoryInfo
    codes = [_code(memory, handle) for handle in (_handle(), _mig(0), _mig(2))]
    assert codes == [0, 0, NO_PERMISSION]


def test_init_and_shutdown_can_fail(machine: NvmlMachine) -> None:
    machine.error("nvmlInit*", 18)
    assert _code(pynvml.nvmlInit) == 18
    assert _library().nvmlInit_v2() == 18
    machine.clear_errors()
    machine.error("nvmlShutdown", 999)
    assert _code(pynvml.nvmlShutdown) == 999
    assert pynvml.nvmlDeviceGetCount() == 2


def test_a_rule_for_a_function_that_does_not_exist_is_refused(machine: NvmlMachine) -> None:
    for call in (
        lambda: machine.error("nvmlDeviceGetPower", 3),
        lambda: machine.latency(5, "nvmlDeviceGetPower"),
        lambda: NvmlMachine(machine.directory, missing=["nvmlDeviceGetPower"]),
    ):
        with pytest.raises(ValueError, match="no function 'nvmlDeviceGetPower'"):
            call()


def test_a_driver_can_be_too_old_for_a_function(machine: NvmlMachine) -> None:
    machine.missing = ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v[23]"]
    machine.write()
    assert _code(QUERIES["used_bytes"], _handle()) == FUNCTION_NOT_FOUND
    assert _code(QUERIES["total_bytes"], _handle()) == 0
    assert _code(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, _handle()) == FUNCTION_NOT_FOUND
    with pytest.raises(pynvml.NVMLLibraryMismatchError):  # what the binding makes of it
        pynvml.nvmlDeviceGetComputeRunningProcesses(_handle())
    assert _fetch("nvmlDeviceGetComputeRunningProcesses", 0)[:2] == (0, 0)


def test_a_lost_gpu_answers_every_call_with_lost(machine: NvmlMachine) -> None:
    handle = _handle(1)
    machine.gpus[1].lost = True
    machine.write()
    assert _code(_handle, 1) == LOST
    assert _code(pynvml.nvmlDeviceGetHandleByUUID, gpu_uuid(1)) == LOST
    assert {_code(query, handle) for query in QUERIES.values()} == {LOST}
    assert pynvml.nvmlDeviceGetCount() == 2
    assert _code(_handle, 0) == 0


HALF_AN_HOUR_US = 1_800_000_000


@contextlib.contextmanager
def _hanging(machine: NvmlMachine, gpu: int, number: int = 1) -> Iterator[threading.Thread]:
    """A call of that GPU, the so manieth in the log, which hangs until the block ends."""
    calling = threading.Thread(
        target=pynvml.nvmlDeviceGetPowerUsage, args=(_handle(gpu),), daemon=True
    )
    calling.start()
    while len(machine.calls("nvmlDeviceGetPowerUsage")) < number:  # it is written, then it sleeps
        time.sleep(0.01)
    yield calling
    machine.clear_latencies()
    calling.join()


def test_calls_can_take_their_time(machine: NvmlMachine) -> None:
    machine.latency(30_000, "nvmlDeviceGetPowerUsage", gpu=1)
    handle = _handle(1)
    start = time.perf_counter()
    pynvml.nvmlDeviceGetPowerUsage(handle)
    assert time.perf_counter() - start >= 0.03


def test_a_latency_is_of_its_function_and_its_gpu_and_ends_when_it_is_taken_back(
    machine: NvmlMachine,
) -> None:
    machine.latency(HALF_AN_HOUR_US, "nvmlDeviceGetPowerUsage", gpu=1)
    with _hanging(machine, 1) as calling:
        assert pynvml.nvmlDeviceGetTemperature(_handle(1), 0) is not None  # or it would not return
        assert calling.is_alive()
    assert pynvml.nvmlDeviceGetPowerUsage(_handle(1)) is not None


def test_a_slow_gpu_does_not_stop_calls_to_another(machine: NvmlMachine) -> None:
    fast = _handle(0)
    machine.latency(HALF_AN_HOUR_US, "nvmlDeviceGetPowerUsage", gpu=1)
    with _hanging(machine, 1) as calling:
        pynvml.nvmlDeviceGetPowerUsage(fast)
        assert calling.is_alive()


# --------------------------------------------------------------------------- time


def _at(machine: NvmlMachine, seconds: float) -> None:
    """Let the series have started so long ago."""
    machine.epoch_ns = time.monotonic_ns() - int(seconds * 1e9)
    machine.write()


def test_a_series_goes_round_with_time(machine: NvmlMachine) -> None:
    machine.series(0, "util", [10, 20, NA], step_ms=60_000)
    for minutes, expected in {0: 10, 1: 20, 2: None, 3: 10, 4: 20}.items():
        _at(machine, 60 * minutes + 1)
        code = _code(pynvml.nvmlDeviceGetUtilizationRates, _handle())
        assert code == (NOT_SUPPORTED if expected is None else 0)
        if expected is not None:
            assert pynvml.nvmlDeviceGetUtilizationRates(_handle()).gpu == expected


def test_a_series_starts_when_the_script_is_loaded(machine: NvmlMachine) -> None:
    machine.series(0, "used_bytes", [1, 2], step_ms=3_600_000, hold=True)
    assert QUERIES["used_bytes"](_handle()) == 1
    machine.clear_series()
    machine.series(0, "used_bytes", [1, 2], step_ms=100, hold=True)
    while QUERIES["used_bytes"](_handle()) != 2:
        time.sleep(0.01)
    _at(machine, 3600)
    assert QUERIES["used_bytes"](_handle()) == 2
    machine.clear_series()
    assert QUERIES["used_bytes"](_handle()) == 0


def test_a_counter_grows_with_time(machine: NvmlMachine) -> None:
    machine.gpus[0].energy_mj = 1000
    machine.rate(0, "energy_mj", 250_000)
    _at(machine, 100)
    energy = pynvml.nvmlDeviceGetTotalEnergyConsumption(_handle())
    passed_s = (time.monotonic_ns() - (machine.epoch_ns or 0)) / 1e9
    assert 25_001_000 <= energy <= 1000 + 250_000 * passed_s


def test_samples_are_means_so_that_short_bursts_are_in_them(machine: NvmlMachine) -> None:
    machine.sample_period_ms = 200
    machine.sample_depth = 50
    machine.series(0, "util", [100] + [0] * 9, step_ms=100)  # 10 % of the time
    _at(machine, 60)
    began = time.time()
    kind, samples = pynvml.nvmlDeviceGetSamples(_handle(), pynvml.NVML_GPU_UTILIZATION_SAMPLES, 0)
    assert kind == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
    assert len(samples) == 50
    mean = sum(one.sampleValue.uiVal for one in samples) / len(samples)
    assert 9 <= mean <= 11
    stamps = [one.timeStamp for one in samples]
    assert {later - earlier for earlier, later in pairwise(stamps)} == {200_000}
    assert began - 0.2 - CLOCKS_DIFFER_S <= stamps[-1] / 1e6 <= time.time() + CLOCKS_DIFFER_S


def test_samples_are_given_once_and_do_not_change(machine: NvmlMachine) -> None:
    machine.sample_period_ms = A_DAY_MS
    machine.sample_depth = 3
    machine.write()
    read = pynvml.nvmlDeviceGetSamples
    first = [one.timeStamp for one in read(_handle(), 0, 0)[1]]
    again = [one.timeStamp for one in read(_handle(), 0, 0)[1]]
    assert first == again
    assert [one.timeStamp for one in read(_handle(), 0, first[0])[1]] == first[1:]
    assert _code(read, _handle(), 0, first[-1]) == NOT_FOUND


# --------------------------------------------------------------------------- the call log


def test_the_log_has_each_call_with_its_gpu_and_result(divided: NvmlMachine) -> None:
    divided.error("nvmlDeviceGetName", 4, gpu=1)
    gpu, mig = _handle(1), _mig(2)
    divided.clear_calls()
    pynvml.nvmlDeviceGetCount()
    _code(pynvml.nvmlDeviceGetName, gpu)
    pynvml.nvmlDeviceGetUUID(mig)
    seen = [(call.function, call.gpu, call.mig, call.result) for call in divided.calls()]
    assert seen == [
        ("nvmlDeviceGetCount_v2", None, None, 0),
        ("nvmlDeviceGetName", 1, None, 4),
        ("nvmlDeviceGetUUID", 0, 2, 0),
    ]
    assert {call.pid for call in divided.calls()} == {os.getpid()}
    assert [call.function for call in divided.calls("*UUID")] == ["nvmlDeviceGetUUID"]
    divided.clear_calls()
    assert divided.calls() == []


def test_processes_can_share_the_log(machine: NvmlMachine) -> None:
    code = "import pynvml; pynvml.nvmlInit(); [pynvml.nvmlDeviceGetCount() for _ in range(500)]"
    variables = {**os.environ, **machine.env()}
    programs = [subprocess.Popen([sys.executable, "-c", code], env=variables) for _ in range(3)]
    assert [program.wait() for program in programs] == [0, 0, 0]
    calls = machine.calls("nvmlDeviceGetCount_v2")
    assert [call.pid for call in calls if call.pid == programs[0].pid] == [programs[0].pid] * 500
    assert len(calls) == 1500


def test_there_is_no_log_unless_asked_for(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu()], log=False)
    _python(machine, "import pynvml; pynvml.nvmlInit()")
    assert not machine.log_path.exists()
    assert machine.calls() == []


def test_a_machine_leaves_the_environment_as_it_was(tmp_path: Path) -> None:
    before = dict(os.environ)
    with NvmlMachine(tmp_path).active():
        assert os.environ["OOMPH_NVML_SCRIPT"] == str(tmp_path / "machine.nvml")
    assert dict(os.environ) == before


# --------------------------------------------------------------------------- libcuda

SHOW_CUDA = """
import ctypes, uuid
cuda = ctypes.CDLL("libcuda.so.1")
result = cuda.cuInit(0)
if result:
    print("error", result)
else:
    count, device = ctypes.c_int(), ctypes.c_int()
    assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
    for index in range(count.value):
        raw, name = (ctypes.c_ubyte * 16)(), ctypes.create_string_buffer(64)
        assert cuda.cuDeviceGet(ctypes.byref(device), index) == 0
        assert cuda.cuDeviceGetUuid_v2(raw, device) == 0
        assert cuda.cuDeviceGetName(name, 64, device) == 0
        print(uuid.UUID(bytes=bytes(raw)))
    assert cuda.cuDeviceGet(ctypes.byref(device), count) == 101
"""


def _cuda_sees(machine: NvmlMachine, **variables: str) -> list[int] | str:
    """The NVML indices of the GPUs that CUDA sees, or its error."""
    output = _python(machine, SHOW_CUDA, **variables)
    if output.startswith("error"):
        return output
    indices = {gpu_uuid(index)[4:]: index for index in range(len(machine.gpus))}
    return [indices[line] for line in output.splitlines()]


def test_cuda_has_its_own_order_unless_told_otherwise(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu(), Gpu(), Gpu()], cuda_order=[2, 0, 1])
    assert _cuda_sees(machine) == [2, 0, 1]
    assert _cuda_sees(machine, CUDA_DEVICE_ORDER="PCI_BUS_ID") == [0, 1, 2]
    assert _cuda_sees(machine, CUDA_VISIBLE_DEVICES="0,2") == [2, 1]
    machine.cuda_order = []
    machine.write()
    assert _cuda_sees(machine) == [0, 1, 2]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2,0", [2, 0]),
        ("0,9,1", [0]),
        ("1,-1,2", [1]),
        ("1gpu2", [1]),
        ("0-2", [0]),
        ("", None),
        ("-1", None),
        ("NoDevFiles", None),
        ("0,0", None),
        (f"{gpu_uuid(1)},{gpu_uuid(0)}", [1, 0]),
        (f"{gpu_uuid(1)},GPU-00,{gpu_uuid(0)}", [1]),
        (f"{gpu_uuid(2)},0", [2]),
        (gpu_uuid(2)[:12], [2]),
        ("GPU-", None),
    ],
)
def test_cuda_visible_devices_has_its_rules(
    tmp_path: Path, value: str, expected: list[int] | None
) -> None:
    machine = NvmlMachine(tmp_path, [Gpu(), Gpu(), Gpu()])
    seen = _cuda_sees(machine, CUDA_VISIBLE_DEVICES=value)
    assert seen == ("error 100" if expected is None else expected)


def test_cuda_sees_one_mig_device(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu(migs=[Mig(), Mig()])])
    assert _python(machine, SHOW_CUDA) == mig_uuid(0, 0)[4:]
    both = f"{mig_uuid(0, 1)},{mig_uuid(0, 0)}"
    assert _python(machine, SHOW_CUDA, CUDA_VISIBLE_DEVICES=both) == mig_uuid(0, 1)[4:]


def test_cuda_can_fail_and_its_calls_are_logged(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu()], cuda_errors={"cuInit": 803})
    assert _cuda_sees(machine) == "error 803"
    assert [(call.function, call.result) for call in machine.calls()] == [("cuInit", 803)]


def test_a_child_forked_after_cuinit_cannot_use_cuda(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu()])
    code = """
import ctypes, os
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
child = os.fork()
if child == 0:
    os._exit(cuda.cuInit(0))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert _python(machine, code) == "3"


# --------------------------------------------------------------------------- the real tools


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[NvmlMachine]:
    """Eight GPUs with 20 processes that exist."""
    sleepers = [subprocess.Popen(["sleep", "300"]) for _ in range(20)]
    gpus = [
        Gpu(util=11 * index, temperature=30 + index, power_mw=1000 * (100 + index), fan=20 + index)
        for index in range(8)
    ]
    for number, sleeper in enumerate(sleepers):
        process = Proc(sleeper.pid, (number + 1) * GIB, sm_util=number)
        gpus[number % 8].processes.append(process)
    yield NvmlMachine(tmp_path, gpus)
    for sleeper in sleepers:
        sleeper.kill()
        sleeper.wait()


def test_gpustat_runs_on_it(busy: NvmlMachine) -> None:
    done = busy.run([str(BIN / "gpustat"), "--json"])
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["driver_version"] == "550.54.15"
    for index, (gpu, seen) in enumerate(zip(busy.gpus, shown["gpus"], strict=True)):
        assert seen["uuid"] == gpu_uuid(index)
        assert seen["utilization.gpu"] == gpu.util
        assert seen["temperature.gpu"] == gpu.temperature
        assert seen["fan.speed"] == gpu.fan
        assert seen["power.draw"] == 100 + index
        assert seen["memory.total"] == 80 * 1024
        expected = {process.pid: (process.used_bytes or 0) // MIB for process in gpu.processes}
        assert {one["pid"]: one["gpu_memory_usage"] for one in seen["processes"]} == expected
        assert seen["memory.used"] == sum(expected.values())


def test_nvitop_runs_on_it(busy: NvmlMachine) -> None:
    done = busy.run([str(BIN / "nvitop"), "-1"], {"COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    assert "Driver Version: 550.54.15" in done.stdout
    for index, gpu in enumerate(busy.gpus):
        row = re.search(rf"{20 + index}% +{30 + index}C +P0 .*", done.stdout)
        assert row is not None
        assert f"{100 + index}W / 400W" in row[0]
        assert re.search(rf"│ +{gpu.util}% +Default", row[0])
        for process in gpu.processes:
            line = re.search(rf"│ +{index} +{process.pid} C .*", done.stdout)
            assert line is not None
            assert re.search(rf"(GiB|MiB) +{process.sm_util} ", line[0])


def test_nvitop_snapshots_work_also_with_mig(busy: NvmlMachine) -> None:
    busy.gpus[7].processes = []
    busy.gpus[7].migs = [Mig(processes=[Proc(os.getpid(), 3 * GIB)]), Mig()]
    busy.write()
    code = """
import nvitop
for device in nvitop.Device.all():
    snapshot = device.as_snapshot()
    print(device.index, snapshot.gpu_utilization, snapshot.memory_used)
    for mig in device.mig_devices():
        print(mig.index, mig.as_snapshot().memory_used, mig.uuid(), list(mig.processes()))
nvitop.take_snapshots()
"""
    lines = _python(busy, code).splitlines()
    assert lines[0] == f"0 0 {(1 + 9 + 17) * GIB}"
    assert lines[7:] == [
        f"7 N/A {3 * GIB}",
        f"(7, 0) {3 * GIB} {mig_uuid(7, 0)} [{os.getpid()}]",
        f"(7, 1) 0 {mig_uuid(7, 1)} []",
    ]


def _gpm_metric(handle: Any, number: int, wait_s: float = 0.05) -> Any:
    samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
    get = pynvml.c_nvmlGpmMetricsGet_t(version=1, numMetrics=1)
    get.metrics[0].metricId = number
    for sample in samples:
        pynvml.nvmlGpmSampleGet(handle, sample)
        time.sleep(wait_s)
    get.sample1, get.sample2 = samples
    metric = pynvml.nvmlGpmMetricsGet(get).metrics[0]
    for sample in samples:
        pynvml.nvmlGpmSampleFree(sample)
    return metric


def test_gpm_is_the_mean_between_two_samples(machine: NvmlMachine) -> None:
    machine.gpus[0] = Gpu(architecture=9, sm_active=40, dram_active=70)
    machine.write()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice == 1
    assert _gpm_metric(handle, pynvml.NVML_GPM_METRIC_SM_UTIL).value == 40
    assert _gpm_metric(handle, pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL).value == 70
    assert _gpm_metric(handle, pynvml.NVML_GPM_METRIC_FP64_UTIL).nvmlReturn == NOT_SUPPORTED
    machine.series(0, "sm_active", [0, 100], step_ms=20)
    assert _gpm_metric(handle, pynvml.NVML_GPM_METRIC_SM_UTIL, 0.4).value == pytest.approx(
        50, abs=6
    )


@pytest.mark.usefixtures("machine")
def test_gpm_is_not_supported_before_hopper() -> None:
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice == 0
    sample = pynvml.nvmlGpmSampleAlloc()
    assert _code(pynvml.nvmlGpmSampleGet, handle, sample) == NOT_SUPPORTED
    pynvml.nvmlGpmSampleFree(sample)


def test_a_latency_can_be_that_of_one_call(machine: NvmlMachine) -> None:
    machine.latency(HALF_AN_HOUR_US, "nvmlDeviceGetPowerUsage", after=1, times=1)
    pynvml.nvmlDeviceGetPowerUsage(_handle())
    with _hanging(machine, 0, number=2) as calling:
        pynvml.nvmlDeviceGetPowerUsage(_handle())
        assert calling.is_alive()

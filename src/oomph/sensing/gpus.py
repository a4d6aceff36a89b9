"""NVML -> Machine, Device: every GPU, what it is doing and who is on it.

Whatever cannot be read is None, and `problem` says what and why. At most ten NVML calls
per GPU, because on a real machine the number of calls is the cost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from oomph.errors import Unreadable
from oomph.records.machine import Device, Machine, Process
from oomph.sensing.nvml import NOT_FOUND, Handle, Nvml, Refusal, with_nvml
from oomph.sensing.occupancy import read_memory, read_processes, settle_memory
from oomph.sensing.problems import Problems

# The driver does not measure it in MIG mode; that is unknown, and is not idle.
NO_BUSY_RATIO_UNDER_MIG = "kernel-active share: not available under MIG"

_NOTHING_READ = Device(
    index=0,
    uuid=None,
    name=None,
    total_bytes=None,
    used_bytes=None,
    memory_source=None,
    busy_ratio=None,
    temperature_c=None,
    power_w=None,
    processes=None,
    problem=None,
)


def read_machine() -> Machine:
    """All GPUs of this machine. Without NVML: none, and the reason."""
    try:
        return with_nvml(_read_machine)
    except Unreadable as error:
        return Machine(gpus=(), problem=error.in_one_line())


def _read_machine(nvml: Nvml) -> Machine:
    count = nvml.ask("nvmlDeviceGetCount")
    if isinstance(count, Refusal):
        return Machine(gpus=(), problem=f"the GPUs could not be counted: {count.text}")
    driver_version = nvml.ask("nvmlSystemGetDriverVersion")
    return Machine(
        gpus=tuple(_read_gpu(nvml, index) for index in range(count)),
        driver_version=None if isinstance(driver_version, Refusal) else driver_version,
        problem=None if count else "the NVIDIA driver runs, but has no GPU",
    )


def _read_gpu(nvml: Nvml, index: int) -> Device:
    pointer = nvml.ask("nvmlDeviceGetHandleByIndex", index)
    if isinstance(pointer, Refusal):
        return replace(_NOTHING_READ, index=index, problem=pointer.text)
    handle, problems = Handle(pointer), Problems()
    sensors: dict[str, Any] = {
        "uuid": problems.value("UUID", nvml.ask_gpu(handle, "nvmlDeviceGetUUID")),
        "name": problems.value("name", nvml.ask_gpu(handle, "nvmlDeviceGetName")),
        "temperature_c": problems.value("temperature", _temperature(nvml, handle)),
        "power_w": problems.value("power", _power_w(nvml, handle)),
    }
    slices = _read_slices(nvml, handle, problems)
    memory = read_memory(nvml, handle)
    if slices is NOT_IN_MIG_MODE:
        busy_ratio = read_busy_ratio(nvml, handle, problems)
        processes = read_processes(nvml, handle, memory, problems)
    else:
        busy_ratio = None
        problems.note(NO_BUSY_RATIO_UNDER_MIG)
        processes = _on_all(slices)
    settled = settle_memory(memory, processes, problems, is_mig=slices is not NOT_IN_MIG_MODE)
    return Device(
        index=index,
        **sensors,
        total_bytes=settled.total_bytes,
        used_bytes=settled.used_bytes,
        memory_source=settled.source,
        busy_ratio=busy_ratio,
        processes=processes,
        mig_enabled=slices is not NOT_IN_MIG_MODE,
        slices=slices.parts,
        problem=problems.told(),
    )


def _temperature(nvml: Nvml, handle: Handle) -> Any:
    sensor = nvml.constant("NVML_TEMPERATURE_GPU")
    answer = nvml.ask_gpu(handle, "nvmlDeviceGetTemperature", sensor)
    if isinstance(answer, Refusal) and answer.is_unsupported:
        # The function that replaces it, and that CUDA 14 will have alone.
        return nvml.ask_gpu(handle, "nvmlDeviceGetTemperatureV", sensor)
    return answer


def _power_w(nvml: Nvml, handle: Handle) -> Any:
    milliwatts = nvml.ask_gpu(handle, "nvmlDeviceGetPowerUsage")
    return milliwatts if isinstance(milliwatts, Refusal) else milliwatts / 1000


def read_busy_ratio(nvml: Nvml, handle: Handle, problems: Problems) -> float | None:
    """Share of the last sample period (1/6 to 1 s) with at least one kernel running."""
    rates = nvml.ask_gpu(handle, "nvmlDeviceGetUtilizationRates")
    ratio: float | None = problems.value("kernel-active share", rates, lambda it: it.gpu / 100)
    return ratio


@dataclass(frozen=True, slots=True)
class Slices:
    """The MIG slices of one GPU. `complete` is False if there may be some that were not seen."""

    parts: tuple[Device, ...] = ()
    complete: bool = True


NOT_IN_MIG_MODE = Slices()


def _read_slices(nvml: Nvml, handle: Handle, problems: Problems) -> Slices:
    mode = problems.value("MIG mode", nvml.ask_gpu(handle, "nvmlDeviceGetMigMode"))
    if mode is None or not mode[0]:
        return NOT_IN_MIG_MODE
    most = nvml.ask_gpu(handle, "nvmlDeviceGetMaxMigDeviceCount")
    if isinstance(most, Refusal):
        problems.add("MIG slices", most)
        return Slices(complete=False)
    slots = ((slot, slice_pointer(nvml, handle.pointer, slot)) for slot in range(most))
    return Slices(
        tuple(_read_slice(nvml, slot, pointer) for slot, pointer in slots if pointer is not None)
    )


def slice_pointer(nvml: Nvml, gpu_pointer: Any, slot: int) -> Any:
    """The slice in a slot, a Refusal, or None where the slot is empty."""
    pointer = nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", gpu_pointer, slot)
    is_empty = isinstance(pointer, Refusal) and pointer.code == NOT_FOUND
    return None if is_empty else pointer


def _read_slice(nvml: Nvml, slot: int, pointer: Any) -> Device:
    if isinstance(pointer, Refusal):
        return replace(_NOTHING_READ, index=slot, problem=pointer.text)
    handle, problems = Handle(pointer), Problems()
    memory = read_memory(nvml, handle)
    processes = read_processes(nvml, handle, memory, problems)
    settled = settle_memory(memory, processes, problems, is_mig=True)
    return replace(
        _NOTHING_READ,
        index=slot,
        uuid=problems.value("UUID", nvml.ask_gpu(handle, "nvmlDeviceGetUUID")),
        name=problems.value("name", nvml.ask_gpu(handle, "nvmlDeviceGetName")),
        total_bytes=settled.total_bytes,
        used_bytes=settled.used_bytes,
        memory_source=settled.source,
        processes=processes,
        mig_instance=read_instance(nvml, handle),
        problem=problems.told(),
    )


def read_instance(nvml: Nvml, handle: Handle) -> tuple[int, int] | None:
    """Of a slice: the ids of its GPU instance and compute instance."""
    gpu_instance = nvml.ask_gpu(handle, "nvmlDeviceGetGpuInstanceId")
    compute_instance = nvml.ask_gpu(handle, "nvmlDeviceGetComputeInstanceId")
    if isinstance(gpu_instance, Refusal) or isinstance(compute_instance, Refusal):
        return None
    return gpu_instance, compute_instance


def _on_all(slices: Slices) -> tuple[Process, ...] | None:
    """Everybody on a GPU in MIG mode; unknown as soon as one slice is."""
    together: list[Process] = []
    for part in slices.parts:
        if part.processes is None:
            return None
        together.extend(part.processes)
    return tuple(together) if slices.complete else None

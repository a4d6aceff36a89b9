"""NVML -> Machine, Device: every GPU, what it is doing and who is on it.

Whatever cannot be read is None, and `problem` says what and why. At most ten NVML calls for
a GPU and for each MIG slice, because on a real machine the number of calls is the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from oomph.errors import Unreadable
from oomph.records.machine import Device, Machine, Process
from oomph.sensing.mig import Slice, read_instance, read_mig_mode
from oomph.sensing.nvml import NO_GPU, UUID, Handle, Nvml, Refusal, with_nvml
from oomph.sensing.occupancy import read_memory, read_processes, settle_memory
from oomph.sensing.problems import Problems

# The driver does not measure it in MIG mode; that is unknown, and is not idle.
NO_BUSY_RATIO_UNDER_MIG = "kernel-active share: not available under MIG"

# No GPU is colder, hotter or hungrier: a driver that says so has nothing to say.
_TEMPERATURES_C = range(-60, 200)
_POWERS_MW = range(10_000_000)

NOTHING_READ = Device(
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
        return Machine(gpus=(), is_readable=False, problem=error.in_one_line())


def _read_machine(nvml: Nvml) -> Machine:
    count = nvml.ask("nvmlDeviceGetCount")
    if isinstance(count, Refusal):
        raise Unreadable("the GPUs could not be counted", because=count.text)
    driver_version = nvml.ask("nvmlSystemGetDriverVersion")
    return Machine(
        gpus=tuple(_read_gpu(nvml, index) for index in range(count)),
        driver_version=None if isinstance(driver_version, Refusal) else driver_version,
        problem=None if count else NO_GPU,
    )


def _read_gpu(nvml: Nvml, index: int) -> Device:
    handle = nvml.gpu(index)
    if isinstance(handle, Refusal):
        return replace(NOTHING_READ, index=index, problem=handle.text)
    problems = Problems()
    if UUID in handle.refused:
        problems.add("UUID", handle.refused[UUID])
    name = problems.value("name", nvml.ask_gpu(handle, "nvmlDeviceGetName"))
    mig = read_mig_mode(nvml, handle)
    if mig.refusal:
        problems.add("MIG slices" if mig.enabled else "MIG mode", mig.refusal)
    slices = tuple(_read_slice(nvml, part) for part in mig.slices or ())
    memory = read_memory(nvml, handle)
    if mig.enabled:
        problems.note(NO_BUSY_RATIO_UNDER_MIG)
        busy_ratio = None
        processes = None if mig.slices is None else on_all(slices)
    else:
        busy_ratio = read_busy_ratio(nvml, handle, problems)
        processes = read_processes(nvml, handle, memory, problems)
    settled = settle_memory(memory, processes, problems, name=name)
    return Device(
        index=index,
        uuid=handle.uuid,
        name=name,
        total_bytes=settled.total_bytes,
        used_bytes=settled.used_bytes,
        memory_source=settled.source,
        busy_ratio=busy_ratio,
        temperature_c=read_temperature_c(nvml, handle, problems),
        power_w=read_power_w(nvml, handle, problems),
        processes=processes,
        mig_enabled=mig.enabled,
        slices=slices,
        problem=problems.told(),
    )


def read_temperature_c(nvml: Nvml, handle: Handle, problems: Problems) -> int | None:
    """Of the chip."""
    sensor = nvml.constant("NVML_TEMPERATURE_GPU")
    answer = nvml.ask_gpu(handle, "nvmlDeviceGetTemperature", sensor)
    if isinstance(answer, Refusal) and answer.is_missing:
        # The function that replaces it, and that CUDA 14 will have alone.
        answer = nvml.ask_gpu(handle, "nvmlDeviceGetTemperatureV", sensor)
    degrees: int | None = problems.value("temperature", answer, among=_TEMPERATURES_C)
    return degrees


def read_power_w(nvml: Nvml, handle: Handle, problems: Problems) -> float | None:
    """Of the whole card: of this moment, or of the last second, as the driver has it."""
    answer = nvml.ask_gpu(handle, "nvmlDeviceGetPowerUsage")
    milliwatts: int | None = problems.value("power", answer, among=_POWERS_MW)
    return None if milliwatts is None else milliwatts / 1000


def read_busy_ratio(nvml: Nvml, handle: Handle, problems: Problems) -> float | None:
    """Share of the last sample period (1/6 to 1 s) with at least one kernel running."""
    rates = nvml.ask_gpu(handle, "nvmlDeviceGetUtilizationRates")
    answer = rates if isinstance(rates, Refusal) else rates.gpu
    percent: int | None = problems.value("kernel-active share", answer, among=range(101))
    return None if percent is None else percent / 100


def _read_slice(nvml: Nvml, part: Slice) -> Device:
    handle = nvml.known(part.pointer)
    if isinstance(handle, Refusal):
        return replace(NOTHING_READ, index=part.slot, is_slice=True, problem=handle.text)
    problems = Problems()
    memory = read_memory(nvml, handle)
    processes = read_processes(nvml, handle, memory, problems)
    settled = settle_memory(memory, processes, problems)
    return replace(
        NOTHING_READ,
        index=part.slot,
        uuid=handle.uuid,
        name=problems.value("name", nvml.ask_gpu(handle, "nvmlDeviceGetName")),
        total_bytes=settled.total_bytes,
        used_bytes=settled.used_bytes,
        memory_source=settled.source,
        processes=processes,
        is_slice=True,
        mig_instance=read_instance(nvml, handle),
        problem=problems.told(),
    )


def on_all(slices: Sequence[Device]) -> tuple[Process, ...] | None:
    """Everybody on a GPU that is cut into these; unknown as soon as one is."""
    together: list[Process] = []
    for part in slices:
        if part.processes is None:
            return None
        together.extend(part.processes)
    return tuple(together)

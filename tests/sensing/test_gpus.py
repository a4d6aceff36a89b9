"""The machine is read as it is; what cannot be read is unknown, with the reason."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest
from conftest import OnMachine
from nvml.machine import ERRORS, GIB, MIB, NA, Gpu, Mig, NvmlMachine, Proc

from oomph.records.machine import Device, Machine
from oomph.sensing.devices import read_machine


def only_gpu(machine: Machine) -> Device:
    assert len(machine.gpus) == 1
    return machine.gpus[0]


def test_every_figure_is_the_drivers(on_machine: OnMachine) -> None:
    machine = on_machine(
        [Gpu(used_bytes=30 * GIB, util=97, temperature=64, power_mw=312_500)], driver="535.129.03"
    )
    read = read_machine()
    gpu = only_gpu(read)
    assert read.driver_version == "535.129.03"
    assert read.problem is None
    assert gpu.index == 0
    assert gpu.uuid == machine.uuid(0)
    assert gpu.name == "NVIDIA A100-SXM4-80GB"
    assert (gpu.total_bytes, gpu.used_bytes) == (80 * GIB, 30 * GIB)
    assert gpu.busy_ratio == 0.97
    assert gpu.temperature_c == 64
    assert gpu.power_w == 312.5
    assert gpu.processes == ()
    assert gpu.problem is None


def test_what_the_driver_reserves_is_not_used_memory(on_machine: OnMachine) -> None:
    on_machine([Gpu(used_bytes=GIB, reserved_bytes=600 * MIB)])
    gpu = only_gpu(read_machine())
    assert (gpu.used_bytes, gpu.memory_source) == (GIB, "nvml-v2")


def test_an_older_driver_counts_it_as_used_and_we_say_so(on_machine: OnMachine) -> None:
    on_machine(
        [Gpu(used_bytes=GIB, reserved_bytes=600 * MIB)], missing=["nvmlDeviceGetMemoryInfo_v2"]
    )
    gpu = only_gpu(read_machine())
    assert (gpu.used_bytes, gpu.memory_source) == (GIB + 600 * MIB, "nvml-v1")


def test_a_sensor_that_a_card_lacks_is_unknown_and_no_problem(on_machine: OnMachine) -> None:
    on_machine([Gpu(temperature=NA, power_mw=NA, util=NA)])
    gpu = only_gpu(read_machine())
    assert (gpu.temperature_c, gpu.power_w, gpu.busy_ratio) == (None, None, None)
    assert gpu.problem is None


def test_a_newer_driver_is_asked_for_its_temperature_by_the_newer_function(
    on_machine: OnMachine,
) -> None:
    on_machine([Gpu(temperature=61)], missing=["nvmlDeviceGetTemperature"])
    assert only_gpu(read_machine()).temperature_c == 61


def test_a_process_list_that_one_may_not_see_is_unknown_and_not_nobody(
    on_machine: OnMachine,
) -> None:
    machine = on_machine([Gpu(processes=[Proc(4100)])])
    machine.error("nvmlDeviceGet*RunningProcesses*", 4)
    gpu = only_gpu(read_machine())
    assert gpu.processes is None
    assert gpu.is_free is None
    assert gpu.problem == "processes: not allowed for this user"


def test_a_process_list_that_the_driver_does_not_support_is_unknown(on_machine: OnMachine) -> None:
    machine = on_machine([Gpu(processes=[Proc(4100)])])
    machine.error("nvmlDeviceGet*RunningProcesses*", 3)
    gpu = only_gpu(read_machine())
    assert gpu.processes is None
    assert gpu.problem == "processes: not supported by this GPU or driver"


def test_a_lost_gpu_is_one_row_and_hides_no_other(on_machine: OnMachine) -> None:
    on_machine([Gpu(), Gpu(lost=True), Gpu()])
    first, lost, last = read_machine().gpus
    assert (first.problem, last.problem) == (None, None)
    assert lost.index == 1
    assert lost.used_bytes is None
    assert lost.processes is None
    assert "the GPU is lost" in (lost.problem or "")


def test_a_gpu_that_is_lost_in_the_middle_of_a_reading_tells_the_cause_once(
    on_machine: OnMachine,
) -> None:
    machine = on_machine([Gpu(util=50)])
    machine.error("nvmlDeviceGetMemoryInfo*", 15)
    machine.error("nvmlDeviceGet*RunningProcesses*", 15)
    gpu = only_gpu(read_machine())
    assert gpu.busy_ratio == 0.5
    assert (gpu.used_bytes, gpu.processes) == (None, None)
    assert (gpu.problem or "").count("lost") == 1


@pytest.mark.parametrize("answer", ["not supported", "zeros"])
def test_a_gpu_without_memory_of_its_own_shares_the_hosts(
    on_machine: OnMachine, answer: str
) -> None:
    total = NA if answer == "not supported" else 0
    on_machine(
        [
            Gpu(
                name="NVIDIA GB10",
                total_bytes=total,
                used_bytes=total,
                reserved_bytes=0,
                processes=[Proc(4100, used_bytes=3 * GIB)],
            )
        ]
    )
    gpu = only_gpu(read_machine())
    assert gpu.memory_source == "unified"
    assert gpu.used_bytes == 3 * GIB
    assert gpu.total_bytes is not None
    assert 3 * GIB < gpu.total_bytes < 3 * GIB + psutil.virtual_memory().total
    assert "shared with the host" in (gpu.problem or "")


def test_any_other_gpu_without_a_memory_figure_is_unknown(on_machine: OnMachine) -> None:
    on_machine([Gpu(total_bytes=NA, used_bytes=NA, reserved_bytes=NA)])
    gpu = only_gpu(read_machine())
    assert (gpu.total_bytes, gpu.used_bytes, gpu.is_free) == (None, None, None)
    assert "memory: not supported" in (gpu.problem or "")


def test_figures_that_cannot_be_are_unknown(on_machine: OnMachine) -> None:
    on_machine([Gpu(util=255, temperature=2**31 - 1, power_mw=2**32 - 1)])
    gpu = only_gpu(read_machine())
    assert (gpu.busy_ratio, gpu.temperature_c, gpu.power_w) == (None, None, None)
    assert (gpu.problem or "").count("makes no sense") == 3


def test_memory_that_makes_no_sense_is_unknown(on_machine: OnMachine) -> None:
    on_machine([Gpu(total_bytes=GIB, used_bytes=2 * GIB)])
    gpu = only_gpu(read_machine())
    assert (gpu.total_bytes, gpu.used_bytes) == (None, None)
    assert "make no sense" in (gpu.problem or "")


def test_memory_of_a_process_that_nobody_tells_is_unknown_not_zero(on_machine: OnMachine) -> None:
    on_machine([Gpu(used_bytes=GIB, processes=[Proc(4100, used_bytes=None)])])
    (process,) = only_gpu(read_machine()).processes or ()
    assert process.used_bytes is None


# ---- MIG -------------------------------------------------------------------------------------


def mig_gpu() -> Gpu:
    slices = [Mig(processes=[Proc(4100, used_bytes=2 * GIB)]), None, Mig(total_bytes=20 * GIB)]
    return Gpu(migs=slices, util=NA)


def test_a_gpu_in_mig_mode_shows_its_slices_and_who_is_on_each(on_machine: OnMachine) -> None:
    machine = on_machine([mig_gpu(), Gpu()])
    cut, whole = read_machine().gpus
    assert cut.mig_enabled
    assert not whole.mig_enabled
    first, second = cut.slices
    assert (first.index, second.index) == (0, 2)
    assert first.uuid == machine.uuid(0, 0)
    assert first.mig_instance == (1, 0)
    assert (first.total_bytes, first.used_bytes) == (10 * GIB, 2 * GIB)
    assert [process.pid for process in first.processes or ()] == [4100]
    assert second.processes == ()
    assert [process.pid for process in cut.processes or ()] == [4100]


def test_utilisation_under_mig_is_unknown_and_never_zero(on_machine: OnMachine) -> None:
    on_machine([mig_gpu()])
    cut = only_gpu(read_machine())
    assert cut.busy_ratio is None
    assert all(part.busy_ratio is None for part in cut.slices)
    assert "not available under MIG" in (cut.problem or "")


def test_a_slice_that_one_may_not_see_makes_the_whole_gpu_unknown(on_machine: OnMachine) -> None:
    machine = on_machine([mig_gpu()])
    machine.error("nvmlDeviceGetMigDeviceHandleByIndex", 4)
    cut = only_gpu(read_machine())
    assert cut.processes is None
    assert cut.is_free is None


def test_slices_that_cannot_be_counted_make_the_whole_gpu_unknown(on_machine: OnMachine) -> None:
    machine = on_machine([mig_gpu()])
    machine.error("nvmlDeviceGetMaxMigDeviceCount", 999)
    cut = only_gpu(read_machine())
    assert cut.mig_enabled
    assert cut.processes is None
    assert "MIG slices" in (cut.problem or "")


# ---- cost and trouble ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gpu",
    [
        pytest.param(lambda: Gpu(processes=[Proc(4100)]), id="healthy"),
        pytest.param(lambda: Gpu(processes=[Proc(4100 + i) for i in range(20)]), id="crowded"),
        pytest.param(lambda: Gpu(name="GB10", total_bytes=NA, used_bytes=NA), id="unified"),
        pytest.param(lambda: Gpu(temperature=NA, power_mw=NA, util=NA), id="no sensors"),
        pytest.param(lambda: Gpu(migs=[Mig() for _ in range(7)]), id="seven slices"),
    ],
)
def test_reading_a_gpu_or_a_slice_takes_at_most_ten_calls(
    on_machine: OnMachine, gpu: Callable[[], Gpu]
) -> None:
    machine = on_machine([gpu() for _ in range(8)])
    read = read_machine()
    devices = sum(1 + len(device.slices) for device in read.gpus)
    calls = [call for call in machine.calls() if call.gpu is not None]
    assert len(calls) <= 10 * devices


def test_what_a_gpu_lacks_is_not_asked_again_when_the_machine_is_polled(
    on_machine: OnMachine,
) -> None:
    machine = on_machine([Gpu(temperature=NA, power_mw=NA)])
    read_machine()
    machine.clear_calls()
    read_machine()
    assert not machine.calls("nvmlDeviceGetTemperature*")
    assert not machine.calls("nvmlDeviceGetPowerUsage")


def functions_used(machine: NvmlMachine) -> list[str]:
    return sorted({call.function for call in machine.calls()})


@pytest.mark.parametrize(
    "gpus", [lambda: [Gpu(processes=[Proc(4100)])], lambda: [mig_gpu()]], ids=["whole GPU", "MIG"]
)
def test_no_error_of_any_function_ever_raises_or_looks_idle(
    on_machine: OnMachine, gpus: Callable[[], list[Gpu]]
) -> None:
    from oomph.sensing.backends import session

    machine = on_machine([*gpus(), Gpu()])
    healthy = read_machine()
    used = functions_used(machine)
    assert len(used) >= 11
    for function in used:
        for code in [*ERRORS, 31, 12345]:
            if (function, code) == ("nvmlDeviceGetMigDeviceHandleByIndex", 6):
                continue  # not found is how NVML says that there is no slice
            machine.clear_errors()
            machine.error(function, code)
            session.forget()
            sick = read_machine()
            assert_nothing_is_invented(sick, healthy, f"{function} answers {code}")


def assert_nothing_is_invented(sick: Machine, healthy: Machine, case: str) -> None:
    """Each figure is the true one or unknown; nobody is never claimed where somebody is."""
    assert sick.gpus or sick.problem, case
    for ill, well in zip(sick.gpus, healthy.gpus, strict=False):
        for field in ("uuid", "name", "temperature_c", "power_w", "busy_ratio"):
            assert getattr(ill, field) in (None, getattr(well, field)), (case, field)
        if ill.processes is None:
            assert ill.problem, case
            assert ill.is_free is None, case
        else:
            seen = {process.pid for process in ill.processes}
            assert seen == {process.pid for process in well.processes or ()}, case
        if ill.used_bytes is None:
            assert ill.problem, case

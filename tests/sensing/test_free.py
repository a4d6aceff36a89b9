"""A GPU is free when nobody is on it, and that is known."""

from __future__ import annotations

import pytest
from conftest import OnMachine
from nvml.machine import GIB, MIB, Gpu, Mig, Proc

from oomph.sensing.free import FreeGpus, find_free
from oomph.sensing.gpus import read_machine


def free() -> FreeGpus:
    return find_free(read_machine())


def test_free_gpus_are_named_by_index(on_machine: OnMachine) -> None:
    on_machine([Gpu(processes=[Proc(4100)]), Gpu(), Gpu(processes=[Proc(4200)]), Gpu()])
    assert free().tokens() == ["1", "3"]


def test_an_idle_process_still_has_its_gpu(on_machine: OnMachine) -> None:
    on_machine([Gpu(util=0, processes=[Proc(4100, used_bytes=300 * MIB)])])
    assert free().tokens() == []


def test_a_display_is_nobody(on_machine: OnMachine) -> None:
    on_machine([Gpu(processes=[Proc(900, used_bytes=40 * MIB, kind="G")])])
    assert free().tokens() == ["0"]


def test_memory_that_nobody_shows_for_is_not_free_and_not_certain(on_machine: OnMachine) -> None:
    on_machine([Gpu(used_bytes=40 * GIB)])
    found = free()
    assert found.tokens() == []
    assert len(found.uncertain) == 1


def test_a_list_that_cannot_be_read_is_not_free(on_machine: OnMachine) -> None:
    machine = on_machine([Gpu(), Gpu()])
    machine.error("nvmlDeviceGet*RunningProcesses*", 4, gpu=0)
    found = free()
    assert found.tokens() == ["1"]
    assert [gpu.index for gpu in found.uncertain] == [0]


def test_a_lost_gpu_is_not_free(on_machine: OnMachine) -> None:
    on_machine([Gpu(lost=True), Gpu()])
    assert [gpu.index for gpu in free().free] == [1]


def test_unlike_gpus_are_named_by_uuid_because_cuda_counts_otherwise(
    on_machine: OnMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = on_machine([Gpu(name="NVIDIA T400"), Gpu()])
    assert free().tokens() == [machine.uuid(0), machine.uuid(1)]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert free().tokens() == ["0", "1"]


def test_slices_are_offered_by_uuid_where_there_is_no_whole_gpu(on_machine: OnMachine) -> None:
    machine = on_machine([Gpu(migs=[Mig(processes=[Proc(4100)]), Mig()])])
    found = free()
    assert found.tokens() == [machine.uuid(0, 1)]
    assert found.are_slices


def test_a_whole_gpu_is_offered_before_slices(on_machine: OnMachine) -> None:
    machine = on_machine([Gpu(migs=[Mig()]), Gpu()])
    assert free().tokens() == [machine.uuid(1)]

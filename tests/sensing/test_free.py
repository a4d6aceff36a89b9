"""A GPU is free when nobody is on it, and that is known."""

from __future__ import annotations

import pytest
from conftest import OnMachine
from nvml.machine import GIB, MIB, Gpu, Mig, Proc

from oomph.sensing.devices import read_machine
from oomph.sensing.mapping import FreeGpus, find_free, only_visible


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


def test_a_gpu_that_runs_kernels_with_nobody_in_sight_is_not_certainly_free(
    on_machine: OnMachine,
) -> None:
    on_machine([Gpu(util=97)])
    assert [gpu.index for gpu in free().uncertain] == [0]


def test_a_gpu_whose_mig_mode_is_unknown_is_not_certainly_free(on_machine: OnMachine) -> None:
    machine = on_machine([Gpu()])
    machine.error("nvmlDeviceGetMigMode", 999)
    assert [gpu.index for gpu in free().uncertain] == [0]


@pytest.mark.parametrize(("used_bytes", "is_free"), [(GIB, True), (GIB + 1, None)])
def test_a_gib_is_what_drivers_and_idle_contexts_may_hold(
    on_machine: OnMachine, used_bytes: int, is_free: bool | None
) -> None:
    on_machine([Gpu(used_bytes=used_bytes)])
    assert read_machine().gpus[0].is_free is is_free


def test_of_the_visible_gpus_the_free_ones_are_named_by_uuid(
    on_machine: OnMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["NVIDIA T400", "NVIDIA A100-SXM4-80GB", "NVIDIA RTX A4000"]
    machine = on_machine([Gpu(name=name) for name in names], cuda_order=[1, 2, 0])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert find_free(only_visible(read_machine())).tokens() == [machine.uuid(1)]


def test_a_visible_slice_is_offered_as_the_slice_that_it_is(
    on_machine: OnMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = on_machine([Gpu(migs=[Mig(processes=[Proc(4100)]), Mig()])])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", machine.uuid(0, 1))
    found = find_free(only_visible(read_machine()))
    assert found.tokens() == [machine.uuid(0, 1)]
    assert found.are_slices


def test_a_free_gpu_that_cannot_be_named_is_uncertain(on_machine: OnMachine) -> None:
    machine = on_machine([Gpu(name="NVIDIA T400"), Gpu()])
    machine.error("nvmlDeviceGetUUID", 999, gpu=0)
    found = free()
    assert found.tokens() == [machine.uuid(1)]
    assert [gpu.index for gpu in found.uncertain] == [0]

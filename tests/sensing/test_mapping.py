"""The GPU behind a torch index is the right one, whatever the order and whatever is hidden."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import OnMachine
from nvml.machine import GIB, Gpu, Mig, NvmlMachine

import oomph
from oomph.sensing.devices import read_machine
from oomph.sensing.mapping import only_visible

MIXED = ["NVIDIA T400", "NVIDIA A100-SXM4-80GB", "NVIDIA RTX A4000"]
FASTEST_FIRST = [1, 2, 0]


def mixed_machine() -> list[Gpu]:
    return [Gpu(name=name) for name in MIXED]


@pytest.mark.parametrize(
    ("variable", "device", "expected"),
    [(None, None, 0), (None, 2, 2), ("2,0", None, 2), ("2,0", 1, 0), ("2,0", "cuda:1", 0)],
)
def test_alike_gpus_are_counted_in_the_order_of_the_pci_bus(
    on_machine: OnMachine,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    device: object,
    expected: int,
) -> None:
    on_machine([Gpu(), Gpu(), Gpu()])
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    reading = oomph.gpu_utilisation(device)
    assert (reading.nvml_index, reading.mapped_by) == (expected, "pci-order")
    assert reading.problem is None


def test_a_uuid_prefix_needs_no_order(
    on_machine: OnMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = on_machine(mixed_machine(), cuda_order=FASTEST_FIRST)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", machine.uuid(2)[:12])
    reading = oomph.gpu_utilisation()
    assert (reading.nvml_index, reading.uuid, reading.mapped_by) == (2, machine.uuid(2), "uuid")


@pytest.mark.parametrize(("variable", "expected"), [(None, [1, 2, 0]), ("0", [1]), ("2,1", [0, 2])])
def test_cuda_is_asked_for_the_order_of_unlike_gpus(
    on_machine: OnMachine,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    expected: list[int],
) -> None:
    on_machine(mixed_machine(), cuda_order=FASTEST_FIRST)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    readings = [oomph.gpu_utilisation(index) for index in range(len(expected))]
    assert [reading.nvml_index for reading in readings] == expected
    assert {reading.mapped_by for reading in readings} == {"cuda"}


def test_the_pci_order_is_taken_at_its_word(
    on_machine: OnMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine(mixed_machine(), cuda_order=FASTEST_FIRST)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    reading = oomph.gpu_utilisation(1)
    assert (reading.nvml_index, reading.mapped_by) == (1, "pci-order")


@pytest.mark.parametrize("trouble", ["no libcuda", "cuInit fails"])
def test_an_order_that_nobody_can_tell_is_called_an_assumption(
    on_machine: OnMachine, trouble: str
) -> None:
    on_machine(
        mixed_machine(),
        cuda_order=FASTEST_FIRST,
        libcuda=trouble != "no libcuda",
        cuda_errors={"cuInit": 100} if trouble == "cuInit fails" else None,
    )
    reading = oomph.gpu_utilisation()
    assert (reading.nvml_index, reading.mapped_by) == (0, "assumed")
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in (reading.problem or "")


@pytest.mark.parametrize("variable", ["", "-1", "void", "9", "0,0", "GPU-ffffffff"])
def test_a_gpu_that_is_hidden_is_not_visible_and_not_another_one(
    on_machine: OnMachine, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    on_machine([Gpu(), Gpu()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    reading = oomph.gpu_utilisation()
    assert reading.nvml_index is None
    assert f"CUDA_VISIBLE_DEVICES is {variable!r}" in (reading.problem or "")


def test_a_slice_is_found_by_its_uuid(
    on_machine: OnMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = on_machine([Gpu(), Gpu(migs=[Mig(), Mig(total_bytes=20 << 30)])])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", machine.uuid(1, 1))
    reading = oomph.gpu_utilisation()
    assert (reading.nvml_index, reading.uuid) == (1, machine.uuid(1, 1))
    assert reading.total_bytes == 20 << 30
    assert reading.busy_ratio is None
    assert "not available under MIG" in (reading.problem or "")


def test_the_visible_machine_is_in_cudas_order_with_cudas_indices(
    on_machine: OnMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine([Gpu(), Gpu(), Gpu()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    visible = only_visible(read_machine())
    assert [(gpu.cuda_index, gpu.index) for gpu in visible.gpus] == [(0, 2), (1, 0)]


# ---- a process in which torch has started CUDA -----------------------------------------------

TORCH = '''
"""What oomph asks of a torch that runs CUDA; this machine has no GPU to run a real one on."""
import os

class cuda:
    is_initialized = staticmethod(lambda: True)
    current_device = staticmethod(lambda: int(os.environ["TORCH_CURRENT"]))
    device_count = staticmethod(lambda: len(os.environ["TORCH_UUIDS"].split(",")))
    memory_reserved = staticmethod(lambda index: 0)

    @staticmethod
    def get_device_properties(index):
        class Properties:
            if "TORCH_IS_OLD" not in os.environ:
                uuid = os.environ["TORCH_UUIDS"].split(",")[index]
        return Properties
'''

READ = """
import torch, oomph
reading = oomph.gpu_utilisation({})
print(reading.nvml_index, reading.cuda_index, reading.mapped_by)
"""


def read_under_torch(
    machine: NvmlMachine, tmp_path: Path, uuids: list[str], device: str = "", **variables: str
) -> str:
    (tmp_path / "torch.py").write_text(TORCH)
    bare = ",".join(uuid.removeprefix("GPU-").removeprefix("MIG-") for uuid in uuids)
    done = subprocess.run(
        [sys.executable, "-c", READ.format(device)],
        env={
            **os.environ,
            **machine.env(),
            "PYTHONPATH": str(tmp_path),
            "TORCH_UUIDS": bare,
            "TORCH_CURRENT": "1",
            **variables,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_the_current_device_of_torch_is_found_by_its_uuid(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, mixed_machine(), cuda_order=FASTEST_FIRST)
    uuids = [machine.uuid(1), machine.uuid(0)]
    assert read_under_torch(machine, tmp_path, uuids) == "0 1 torch"
    assert read_under_torch(machine, tmp_path, uuids, "0") == "1 0 torch"
    assert read_under_torch(machine, tmp_path, uuids, "5") == "None None None"


def test_what_torch_says_counts_more_than_a_variable_that_was_changed_later(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu(), Gpu(), Gpu()])
    uuids = [machine.uuid(2), machine.uuid(1)]
    assert read_under_torch(machine, tmp_path, uuids, CUDA_VISIBLE_DEVICES="0") == "1 1 torch"


def test_torch_on_a_slice_is_found_by_the_slices_uuid(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu(), Gpu(migs=[Mig(), Mig()])])
    uuids = [machine.uuid(1, 1)]
    assert read_under_torch(machine, tmp_path, uuids, TORCH_CURRENT="0") == "1 0 torch"


def test_a_torch_that_tells_no_uuid_is_mapped_by_asking_cuda(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, mixed_machine(), cuda_order=FASTEST_FIRST)
    uuids = [machine.uuid(i) for i in FASTEST_FIRST]
    assert read_under_torch(machine, tmp_path, uuids, TORCH_IS_OLD="1") == "2 1 torch"


def test_a_real_torch_that_has_not_started_cuda_is_not_asked(on_machine: OnMachine) -> None:
    import torch

    on_machine([Gpu(), Gpu()])
    reading = oomph.gpu_utilisation(torch.device("cuda", 1))
    assert (reading.nvml_index, reading.mapped_by) == (1, "pci-order")
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def test_cuda_is_asked_once_however_many_devices_are_read(on_machine: OnMachine) -> None:
    machine = on_machine(mixed_machine(), cuda_order=FASTEST_FIRST)
    for device in (0, 1, 2, 7, 7, 7):
        oomph.gpu_utilisation(device)
    assert len(machine.calls("cuInit")) == 1


@pytest.mark.parametrize(
    ("function", "code"),
    [("nvmlDeviceGetMaxMigDeviceCount", 4), ("nvmlDeviceGetMigDeviceHandleByIndex", 4)],
)
def test_slices_that_cannot_be_read_make_the_mapping_an_assumption(
    on_machine: OnMachine, function: str, code: int
) -> None:
    machine = on_machine([Gpu(migs=[Mig(), Mig()])], libcuda=False)
    machine.error(function, code)
    reading = oomph.gpu_utilisation()
    assert reading.mapped_by in ("assumed", None)
    assert reading.problem


def test_under_mig_the_advice_is_to_name_the_slice(on_machine: OnMachine) -> None:
    on_machine([Gpu(migs=[Mig()])], libcuda=False)
    assert "UUID of the slice" in (oomph.gpu_utilisation().problem or "")


def test_a_gpu_in_mig_mode_without_slices_shows_nothing(on_machine: OnMachine) -> None:
    on_machine([Gpu(mig_mode=1), Gpu(used_bytes=GIB)], libcuda=False)
    assert oomph.gpu_utilisation(0).nvml_index == 1


def test_the_current_device_is_looked_up_at_every_call(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu(), Gpu()])
    (tmp_path / "torch.py").write_text(TORCH)
    code = """
import os, torch, oomph
for current in ("0", "1"):
    os.environ["TORCH_CURRENT"] = current
    print(oomph.gpu_utilisation("cuda").nvml_index, oomph.gpu_utilisation().nvml_index)
"""
    uuids = ",".join(machine.uuid(i).removeprefix("GPU-") for i in range(2))
    done = machine.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path), "TORCH_UUIDS": uuids}
    )
    assert done.stdout.split() == ["0", "0", "1", "1"], done.stderr


def test_a_torch_that_starts_cuda_later_is_believed_from_then_on(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu(), Gpu()])
    starts_later = TORCH.replace("lambda: True", 'lambda: "STARTED" in os.environ')
    (tmp_path / "torch.py").write_text(starts_later)
    code = """
import os, torch, oomph
print(oomph.gpu_utilisation(0).nvml_index)
os.environ["STARTED"] = "1"
print(oomph.gpu_utilisation(0).nvml_index)
"""
    environment = {
        "PYTHONPATH": str(tmp_path),
        "TORCH_UUIDS": machine.uuid(1).removeprefix("GPU-"),
        "TORCH_CURRENT": "0",
    }
    done = machine.run([sys.executable, "-c", code], env=environment)
    assert done.stdout.split() == ["0", "1"], done.stderr


def test_torch_after_a_cuda_error_is_a_problem_and_no_exception(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu()])
    (tmp_path / "torch.py").write_text(
        TORCH + "def fail(): raise RuntimeError('CUDA error:\\ndevice-side assert')\n"
        "cuda.current_device = fail\n"
    )
    code = "import torch, oomph; oomph.print_gpu_utilisation()"
    done = machine.run([sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)})
    assert done.stdout == "GPU: RuntimeError: CUDA error: device-side assert\n", done.stderr


def test_an_index_of_numpy_is_an_index(on_machine: OnMachine) -> None:
    import numpy

    on_machine([Gpu(), Gpu()])
    assert oomph.gpu_utilisation(numpy.int64(1)).nvml_index == 1

"""What CUDA takes is measured from outside, in a child, and refused where it is not certain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import OnMachine
from nvml.machine import GIB, MIB, NA, Gpu, Mig, Proc

import oomph
from oomph.errors import Unreadable
from oomph.records.gpu_model import Calibration
from oomph.sensing import calibration
from sensing import stand_in_torch

UseTorch = Callable[..., None]


@pytest.fixture(autouse=True)
def use_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UseTorch:
    """Give children a stand-in for torch, which says what the test says."""

    def use(**said: object) -> None:
        directory = stand_in_torch.write(tmp_path / "packages", **said)
        source = Path(oomph.__file__).parents[1]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (directory, source))))

    use()
    return use


def measured(**how: bool) -> Calibration:
    (gpu,), driver = calibration.kinds_here()
    return calibration.measure(gpu, driver, **how)


def test_what_the_driver_says_of_the_child_is_taken_without_what_torch_reserves(
    on_machine: OnMachine,
) -> None:
    on_machine([Gpu(used_bytes=3 * MIB)], driver="560.35.03")
    found = measured()
    assert found.context_bytes == 420 * MIB
    assert found.context_with_libraries_bytes == (420 + 40 + 60) * MIB
    assert found.total_bytes == 85_095_874_560
    assert found.measured_by == "process"
    assert found.key == ("NVIDIA A100-SXM4-80GB", "560.35.03", "2.13.0+cpu", "12.4")


def test_the_rates_are_those_that_the_gpu_has(on_machine: OnMachine) -> None:
    on_machine()
    found = measured()
    assert found.matmul_flops == pytest.approx(stand_in_torch.SAID["flops"])
    assert found.bandwidth_bytes_per_s == pytest.approx(1.7e12)


def test_a_gpu_that_only_emulates_bfloat16_is_not_measured_with_it(
    on_machine: OnMachine, use_torch: UseTorch
) -> None:
    use_torch(capability=[7, 0])
    on_machine()
    assert set(measured().matmul_flops) == {"float16", "float32"}


def test_what_does_not_fit_is_not_measured(on_machine: OnMachine, use_torch: UseTorch) -> None:
    use_torch(total_bytes=800 * MIB)  # a quarter of the free half is 100 MiB: only half of 4096
    on_machine()
    assert set(measured().matmul_flops) == {"bfloat16", "float16"}


def test_memory_alone_takes_no_rates(on_machine: OnMachine) -> None:
    on_machine()
    found = measured(with_rates=False)
    assert (found.matmul_flops, found.bandwidth_bytes_per_s) == ({}, None)
    assert found.context_bytes == 420 * MIB


def test_without_cudnn_there_is_no_convolution(on_machine: OnMachine, use_torch: UseTorch) -> None:
    use_torch(cudnn_bytes=None)
    on_machine()
    assert measured().context_with_libraries_bytes == 460 * MIB


def test_a_neighbour_is_no_matter_where_the_driver_tells_processes_apart(
    on_machine: OnMachine, use_torch: UseTorch
) -> None:
    use_torch(moves_bytes=5 * GIB)
    on_machine([Gpu(processes=[Proc(4100, 30 * GIB)])])
    found = measured()
    assert found.context_bytes == 420 * MIB
    assert found.matmul_flops == {}, "rates beside a neighbour are not the GPU's"


@pytest.mark.parametrize("listed", ["without", "hidden"])
def test_without_a_figure_of_the_child_the_difference_is_taken(
    on_machine: OnMachine, use_torch: UseTorch, listed: str
) -> None:
    use_torch(listed=listed)
    on_machine([Gpu(used_bytes=700 * MIB)])
    found = measured()
    assert found.measured_by == "difference"
    assert found.context_bytes == 420 * MIB
    assert found.context_with_libraries_bytes == 520 * MIB


@pytest.mark.parametrize("listed", ["without", "hidden"])
def test_a_neighbour_is_refused_where_the_driver_does_not_tell_them_apart(
    on_machine: OnMachine, use_torch: UseTorch, listed: str
) -> None:
    use_torch(listed=listed)
    on_machine([Gpu(processes=[Proc(4100, 30 * GIB)])])
    with pytest.raises(Unreadable, match="cannot be separated from what others take") as raised:
        measured()
    assert "1 other processes" in (raised.value.because or "")


def test_memory_that_moved_meanwhile_is_refused(on_machine: OnMachine, use_torch: UseTorch) -> None:
    use_torch(listed="hidden", moves_bytes=GIB, moves_for_good_bytes=GIB)
    on_machine([Gpu(used_bytes=700 * MIB)])
    with pytest.raises(Unreadable, match="somebody else's memory") as raised:
        measured()
    assert "700.0 MiB were taken before and 1.7 GiB after" in (raised.value.because or "")


def test_a_figure_below_what_torch_holds_is_refused(
    on_machine: OnMachine, use_torch: UseTorch
) -> None:
    use_torch(listed="hidden", moves_bytes=-GIB)
    on_machine([Gpu(used_bytes=2 * GIB)])
    with pytest.raises(Unreadable, match="cannot be read"):
        measured()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"cuda": None}, "built without CUDA"),
        ({"is_available": False}, "finds no GPU, though the driver has one"),
        ({"fails": "CUDA error: out of memory"}, "RuntimeError: CUDA error: out of memory"),
    ],
)
def test_a_torch_that_cannot_start_cuda_is_one_clear_error(
    on_machine: OnMachine, use_torch: UseTorch, said: dict[str, object], told: str
) -> None:
    use_torch(**said)
    on_machine()
    with pytest.raises(Unreadable) as raised:
        measured()
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("raise ModuleNotFoundError('no torch', name='torch')", "torch is not installed"),
        ("import os; os._exit(7)", "its process ended with 7"),
        ("import sys; print('libcudart', file=sys.stderr, flush=True); import os; os.abort()",
         "libcudart"),
    ],
)  # fmt: skip
def test_a_child_that_comes_to_nothing_says_of_what(
    on_machine: OnMachine, tmp_path: Path, source: str, told: str
) -> None:
    (tmp_path / "packages" / "torch" / "__init__.py").write_text(source)
    on_machine()
    with pytest.raises(Unreadable) as raised:
        measured()
    assert told in str(raised.value)


def test_one_gpu_of_each_name_is_measured_and_a_free_one_first(on_machine: OnMachine) -> None:
    machine = on_machine(
        [Gpu(processes=[Proc(4100, 30 * GIB)]), Gpu(), Gpu(name="NVIDIA L4", total_bytes=24 * GIB)]
    )
    kinds, _ = calibration.kinds_here()
    assert {gpu.uuid for gpu in kinds} == {machine.uuid(1), machine.uuid(2)}


def test_the_gpu_that_is_measured_is_the_one_that_is_meant(
    on_machine: OnMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    on_machine([Gpu(processes=[Proc(4100, 30 * GIB)]), Gpu()])
    assert measured().context_bytes == 420 * MIB


def test_a_slice_of_a_gpu_has_a_name_of_its_own(on_machine: OnMachine) -> None:
    on_machine([Gpu(migs=[Mig()])])
    (part,), _ = calibration.kinds_here()
    assert "MIG" in (part.name or "")


def test_this_process_gets_no_context(on_machine: OnMachine) -> None:
    machine = on_machine()
    measured()
    assert machine.calls("cu*") == []


@pytest.mark.parametrize(
    ("gpus", "said"), [([], "has no GPU"), ([Gpu(lost=True)], "the GPU is lost")]
)
def test_without_a_gpu_it_is_said_why(on_machine: OnMachine, gpus: list[Gpu], said: str) -> None:
    on_machine(gpus)
    with pytest.raises(Unreadable, match=said):
        calibration.kinds_here()


def test_memory_that_the_driver_does_not_tell_is_an_error(on_machine: OnMachine) -> None:
    on_machine([Gpu(used_bytes=NA, total_bytes=NA)])
    with pytest.raises(Unreadable, match="memory of the GPU cannot be read"):
        measured()


@pytest.mark.gpu
def test_on_a_real_gpu_the_figures_are_plausible() -> None:
    """In a process of its own: this one may have the test machine's driver."""
    command = [sys.executable, "-m", "oomph", "calibrate", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "no NVIDIA driver" in done.stderr:
        pytest.skip("this machine has no GPU")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["calibrations"][0]["calibration"]
    assert 50 * MIB < found["context_bytes"] <= found["context_with_libraries_bytes"] < 4 * GIB
    assert 1e11 < found["matmul_flops"]["float32"] < found["matmul_flops"]["float16"] < 1e16
    assert 1e10 < found["bandwidth_bytes_per_s"] < 1e14

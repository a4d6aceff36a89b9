"""NVML comes and goes, is forked and shut down under us, or is not there at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest
from conftest import OnMachine
from nvml.machine import Gpu, NvmlMachine

from oomph.sensing.devices import read_machine

READ = "from oomph.sensing.devices import read_machine; print(read_machine())"
PROBLEM = "from oomph.sensing.devices import read_machine; print(read_machine().problem)"


def python(code: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_machine_without_a_driver_says_so(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path)
    problem = python(
        "import ctypes\n"
        "class Missing(ctypes.CDLL):\n"
        "    def __init__(self, name, *rest): raise OSError(name)\n"
        "import pynvml; pynvml.CDLL = Missing\n" + PROBLEM,
        **machine.env(),
    )
    assert "no NVIDIA driver" in problem
    assert "libnvidia-ml.so.1" in problem


def test_a_driver_that_is_not_loaded_says_so_and_is_found_once_it_is(
    on_machine: OnMachine,
) -> None:
    machine = on_machine([Gpu()])
    machine.unload_driver()
    assert "driver is not loaded" in (read_machine().problem or "")
    machine.write()
    assert read_machine().problem is None


def test_a_driver_upgraded_under_a_running_kernel_tells_the_cure(on_machine: OnMachine) -> None:
    machine = on_machine([Gpu()])
    machine.error("nvmlInitWithFlags", 18)
    problem = read_machine().problem or ""
    assert "different versions" in problem
    assert "rebooting" in problem


def test_a_driver_without_gpus_is_not_a_missing_driver(on_machine: OnMachine) -> None:
    on_machine([])
    assert read_machine().problem == "the NVIDIA driver runs, but has no GPU"


def test_a_gpu_is_read_again_after_the_users_code_has_shut_nvml_down(on_machine: OnMachine) -> None:
    on_machine([Gpu(util=42)])
    assert read_machine().gpus[0].busy_ratio == 0.42
    pynvml.nvmlShutdown()
    assert read_machine().gpus[0].busy_ratio == 0.42


def test_a_forked_child_opens_nvml_for_itself(on_machine: OnMachine) -> None:
    machine = on_machine([Gpu(util=42)])
    read_machine()
    child = os.fork()
    if child == 0:
        os._exit(0 if read_machine().gpus[0].busy_ratio == 0.42 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    openers = {call.pid for call in machine.calls("nvmlInitWithFlags")}
    assert openers == {os.getpid(), child}


@pytest.mark.parametrize("form", ["package", "old module"])
def test_another_distribution_that_owns_the_name_pynvml_is_named_with_the_cure(
    tmp_path: Path, form: str
) -> None:
    where, distribution = (
        ("pynvml/__init__.py", "pynvml") if form == "package" else ("pynvml.py", "nvidia-ml-py3")
    )
    (tmp_path / where).parent.mkdir(exist_ok=True)
    (tmp_path / where).write_text("class NVMLError(Exception): pass\n")
    info = tmp_path / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "RECORD").write_text(f"{where},,\n")
    problem = python(PROBLEM, PYTHONPATH=str(tmp_path))
    assert f"it belongs to {distribution} " in problem
    assert (
        f"pip uninstall -y {distribution} && pip install --force-reinstall nvidia-ml-py" in problem
    )


def test_a_missing_binding_tells_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("raise ImportError('No module named pynvml')\n")
    assert "pip install nvidia-ml-py" in python(PROBLEM, PYTHONPATH=str(tmp_path))


def test_what_a_gpu_does_not_support_is_asked_once(on_machine: OnMachine) -> None:
    from oomph.sensing.reading import read_gpu

    machine = on_machine([Gpu()])
    machine.error("nvmlDeviceGetUtilizationRates", 3)
    for _ in range(5):
        assert read_gpu().busy_ratio is None
    assert len(machine.calls("nvmlDeviceGetUtilizationRates")) == 1

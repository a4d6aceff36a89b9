"""print_gpu_utilisation: the right GPU in one line, whose memory it is, and never an exception."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import OnMachine
from nvml.machine import ERRORS, GIB, MIB, Gpu, Mig, NvmlMachine, Proc

import oomph
from oomph.sensing.backends import session
from oomph.showing import line
from sensing.test_mapping import TORCH
from sensing.test_ownership import as_root, in_container

Start = Callable[..., int]


def test_memory_is_told_apart_by_whose_it_is(on_machine: OnMachine, start_process: Start) -> None:
    child = start_process()
    on_machine(
        [
            Gpu(
                used_bytes=31 * GIB,
                util=97,
                processes=[Proc(os.getpid(), 20 * GIB), Proc(child, 10 * GIB)],
            )
        ]
    )
    reading = oomph.gpu_utilisation()
    assert reading.this_process_bytes == 20 * GIB
    assert reading.mine_bytes == 30 * GIB
    assert reading.others_bytes == 0
    assert (reading.used_bytes, reading.total_bytes) == (31 * GIB, 80 * GIB)
    assert reading.busy_ratio == 0.97
    assert reading.problem is None


@as_root
def test_memory_of_other_users_is_others(on_machine: OnMachine, start_process: Start) -> None:
    stranger = start_process(user="nobody")
    # A child of this process would be this run's; seen from one that is not its parent it is not.
    machine = on_machine([Gpu(processes=[Proc(stranger, 10 * GIB)])])
    code = "import oomph; r = oomph.gpu_utilisation(); print(r.mine_bytes, r.others_bytes)"
    assert machine.run([sys.executable, "-c", code]).stdout.split() == ["0", str(10 * GIB)]


def test_a_process_that_has_no_part_of_the_gpu_reads_zero_for_itself(on_machine: OnMachine) -> None:
    on_machine([Gpu()])
    reading = oomph.gpu_utilisation()
    assert (reading.this_process_bytes, reading.mine_bytes, reading.others_bytes) == (0, 0, 0)


def test_memory_of_an_unseen_list_is_unknown_and_not_zero(on_machine: OnMachine) -> None:
    machine = on_machine([Gpu(used_bytes=GIB, processes=[Proc(os.getpid())])])
    machine.error("nvmlDeviceGetComputeRunningProcesses_v3", 4)
    reading = oomph.gpu_utilisation()
    assert (reading.this_process_bytes, reading.mine_bytes, reading.others_bytes) == (
        None,
        None,
        None,
    )
    assert reading.used_bytes == GIB
    assert "not allowed" in (reading.problem or "")


def test_a_process_of_unknown_owner_makes_the_sums_unknown(on_machine: OnMachine) -> None:
    on_machine([Gpu(processes=[Proc(os.getpid(), GIB), Proc(4_194_303, 2 * GIB)])])
    reading = oomph.gpu_utilisation()
    assert reading.this_process_bytes == GIB
    assert (reading.mine_bytes, reading.others_bytes) == (None, None)
    assert "cannot tell whose 1 of the processes" in (reading.problem or "")
    assert "2.0 GiB" in (reading.problem or "")


def test_the_line_says_all_of_it(
    on_machine: OnMachine,
    start_process: Start,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    mine = [Proc(os.getpid(), 40 * GIB), Proc(start_process(), 20 * GIB)]
    on_machine([Gpu(), Gpu(used_bytes=60 * GIB + 512 * MIB, util=97, processes=mine)])
    oomph.print_gpu_utilisation()
    assert capsys.readouterr().out == (
        "GPU 1 = cuda:0 (by PCI order) NVIDIA A100-SXM4-80GB: 60.5 GiB of 80.0 GiB used (76%):"
        " this process 40.0 GiB, my other processes 20.0 GiB, others' 0 B; kernel-active 97%\n"
    )


def test_memory_that_no_listed_process_holds_is_told(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    on_machine([Gpu(used_bytes=60 * GIB)])
    oomph.print_gpu_utilisation()
    assert "60.0 GiB are held by no process in sight" in capsys.readouterr().out
    reading = oomph.gpu_utilisation()
    assert (reading.mine_bytes, reading.others_bytes) == (None, None)


def test_a_problem_is_explained_once_and_then_only_named(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    on_machine([Gpu()]).error("nvmlInitWithFlags", 18)
    line._shown_problems.clear()
    oomph.print_gpu_utilisation()
    oomph.print_gpu_utilisation()
    first, second = capsys.readouterr().out.splitlines()
    assert "rebooting" in first
    assert second == first.partition(" (")[0]


@pytest.mark.parametrize("name", ["NVIDIA \x1b[2J\rEVIL", "NVIDIA\u00ae A100", "N" * 90])
def test_whatever_a_gpu_is_called_the_line_stays_one_line(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    on_machine([Gpu(name=name)])
    oomph.print_gpu_utilisation()
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1
    assert "\x1b" not in out


def test_a_name_that_is_not_text_is_unknown(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu(name="NAME", used_bytes=GIB)])
    machine.path.write_bytes(machine.path.read_bytes().replace(b"NAME", b"\xff\xfe"))
    code = "import oomph; r = oomph.gpu_utilisation(); print(r.name, r.used_bytes)"
    done = machine.run([sys.executable, "-c", code])
    assert done.stdout.split() == ["None", str(GIB)], done.stderr
    assert machine.run([sys.executable, "-m", "oomph", "gpus"]).returncode == 0


@pytest.mark.parametrize("where", [">&-", "> /dev/full"])
def test_a_log_that_cannot_be_written_does_not_end_training(tmp_path: Path, where: str) -> None:
    machine = NvmlMachine(tmp_path, [Gpu(name="NVIDIA\u00ae")])
    code = "import oomph, sys; oomph.print_gpu_utilisation(); sys.stderr.write('trained')"
    done = machine.run(["sh", "-c", f'{sys.executable} -c "{code}" {where}'])
    assert done.stderr.startswith("trained")


def test_a_terminal_without_unicode_gets_the_line_all_the_same(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu(name="NVIDIA\u00ae")])
    code = "import oomph; oomph.print_gpu_utilisation()"
    done = machine.run([sys.executable, "-c", code], env={"PYTHONIOENCODING": "ascii"})
    assert "NVIDIA?" in done.stdout, done.stderr


def test_figures_that_cannot_be_are_unknown(on_machine: OnMachine) -> None:
    on_machine([Gpu(util=2**32 - 1)])
    reading = oomph.gpu_utilisation()
    assert reading.busy_ratio is None
    assert "makes no sense" in (reading.problem or "")


def test_lines_of_threads_do_not_mix(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu()])
    code = """
import threading, oomph
def work():
    for _ in range(50): oomph.print_gpu_utilisation()
threads = [threading.Thread(target=work) for _ in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    lines = machine.run([sys.executable, "-c", code]).stdout.splitlines()
    assert len(lines) == 800
    assert len(set(lines)) == 1


def test_the_american_spelling_is_the_same_function() -> None:
    assert oomph.print_gpu_utilization is oomph.print_gpu_utilisation
    assert oomph.gpu_utilization is oomph.gpu_utilisation


@pytest.mark.parametrize(
    "device",
    ["cpu", "banana", "cuda:x", -1, 7, 1.5, True, object(), "cuda:" + "9" * 5000, 2**70],
)
def test_a_device_that_is_none_is_one_line_and_no_exception(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str], device: object
) -> None:
    on_machine([Gpu()])
    oomph.print_gpu_utilisation(device)
    assert capsys.readouterr().out.count("\n") == 1
    assert oomph.gpu_utilisation(device).problem


def test_a_machine_without_a_driver_is_one_line_that_says_why(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    on_machine([Gpu()]).unload_driver()
    oomph.print_gpu_utilisation()
    assert capsys.readouterr().out.startswith("GPU: the NVIDIA driver is not loaded (")


@pytest.mark.parametrize(
    "gpu",
    [
        pytest.param(Gpu(), id="whole GPU"),
        pytest.param(Gpu(migs=[Mig(), Mig()]), id="MIG", marks=pytest.mark.slow),
    ],
)
def test_no_error_of_any_function_ever_raises(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str], gpu: Gpu
) -> None:
    machine = on_machine([gpu])
    assert oomph.gpu_utilisation().used_bytes is not None
    used = sorted({call.function for call in machine.calls() if call.function.startswith("nvml")})
    assert len(used) >= 10
    for function in used:
        for code in [*ERRORS, 12345]:
            machine.clear_errors()
            machine.error(function, code)
            session.forget()
            oomph.print_gpu_utilisation()
            out = capsys.readouterr().out
            assert out.startswith("GPU"), (function, code)
            assert out.count("\n") == 1, (function, code)
            assert "could not be read: " not in out, (function, code)  # that would be a bug of ours


def test_a_gpu_lost_between_two_readings_is_told(on_machine: OnMachine) -> None:
    machine = on_machine([Gpu(used_bytes=GIB), Gpu()])
    assert oomph.gpu_utilisation().used_bytes == GIB
    machine.gpus[0].lost = True
    machine.write()
    reading = oomph.gpu_utilisation()
    assert reading.used_bytes is None
    assert "the GPU is lost" in (reading.problem or "")
    assert oomph.gpu_utilisation(1).used_bytes == 0


def test_a_reading_after_the_first_takes_four_calls(on_machine: OnMachine) -> None:
    machine = on_machine([Gpu(processes=[Proc(os.getpid())]) for _ in range(8)])
    oomph.gpu_utilisation()
    machine.clear_calls()
    oomph.gpu_utilisation()
    assert len(machine.calls()) == 4


def test_a_change_of_the_environment_is_seen_at_once(
    on_machine: OnMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine([Gpu(), Gpu()])
    assert oomph.gpu_utilisation().nvml_index == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert oomph.gpu_utilisation().nvml_index == 1


# ---- in a container --------------------------------------------------------------------------

IN_CONTAINER = """
import torch, oomph
r = oomph.gpu_utilisation(0)
print(r.this_process_bytes, r.mine_bytes, r.others_bytes, r.problem)
"""


def read_in_container(machine: NvmlMachine, tmp_path: Path, reserved_bytes: int) -> str:
    torch = TORCH.replace("lambda index: 0", f"lambda index: {reserved_bytes}")
    (tmp_path / "torch.py").write_text(torch)
    (tmp_path / "read.py").write_text(IN_CONTAINER)
    unshare = shutil.which("unshare")
    assert unshare
    namespaces = ["--user", "--map-root-user", "--pid", "--mount", "--fork", "--mount-proc"]
    done = subprocess.run(
        [unshare, *namespaces, sys.executable, str(tmp_path / "read.py")],
        env={
            **os.environ,
            **machine.env(),
            "PYTHONPATH": str(tmp_path),
            "TORCH_UUIDS": machine.uuid(0).removeprefix("GPU-"),
            "TORCH_CURRENT": "0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@in_container
def test_in_a_container_the_process_that_holds_what_torch_holds_is_this_one(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu(processes=[Proc(987_654, 12 * GIB)])])
    told = read_in_container(machine, tmp_path, reserved_bytes=11 * GIB)
    assert told.startswith(f"{12 * GIB} {12 * GIB} 0 this process inferred to be PID 987654")


@in_container
@pytest.mark.parametrize("reserved_bytes", [0, GIB, 39 * GIB - 2 * GIB - 1, 41 * GIB])
def test_in_a_container_a_process_that_holds_something_else_is_not_this_one(
    tmp_path: Path, reserved_bytes: int
) -> None:
    machine = NvmlMachine(tmp_path, [Gpu(processes=[Proc(987_654, 40 * GIB)])])
    told = read_in_container(machine, tmp_path, reserved_bytes=reserved_bytes)
    assert told.startswith("None None None cannot tell whose 1 of the processes")


@in_container
def test_in_a_container_a_foreign_process_of_my_number_is_not_taken_for_mine(
    tmp_path: Path,
) -> None:
    everybody = [Proc(pid, 40 * GIB // 30) for pid in range(1, 31)]  # whatever my number is there
    machine = NvmlMachine(tmp_path, [Gpu(processes=everybody)])
    assert read_in_container(machine, tmp_path, 0).startswith("None None None cannot tell")


@in_container
def test_in_a_container_this_process_is_known_by_what_torch_holds(tmp_path: Path) -> None:
    host = [Proc(987_654, 12 * GIB), Proc(987_655, 40 * GIB)]
    machine = NvmlMachine(tmp_path, [Gpu(processes=host)])
    told = read_in_container(machine, tmp_path, reserved_bytes=11 * GIB)
    assert told.startswith(f"{12 * GIB} None None this process inferred to be PID 987654")
    assert "--pid=host" in told


@in_container
def test_in_a_container_two_that_could_be_this_one_are_both_unknown(tmp_path: Path) -> None:
    host = [Proc(987_654, 12 * GIB), Proc(987_655, 12 * GIB)]
    machine = NvmlMachine(tmp_path, [Gpu(processes=host)])
    told = read_in_container(machine, tmp_path, reserved_bytes=11 * GIB)
    assert told.startswith("None None None cannot tell whose 2 of the processes")
